"""The model: what a backbone is made of, its heads, and how text is generated from it."""
