"""Peak and free memory: PyTorch's allocations on a GPU, the resident set of the process on a CPU."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

STATUS, CLEAR_REFS, CGROUP = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/sys/fs/cgroup")
ASSUMED_FREE = 4 << 30  # bytes, where the system does not report it, as on Windows


class PeakMemory:
    """The peak since construction, or of the whole process where the system cannot reset it.

    Pages of memory-mapped files, such as token stores, do not count: the system reclaims them when needed.
    """

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif CLEAR_REFS.exists():
            with suppress(OSError):  # not permitted: the peak is that of the process so far
                CLEAR_REFS.write_text("5")
        self.mapped = status("RssFile") or 0

    def bytes(self) -> int:
        """0 where the system does not report it, as on Windows."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if (peak := status("VmHWM")) is not None:
            return peak - max(0, (status("RssFile") or 0) - self.mapped)
        try:
            import resource
        except ImportError:
            return 0
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def process_bytes(device: torch.device) -> int:
    """Memory in use now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return status("VmRSS") or PeakMemory(device).bytes()


def free_bytes(device: torch.device) -> int:
    """Memory available without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    memory = dict(map(parse, lines(Path("/proc/meminfo"))))
    if "MemAvailable" in memory:
        return min(memory["MemAvailable"], cgroup_free_bytes())
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return ASSUMED_FREE


def cgroup_free_bytes() -> int:
    """The memory limit of the control group less its use; very large if there is no limit.

    Inactive file pages count as used there, but can be reclaimed.
    """
    statistics = dict(line.split() for line in lines(CGROUP / "memory.stat"))
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no such file, or "max"
        return sys.maxsize
    return max(0, limit - used + int(statistics.get("inactive_file", 0)))


def status(name: str) -> int | None:
    return next((size for key, size in map(parse, lines(STATUS)) if key == name), None)


def parse(line: str) -> tuple[str, int]:
    """`VmRSS:   1234 kB` -> ("VmRSS", 1263616)."""
    name, _, value = line.partition(":")
    words = value.split()
    return name, int(words[0]) * 1024 if len(words) == 2 and words[1] == "kB" else 0


def lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not Linux
        return []
