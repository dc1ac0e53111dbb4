"""One file for each Hugging Face architecture, or for several whose tensors have the same names."""
