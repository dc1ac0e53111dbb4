"""Reads and writes safetensors files; nothing is ever unpickled."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Size, Tensor

from headstock.errors import UserError


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
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path}: is not a complete safetensors file ({error})") from None


def read_shapes(path: Path) -> dict[str, Size]:
    """The shape of each tensor, from the file header alone."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{path}: is not a complete safetensors file ({error})") from None
