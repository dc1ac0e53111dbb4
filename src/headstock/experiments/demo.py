"""The demo: a complete comparison on real film reviews, in minutes on this machine."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headstock.data import catalog
from headstock.data.corpus import read_corpus
from headstock.errors import UserError, shell_quote
from headstock.experiments.compare import LAYOUT, compare, grid_points, make_context
from headstock.experiments.compare_settings import make_arms, make_plan
from headstock.experiments.duration import format_duration_range, grid_seconds, measure_throughput
from headstock.experiments.grid import read_json
from headstock.experiments.terminal_tables import comparison_table
from headstock.inference.pipeline import load
from headstock.io import FolderLayout, check_replaceable, remove_folder, write_json, write_text
from headstock.report.charts import terminal_chart
from headstock.report.format import Difference
from headstock.report.pages import write_report
from headstock.train.callbacks import status_line, terminal_progress
from headstock.train.distributed import DistributedContext, choose_device
from headstock.train.pretrain import pretrain
from headstock.train.run_folder import LAYOUT as RUN_LAYOUT
from headstock.train.run_folder import RunFolder

logger = logging.getLogger(__name__)

BUNDLED_RUN, DATASET = "reviews-en-uncased", "rotten-tomatoes"
SENTENCES = (
    "A warm, funny film with a heart, and two wonderful performances.",
    "Two hours of noise, and not one idea worth stealing.",
    "It begins well, but the second half forgets what made the first one work.",
)
MASKED_TEXTS = ("The [MASK] was superb, but the [MASK] was dull.", "I [MASK] this film, and I will see it [MASK].")
# a word vocabulary and many small steps: after a minute on two cores the samples are readable
LIVE_SETTINGS = {"tokenizer.kind": "word", "vocabulary": 3000, "depth": 2, "width": 96, "heads": 2, "hidden": 256}
LIVE_SETTINGS |= {"context": 64, "batch": 8, "tensorboard": False}
LONG_LIVE_SETTINGS = {"vocabulary": 4000, "context": 128, "tensorboard": False}  # on a GPU, or with more time
LONG_MINUTES = 15.0  # demos of at least this length use the long settings
PROMPTS = ("This film is", "The actors")
REVIEWS, LONG_REVIEWS = 2000, 4000  # training texts of the live model
LIVE_SHARE = 1 / 7  # of the demo's time
LEAST_STEPS = 60
OVERHEAD_ROWS = 12_000  # tokenizing, leakage search and report cost about as much as reading this many rows
PLAN_FILE = "demo.json"  # the chosen size, so that a resumed demo keeps it
DEMO_LAYOUT: FolderLayout = {**LAYOUT, "live": RUN_LAYOUT, "reviews.txt": None, PLAN_FILE: None}


@dataclass(frozen=True)
class ComparisonSize:
    labels: tuple[int, ...]
    seeds: int
    rows: int | None
    least_steps: int = LEAST_STEPS

    @property
    def settings(self) -> dict[str, Any]:
        """Of fine-tuning: a linear probe is better than a random head with few labels and steps."""
        return {"linear_probe": True, "least_steps": self.least_steps}


SIZES = (  # by increasing cost
    ComparisonSize((30, 100), 3, 300, least_steps=20),
    ComparisonSize((50, 150), 3, 300, least_steps=30),
    ComparisonSize((50, 200), 3, 400),
    ComparisonSize((100, 300), 3, 600),
    ComparisonSize((100, 250, 600), 3, 1000),
    ComparisonSize((100, 400, 1600), 3, 1000),
    ComparisonSize((100, 400, 1600), 5, None),
    ComparisonSize((100, 400, 1600, 6400), 5, None),
    ComparisonSize((100, 400, 1600, 6400), 10, None),
)


def run_demo(
    out: Path,
    *,
    minutes: float,
    sentences: list[str],
    overwrite: bool,
    device: str,
    seed: int,
    quiet: bool,
    show: Callable[[Any], None],
) -> dict[str, Any]:
    """Fill masks with the bundled model, pretrain a small one, compare on real labels, predict and write the report."""
    start = time.monotonic()
    check_output_folder(out, overwrite=overwrite)
    show(f"{BUNDLED_RUN}, a small model of film reviews bundled with Headstock, fills in masked words:\n")
    for filled in load(BUNDLED_RUN, device=device).fill(MASKED_TEXTS):
        show(f"   {filled.text}\n   {filled.filled}")
    catalog.fetch(DATASET)
    size = choose_size(out, minutes=minutes, device=device, seed=seed)
    logger.info("1. Pretraining a tokenizer and a small Transformer on film reviews")
    is_long = minutes >= LONG_MINUTES or choose_device(device).type != "cpu"
    live = pretrain_live(out, minutes=LIVE_SHARE * minutes, is_long=is_long, device=device, seed=seed, quiet=quiet)
    show(describe_live_run(RunFolder(out / "live"), live, device, seed))
    logger.info("\n2. Does pretraining help? %s (pretrained on film reviews) on short quotes", BUNDLED_RUN)
    counts = ", ".join(f"{count:,}" for count in size.labels)
    logger.info("   %s labels, %d seeds; the baseline is TF-IDF", counts, size.seeds)
    with status_line(quiet=quiet) as callbacks:
        results = compare(
            BUNDLED_RUN,
            train=f"catalog:{DATASET}/train.csv",
            valid=f"catalog:{DATASET}/valid.csv",
            test=f"catalog:{DATASET}/test.csv",
            out=out,
            labels=size.labels,
            seeds=size.seeds,
            seed=seed,
            rows=size.rows,
            settings=size.settings,
            device=device,
            callbacks=callbacks,
        )
    show(comparison_table(results))
    for verdict in results["verdicts"]:
        show(f"   {verdict}")
    show(summarize_pretrained(results))
    run = out / "runs" / f"pretrained-{size.labels[-1]}"
    show(f"\n3. Predictions of the model fine-tuned on {size.labels[-1]:,} labels\n")
    predictions = load(run, device=device).predict(sentences or SENTENCES)
    for text, prediction in zip(sentences or SENTENCES, predictions, strict=True):
        show(f"   {prediction['label']:9s} {max(prediction['probabilities'].values()):4.0%}  {text}")
    page = write_report(out)
    show(f'\n   Try your own: headstock predict {shell_quote(run)} "..."')
    show(f"\n4. The report, with the errors of each model: {page}   ({time.monotonic() - start:.0f} s in total)")
    return results | {"live": live, "predictions": predictions.to_dict(), "report": str(page)}


def check_output_folder(out: Path, *, overwrite: bool) -> None:
    """Continue an existing demo or start over; a folder with anything else is left alone."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    live = out / "live"
    is_demo = out.is_dir() and (live.is_dir() or (out / PLAN_FILE).is_file())
    if not is_demo or (live.is_dir() and any(live.iterdir()) and not RunFolder(live).has_run_config()):
        raise UserError(f"{out}: exists and is not a demo; choose another folder with --out")
    if overwrite:
        check_replaceable(out, DEMO_LAYOUT)
        remove_folder(out.resolve())
    else:
        logger.info("%s exists: continuing with its results (--overwrite starts over)", out)


