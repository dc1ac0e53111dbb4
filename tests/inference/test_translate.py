"""Tokens as charts show them."""

import pytest

from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.inference.translate import display_tokens


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sees the dog"] * 4, TokenizerSettings(kind="bpe", vocabulary=280))


def test_the_bytes_of_a_letter_are_shown_as_the_letter(tokenizer):
    tokens = tokenizer.encode("the é € dog")
    shown = display_tokens(tokenizer, tokens)
    assert len(shown) == len(tokens)
    assert not any("Ã" in text or "\ufffd" in text for text in shown)
    assert [text for text in shown if "é" in text] == ["é (1/2)", "é (2/2)"]
    assert [text for text in shown if "€" in text] == ["€ (1/3)", "€ (2/3)", "€ (3/3)"]


def test_bytes_that_give_no_letter_appear_as_in_the_vocabulary(tokenizer):
    first = next(token for token in tokenizer.encode("é") if "\ufffd" in tokenizer.decode([token]))
    assert display_tokens(tokenizer, [first]) == [tokenizer.id_to_token(first)]
    assert display_tokens(tokenizer, [first, *tokenizer.encode("the")])[1:] == ["the"]
