"""Functions for data before it is trained on: `download`, `read_corpus`, `train_tokenizer` and `open_tokenizer`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from headstock.api.data import CorpusData, corpus_paths
from headstock.data import catalog
from headstock.data import corpus as corpora
from headstock.data import tokenizer as tokenizers
from headstock.data.corpus import Corpus, DocumentUnit
from headstock.data.tokenizer import Tokenizer, TokenizerSettings
from headstock.option_names import names_keywords

TokenizerKind = Literal["bpe", "unigram", "wordpiece", "word", "char"]


@names_keywords
def download(path: str | Path) -> Path:
    """The local copy of a file: of the catalog (`catalog:rotten-tomatoes/train.csv`) or a URL, downloaded once.

    A local path is returned as it is.
    """
    return catalog.resolve(str(path)) or Path(path)


@names_keywords
def read_corpus(
    corpus: CorpusData,
    *,
    documents: DocumentUnit = "auto",
    column: str = "text",
    lowercase: bool = False,
    strip_accents: bool = False,
) -> Corpus:
    """A corpus, checked as far as possible without reading all of it. Iterating over it streams the documents."""
    paths = corpus_paths(corpus, column=column)
    return corpora.read_corpus(
        paths, documents=documents, column=column, lowercase=lowercase, strip_accents=strip_accents
    )


@names_keywords
def train_tokenizer(
    texts: Iterable[str],
    *,
    kind: TokenizerKind = "bpe",
    vocabulary: int = 8000,
    min_frequency: int = 2,
    lowercase: bool = False,
    strip_accents: bool = False,
) -> Tokenizer:
    """Train a tokenizer in one pass over texts; `tokenizer.save(file)` writes it for `pretrain(tokenizer=file)`."""
    settings = TokenizerSettings(kind, vocabulary, min_frequency, lowercase, strip_accents)
    return tokenizers.train_tokenizer(texts, settings)


@names_keywords
def open_tokenizer(path: str | Path) -> Tokenizer:
    """A tokenizer of ours, of Hugging Face (tokenizer.json) or of SentencePiece (.model)."""
    return tokenizers.open_tokenizer(Path(path))