def pretrain_live(out: Path, *, minutes: float, is_long: bool, device: str, seed: int, quiet: bool) -> dict[str, Any]:
    """Pretrain a small causal model on part of the reviews."""
    run = RunFolder(out / "live")
    if run.is_finished():
        return run.results()
    reviews = read_corpus("catalog:imdb", documents="block").first_texts(LONG_REVIEWS if is_long else REVIEWS)
    corpus = out / "reviews.txt"
    write_text(corpus, "\n\n".join(reviews) + "\n")
    settings = LONG_LIVE_SETTINGS if is_long else LIVE_SETTINGS
    with terminal_progress(quiet=quiet) as callbacks:
        return pretrain(
            corpus,
            out=run.path,
            preset="modern-nano",
            settings=settings | {"minutes": minutes, "seed": seed, "data.documents": "block"},
            resume=True,
            device=device,
            callbacks=callbacks,
        )


def describe_live_run(run: RunFolder, results: dict[str, Any], device: str, seed: int) -> str:
    """The live model's loss curve and samples."""
    curve = [(row["step"], row["loss"]) for row in run.read_metrics() if "loss" in row]
    generated = load(run.path, device=device).generate(PROMPTS, max_tokens=40, temperature=0.7, top_p=0.9, seed=seed)
    samples = "\n".join(f"   > {' '.join(sample.text.split())}" for sample in generated)
    return (
        f"\n   Training loss in nats per token over {results['seconds']:.0f} seconds\n"
        f"{terminal_chart(curve, name='step')}\n"
        f"\n   Perplexity on held-out reviews: {results['perplexity']:.0f}. Samples:\n{samples}\n"
        f"   So short a pretraining does not help fine-tuning; the comparison uses the bundled run, trained longer.\n"
    )


