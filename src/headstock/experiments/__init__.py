"""Experiments: comparisons and sweeps on one grid of trials, their summaries and verdicts, the demo, and benchmarks."""
