"""Data: corpora, file formats, tokenizers, token stores, readers of labelled data, and datasets by name."""
