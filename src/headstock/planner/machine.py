"""Measures a device in about a second: matrix products, memory bandwidth, launch overhead and free memory."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headstock.report.format import pluralize
from headstock.train.memory import free_bytes, process_bytes

MATRIX_SIZE = {"cpu": 768, "mps": 2048, "cuda": 8192}
BANDWIDTH_ELEMENTS = {"cpu": 1 << 24, "mps": 1 << 26, "cuda": 1 << 28}
SMALL_OPERATIONS = 50
REPEATS = 5


@dataclass(frozen=True)
class Machine:
    device: str  # cpu, cuda or mps
    name: str
    bfloat16: bool  # True if matrices are multiplied in bfloat16
    matmul_flops: float  # per second, in large matrix products
    memory_bandwidth: float  # bytes per second, reads and writes
    launch_seconds: float  # duration of an operation on almost no data
    free_bytes: int
    baseline_bytes: int  # memory of this process without a model
    slowdown: float = 1.0  # measured over forecast duration of a step


def measure_machine(device: torch.device) -> Machine:
    """Measure the device now: other programs may be using it."""
    bfloat16 = device.type == "cuda"
    size = MATRIX_SIZE[device.type]
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16 if bfloat16 else torch.float32)
    vector = torch.zeros(BANDWIDTH_ELEMENTS[device.type], device=device)
    small = torch.zeros(8, device=device)
    matmul_seconds = median_seconds(lambda: matrix @ matrix, device)
    vector_seconds = median_seconds(lambda: vector.add_(1.0), device)
    small_seconds = median_seconds(lambda: [small.add_(1.0) for _ in range(SMALL_OPERATIONS)], device)
    if bfloat16:
        matrix = vector = small
        torch.cuda.empty_cache()
    return Machine(
        device=device.type,
        name=device_name(device),
        bfloat16=bfloat16,
        matmul_flops=2 * size**3 / matmul_seconds,
        memory_bandwidth=2 * 4 * BANDWIDTH_ELEMENTS[device.type] / vector_seconds,
        launch_seconds=small_seconds / SMALL_OPERATIONS,
        free_bytes=free_bytes(device),
        baseline_bytes=process_bytes(device),
    )


def busy_warning(device: torch.device, *, effect: str) -> str | None:
    """One line if more processes want to run than there are cores, with the effect that this has."""
    if device.type != "cpu" or not hasattr(os, "getloadavg"):  # Windows has none
        return None
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores:
        return None
    return f"this machine is busy (load average {load:.1f}, {pluralize(cores, 'core')}): {effect}"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {device.type}, {torch.get_num_threads()} threads"


def median_seconds(work: Callable[[], object], device: torch.device, *, repeats: int = REPEATS) -> float:
    """The median duration of several calls, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
