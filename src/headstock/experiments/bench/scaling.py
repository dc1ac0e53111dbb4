"""`headstock bench --growth`: scaling of speed and memory with the token store, the batch and the sequence length."""

import logging
import multiprocessing
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headstock.cost.model import model_cost, model_dimensions
from headstock.cost.training_cost import flops_per_token
from headstock.data.token_store import SplitStores, open_split_stores
from headstock.experiments.bench.runner import environment_info
from headstock.experiments.bench.workloads import Workload, time_steps, workload_config, write_token_stores
from headstock.io import write_json
from headstock.train.distributed import choose_device
from headstock.train.models import blueprint
from headstock.train.settings import RunConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

CPU_WORKLOAD = Workload(
    "gpt-nano", 8, 128, {"model.depth": 2, "model.width": 64, "model.heads": 2, "model.hidden": 256}
)
CUDA_WORKLOAD = Workload("gpt-small", 64, 512, {})
BATCH_SIZES = (2, 4, 8, 16, 32, 64)
LENGTHS = (64, 128, 256, 512, 1024, 2048)
TOKENS = 4096  # per step, for all lengths
STEPS, ROUNDS = 20, 3


def measure_scaling(*, device: str = "auto", megabytes: float = 300, steps: int = STEPS) -> dict[str, Any]:
    """Measure token stores from 1 MB to `megabytes`, batch sizes and sequence lengths."""
    torch_device = choose_device(device)
    workload = CUDA_WORKLOAD if torch_device.type == "cuda" else CPU_WORKLOAD
    sizes = [size for size in (1.0, 10.0, 100.0, 1000.0, 10_000.0) if size < megabytes] + [float(megabytes)]
    with tempfile.TemporaryDirectory() as temporary:
        vocabulary = workload_config(workload).model.vocabulary
        paths = [
            write_token_stores(Path(temporary) / f"{size:g}", size, vocabulary=vocabulary).folder for size in sizes
        ]
        logger.info("wrote token stores of %s MB", ", ".join(f"{size:g}" for size in sizes))
        rounds = [[time_in_process(path, workload, torch_device.type, steps) for path in paths] for _ in range(ROUNDS)]
        stores = [{"megabytes": size, **fastest(times)} for size, *times in zip(sizes, *rounds, strict=True)]
        logger.info("measured token stores")
        small = open_split_stores(paths[0])
        batches = [
            fastest([time_batch_size(workload, rows, small, torch_device, steps) for _ in range(ROUNDS)])
            for rows in BATCH_SIZES
        ]
        logger.info("measured batch sizes")
        lengths = [
            fastest([time_length(workload, length, small, torch_device, steps // 2) for _ in range(ROUNDS)])
            for length in LENGTHS
        ]
        logger.info("measured sequence lengths")
    results = {"shape": describe(workload), "stores": stores, "rows": batches, "lengths": lengths}
    return environment_info(torch_device) | results


def describe(workload: Workload) -> str:
    model = workload_config(workload).model
    return f"{model.depth} layers, width {model.width}, {workload.rows} rows of {workload.length} tokens"


def fastest(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest round: other programs only ever slow it down."""
    return min(rounds, key=lambda one: one["seconds"])


def time_in_process(folder: Path, workload: Workload, device: str, steps: int) -> dict[str, Any]:
    """In a new process, so that the peak memory is that of the run alone."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(time_store, (folder, workload, device, steps, torch.get_num_threads()))


def time_store(folder: Path, workload: Workload, device: str, steps: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    timing = time_steps(workload_config(workload), open_split_stores(folder), choose_device(device), steps=steps)
    return {"seconds": timing.seconds, "tokens_per_second": timing.tokens_per_second, "peak_bytes": timing.peak_bytes}


def time_batch_size(
    workload: Workload, rows: int, stores: SplitStores, device: torch.device, steps: int
) -> dict[str, Any]:
    timing = time_steps(workload_config(replace(workload, rows=rows)), stores, device, steps=steps)
    return {"tokens": rows * workload.length, "seconds": timing.seconds}


def time_length(
    workload: Workload, length: int, stores: SplitStores, device: torch.device, steps: int
) -> dict[str, Any]:
    """The same number of tokens in fewer, longer rows, and the fraction of FLOPs spent in attention."""
    longer = replace(
        workload,
        rows=max(1, TOKENS // length),
        length=length,
        settings=workload.settings | {"model.context": max(length, LENGTHS[-1])},
    )
    config = workload_config(longer)
    timing = time_steps(config, stores, device, steps=max(4, steps))
    return {"length": length, "seconds": timing.seconds, "attention": attention_share(config, length)}


def attention_share(config: RunConfig, length: int) -> float:
    """The fraction of FLOPs that grows with the sequence length, by the closed form."""
    model, task = blueprint(config)
    total, without_attention = (
        flops_per_token(model_cost(model, task, replace(model_dimensions(model, length=length), length=size)))
        for size in (length, 0)
    )
    return float(1 - without_attention / total)


def write_scaling_chart(results: dict[str, Any], out: Path) -> None:
    """Write four charts as one SVG, and the numbers as JSON next to it."""
    from headstock.report.theme import chart_style, make_figure

    figure = make_figure(lambda figure: paint(figure, results), 1000, 620)
    with chart_style():
        figure.savefig(out, format="svg", facecolor="#fdfcfa")
    write_json(out.with_suffix(".json"), results)


def paint(figure: "Figure", results: dict[str, Any]) -> None:
    figure.suptitle(f"{results['shape']}; {results['device']}, {results['date']}")
    (speed, memory), (step, length) = figure.subplots(2, 2)
    stores, rows, lengths = results["stores"], results["rows"], results["lengths"]
    sizes = [row["megabytes"] for row in stores]
    line(speed, sizes, [row["tokens_per_second"] for row in stores], "token store (MB)", "tokens/s")
    line(memory, sizes, [row["peak_bytes"] / 1e6 for row in stores], "token store (MB)", "peak memory (MB)")
    for axes in (speed, memory):
        axes.set_xscale("log")
        axes.set_xticks(sizes, [f"{size:,g}" for size in sizes])
        axes.minorticks_off()
    line(
        step, [row["tokens"] for row in rows], [1e3 * row["seconds"] for row in rows], "tokens per step", "ms per step"
    )
    step.set_xlim(left=0)
    milliseconds = [1e3 * row["seconds"] for row in lengths]
    line(length, [row["length"] for row in lengths], milliseconds, "sequence length", f"ms per {TOKENS:,} tokens")
    for row in lengths[-3:]:
        length.annotate(
            f"{row['attention']:.0%} attention",
            (row["length"], 1e3 * row["seconds"]),
            textcoords="offset points",
            xytext=(-8, 6),
            ha="right",
            fontsize=9,
        )


def line(axes: Any, xs: list[float], ys: list[float], x_label: str, y_label: str) -> None:
    axes.plot(xs, ys, marker="o", color="#0072b2")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(0, 1.15 * max(ys))  # from zero, so that a flat curve looks flat
    axes.grid(True)
