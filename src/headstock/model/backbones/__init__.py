"""One file per model family; each registers itself."""
