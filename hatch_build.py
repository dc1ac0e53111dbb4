"""Adds what is generated from the command line to the wheel: the man page and the completions of three shells."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TARGETS = {
    "bash": "share/bash-completion/completions/headstock",
    "zsh": "share/zsh/site-functions/_headstock",
    "fish": "share/fish/vendor_completions.d/headstock.fish",
}


class GeneratedFiles(BuildHookInterface):
    """Imports the command line, which needs typer but not torch, and writes its files where the wheel takes them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # the code changes after the installation
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from headstock.cli.command_tree import command_tree
        from headstock.cli.completion import SCRIPTS
        from headstock.cli.man_page import man_page

        self.folder = TemporaryDirectory()
        root = command_tree()
        files = {TARGETS[shell]: script(root) for shell, script in SCRIPTS.items()}
        files["share/man/man1/headstock.1"] = man_page()
        for number, (target, text) in enumerate(files.items()):
            file = Path(self.folder.name) / str(number)
            file.write_text(text, encoding="utf-8")
            build_data["shared_data"][str(file)] = target

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self.folder.cleanup()
