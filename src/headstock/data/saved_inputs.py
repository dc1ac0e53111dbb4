"""Copies of inputs that are no files: in the cache, named by the hash of their content, so that runs can be resumed."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from headstock.cache_use import mark_used
from headstock.errors import WorkError
from headstock.io import atomic_file, remove_stale

STDIN, MEMORY = "stdin", "memory"  # cache folders for copies of standard input, and of rows in Python


def save_input(chunks: Iterable[bytes], folder: Path, suffix: Callable[[bytes], str]) -> Path:
    """Write the chunks to a file named by their hash; its suffix depends on the first chunk."""
    remove_stale(folder)
    copy, digest, first = folder / f"{os.getpid()}-{threading.get_ident()}.copy", hashlib.sha256(), b""
    try:
        with atomic_file(copy) as temporary, temporary.open("wb") as file:
            for data in chunks:
                first = first or data
                digest.update(data)
                file.write(data)
            path = mark_used(folder / f"{digest.hexdigest()}{suffix(first)}")
        os.replace(copy, path)
    except OSError as error:
        raise WorkError(f"{folder}: a copy of the input could not be saved ({error.strerror})") from None
    return path


def is_saved(path: Path, *kinds: str) -> bool:
    """Whether a file is such a copy, in a cache folder of one of these names."""
    return path.parent.name in kinds and len(path.stem) == hashlib.sha256().digest_size * 2


def source_name(source: str) -> str:
    """How messages and titles call a file: by its path, or `data in memory` for a copy of rows in Python."""
    return "data in memory" if is_saved(Path(source), MEMORY) else source
