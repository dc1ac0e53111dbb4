"""How much memory work took at its highest: of a GPU what torch asked for, of a CPU what the process held."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

STATUS, FORGET, GROUP = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/sys/fs/cgroup")
UNTOLD = 4 << 30  # bytes that are taken to be free where the system does not say, as on Windows


class PeakMemory:
    """The highest since this was made; where the system cannot forget what was before, of the process so far.

    Pages of files that are mapped while it looks, such as those of a token store, do not count: they are the system's
    copy of what is on disk, which it takes back when it needs the room.
    """

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif FORGET.exists():
            with suppress(OSError):  # where it is not allowed, the peak is that of the process so far
                FORGET.write_text("5")
        self.mapped = status("RssFile") or 0

    def bytes(self) -> int:
        """0 where the system does not tell, as on Windows."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if (found := status("VmHWM")) is not None:
            return found - max(0, (status("RssFile") or 0) - self.mapped)
        try:
            import resource
        except ImportError:
            return 0
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def process_bytes(device: torch.device) -> int:
    """What is held now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return status("VmRSS") or PeakMemory(device).bytes()


def free_bytes(device: torch.device) -> int:
    """What could still be taken without pushing others out."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = dict(map(parse, lines(Path("/proc/meminfo"))))
    if "MemAvailable" in found:
        return min(found["MemAvailable"], cgroup_free_bytes())
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return UNTOLD


def cgroup_free_bytes() -> int:
    """The limit that a container sets for this process, less what is used in it; very large if there is none.

    Files that were read and are not in use count as used there, but their pages are given back when room is needed.
    """
    most, used = (GROUP / name for name in ("memory.max", "memory.current"))
    kept = next((int(line.split()[1]) for line in lines(GROUP / "memory.stat") if line.startswith("inactive_file ")), 0)
    try:
        return max(0, int(most.read_text()) - int(used.read_text()) + kept)
    except (OSError, ValueError):  # there is no such file, or it says "max"
        return sys.maxsize


def status(name: str) -> int | None:
    return next((size for found, size in map(parse, lines(STATUS)) if found == name), None)


def parse(line: str) -> tuple[str, int]:
    """`VmRSS:   1234 kB` -> ("VmRSS", 1263616)."""
    name, _, rest = line.partition(":")
    words = rest.split()
    return name, int(words[0]) * 1024 if len(words) == 2 and words[1] == "kB" else 0


def lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # another system than Linux
        return []
