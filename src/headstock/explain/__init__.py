"""Explains what a model consists of and what it computes, each formula beside the measured number."""
