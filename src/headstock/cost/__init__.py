"""Parameter, FLOP and memory formulas."""
