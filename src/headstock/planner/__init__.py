"""Proposes a model for a text and estimates the time and memory that training it takes."""
