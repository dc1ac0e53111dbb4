"""Counts the system calls with which a process changes a folder, and kills it after the n-th (Linux, ptrace)."""

import ctypes
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

SEIZE, INTERRUPT, SYSCALL, SYSCALL_INFO = 0x4206, 0x4207, 24, 0x420E
TRACE_SYSGOOD, TRACE_FORK, TRACE_VFORK, TRACE_CLONE, EXIT_KILL = 1, 2, 4, 8, 0x100000
SYSCALL_STOP = signal.SIGTRAP | 0x80
WALL = 0x40000000  # also wait for threads
ENTRY, EXIT = 1, 2

# number of each call by machine; then how its first arguments name the file
NUMBERS = {
    "x86_64": {
        "write": 1, "pwrite64": 18, "writev": 20, "fsync": 74, "fdatasync": 75, "ftruncate": 77, "msync": 26,
        "rename": 82, "renameat": 264, "renameat2": 316, "mkdir": 83, "mkdirat": 258, "rmdir": 84, "unlink": 87,
        "unlinkat": 263, "chmod": 90, "fchmodat": 268,
    },
    "aarch64": {
        "write": 64, "pwrite64": 68, "writev": 66, "fsync": 82, "fdatasync": 83, "ftruncate": 46, "msync": 227,
        "renameat": 38, "renameat2": 276, "mkdirat": 34, "unlinkat": 35, "fchmodat": 53,
    },
}  # fmt: skip
NAMES = {number: name for name, number in NUMBERS.get(platform.machine(), {}).items()}
BY_DESCRIPTOR = ("write", "pwrite64", "writev", "fsync", "fdatasync", "ftruncate")
BY_PATH = ("rename", "mkdir", "rmdir", "unlink", "chmod")
AVAILABLE = sys.platform == "linux" and bool(NAMES)


class SyscallInfo(ctypes.Structure):
    """struct ptrace_syscall_info"""

    _fields_ = (
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("ip", ctypes.c_uint64),
        ("sp", ctypes.c_uint64),
        ("number", ctypes.c_uint64),  # the result, at the exit
        ("arguments", ctypes.c_uint64 * 6),
    )


def trace(work: Callable[[], None], folder: Path, *, kill_after: int | None = None, since: str = "") -> list[str]:
    """Fork, run `work` in the child, and list its changes to files in `folder`, as `fsync step-6/model.safetensors`.

    Counting begins with the first change of a path that contains `since`. After `kill_after` changes the child gets
    SIGKILL, before it runs another instruction.
    """
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    child = os.fork()
    if child == 0:
        try:
            os.kill(os.getpid(), signal.SIGSTOP)
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    options = TRACE_SYSGOOD | TRACE_FORK | TRACE_VFORK | TRACE_CLONE | EXIT_KILL
    if ptrace(SEIZE, child, None, options):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise PermissionError(ctypes.get_errno(), "ptrace is not permitted")
    os.kill(child, signal.SIGCONT)
    ptrace(INTERRUPT, child, None, None)  # a stop from which it goes on with its calls reported
    entered: dict[int, str | None] = {}
    changes: list[str] = []
    started = not since
    while True:
        thread, status = os.waitpid(-1, WALL)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if thread == child:
                if kill_after is None and status:
                    raise RuntimeError(f"the traced process failed: {status}")
                return changes
            continue
        stop, deliver = os.WSTOPSIG(status), 0
        if stop == SYSCALL_STOP:
            info = SyscallInfo()
            ptrace(SYSCALL_INFO, thread, ctypes.sizeof(info), ctypes.addressof(info))
            if info.op == ENTRY:
                entered[thread] = changed_file(thread, info, folder) if info.number in NAMES else None
            elif info.op == EXIT and (change := entered.pop(thread, None)):
                started = started or since in change
                if started:
                    changes.append(change)
                    if len(changes) == kill_after:
                        os.kill(child, signal.SIGKILL)
                        continue
        elif not status >> 16:  # no ptrace event: a signal for the child
            deliver = stop if stop != signal.SIGTRAP else 0
        ptrace(SYSCALL, thread, None, deliver)


def changed_file(thread: int, info: SyscallInfo, folder: Path) -> str | None:
    """The call and the file that it changes, relative to the folder; None if that is elsewhere."""
    name = NAMES[info.number]
    try:
        if name == "msync":
            return name
        if name in BY_DESCRIPTOR:
            path = os.readlink(f"/proc/{thread}/fd/{info.arguments[0]}")
        elif name in BY_PATH:
            path = os.path.join(os.readlink(f"/proc/{thread}/cwd"), text_at(thread, info.arguments[0]))
        else:  # a path relative to a folder's descriptor
            descriptor = ctypes.c_int(info.arguments[0]).value
            base = os.readlink(f"/proc/{thread}/{'cwd' if descriptor < 0 else f'fd/{descriptor}'}")
            path = os.path.join(base, text_at(thread, info.arguments[1]))
    except OSError:
        return None
    return f"{name} {os.path.relpath(path, folder)}" if path.startswith(f"{folder}{os.sep}") else None


def text_at(thread: int, address: int) -> str:
    """A string in the memory of a stopped thread."""
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        text = memory.read(4096 - address % 4096)
        if b"\0" not in text:
            text += memory.read(4096)
    return os.fsdecode(text.partition(b"\0")[0])