def choose_size(out: Path, *, minutes: float, device: str, seed: int) -> ComparisonSize:
    """Measure this machine and choose the largest comparison that fits; a resumed demo keeps its size."""
    estimates, saved = estimate_sizes(out, device=device, seed=seed), read_json(out / PLAN_FILE)
    if saved.get("minutes") == minutes and saved.get("seed") == seed:
        size, seconds = estimates[saved["size"]]
    else:
        size, seconds = largest_fitting(estimates, seconds=(1 - LIVE_SHARE) * 60 * minutes)
    write_json(out / PLAN_FILE, {"minutes": minutes, "seed": seed, "size": SIZES.index(size)})
    seconds += 0.0 if RunFolder(out / "live").is_finished() else LIVE_SHARE * 60 * minutes
    duration = format_duration_range(seconds)
    logger.info("\n   Estimated time of the demo on this machine at its current load: %s.\n", duration)
    return size


def estimate_sizes(out: Path, *, device: str, seed: int) -> list[tuple[ComparisonSize, float]]:
    """Each size with the estimated seconds of its comparison, leakage search and report."""
    files = {split: f"catalog:{DATASET}/{split}.csv" for split in ("train", "valid", "test")}
    plans = [
        make_plan(None, files | {"labels": size.labels, "seeds": size.seeds, "seed": seed}, size.settings)
        for size in SIZES
    ]
    context = make_context(plans[0], out, DistributedContext(choose_device(device)))
    arms = make_arms([BUNDLED_RUN], plans[0].compare.arms, plans[0].arms)
    speeds = {str(arm.run): measure_throughput(context, arm) for arm in {str(arm.run): arm for arm in arms}.values()}
    overhead = OVERHEAD_ROWS * max(speed.row for speed in speeds.values())
    estimates, rows = [], len(context.eval_records)
    for size, plan in zip(SIZES, plans, strict=True):
        eval_records = context.eval_records.select(range(min(size.rows or rows, rows)))
        sized = replace(context, settings=plan.settings, eval_records=eval_records)
        seconds = grid_seconds(sized, grid_points(plan.compare, sized, arms), speeds)
        estimates.append((size, seconds + overhead))
    return estimates


def largest_fitting(
    estimates: Sequence[tuple[ComparisonSize, float]], *, seconds: float
) -> tuple[ComparisonSize, float]:
    """The last size that fits in the time, or the first if none does."""
    return [estimates[0], *(estimate for estimate in estimates[1:] if estimate[1] <= seconds)][-1]


def summarize_pretrained(results: dict[str, Any]) -> str:
    """Where the pretrained model is not clearly better than scratch or TF-IDF."""
    differences = {}  # of the pretrained model to each rival
    for pair in results["pairs"]:
        if (pair["a"], pair["b"]) == ("pretrained", "tfidf"):
            differences[f"TF-IDF at {pair['labels']:,} labels"] = Difference.of(pair)
        elif (pair["a"], pair["b"]) == ("scratch", "pretrained"):
            differences[f"scratch at {pair['labels']:,} labels"] = Difference.of(pair).reversed()
    unclear = [rival for rival, gap in differences.items() if not gap.above]
    if unclear:
        return f"   The pretrained model is not clearly better than {', '.join(unclear)}."
    return "   The pretrained model is clearly better than scratch and TF-IDF at every number of labels."
