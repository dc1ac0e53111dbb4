"""`headstock bench`: runs all measurements and, where available, the comparisons with other libraries."""

import importlib.util
import json
import logging
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headstock import __version__
from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.decoding.generate import generate
from headstock.decoding.sampling import Sampling
from headstock.errors import UserError
from headstock.experiments.bench.workloads import (
    QUICK,
    Workload,
    random_lines,
    time_steps,
    workload_config,
    workloads_for,
    write_corpus,
    write_labelled_rows,
    write_token_stores,
)
from headstock.inference.pipeline import load
from headstock.io import write_json
from headstock.logs import muted
from headstock.planner.machine import device_name, median_seconds
from headstock.ray_cluster import alive_nodes, check_nodes, connect, largest, run_tasks
from headstock.train.distributed import choose_device
from headstock.train.finetune import finetune
from headstock.train.models import blueprint

logger = logging.getLogger(__name__)

PROMPT_LENGTH = 16
INIT_STD = 0.08  # of random weights: large enough that greedy decoding does not repeat one token
QUICK_MODEL: dict[str, Any] = {"depth": 2, "width": 32, "heads": 2, "hidden": 64}
PEER_SCRIPTS = Path(__file__).parents[4] / "benchmarks"  # exists in a checkout, not in an installed package


@dataclass(frozen=True)
class Measurement:
    """A throughput, or a time if the unit is s."""

    work: str
    value: float
    unit: str
    theirs: float | None = None  # of another library, measured alternately
    peer: str = ""

    @property
    def ratio(self) -> float | None:
        """The speedup over the peer."""
        if self.theirs is None:
            return None
        return self.theirs / self.value if self.unit == "s" else self.value / self.theirs

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {"work": self.work, "value": self.value, "unit": self.unit}
        if self.theirs is None:
            return values
        return values | {"theirs": self.theirs, "peer": self.peer, "ratio": self.ratio}


def bench(
    *,
    device: str = "auto",
    quick: bool = False,
    only: list[str] | None = None,
    peers: Path | None = None,
    nanogpt: Path | None = None,
    out: Path | None = None,
    on: str | None = None,
) -> dict[str, Any]:
    """Run the measurements and write them to `out`. With `quick` they only show that everything works.

    With `on="ray"` or `"ray:ADDRESS"` each part is a Ray task, and each row names the node that it was measured on.
    """
    names = [*PARTS, "peers"]
    if unknown := [name for name in only or [] if name not in names]:
        raise UserError(f"--only {unknown[0]}: must be one of {', '.join(names)}")
    if nanogpt is not None and not (nanogpt / "model.py").is_file():
        raise UserError(f"--nanogpt {nanogpt}: contains no model.py")
    if peers is not None and not peers.is_dir():
        raise UserError(f"--peers {peers}: no such folder")
    parts: dict[str, Part] = {name: partial(measure, quick=quick) for name, measure in PARTS.items()}
    parts["peers"] = partial(bench_peers, quick=quick, folder=peers, nanogpt=nanogpt)
    parts = {name: measure for name, measure in parts.items() if not only or name in only}
    if on is not None:
        environment, rows = bench_on_ray(parts, on, device)
    else:
        torch_device, rows = choose_device(device), []
        for name, measure in parts.items():
            logger.info("measuring: %s", name)
            rows += [measurement.to_dict() for measurement in measure(torch_device)]
        environment = environment_info(torch_device)
    results = environment | {"quick": quick, "results": rows}
    if out is not None:
        write_json(out, results)
    return results


Part = Callable[[torch.device], list[Measurement]]


