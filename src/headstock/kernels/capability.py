"""What a GPU can do, as far as kernels ask."""

import warnings
from functools import cache
from importlib.util import find_spec

import torch


def is_ampere_or_newer(device: torch.device) -> bool:
    """Whether kernels for GPUs are made for this one: one of NVIDIA's since Ampere."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_properties(device).major >= 8  # which a compiler may take for a constant


def triton_works(device: torch.device) -> bool:
    """Whether Triton runs there; torch.compile calls this and takes the answer for a constant."""
    return _builds_triton(device)


# What torch.compiler.assume_constant_result does. Calling that would import torch._dynamo into every process.
triton_works._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _builds_triton(device: torch.device) -> bool:
    """Whether it can build there: for that it needs a C compiler and Python's headers."""
    if not is_ampere_or_newer(device) or find_spec("triton") is None:
        return False
    try:
        from headstock.kernels import cross_entropy_triton as fused

        scores, labels = torch.zeros(1, 2, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        fused.lose(scores, labels, 0.0, scores)
    except Exception as error:  # of which there are many kinds, and every one has a way round
        warnings.warn(f"Triton cannot build a kernel here, and training takes longer without: {error}", stacklevel=2)
        return False
    return True
