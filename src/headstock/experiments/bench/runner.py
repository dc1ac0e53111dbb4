"""All measurements as one table with the date, the device and the versions they were made with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headstock.errors import UserError
from headstock.experiments.bench.inference import bench_decoding, bench_finetuned
from headstock.experiments.bench.measurement import Measurement, environment_info
from headstock.experiments.bench.peers import against_peers
from headstock.experiments.bench.startup import bench_startup, bench_token_store
from headstock.experiments.bench.training import bench_training
from headstock.io import write_json
from headstock.train.distributed import choose_device

PARTS = {
    "start": bench_startup,
    "store": bench_token_store,
    "train": bench_training,
    "decode": bench_decoding,
    "read": bench_finetuned,
}


def bench(
    *,
    device: str = "auto",
    quick: bool = False,
    only: list[str] | None = None,
    peers: Path | None = None,
    nanogpt: Path | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure, and keep what was found in `out`; `quick`, on so little work that only its order of magnitude counts."""
    known = [*PARTS, "peers"]
    if wrong := [name for name in only or [] if name not in known]:
        raise UserError(f"--only {wrong[0]}: must be one of {', '.join(known)}")
    chosen, found = choose_device(device), list[Measurement]()
    for name, part in PARTS.items():
        if not only or name in only:
            say(f"measuring: {name}")
            found += part(chosen, quick=quick)
    if not only or "peers" in only:
        found += against_peers(chosen, quick=quick, folder=peers, nanogpt=nanogpt, say=say)
    results = environment_info(chosen) | {"quick": quick, "results": [one.plain() for one in found]}
    if out is not None:
        write_json(out, results)
    return results


def bench_table(results: dict[str, Any]) -> Any:
    from rich.table import Table

    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    made = Table(title=f"{results['device']}, {results['date']}", caption=versions)
    for name in ("work", "here", "unit", "peer", "times as fast"):
        made.add_column(name, justify="right" if name in ("here", "peer", "times as fast") else "left")
    for row in results["results"]:
        shown = "" if "theirs" not in row else f"{amount(row['theirs'])} ({row['peer']})"
        ratio = "" if "ratio" not in row else f"{row['ratio']:.2f}"
        made.add_row(row["work"], amount(row["value"]), row["unit"], shown, ratio)
    return made


def amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
