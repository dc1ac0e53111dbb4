"""What growth costs: speed and memory over the size of the store, a step over its tokens and over its rows' length."""

import multiprocessing
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headstock.cost.training import flops_per_token, model_cost
from headstock.data.token_store import SplitStores, open_split_stores
from headstock.experiments.bench.measurement import environment_info
from headstock.experiments.bench.synthetic_data import write_token_stores
from headstock.experiments.bench.training import Workload, measure, settings_of
from headstock.io import write_json
from headstock.train.blueprint import blueprint
from headstock.train.distributed import choose_device
from headstock.train.settings import RunConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL = Workload("gpt-nano", 8, 128, {"model.depth": 2, "model.width": 64, "model.heads": 2, "model.hidden": 256})
LARGE = Workload("gpt-small", 64, 512, {})
ROWS = (2, 4, 8, 16, 32, 64)
LENGTHS = (64, 128, 256, 512, 1024, 2048)
TOKENS = 4096  # in a step, when the length of its rows changes
STEPS, ROUNDS = 20, 3


def measure_scaling(
    *,
    device: str = "auto",
    megabytes: float = 300,
    steps: int = STEPS,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Stores from 1 MB up to `megabytes`, tenfold each; then steps of more rows, and of longer ones."""
    chosen = choose_device(device)
    shape = LARGE if chosen.type == "cuda" else SMALL
    sizes = [size for size in (1.0, 10.0, 100.0, 1000.0, 10_000.0) if size < megabytes] + [float(megabytes)]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        vocabulary = settings_of(shape).model.vocabulary
        made = [write_token_stores(Path(place) / f"{size:g}", size, vocabulary=vocabulary).folder for size in sizes]
        say(f"stores of {', '.join(f'{size:g}' for size in sizes)} MB are made")
        rounds = [[in_own_process(one, shape, chosen.type, steps) for one in made] for _ in range(ROUNDS)]
        stores = [{"megabytes": size, **best(turns)} for size, *turns in zip(sizes, *rounds, strict=True)]
        say("stores of all sizes: done")
        small = open_split_stores(made[0])
        rows = [best([over_rows(shape, count, small, chosen, steps) for _ in range(ROUNDS)]) for count in ROWS]
        say("steps of more tokens: done")
        lengths = [
            best([over_length(shape, each, small, chosen, steps // 2) for _ in range(ROUNDS)]) for each in LENGTHS
        ]
        say("longer rows: done")
    return environment_info(chosen) | {"shape": named(shape), "stores": stores, "rows": rows, "lengths": lengths}


def named(shape: Workload) -> str:
    model = settings_of(shape).model
    return f"{model.depth} layers x {model.width} wide, {shape.rows} rows of {shape.length} tokens"


def best(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest turn: others may be at work on the machine, which never makes anything faster."""
    return min(turns, key=lambda turn: turn["seconds"])


def in_own_process(folder: Path, shape: Workload, device: str, steps: int) -> dict[str, Any]:
    """A process that has done nothing else, so that its memory is that of the run alone."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(read_store, (folder, shape, device, steps, torch.get_num_threads()))


def read_store(folder: Path, shape: Workload, device: str, steps: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    found = measure(settings_of(shape), open_split_stores(folder), choose_device(device), steps=steps)
    return {"seconds": found.seconds, "tokens_per_second": found.speed, "peak_bytes": found.peak}


def over_rows(shape: Workload, rows: int, stores: SplitStores, device: torch.device, steps: int) -> dict[str, Any]:
    found = measure(settings_of(replace(shape, rows=rows)), stores, device, steps=steps)
    return {"tokens": rows * shape.length, "seconds": found.seconds}


def over_length(shape: Workload, length: int, stores: SplitStores, device: torch.device, steps: int) -> dict[str, Any]:
    """The same number of tokens in fewer, longer rows; and the share of its arithmetic that is attention's."""
    longer = replace(
        shape,
        rows=max(1, TOKENS // length),
        length=length,
        settings=shape.settings | {"model.context": max(length, LENGTHS[-1])},
    )
    chosen = settings_of(longer)
    found = measure(chosen, stores, device, steps=max(4, steps))
    return {"length": length, "seconds": found.seconds, "attention": attention_share(chosen, length)}


def attention_share(chosen: RunConfig, length: int) -> float:
    """By the closed form: what grows with the length of a row, of all."""
    model, task = blueprint(chosen)
    whole, none = (
        flops_per_token(model_cost(model, task, replace(model.dimensions(length=length), length=size)))
        for size in (length, 0)
    )
    return float(1 - none / whole)


def write_scaling_chart(found: dict[str, Any], out: Path) -> None:
    """Four small charts in one picture, and the numbers beside it."""
    from headstock.report.theme import chart_style, make_figure

    figure = make_figure(lambda figure: paint(figure, found), 1000, 620)
    with chart_style():
        figure.savefig(out, format="svg", facecolor="#fdfcfa")
    write_json(out.with_suffix(".json"), found)


def paint(figure: "Figure", found: dict[str, Any]) -> None:
    figure.suptitle(f"{found['shape']}; {found['device']}, {found['date']}")
    (speed, memory), (step, length) = figure.subplots(2, 2)
    sizes = [row["megabytes"] for row in found["stores"]]
    line(speed, sizes, [row["tokens_per_second"] for row in found["stores"]], "megabytes in the store", "tokens/s")
    line(memory, sizes, [row["peak_bytes"] / 1e6 for row in found["stores"]], "megabytes in the store", "MB of memory")
    for axes in (speed, memory):
        axes.set_xscale("log")
        axes.set_xticks(sizes, [f"{size:,g}" for size in sizes])
        axes.minorticks_off()
    tokens, seconds = [row["tokens"] for row in found["rows"]], [1e3 * row["seconds"] for row in found["rows"]]
    line(step, tokens, seconds, "tokens in a step", "ms a step")
    step.set_xlim(left=0)
    lengths, seconds = [row["length"] for row in found["lengths"]], [1e3 * row["seconds"] for row in found["lengths"]]
    line(length, lengths, seconds, "tokens in a row", f"ms for {TOKENS:,} tokens")
    for row in found["lengths"][-3:]:
        length.annotate(
            f"{row['attention']:.0%} attention",
            (row["length"], 1e3 * row["seconds"]),
            textcoords="offset points",
            xytext=(-8, 6),
            ha="right",
            fontsize=9,
        )


def line(axes: Any, across: list[float], up: list[float], name: str, unit: str) -> None:
    axes.plot(across, up, marker="o", color="#0072b2")
    axes.set_xlabel(name)
    axes.set_ylabel(unit)
    axes.set_ylim(0, 1.15 * max(up))  # from nothing up, so that what is flat looks flat
    axes.grid(True)
