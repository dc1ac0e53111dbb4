"""Reads and writes safetensors files, and verifies folders with a manifest; nothing is ever unpickled."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Size, Tensor

from headstock.errors import UserError
from headstock.io import folder_mismatches

MANIFEST = "manifest.json"  # size and SHA-256 of files that must not change


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with default permissions: the library would make it readable by its owner only."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:  # a full disk, for example
        match = re.search(r"os error (\d+)", str(error))
        number = int(match[1]) if match else None
        raise OSError(number, os.strerror(number) if number else str(error), str(path)) from None
    if path.stat().st_mode != mode:
        path.chmod(mode)


def read_tensors(path: Path) -> dict[str, Tensor]:
    with _incomplete_as_user_error(path):
        return load_file(path)


def read_shapes(path: Path) -> dict[str, Size]:
    """The shape of each tensor, from the file header alone."""
    with _incomplete_as_user_error(path), safe_open(path, framework="pt") as file:
        return {name: Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@contextmanager
def _incomplete_as_user_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, TypeError, ValueError, RuntimeError) as error:  # sizes beyond 64 bits, for example
        raise UserError(f"{path}: is not a complete safetensors file ({str(error).splitlines()[0]})") from None


def check_finite(tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Reject weights with values that are not finite."""
    names = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UserError(f"{source}: contains values that are not finite numbers, in {names[0]}{others}")


def find_damage(folder: Path) -> str | None:
    """How a folder differs from its manifest; None if it does not."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return next(folder_mismatches(folder, manifest), None)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({error})"
