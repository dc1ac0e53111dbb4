"""A short real run: pretrain, save, load and generate on a device, in a process of its own.

`python -m headstock.maintenance.self_test DEVICE FOLDER SEED` prints one line of JSON per stage. So a crash of the
process, which a broken installation of torch may cause, or a hang still tells how far it came.
"""

import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIME_LIMIT = 120.0  # seconds, with imports, which take most of the time on a slow disk
STAGES = ("torch", "pretrain", "load", "generate")
TINY = {"depth": 2, "width": 64, "heads": 2, "context": 64, "vocabulary": 300, "batch": 16}
TINY |= {"steps": 30, "validate_every": 30, "tensorboard": False}
WORDS = (("Anne", "Ben", "Zoë"), ("sees", "likes", "finds"), ("the café", "a film", "Paris"))


@dataclass
class SelfTest:
    """What each stage reported, and why the next one failed."""

    device: str
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


def run_self_test(device: str = "auto", *, seed: int = 0, stages: tuple[str, ...] = STAGES) -> SelfTest:
    """Run the stages in a process of its own, which is stopped after `TIME_LIMIT` seconds."""
    result = SelfTest(device)
    with tempfile.TemporaryDirectory(prefix="headstock-") as name:
        words = [sys.executable, "-m", __name__, device, name, str(seed), *stages]
        environment = os.environ | {"HEADSTOCK_CACHE": str(Path(name) / "cache"), "PYTHONIOENCODING": "utf-8"}
        log = Path(name) / "stderr"
        with log.open("wb") as stderr:
            try:
                done = subprocess.run(words, stdout=subprocess.PIPE, stderr=stderr, env=environment, timeout=TIME_LIMIT)
                out, code = done.stdout, done.returncode
            except subprocess.TimeoutExpired as error:
                out, code = error.stdout or b"", None
        for line in out.decode("utf-8", "replace").splitlines():
            if line.startswith('{"stage"'):
                values = json.loads(line)
                result.stages[values.pop("stage")] = values
        failed = next((stage for stage in stages if stage not in result.stages), None)
        if failed is not None:
            last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
            last = last.removeprefix("headstock.errors.UserError: ").removeprefix("headstock.errors.WorkError: ")
            result.error = f"{failed}: {_reason(code, last)}"
    return result


def _reason(code: int | None, last_line: str) -> str:
    if code is None:
        return f"not done after {TIME_LIMIT:.0f} s"
    if code < 0:
        return f"the process was killed by signal {-code}"
    return last_line or f"exit code {code}"


# In the process of the test


def run_stages(device: str, folder: Path, seed: int) -> Iterator[dict[str, Any]]:
    yield torch_facts()
    import headstock
    from headstock.train.distributed import choose_device

    text = folder / "text.txt"
    text.write_text(make_text(random.Random(seed)), encoding="utf-8")
    results = headstock.pretrain(text, out=folder / "run", settings=TINY | {"seed": seed}, device=device)
    if not results["valid_loss"] < math.log(TINY["vocabulary"]):
        raise RuntimeError(f"the model has not learned: validation loss {results['valid_loss']}")
    facts = {name: results[name] for name in ("steps", "seconds", "tokens_per_second", "valid_loss", "device")}
    yield {"stage": "pretrain"} | facts
    pipeline = headstock.load(folder / "run", device=str(choose_device(device)))
    size = (folder / "run" / "model.safetensors").stat().st_size
    yield {"stage": "load", "bytes": size}
    generated = pipeline.generate("Anne", max_tokens=16, seed=seed)[0]
    yield {"stage": "generate", "text": generated.text}


def make_text(pick: random.Random) -> str:
    """Two hundred short documents that a model learns within seconds."""
    sentences = [" ".join(map(pick.choice, WORDS)) + "." for _ in range(800)]
    return "\n\n".join(" ".join(sentences[start : start + 4]) for start in range(0, 800, 4))


def torch_facts() -> dict[str, Any]:
    """What torch says about itself, the memory and the devices."""
    import torch

    from headstock.train.memory import free_bytes

    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        devices.append(f"{torch.cuda.get_device_name(index)}, {_gb(free)} of {_gb(total)} free, compute {capability}")
    if torch.backends.mps.is_available():
        devices.append(f"Apple GPU (mps), up to {_gb(torch.mps.recommended_max_memory())}")
    return {
        "stage": "torch",
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "free_bytes": free_bytes(torch.device("cpu")),
        "devices": devices,
    }


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def main() -> None:
    from headstock.option_names import in_command

    device, folder, seed, *stages = sys.argv[1:]
    with in_command():  # `headstock doctor` shows an error of these calls
        for values in run_stages(device, Path(folder), int(seed)):
            print(json.dumps(values), flush=True)
            if values["stage"] == stages[-1]:
                return


if __name__ == "__main__":
    main()
