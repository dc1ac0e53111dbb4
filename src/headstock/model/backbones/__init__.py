"""One file per family of models; each registers itself."""
