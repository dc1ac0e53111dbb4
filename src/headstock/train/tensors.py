"""Tensors in files: safetensors only, so that nothing is ever unpickled."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstock.errors import UserError


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as wrong:  # a full disk, which everywhere else is an OSError
        raise OSError(f"{path.name}: {wrong}") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as wrong:
        raise UserError(f"{path}: is not a whole safetensors file ({wrong})") from None
