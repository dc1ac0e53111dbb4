"""Merges the results of `make faults` into benchmarks/results/faults.json and docs/evidence/reliability.md.

    python benchmarks/faults.py ROWS.jsonl

The rows of a fault that was tested again replace all its earlier ones.
"""

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
PAGE = ROOT / "docs" / "evidence" / "reliability.md"
TABLE = re.compile(r"(?<=<!-- table of faults -->\n).*?(?=\n<!-- end of the table -->)", re.DOTALL)

FAULTS = {
    1: "`kill -9` at random moments and inside saves",
    2: "`kill -9` after each system call of a save",
    3: "SIGTERM and Ctrl-C",
    4: "resume at every step of three epochs",
    5: "another number of ranks",
    6: "the same seed twice, every model family",
    7: "one piece of the saved state missing",
    8: "flipped bits in checkpoints",
    9: "truncated checkpoints",
    10: "a full disk",
    11: "a read-only folder",
    12: "NaN in a step",
    13: "loss spikes",
    14: "out of memory",
    15: "a worker killed under torchrun",
    16: "a rank that hangs",
    17: "resuming with other numbers of ranks",
    18: "changed corpus or tokenizer at a resume",
    19: "two processes, one run folder",
    20: "retention of checkpoints",
    21: "pickles in place of model files",
    22: "fuzzed model, tokenizer, config and report files",
    23: "JSON, TOML and compression bombs",
    24: "path traversal in archives and indexes",
    25: "config fields that name code",
    26: "server: requests that are too large, slow or many",
    27: "server: hostile requests",
    28: "server: clients that go away",
    29: "hostile strings in pages and reports",
    30: "export parity",
}


def merge(before: Iterable[dict[str, Any]], rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows in the order of the faults; those of faults that were tested again replace the earlier ones."""
    rows = list(rows)
    again = {row["fault"] for row in rows}
    kept = [row for row in before if row["fault"] not in again]
    merged = {(row["fault"], row["what"]): row for row in [*kept, *rows]}
    return sorted(merged.values(), key=lambda row: row["fault"])


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The Markdown table of the results."""
    results: dict[int, list[str]] = {}
    for row in rows:
        figures = [(name, value) for name, value in row.items() if name not in ("fault", "what", "size")]
        text = ", ".join(format_figure(name.replace("_", " "), value) for name, value in figures)
        results.setdefault(row["fault"], []).append(f"{row['what']}: {text}" if text else row["what"])
    lines = ["| | fault | measured |", "|---|---|---|"]
    lines += [f"| {number} | {FAULTS[number]} | {'<br>'.join(texts)} |" for number, texts in sorted(results.items())]
    return "\n".join(lines)


def format_figure(name: str, value: Any) -> str:
    """`1,000 flips`, but `exit code 1` and `slowest exit in seconds 0.4`."""
    is_count = isinstance(value, int) and name != "exit code"
    return f"{value:,} {name}" if is_count else f"{name} {value}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="JSON lines that the fault tests wrote")
    rows = [json.loads(line) for line in parser.parse_args().rows.read_text(encoding="utf-8").splitlines()]
    before = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else []
    merged = merge(before, rows)
    lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in merged)
    RESULTS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda match: table(merged), page), encoding="utf-8")
    print(table(merged))


if __name__ == "__main__":
    main()
