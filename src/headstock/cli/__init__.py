"""The command line. A verb is a function in a module of this package; torch is imported only when a verb runs."""

from headstock.cli.app import main

__all__ = ["main"]
