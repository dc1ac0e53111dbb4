"""Models: batches, layers, backbones and heads."""
