"""The demo: does pretraining pay? The whole story on real film reviews, in minutes, on this machine."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstock.errors import UserError, quoted
from headstock.files import Layout, check_replaceable, discard, write_text
from headstock.study.chart import draw
from headstock.study.compare import LAYOUT, compare
from headstock.study.report import write_report
from headstock.study.table import table
from headstock.study.verdict import Gap
from headstock.text import catalog
from headstock.text.reading import read_corpus
from headstock.text.samples import first
from headstock.train.loaded import load
from headstock.train.pretrain import pretrain
from headstock.train.run import LAYOUT as RUN_LAYOUT
from headstock.train.run import Run
from headstock.train.transfer import BY_KIND
from headstock.train.watch import on_screen, one_line

DEMO: Layout = {**LAYOUT, "live": RUN_LAYOUT, "reviews.txt": None}
STOCK, QUOTES = "reviews-en", "rotten-tomatoes"
SENTENCES = (
    "A warm, funny film with a heart, and two wonderful performances.",
    "Two hours of noise, and not one idea worth stealing.",
    "It begins well, but the second half forgets what made the first one work.",
)
LIVE = {"vocabulary": 4000, "context": 128, "valid_tokens": 20_000, "tensorboard": False}
PROMPTS = ("This film is", "The actors")
REVIEWS = 4000  # what the live model learns from
LIVE_SHARE = 1 / 7  # of the demo's time
LEAST_STEPS = 60
EPOCHS = {kind: BY_KIND[kind]["epochs"] for kind in ("pretrained", "scratch")}
TOKENS = 32  # in a quote, about
SLOWER = 1.5  # short quotes are read slower than the live model's full rows, and the frozen arm takes its time too
ASIDE = 300_000  # tokens that the live model could read while leaks are looked for and the report is drawn


@dataclass(frozen=True)
class Size:
    """How much is compared: the more time, the more labels, seeds and test rows."""

    labels: tuple[int, ...]
    seeds: int
    rows: int | None

    def work(self) -> float:
        """Texts that are read: a pass forward and back counts three times a pass forward. Two arms learn."""
        learned = sum(max(EPOCHS[kind] * n, 16 * LEAST_STEPS) for kind in EPOCHS for n in self.labels)
        return self.seeds * (3 * learned + len(EPOCHS) * len(self.labels) * (self.rows or 2539))


SIZES = (
    Size((100, 300), 3, 600),
    Size((100, 250, 600), 3, 1000),
    Size((100, 400, 1600), 3, 1000),
    Size((100, 400, 1600), 5, None),
    Size((100, 400, 1600, 6400), 5, None),
    Size((100, 400, 1600, 6400), 10, None),
)


def tell(
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
    """A model grown live, a comparison on real labels, three sentences, and the report's path."""
    began = time.monotonic()
    clear(out, overwrite=overwrite, say=say)
    say("1. A tokenizer and a small Transformer learn to continue film reviews, live")
    live = grow(out, minutes=LIVE_SHARE * minutes, device=device, seed=seed, quiet=quiet, say=say)
    show(tell_live(Run(out / "live"), live, device, seed))
    say(f"\n2. Does pretraining pay? {STOCK} (pretrained on film reviews, it ships with Headstock) on short quotes")
    catalog.get(QUOTES, say=say)
    size = fitting(live, seconds=60 * minutes - (time.monotonic() - began))
    say(f"   {', '.join(f'{n:,}' for n in size.labels)} labels, {size.seeds} seeds; TF-IDF is the rival to beat")
    with one_line(quiet=quiet) as watch:
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
            settings={"least_steps": LEAST_STEPS},
            device=device,
            watch=watch,
            say=say,
        )
    show(table(results))
    for verdict in results["verdicts"]:
        show(f"   {verdict}")
    show(honest(results))
    model = out / "runs" / f"pretrained-{size.labels[-1]}"
    show(f"\n3. What the model with {size.labels[-1]:,} labels makes of three sentences\n")
    predictions = load(model, device=device).predict(sentences or SENTENCES)
    for text, told in zip(sentences or SENTENCES, predictions, strict=True):
        show(f"   {told['label']:9s} {max(told['probabilities'].values()):4.0%}  {text}")
    page = write_report(out)
    show(f'\n   Try your own: headstock predict {quoted(model)} "..."')
    show(f"\n4. All of it, with the mistakes explained: {page}   ({time.monotonic() - began:.0f} s in all)")
    return results | {"live": live, "predictions": predictions, "report": str(page)}


