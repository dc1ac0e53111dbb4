"""One file per Hugging Face architecture."""
