"""Turns the tokens that a model adds to a prompt into text."""

from collections.abc import Callable, Sequence

from headstock.data.tokenizer import Tokenizer


class Writer:
    """Turns a growing row of tokens into text, watching for where it must stop."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: list[int], stop: Sequence[str], stream: Callable[[str], None] | None
    ):
        self.tokenizer, self.prompt, self.before = tokenizer, prompt, tokenizer.decode(prompt)
        self.stop, self.stream = [s for s in stop if s], stream
        self.told = 0  # characters already given to the stream

    def text(self, tokens: list[int]) -> str:
        """What the tokens add to the prompt. They are read together with it: many tokenizers drop a first space."""
        whole = self.tokenizer.decode([*self.prompt, *tokens])
        return whole[len(self.before) :] if whole.startswith(self.before) else self.tokenizer.decode(tokens)

    def done(self, tokens: list[int]) -> bool:
        text = self.text(tokens)
        cut = self.cut(text)
        # what may still change stays back: half a character, or the beginning of a stop string
        settled = len(text.rstrip("\ufffd")) - max((len(s) - 1 for s in self.stop), default=0)
        self.tell(text[: settled if cut is None else cut])
        return cut is not None

    def finish(self, tokens: list[int]) -> str:
        text = self.text(tokens)
        text = text[: self.cut(text)]
        self.tell(text)
        return text

    def stops(self, tokens: list[int]) -> bool:
        return self.cut(self.text(tokens)) is not None

    def cut(self, text: str) -> int | None:
        return min((place for s in self.stop if (place := text.find(s)) >= 0), default=None)

    def tell(self, text: str) -> None:
        if self.stream is not None and len(text) > self.told:
            self.stream(text[self.told :])
            self.told = len(text)
