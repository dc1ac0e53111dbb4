"""Streaming of generated text."""

import pytest

from headstock.data.corpus import read_corpus
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.decoding.text_streamer import TextStreamer


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word", "char"])
def test_continuation_keeps_its_leading_space(corpus, kind):
    settings = TokenizerSettings(kind=kind, vocabulary=300, min_frequency=1)
    tokenizer = train_tokenizer((document.text for document in read_corpus(corpus)), settings)
    prompt, tokens = tokenizer.encode("Anne likes"), tokenizer.encode("Anne likes Paris. Ben")
    assert tokens[: len(prompt)] == prompt
    parts: list[str] = []
    streamer = TextStreamer(tokenizer, prompt, ["Ben"], parts.append)
    for count in range(1, len(tokens) - len(prompt)):
        streamer.update(tokens[len(prompt) : len(prompt) + count])
    assert streamer.update(tokens[len(prompt) :])
    assert streamer.finish(tokens[len(prompt) :]) == "".join(parts) == " Paris. "
