"""Using a trained run: predict, generate, fill masks, score, embed."""
