"""Text in: readers, tokenizers, the token store and datasets by name."""
