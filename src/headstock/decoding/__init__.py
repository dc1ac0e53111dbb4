"""Text generation: sampling, beam search and the decoding loop."""
