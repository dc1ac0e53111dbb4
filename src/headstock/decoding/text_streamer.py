"""Turns the tokens that a model adds to a prompt into text."""

from collections.abc import Callable, Sequence

from headstock.data.tokenizer import Tokenizer


class TextStreamer:
    """Turns a growing row of tokens into text, watching for where it must stop."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: list[int], stop: Sequence[str], stream: Callable[[str], None] | None
    ):
        self.tokenizer, self.prompt, self.before = tokenizer, prompt, tokenizer.decode(prompt)
        self.stop, self.stream = [s for s in stop if s], stream
        self.emitted = 0  # characters already given to the stream

    def text(self, tokens: list[int]) -> str:
        """What the tokens add to the prompt. They are read together with it: many tokenizers drop a first space."""
        whole = self.tokenizer.decode([*self.prompt, *tokens])
        return whole[len(self.before) :] if whole.startswith(self.before) else self.tokenizer.decode(tokens)

    def update(self, tokens: list[int]) -> bool:
        text = self.text(tokens)
        cut = self.find_stop(text)
        # what may still change stays back: half a character, or the beginning of a stop string
        settled = len(text.rstrip("\ufffd")) - max((len(s) - 1 for s in self.stop), default=0)
        self.emit(text[: settled if cut is None else cut])
        return cut is not None

    def finish(self, tokens: list[int]) -> str:
        text = self.text(tokens)
        text = text[: self.find_stop(text)]
        self.emit(text)
        return text

    def has_stop(self, tokens: list[int]) -> bool:
        return self.find_stop(self.text(tokens)) is not None

    def find_stop(self, text: str) -> int | None:
        return min((place for s in self.stop if (place := text.find(s)) >= 0), default=None)

    def emit(self, text: str) -> None:
        if self.stream is not None and len(text) > self.emitted:
            self.stream(text[self.emitted :])
            self.emitted = len(text)
