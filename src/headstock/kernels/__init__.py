"""Fast implementations of what the model computes, each beside its plain PyTorch reference."""
