"""The command line: one function per verb; nothing heavy is imported before a verb runs."""

from headstock.cli.app import main

__all__ = ["main"]
