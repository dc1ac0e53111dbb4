"""Hugging Face folders, in both directions."""

from headstock.interop.huggingface.exporter import export
from headstock.interop.huggingface.importer import import_folder

__all__ = ["export", "import_folder"]
