"""Rewrites the verdicts of the comparisons in recipes/results, from their stored scores and in the current wording.

    python scripts/verdicts.py

A test fails until they are current. Scores, intervals and differences stay as they were measured.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headstock.experiments.comparison_summary import verdicts
from headstock.io import write_text
from headstock.tasks.labelled import nouns_of

ROOT = Path(__file__).parents[1]


def main() -> None:
    for path, results in comparisons():
        if (lines := current_verdicts(results)) != results["verdicts"]:
            write_text(path, json.dumps(results | {"verdicts": lines}, indent=1, ensure_ascii=False) + "\n")
            print(f"{path.relative_to(ROOT)}: rewritten")


def comparisons() -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted((ROOT / "recipes" / "results").glob("*/*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(results, dict) and results.get("kind") == "compare":
            yield path, results


def current_verdicts(results: dict[str, Any]) -> list[str]:
    return verdicts(results, unit=nouns_of(results["task"]).unit)


if __name__ == "__main__":
    main()
