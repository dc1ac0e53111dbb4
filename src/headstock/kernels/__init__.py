"""Fast implementations of attention, loss, matmul and decoding, each beside a plain PyTorch reference."""
