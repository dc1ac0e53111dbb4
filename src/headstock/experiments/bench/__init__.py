"""Benchmarks of this machine: training, decoding, prediction, start-up, token store and scaling."""
