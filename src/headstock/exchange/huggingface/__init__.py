"""Hugging Face folders, in both directions."""

from headstock.exchange.huggingface.export import export
from headstock.exchange.huggingface.importing import import_folder

__all__ = ["export", "import_folder"]
