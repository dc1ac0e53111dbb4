"""How long vectors are and what angle they make, also when they are too small to be squared."""

from torch import Tensor


def size(tensor: Tensor) -> float:
    """The Euclidean length of all numbers taken as one vector."""
    most = float(tensor.abs().max()) if tensor.numel() else 0.0
    return most * float((tensor / most).norm()) if most else 0.0


def cosine(a: Tensor, b: Tensor) -> float:
    """Of the angle between two tensors taken as vectors; 0 where one of them is nothing."""
    most = float(a.abs().max()), float(b.abs().max())
    if not all(most):
        return 0.0
    a, b = a / most[0], b / most[1]
    return float((a * b).sum() / (a.norm() * b.norm()))
