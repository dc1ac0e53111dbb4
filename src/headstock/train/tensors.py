"""Tensors in files: safetensors only, so that nothing is ever unpickled."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Size, Tensor

from headstock.errors import UserError


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, with the access rights of any new file: the library makes it for its owner alone."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata)
    except SafetensorError as wrong:  # a full disk, which everywhere else is an OSError
        found = re.search(r"os error (\d+)", str(wrong))
        number = int(found[1]) if found else None
        raise OSError(number, os.strerror(number) if number else str(wrong), str(path)) from None
    if path.stat().st_mode != mode:
        path.chmod(mode)


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as wrong:
        raise UserError(f"{path}: is not a whole safetensors file ({wrong})") from None


def read_shapes(path: Path) -> dict[str, Size]:
    """The shape of each tensor in a file, from its header alone."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as wrong:
        raise UserError(f"{path}: is not a whole safetensors file ({wrong})") from None
