"""The demo: does pretraining pay? The whole story on real film reviews, in minutes, on this machine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headstock.data import catalog
from headstock.data.corpus import read_corpus
from headstock.errors import UserError, shell_quote
from headstock.experiments.arms import make_arms
from headstock.experiments.compare import LAYOUT, compare, grid_points, make_context, silent
from headstock.experiments.compare_settings import make_plan
from headstock.experiments.compare_table import comparison_table
from headstock.experiments.compare_trials import read_json
from headstock.experiments.duration import format_duration_range, grid_seconds, measure_throughput
from headstock.experiments.verdict import Difference
from headstock.inference.pipeline import load
from headstock.io import FolderLayout, check_replaceable, remove_folder, write_json, write_text
from headstock.report.pages import write_report
from headstock.report.terminal_chart import terminal_chart
from headstock.train.callbacks import status_line, terminal_progress
from headstock.train.distributed import DistributedContext, choose_device
from headstock.train.pretrain import pretrain
from headstock.train.run_folder import LAYOUT as RUN_LAYOUT
from headstock.train.run_folder import RunFolder

STOCK, QUOTES = "reviews-en", "rotten-tomatoes"
SENTENCES = (
    "A warm, funny film with a heart, and two wonderful performances.",
    "Two hours of noise, and not one idea worth stealing.",
    "It begins well, but the second half forgets what made the first one work.",
)
GAPS = ("The [MASK] was superb, but the [MASK] was dull.", "I [MASK] this film, and I will see it [MASK].")
# A vocabulary of words and many small steps: what it says after a minute on two cores can be read
LIVE = {"tokenizer.kind": "word", "vocabulary": 3000, "depth": 2, "width": 96, "heads": 2, "hidden": 256}
LIVE |= {"context": 64, "batch": 8, "tensorboard": False}
LIVE_LONGER = {"vocabulary": 4000, "context": 128, "tensorboard": False}  # for a GPU, or with more time
LONGER = 15.0  # minutes of the whole demo
PROMPTS = ("This film is", "The actors")
REVIEWS = 2000  # what the live model learns from,
REVIEWS_LONGER = 4000  # or with more time
LIVE_SHARE = 1 / 7  # of the demo's time
LEAST_STEPS = 60
BESIDE = 12_000  # rows that the stock could read while texts are cut, leaks are looked for and the report is drawn
PLAN = "demo.json"  # in the demo's folder: what was decided, for a demo that goes on
DEMO: FolderLayout = {**LAYOUT, "live": RUN_LAYOUT, "reviews.txt": None, PLAN: None}


@dataclass(frozen=True)
class ComparisonSize:
    """How much is compared: the more time, the more labels, seeds and test rows."""

    labels: tuple[int, ...]
    seeds: int
    rows: int | None
    least_steps: int = LEAST_STEPS


SIZES = (
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
    say: Callable[[str], None],
    show: Callable[[Any], None],
) -> dict[str, Any]:
    """The stock at work, a model grown live, a comparison on real labels, three sentences, and the report's path."""
    began = time.monotonic()
    check_output_folder(out, overwrite=overwrite, say=say)
    show(f"{STOCK}, a small model of film reviews that ships with Headstock, fills in what is missing:\n")
    for filled in load(STOCK, device=device).fill(GAPS):
        show(f"   {filled.text}\n   {filled.filled}")
    catalog.fetch(QUOTES)
    size = choose_size(out, minutes=minutes, device=device, seed=seed, say=say)
    say("1. A tokenizer and a small Transformer learn to continue film reviews, live")
    longer = minutes >= LONGER or choose_device(device).type != "cpu"
    live = pretrain_live(
        out, minutes=LIVE_SHARE * minutes, longer=longer, device=device, seed=seed, quiet=quiet, say=say
    )
    show(tell_live(RunFolder(out / "live"), live, device, seed))
    say(f"\n2. Does pretraining pay? {STOCK} (pretrained on film reviews, it ships with Headstock) on short quotes")
    say(f"   {', '.join(f'{n:,}' for n in size.labels)} labels, {size.seeds} seeds; TF-IDF is the rival to beat")
    with status_line(quiet=quiet) as callbacks:
        results = compare(
            STOCK,
            train=f"catalog:{QUOTES}/train.csv",
            valid=f"catalog:{QUOTES}/valid.csv",
            test=f"catalog:{QUOTES}/test.csv",
            out=out,
            labels=size.labels,
            seeds=size.seeds,
            seed=seed,
            rows=size.rows,
            settings={"least_steps": size.least_steps},
            device=device,
            callbacks=callbacks,
            say=say,
        )
    show(comparison_table(results))
    for verdict in results["verdicts"]:
        show(f"   {verdict}")
    show(honest(results))
    model = out / "runs" / f"pretrained-{size.labels[-1]}"
    show(f"\n3. What the model with {size.labels[-1]:,} labels makes of three sentences\n")
    predictions = load(model, device=device).predict(sentences or SENTENCES)
    for text, told in zip(sentences or SENTENCES, predictions, strict=True):
        show(f"   {told['label']:9s} {max(told['probabilities'].values()):4.0%}  {text}")
    page = write_report(out)
    show(f'\n   Try your own: headstock predict {shell_quote(model)} "..."')
    show(f"\n4. All of it, with the mistakes explained: {page}   ({time.monotonic() - began:.0f} s in all)")
    return results | {"live": live, "predictions": predictions, "report": str(page)}


