"""Decodes generated tokens to text as they arrive, and finds stop strings."""

from collections.abc import Callable, Sequence

from headstock.data.tokenizer import Tokenizer


class TextStreamer:
    """The text of one growing continuation of a prompt."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: list[int], stop: Sequence[str], stream: Callable[[str], None] | None
    ):
        self.tokenizer, self.prompt, self.prompt_text = tokenizer, prompt, tokenizer.decode(prompt)
        self.stop, self.stream = [string for string in stop if string], stream
        self.emitted = 0  # characters already passed to the stream

    def text(self, tokens: list[int]) -> str:
        """The text of the tokens, decoded together with the prompt, because many tokenizers drop a leading space."""
        text = self.tokenizer.decode([*self.prompt, *tokens])
        if text.startswith(self.prompt_text):
            return text[len(self.prompt_text) :]
        return self.tokenizer.decode(tokens)

    def update(self, tokens: list[int]) -> bool:
        """Stream what is new; True if a stop string was found."""
        text = self.text(tokens)
        stop = self.find_stop(text)
        # hold back what may still change: an incomplete character, or the start of a stop string
        final = len(text.rstrip("\ufffd")) - max((len(string) - 1 for string in self.stop), default=0)
        self.emit(text[: final if stop is None else stop])
        return stop is not None

    def finish(self, tokens: list[int]) -> str:
        """Stream the remaining text and return the continuation, up to the first stop string."""
        text = self.text(tokens)
        text = text[: self.find_stop(text)]
        self.emit(text)
        return text

    def has_stop(self, tokens: list[int]) -> bool:
        return self.find_stop(self.text(tokens)) is not None

    def find_stop(self, text: str) -> int | None:
        return min((index for string in self.stop if (index := text.find(string)) >= 0), default=None)

    def emit(self, text: str) -> None:
        if self.stream is not None and len(text) > self.emitted:
            self.stream(text[self.emitted :])
            self.emitted = len(text)
