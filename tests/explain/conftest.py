"""The tokenizer that all explained models share."""

import pytest

from tests.explain.pipelines import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer(corpus):
    return make_tokenizer(corpus)