def clear(out: Path, *, overwrite: bool, say: Callable[[str], None]) -> None:
    """Go on with a demo that is there, or begin anew; a folder that holds anything else is left alone."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    live = out / "live"
    if not out.is_dir() or not live.is_dir() or (any(live.iterdir()) and not Run(live).is_ours()):
        raise UserError(f"{out}: is there already and holds something else; name another folder with --out")
    if overwrite:
        check_replaceable(out, DEMO)
        discard(out.resolve())
    else:
        say(f"{out} is there already: what it holds is kept, and the rest is done (--overwrite begins anew)")


def grow(
    out: Path, *, minutes: float, device: str, seed: int, quiet: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """A small causal model, trained here and now on part of the reviews."""
    run = Run(out / "live")
    if run.finished():
        return run.results()
    reviews = first(read_corpus("catalog:imdb", documents="block"), REVIEWS)
    texts = out / "reviews.txt"
    write_text(texts, "\n\n".join(reviews) + "\n")
    with on_screen(quiet=quiet) as watch:
        return pretrain(
            texts,
            out=run.path,
            preset="modern-nano",
            settings=LIVE | {"minutes": minutes, "seed": seed, "data.documents": "block"},
            resume=True,
            device=device,
            watch=watch,
            say=say,
        )


def tell_live(run: Run, results: dict[str, Any], device: str, seed: int) -> str:
    """The live model's curve and voice."""
    curve = [(row["step"], row["loss"]) for row in run.read_metrics() if "loss" in row]
    spoken = load(run.path, device=device).generate(PROMPTS, max_tokens=40, temperature=0.8, top_p=0.95, seed=seed)
    samples = "\n".join(f"   > {' '.join(sample.text.split())}" for sample in spoken)
    return (
        f"\n   Training loss, in nats per token, over {results['seconds']:.0f} seconds\n{draw(curve, name='step')}\n"
        f"\n   On reviews it never saw: perplexity {results['perplexity']:.0f}. How it goes on by itself:\n{samples}\n"
        f"   So short a training gains nothing for what follows, so that begins with a stock grown for longer.\n"
    )


def fitting(live: dict[str, Any], *, seconds: float) -> Size:
    """The largest size that should be done in the time that is left, going by the speed just measured."""
    speed = live["tokens_per_second"]
    costs = {size: (SLOWER * size.work() * TOKENS / 3 + ASIDE) / speed for size in SIZES}
    return max((size for size in SIZES if costs[size] < seconds), key=Size.work, default=SIZES[0])


def honest(results: dict[str, Any]) -> str:
    """Where the pretrained model does not clearly beat scratch or TF-IDF, that is said too."""
    gaps = {}  # of the pretrained model over each rival
    for pair in results["pairs"]:
        if (pair["a"], pair["b"]) == ("pretrained", "tfidf"):
            gaps[f"TF-IDF at {pair['labels']:,} labels"] = Gap.of(pair)
        elif (pair["a"], pair["b"]) == ("scratch", "pretrained"):
            gaps[f"scratch at {pair['labels']:,} labels"] = Gap.of(pair).turned()
    unclear = [rival for rival, gap in gaps.items() if not gap.above]
    return (
        f"   The pretrained model is not clearly better than {', '.join(unclear)}."
        if unclear
        else "   The pretrained model is clearly better than scratch and TF-IDF, at every number of labels."
    )
