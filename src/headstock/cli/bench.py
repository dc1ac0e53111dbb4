"""`headstock bench`: how fast is it on this machine?"""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, verb


def bench(
    common: Common,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds, on very little work: to see that it runs.")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="start, store, train, decode, read or peers; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Where the numbers are kept, as .json.")] = None,
    growth: Annotated[bool, typer.Option("--growth", help="Over sizes of store, step and row, as a chart.")] = False,
    megabytes: Annotated[float, typer.Option("--megabytes", help="With --growth: the largest store.")] = 300,
    peers: Annotated[Path | None, typer.Option("--peers", help="The folder of the peers' side; benchmarks/.")] = None,
    nanogpt: Annotated[Path | None, typer.Option("--nanogpt", help="A folder with nanoGPT's own model.py.")] = None,
) -> dict[str, Any]:
    """Measure training, fine-tuning, decoding, classifying, embedding, start-up and the token store, here and now.

    Example: headstock bench --out bench.json
    Example: headstock bench --growth --out growth.svg
    """
    from headstock.errors import UserError
    from headstock.experiments.bench.runner import bench as work
    from headstock.experiments.bench.runner import bench_table
    from headstock.experiments.bench.scaling import STEPS, write_scaling_chart
    from headstock.experiments.bench.scaling import measure_scaling as grow

    wanted = ".svg" if growth else ".json"
    out = out or Path(f"{'growth' if growth else 'bench'}{wanted}")
    if out.suffix != wanted:
        raise UserError(f"--out {out}: must end in {wanted}")
    if growth:
        if megabytes < 1:
            raise UserError(f"--megabytes {megabytes}: must be 1 or more")
        found = grow(device=common.device, megabytes=megabytes, steps=4 if quick else STEPS, say=common.say)
        write_scaling_chart(found, out)
        common.show(f"{out} and {out.with_suffix('.json')}")
        return found | {"chart": str(out)}
    results = work(device=common.device, quick=quick, only=only, peers=peers, nanogpt=nanogpt, out=out, say=common.say)
    common.show(bench_table(results))
    common.show(str(out))
    return results | {"file": str(out)}


def add_to(app: typer.Typer) -> None:
    verb(app, writes=written)(bench)


def written(given: dict[str, Any]) -> list[Path]:
    """The files of an --out; those of the default name are replaced by every measurement."""
    out = given["out"]
    return [] if out is None else [out, *([out.with_suffix(".json")] if given["growth"] else [])]