def bench_on_ray(parts: dict[str, Part], on: str, device: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The environments, as one, and the rows of all parts. A part takes all CPUs of a node, so it runs there alone."""
    with connect(on):
        check_nodes()
        needs_gpu = device == "cuda" or (device == "auto" and largest("GPU") >= 1)
        nodes = [node for node in alive_nodes() if not needs_gpu or node["Resources"].get("GPU", 0) >= 1]
        arguments = [(measure, "cuda" if needs_gpu else "cpu") for measure in parts.values()]
        measured: dict[int, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
        for index, result in run_tasks(
            measure_on_node, arguments, names=list(parts), cpus=max(1, largest("CPU", nodes)), gpus=float(needs_gpu)
        ):
            measured[index] = result
            logger.info("measured: %s on %s", list(parts)[index], result[0]["host"])
    environments = [measured[index][0] for index in range(len(parts))]
    devices = sorted({environment["device"] for environment in environments})
    environment = environments[0] | {"device": ", ".join(devices)}
    environment.pop("host")
    return environment, [row for index in range(len(parts)) for row in measured[index][1]]


def measure_on_node(measure: Part, device: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    torch_device, host = choose_device(device), socket.gethostname()
    rows = [measurement.to_dict() | {"node": host} for measurement in measure(torch_device)]
    return environment_info(torch_device) | {"host": host}, rows


def environment_info(device: torch.device) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": device_name(device),
        "versions": {"headstock": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def bench_table(results: dict[str, Any]) -> Any:
    from rich.table import Table

    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    table = Table(title=f"{results['device']}, {results['date']}", caption=versions)
    for name in ("work", "Headstock", "unit", "peer", "speedup"):
        table.add_column(name, justify="right" if name in ("Headstock", "peer", "speedup") else "left")
    for row in results["results"]:
        peer = "" if "theirs" not in row else f"{format_amount(row['theirs'])} ({row['peer']})"
        speedup = "" if "ratio" not in row else f"{row['ratio']:.2f}"
        table.add_row(row["work"], format_amount(row["value"]), row["unit"], peer, speedup)
    return table


def format_amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# Measurements


def bench_startup(device: torch.device, *, quick: bool) -> list[Measurement]:
    """`headstock --help` in a new process."""
    times = []
    for _ in range(2 if quick else 7):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "headstock", "--help"], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return [Measurement("headstock --help", statistics.median(times), "s")]


def bench_token_store(device: torch.device, *, quick: bool) -> list[Measurement]:
    """Reading, deduplicating, splitting, tokenizing and writing text."""
    megabytes = 0.3 if quick else 20
    with tempfile.TemporaryDirectory() as folder:
        corpus = read_corpus(write_corpus(Path(folder) / "text.txt", megabytes), documents="line")
        texts = corpus.first_texts(2000 if quick else 30_000)
        tokenizer = train_tokenizer(texts, TokenizerSettings(vocabulary=8000))
        start = time.perf_counter()
        with muted():
            build_split_stores(corpus, tokenizer, cache=Path(folder) / "cache")
        seconds = time.perf_counter() - start
    return [Measurement("building a token store", megabytes / seconds, "MB/s")]


def bench_training(device: torch.device, *, quick: bool) -> list[Measurement]:
    """The training loop without validation and checkpoints, one measurement per workload."""
    measurements = []
    with tempfile.TemporaryDirectory() as folder:
        for number, workload in enumerate(workloads_for(device, quick=quick)):
            config = workload_config(workload)
            path, megabytes = Path(folder) / str(number), 0.2 if quick else 20
            stores = write_token_stores(path, megabytes, vocabulary=config.model.vocabulary)
            timing = time_steps(config, stores, device, steps=6 if quick else 20)
            measurements.append(Measurement(f"training {workload.name}", timing.tokens_per_second, "tokens/s"))
    return measurements


def bench_decoding(device: torch.device, *, quick: bool) -> list[Measurement]:
    """Greedy decoding with a KV cache, batch sizes 1 and 64."""
    workload = QUICK if quick else Workload("gpt-base" if device.type == "cuda" else "gpt-mini", 1, 256, {})
    torch.manual_seed(0)
    model, _ = blueprint(workload_config(workload), weights=True)
    for name, weight in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(weight, std=INIT_STD)
    model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    new_tokens, rng, measurements = 8 if quick else 128, random.Random(0), []
    for rows in (1, 4) if quick else (1, 64):
        prompts = [[rng.randrange(10, 200) for _ in range(PROMPT_LENGTH)] for _ in range(rows)]
        decode = partial(generate, model, prompts, max_tokens=new_tokens, sampling=Sampling(temperature=0.0))
        seconds = median_seconds(decode, device, repeats=1 if quick else 3)
        name = f"decoding {workload.preset}, {rows} rows"
        measurements.append(Measurement(name, rows * new_tokens / seconds, "tokens/s"))
    return measurements


def bench_finetuned(device: torch.device, *, quick: bool) -> list[Measurement]:
    """Fine-tuning a classifier, then classifying and embedding short texts with it."""
    preset, count = ("bert-base", 20_000) if device.type == "cuda" else ("bert-nano", 1000)
    size = {**QUICK_MODEL, "tokenizer.vocabulary": 400} if quick else {"tokenizer.vocabulary": 4000}
    settings = {"steps": 4 if quick else 30, "length": 128, "batch": 8 if quick else 32} | size
    with tempfile.TemporaryDirectory() as folder, muted():
        rows = write_labelled_rows(Path(folder) / "rows.csv", 60 if quick else 1600)
        run = Path(folder) / "run"
        results = finetune(preset=preset, train=rows, out=run, settings=settings, device=device.type)
        pipeline = load(run, device=device.type)
    lines = random_lines(2)
    texts = [next(lines) for _ in range(40 if quick else count)]
    measurements = [Measurement(f"fine-tuning {preset}", results["tokens_per_second"], "tokens/s")]
    for name, work in (("classifying", pipeline.predict), ("embedding", pipeline.embed)):
        seconds = median_seconds(partial(work, texts), pipeline.model.device, repeats=1 if quick else 3)
        measurements.append(Measurement(f"{name} with {preset}", len(texts) / seconds, "texts/s"))
    return measurements


PARTS = {
    "start": bench_startup,
    "store": bench_token_store,
    "train": bench_training,
    "decode": bench_decoding,
    "read": bench_finetuned,
}


# Other libraries: the scripts in benchmarks/ time both sides alternately


def bench_peers(device: torch.device, *, quick: bool, folder: Path | None, nanogpt: Path | None) -> list[Measurement]:
    """The results of the benchmark scripts; scripts whose peer is not installed are skipped."""
    folder = folder or PEER_SCRIPTS
    if not folder.is_dir() or importlib.util.find_spec("transformers") is None:
        logger.info("skipping comparisons with other libraries: they need benchmarks/ of a checkout and transformers")
        return []
    options = ["--device", device.type]
    size = ["--tiny"] if quick else [] if device.type == "cuda" else ["--texts", "2000", "--rounds", "3"]
    measurements = run_script(folder / "inference.py", [*options, *size, "--json"], inference_measurements)
    if quick or device.type == "cuda":  # the training script's models are too large for a CPU
        options += ["--peers", *(["--tiny"] if quick else [])]
        options += ["--nanogpt", str(nanogpt)] if nanogpt is not None else []
        measurements += run_script(folder / "train_speed.py", [*options, "--out"], training_measurements)
    return measurements


def run_script(
    script: Path, options: list[str], parse: Callable[[dict[str, Any]], list[Measurement]]
) -> list[Measurement]:
    """Run a script; the last of its options takes the name of the JSON file it writes."""
    logger.info("running %s", script.name)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        done = subprocess.run([sys.executable, str(script), *options, str(out)], capture_output=True, text=True)
        if done.returncode or not out.is_file():
            reason = (done.stderr.strip().splitlines() or ["no error message"])[-1]
            logger.info("%s: skipped (%s)", script.name, reason)
            return []
        return parse(json.loads(out.read_text(encoding="utf-8")))


def inference_measurements(output: dict[str, Any]) -> list[Measurement]:
    return [
        Measurement(work_name(row), row["ours"], f"{row['unit']}/s", row["theirs"], "transformers")
        for row in output["results"]
    ]


def training_measurements(output: dict[str, Any]) -> list[Measurement]:
    """Our training speed beside that of each peer, which has a row of its own for the same work."""
    ours = {row["work"]: row["tokens_per_second"] for row in output["rows"] if row["how"] == "headstock"}
    return [
        Measurement(f"training {row['work']}", ours[row["work"]], "tokens/s", row["tokens_per_second"], row["how"])
        for row in output["rows"]
        if row["how"] != "headstock" and row["work"] in ours
    ]


def work_name(row: dict[str, Any]) -> str:
    """`generate, 64 rows, even prompts`."""
    parts = [str(row["work"])]
    parts += [f"{row[key]:,} {key}" for key in ("rows", "texts") if isinstance(row.get(key), int)]
    return ", ".join(parts + ([f"{row['prompts']} prompts"] if "prompts" in row else []))
