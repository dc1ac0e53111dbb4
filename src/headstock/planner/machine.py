"""What a device can do, found out in a second: products of matrices, memory traffic, small operations, free memory."""

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headstock.train.peak_memory import free_bytes, process_bytes

SIDE = {"cpu": 768, "mps": 2048, "cuda": 8192}  # of the matrices that are multiplied
MOVED = {"cpu": 1 << 24, "mps": 1 << 26, "cuda": 1 << 28}  # numbers that are read and written
SMALL = 50  # operations that do next to nothing
REPEATS = 5


@dataclass(frozen=True)
class Machine:
    device: str  # cpu, cuda or mps
    name: str
    half: bool  # products are computed in bfloat16
    products: float  # operations a second in large products of matrices
    traffic: float  # bytes a second that are read or written
    launch: float  # seconds that an operation takes however little it does
    free: int  # bytes
    held: int  # bytes that the process has without any model
    slower: float = 1.0  # how many times as long as forecast a step was found to take


def look_at(device: torch.device) -> Machine:
    """Measured now, as other programs may be at work here too."""
    half = device.type == "cuda"
    side = SIDE[device.type]
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16 if half else torch.float32)
    numbers = torch.zeros(MOVED[device.type], device=device)
    one = torch.zeros(8, device=device)
    product = seconds_of(lambda: matrix @ matrix, device)
    moving = seconds_of(lambda: numbers.add_(1.0), device)
    small = seconds_of(lambda: [one.add_(1.0) for _ in range(SMALL)], device)
    if half:
        matrix = numbers = one
        torch.cuda.empty_cache()
    return Machine(
        device=device.type,
        name=name_of(device),
        half=half,
        products=2 * side**3 / product,
        traffic=2 * 4 * MOVED[device.type] / moving,
        launch=small / SMALL,
        free=free_bytes(device),
        held=process_bytes(device),
    )


def name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {device.type}, {torch.get_num_threads()} threads"


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """The middle of several times."""
    times = []
    for _ in range(REPEATS + 1):
        wait(device)
        began = time.perf_counter()
        work()
        wait(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])  # the first is to warm up


def wait(device: torch.device) -> None:
    """Until what the device was told to do is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
