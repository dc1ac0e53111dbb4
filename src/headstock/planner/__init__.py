"""Proposes a model size and estimates what training it takes."""
