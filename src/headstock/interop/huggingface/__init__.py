"""Import and export of Hugging Face model folders."""

from headstock.interop.huggingface.exporter import export_folder
from headstock.interop.huggingface.importer import import_folder

__all__ = ["export_folder", "import_folder"]
