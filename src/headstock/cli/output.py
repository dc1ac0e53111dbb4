"""Output files that a user names: an existing one is replaced only on request, and an input never."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headstock.errors import UserError


def check_outputs(outputs: Iterable[Path], arguments: Iterable[Any], *, overwrite: bool) -> None:
    """Refuse outputs that exist unless `overwrite`, and those that are among the verb's inputs.

    Every argument that is the path of an existing file counts as an input, and so do the files of a run folder.
    """
    inputs = list(existing_paths(arguments))
    for path in outputs:
        if not os.path.lexists(path):
            continue
        if path.is_dir():
            raise UserError(f"--out {path}: is a folder, wanted a file")
        for source in inputs:
            if is_part_of(path, source):
                raise UserError(f"--out {path}: is an input of this command ({source}), which is never replaced")
        if not overwrite:
            raise UserError(f"--out {path}: exists already; replace it with --overwrite, or name another file")


def existing_paths(values: Iterable[Any]) -> Iterable[Path]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from existing_paths(value)
        elif isinstance(value, str | Path) and value != "":
            try:
                if Path(value).exists():
                    yield Path(value)
            except (OSError, ValueError):  # a text that is no file name: too long, or with a NUL
                continue


def is_part_of(path: Path, source: Path) -> bool:
    """Whether a file is the input itself, or one of the files a run folder consists of."""
    from headstock.train.run_folder import RunFolder

    if not source.is_dir():
        return path.exists() and path.samefile(source)
    return RunFolder(source).exists() and RunFolder(source).owns(path)