def check_output_folder(out: Path, *, overwrite: bool, say: Callable[[str], None]) -> None:
    """Go on with a demo that is there, or begin anew; a folder that holds anything else is left alone."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    live = out / "live"
    begun = live.is_dir() or (out / PLAN).is_file()
    if (
        not out.is_dir()
        or not begun
        or (live.is_dir() and any(live.iterdir()) and not RunFolder(live).has_run_config())
    ):
        raise UserError(f"{out}: is there already and holds something else; name another folder with --out")
    if overwrite:
        check_replaceable(out, DEMO)
        remove_folder(out.resolve())
    else:
        say(f"{out} is there already: what it holds is kept, and the rest is done (--overwrite begins anew)")


def pretrain_live(
    out: Path, *, minutes: float, longer: bool, device: str, seed: int, quiet: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """A small causal model, trained here and now on part of the reviews."""
    run = RunFolder(out / "live")
    if run.is_finished():
        return run.results()
    reviews = read_corpus("catalog:imdb", documents="block").first_texts(REVIEWS_LONGER if longer else REVIEWS)
    texts = out / "reviews.txt"
    write_text(texts, "\n\n".join(reviews) + "\n")
    with terminal_progress(quiet=quiet) as callbacks:
        return pretrain(
            texts,
            out=run.path,
            preset="modern-nano",
            settings=(LIVE_LONGER if longer else LIVE) | {"minutes": minutes, "seed": seed, "data.documents": "block"},
            resume=True,
            device=device,
            callbacks=callbacks,
        )


def tell_live(run: RunFolder, results: dict[str, Any], device: str, seed: int) -> str:
    """The live model's curve and voice."""
    curve = [(row["step"], row["loss"]) for row in run.read_metrics() if "loss" in row]
    spoken = load(run.path, device=device).generate(PROMPTS, max_tokens=40, temperature=0.7, top_p=0.9, seed=seed)
    samples = "\n".join(f"   > {' '.join(sample.text.split())}" for sample in spoken)
    return (
        f"\n   Training loss, in nats per token, over {results['seconds']:.0f} seconds\n"
        f"{terminal_chart(curve, name='step')}\n"
        f"\n   On reviews it never saw: perplexity {results['perplexity']:.0f}. How it goes on by itself:\n{samples}\n"
        f"   So short a training gains nothing for what follows, so that begins with a stock grown for longer.\n"
    )


def choose_size(out: Path, *, minutes: float, device: str, seed: int, say: Callable[[str], None]) -> ComparisonSize:
    """Measure this machine, choose how much is compared in the minutes, and say how long all of it takes.

    A demo that goes on keeps what it had decided: cells of another size would not serve it.
    """
    found, kept = sizes_here(out, device=device, seed=seed), read_json(out / PLAN)
    if kept.get("minutes") == minutes and kept.get("seed") == seed:
        chosen, seconds = found[kept["size"]]
    else:
        chosen, seconds = largest_fitting(found, seconds=(1 - LIVE_SHARE) * 60 * minutes)
    write_json(out / PLAN, {"minutes": minutes, "seed": seed, "size": SIZES.index(chosen)})
    seconds += 0.0 if RunFolder(out / "live").is_finished() else LIVE_SHARE * 60 * minutes
    duration = format_duration_range(seconds)
    say(f"\n   Measured here: from now on the demo takes {duration} on this machine, if it stays as busy.\n")
    return chosen


def sizes_here(out: Path, *, device: str, seed: int) -> list[tuple[ComparisonSize, float]]:
    """Each size, and the seconds that its comparison and what is beside it take on this machine."""
    files = {side: f"catalog:{QUOTES}/{side}.csv" for side in ("train", "valid", "test")}
    asked = [
        make_plan(
            None, files | {"labels": size.labels, "seeds": size.seeds, "seed": seed}, {"least_steps": size.least_steps}
        )
        for size in SIZES
    ]
    ground = make_context(asked[0], out, DistributedContext(choose_device(device)), silent)
    arms = make_arms([STOCK], asked[0].compare.arms, asked[0].arms)
    paces = {str(arm.run): measure_throughput(ground, arm) for arm in {str(arm.run): arm for arm in arms}.values()}
    beside = BESIDE * max(pace.row for pace in paces.values())
    found = []
    for size, one in zip(SIZES, asked, strict=True):
        measured = ground.eval_records.select(
            range(min(size.rows or len(ground.eval_records), len(ground.eval_records)))
        )
        there = replace(ground, settings=one.settings, eval_records=measured)
        found.append((size, grid_seconds(there, grid_points(one.compare, there, arms), paces) + beside))
    return found


def largest_fitting(found: Sequence[tuple[ComparisonSize, float]], *, seconds: float) -> tuple[ComparisonSize, float]:
    """The last of the sizes, which are in the order of their cost, that is done in so many seconds; else the first."""
    return [found[0], *(one for one in found[1:] if one[1] <= seconds)][-1]


def honest(results: dict[str, Any]) -> str:
    """Where the pretrained model does not clearly beat scratch or TF-IDF, that is said too."""
    gaps = {}  # of the pretrained model over each rival
    for pair in results["pairs"]:
        if (pair["a"], pair["b"]) == ("pretrained", "tfidf"):
            gaps[f"TF-IDF at {pair['labels']:,} labels"] = Difference.of(pair)
        elif (pair["a"], pair["b"]) == ("scratch", "pretrained"):
            gaps[f"scratch at {pair['labels']:,} labels"] = Difference.of(pair).reversed()
    unclear = [rival for rival, gap in gaps.items() if not gap.above]
    return (
        f"   The pretrained model is not clearly better than {', '.join(unclear)}."
        if unclear
        else "   The pretrained model is clearly better than scratch and TF-IDF, at every number of labels."
    )
