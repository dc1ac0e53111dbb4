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
from headstock.study.bench.measured import Measured

# script -> its options in a quick run; each takes --json FILE and writes {"results": [{"work", "ours", "theirs", ...}]}
SCRIPTS: dict[str, list[str]] = {"inference.py": ["--tiny"], "train_speed.py": ["--tiny"]}
FOLDER = Path(__file__).parents[4] / "benchmarks"  # in a checkout; an installed package has none


def against_peers(
    device: torch.device,
    *,
    quick: bool,
    folder: Path | None,
    nanogpt: Path | None,
    say: Callable[[str], None],
) -> list[Measured]:
    """All that the scripts found; a script whose peer is not installed says so and is left out."""
    if nanogpt is not None and not (nanogpt / "model.py").is_file():
        raise UserError(f"--nanogpt {nanogpt}: there is no model.py in it")
    if folder is not None and not folder.is_dir():
        raise UserError(f"--peers {folder}: no such folder")
    folder = folder or FOLDER
    if not folder.is_dir() or importlib.util.find_spec("transformers") is None:
        say("no peers are at hand: they want a checkout's benchmarks/ and transformers")
        return []
    found = []
    for script, tiny in SCRIPTS.items():
        if (folder / script).is_file():
            options = ["--device", device.type, *(tiny if quick else [])]
            if nanogpt is not None and script == "train_speed.py":
                options += ["--nanogpt", str(nanogpt)]
            found += run(folder / script, options, say)
    return found


def run(script: Path, options: list[str], say: Callable[[str], None]) -> list[Measured]:
    say(f"{script.name}: both sides in turns")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        done = subprocess.run(
            [sys.executable, str(script), *options, "--json", str(out)], capture_output=True, text=True
        )
        if done.returncode or not out.is_file():
            why = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
            say(f"{script.name}: left out ({why})")
            return []
        return rows_of(json.loads(out.read_text(encoding="utf-8")))


def rows_of(told: dict[str, Any]) -> list[Measured]:
    return [
        Measured(
            named(row), row["ours"], f"{row.get('unit', 'tokens')}/s", row["theirs"], row.get("peer", "transformers")
        )
        for row in told["results"]
        if row.get("ours") and row.get("theirs")
    ]


def named(row: dict[str, Any]) -> str:
    """`generate, 64 rows, even prompts`."""
    parts = [str(row["work"])]
    parts += [f"{row[key]:,} {key}" for key in ("rows", "texts") if isinstance(row.get(key), int)]
    return ", ".join(parts + ([f"{row['prompts']} prompts"] if "prompts" in row else []))
