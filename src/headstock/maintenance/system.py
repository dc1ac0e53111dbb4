"""Facts about this machine that a bug report needs. Nothing here imports torch, which may be what is broken."""

import getpass
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import webbrowser
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from headstock.data import urls

# environment variables that change what Headstock, torch or the Hugging Face Hub do
VARIABLES = re.compile(
    r"(HEADSTOCK|OMP|KMP|MKL|OPENBLAS|CUDA|NCCL|PYTORCH|TORCH\w*|TRITON|HF)_\w+|PYTHONPATH|LC_ALL|LANG"
)
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|AUTH|CREDENTIAL|HEADSTOCK_SERVE")  # the last one holds the server's token
MAX_VALUE = 120  # characters of a variable that are shown
NVIDIA_SMI = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "firefox", "msedge")


def anonymous(text: str | Path) -> str:
    """A path or message without the names of the home folder and the user."""
    text, home = str(text), Path.home()
    if len(home.parts) > 1:  # a container may have / as its home
        text = re.sub(rf"{re.escape(str(home))}(?![\w.-])", "~", text)
    with suppress(KeyError, OSError):  # no such user in the password database
        text = re.sub(rf"(?<=[/\\]){re.escape(getpass.getuser())}(?![\w.-])", "$USER", text)
    return text


def environment_variables(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that matter, with values that may be published: of secrets only that they are set."""
    variables = os.environ if variables is None else variables
    return {name: public_value(name, variables[name]) for name in sorted(variables) if VARIABLES.fullmatch(name)}


def public_value(name: str, value: str) -> str:
    if SECRET.search(name):
        return "(set)"
    text = anonymous(urls.redact(value) if "://" in value else value)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."


def platform_name() -> str:
    """The operating system with its version, the kernel, the architecture and the C library."""
    parts = [f"{platform.system()} {platform.release()}", platform.machine()]
    with suppress(OSError):
        parts.insert(0, platform.freedesktop_os_release()["PRETTY_NAME"])
    if sys.platform == "darwin":
        parts.insert(0, f"macOS {platform.mac_ver()[0]}")
    return ", ".join([*parts, " ".join(platform.libc_ver())]).rstrip(", ")


def python_name() -> str:
    kind = "virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    return f"{platform.python_version()} ({platform.python_implementation()}, {kind})"


def cpu_name() -> str:
    """The processor, its cores, and how many of them this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = _cpu_model() or platform.processor() or platform.machine()
    quota = _cpu_quota()
    limit = f", limited to {quota:g} by the control group" if quota is not None else ""
    return f"{name}, {os.cpu_count()} logical cores, {usable} usable{limit}"


def _cpu_model() -> str:
    with suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return match[1] if match else ""
    return ""


def _cpu_quota() -> float | None:
    """The number of cores that the control group grants; None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # not Linux, or "max"
        return None


def nvidia_gpus() -> list[str]:
    """Name, memory and driver of each NVIDIA GPU, as the driver tells; also where torch cannot use them."""
    if shutil.which(NVIDIA_SMI[0]) is None:
        return []
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=10)
        return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
    return []


def browser_name() -> str | None:
    """The browser that `headstock serve --open` would start, or one that is installed."""
    with suppress(webbrowser.Error):
        return getattr(webbrowser.get(), "name", None) or "default browser"
    return next(filter(shutil.which, BROWSERS), None)


def existing_parent(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def write_error(folder: Path) -> str | None:
    """Why no file can be written in a folder, or in its nearest parent if it does not exist; None if one can."""
    try:
        with tempfile.NamedTemporaryFile(dir=existing_parent(folder), prefix=".headstock-") as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None


def free_disk(folder: Path) -> int:
    return shutil.disk_usage(existing_parent(folder)).free
