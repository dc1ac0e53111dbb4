"""Compares pretraining and fine-tuning settings for CLS-books by cross-validation on its labelled rows.

    python benchmarks/cls_books.py [--pretraining hybrid electra] [--finetuning plain] --minutes 4 --out runs/search

The candidates are in benchmarks/cls_books.toml. Results are appended to OUT/results.jsonl, one line per point.
"""

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).with_suffix(".toml")
ROWS = ["--train", "data/cls-books/train.review.spm", "--valid", "data/cls-books/valid.review.spm"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--pretraining", nargs="*", help="candidates; default: all")
    parser.add_argument("--finetuning", nargs="*", help="candidates; default: all")
    parser.add_argument("--minutes", type=float, help="of each pretraining; default: as the recipe says")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--processes", type=int, default=4, help="cross-validations at once")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    recipe = tomllib.loads(options.recipe.read_text(encoding="utf-8"))
    pretraining = select(recipe["pretraining"], options.pretraining)
    finetuning = select(recipe["finetuning"], options.finetuning)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, sections in pretraining.items():
        pretrain(options.out / name, sections, options.minutes)
    with ThreadPoolExecutor(options.processes) as pool:
        calls = [
            pool.submit(cross_validate, options, backbone, name, recipe["finetune"] | settings)
            for backbone in pretraining
            for name, settings in finetuning.items()
        ]
        with (options.out / "results.jsonl").open("a", encoding="utf-8") as file:
            for call in calls:
                if error := call.exception():
                    print(error, flush=True)  # not every combination is possible
                    continue
                for row in call.result():
                    print(row, flush=True)
                    file.write(json.dumps(row) + "\n")


def select(candidates: dict[str, Any], names: list[str] | None) -> dict[str, Any]:
    return candidates if names is None else {name: candidates[name] for name in names}


def pretrain(out: Path, sections: Mapping[str, Any], minutes: float | None) -> None:
    if (out / "results.json").exists():
        return
    config = tomllib.loads(Path("recipes/reviews-fr.toml").read_text(encoding="utf-8"))
    for name, values in sections.items():
        config[name] = values if name == "task" else config[name] | values
    file = out.with_suffix(".json")
    file.write_text(json.dumps(config), encoding="utf-8")
    duration = [] if minutes is None else ["--minutes", str(minutes)]
    headstock(["pretrain", "--config", str(file), *duration, "--out", str(out)], out.with_suffix(".log"))


def cross_validate(options: argparse.Namespace, backbone: str, name: str, settings: dict[str, Any]) -> list[Any]:
    """The score of each point of the grid, with its interval."""
    out = options.out / f"{backbone}-{name}"
    grid = {key: ",".join(map(str, values)) for key, values in settings.pop("grid").items()}
    axes = [word for key, values in grid.items() for word in ("--grid", f"{key}={values}")]
    folds = ["--folds", str(options.folds), "--repeats", str(options.repeats), "--out-of-fold", "all"]
    headstock(
        ["sweep", "--run", str(options.out / backbone), *ROWS, *axes, *sets(settings), *folds, "--out", str(out)],
        out.with_suffix(".log"),
    )
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    seconds = json.loads((options.out / backbone / "results.json").read_text(encoding="utf-8"))["seconds"]
    keys = ("settings", "mean", "low", "high", "seconds")
    common = {"pretraining": backbone, "pretraining_seconds": seconds, "finetuning": name}
    return [common | {key: point[key] for key in keys} for point in results["points"]]


def sets(settings: Mapping[str, Any]) -> Iterable[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def headstock(command: list[str], log: Path) -> None:
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run([sys.executable, "-m", "headstock", *command], stdout=file, stderr=file)
    if done.returncode:
        raise RuntimeError(f"headstock {command[0]} failed: {log}: {log.read_text(encoding='utf-8')[-500:]}")


if __name__ == "__main__":
    main()
