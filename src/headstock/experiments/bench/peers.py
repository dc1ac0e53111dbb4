"""Ratios to others where their side is at hand: the scripts of `benchmarks/`, which time both sides in turns."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headstock.errors import UserError
from headstock.experiments.bench.measurement import Measurement

FOLDER = Path(__file__).parents[4] / "benchmarks"  # in a checkout; an installed package has none


def against_peers(
    device: torch.device,
    *,
    quick: bool,
    folder: Path | None,
    nanogpt: Path | None,
    say: Callable[[str], None],
) -> list[Measurement]:
    """All that the scripts found; a script whose peer is not installed says so and is left out."""
    if nanogpt is not None and not (nanogpt / "model.py").is_file():
        raise UserError(f"--nanogpt {nanogpt}: there is no model.py in it")
    if folder is not None and not folder.is_dir():
        raise UserError(f"--peers {folder}: no such folder")
    folder = folder or FOLDER
    if not folder.is_dir() or importlib.util.find_spec("transformers") is None:
        say("no peers are at hand: they want a checkout's benchmarks/ and transformers")
        return []
    where = ["--device", device.type]
    inference = where + (["--tiny"] if quick else [] if device.type == "cuda" else ["--texts", "2000", "--rounds", "3"])
    found = run(folder / "inference.py", [*inference, "--json"], inference_rows, say)
    if quick or device.type == "cuda":  # its models are too large for a CPU
        training = [*where, "--peers", *(["--tiny"] if quick else [])]
        training += ["--nanogpt", str(nanogpt)] if nanogpt is not None else []
        found += run(folder / "train_speed.py", [*training, "--out"], training_rows, say)
    return found


def run(
    script: Path,
    options: list[str],
    rows_of: Callable[[dict[str, Any]], list[Measurement]],
    say: Callable[[str], None],
) -> list[Measurement]:
    """What a script found; its last option is the one that the name of a file follows, which it writes."""
    say(f"{script.name}: both sides in turns")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        done = subprocess.run([sys.executable, str(script), *options, str(out)], capture_output=True, text=True)
        if done.returncode or not out.is_file():
            why = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
            say(f"{script.name}: left out ({why})")
            return []
        return rows_of(json.loads(out.read_text(encoding="utf-8")))


def inference_rows(told: dict[str, Any]) -> list[Measurement]:
    return [
        Measurement(named(row), row["ours"], f"{row['unit']}/s", row["theirs"], "transformers")
        for row in told["results"]
    ]


def training_rows(told: dict[str, Any]) -> list[Measurement]:
    """Of each work ours comes first, and then the peers."""
    found, ours = [], dict[str, float]()
    for row in told["rows"]:
        speed = row["tokens_per_second"]
        if row["work"] in ours:
            found.append(Measurement(f"training {row['work']}", ours[row["work"]], "tokens/s", speed, row["how"]))
        ours.setdefault(row["work"], speed)
    return found


def named(row: dict[str, Any]) -> str:
    """`generate, 64 rows, even prompts`."""
    parts = [str(row["work"])]
    parts += [f"{row[key]:,} {key}" for key in ("rows", "texts") if isinstance(row.get(key), int)]
    return ", ".join(parts + ([f"{row['prompts']} prompts"] if "prompts" in row else []))
