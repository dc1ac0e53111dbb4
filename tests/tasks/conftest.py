"""Fixtures of the task tests."""

import pytest

from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer


@pytest.fixture(scope="session")
def stores(corpus):
    """A tokenizer, and the training and validation text of the corpus."""
    text = read_corpus(corpus)
    tokenizer = train_tokenizer((document.text for document in text), TokenizerSettings(vocabulary=300))
    return tokenizer, build_split_stores(text, tokenizer)
