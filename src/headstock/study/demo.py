"""The demo: a small Shakespeare model, grown on this machine in two minutes, with its curve and its voice."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headstock.study.chart import draw
from headstock.study.report import write_run_report
from headstock.text import catalog
from headstock.train.loaded import load
from headstock.train.pretrain import pretrain
from headstock.train.run import Run
from headstock.train.watch import on_screen

PROMPTS = ("ROMEO:\n", "JULIET:\n", "KING RICHARD III:\n", "First Citizen:\n")
SETTINGS = {"minutes": 1.75, "vocabulary": 2000, "context": 128, "valid_tokens": 20_000}


def tell(
    out: Path,
    *,
    overwrite: bool,
    device: str,
    seed: int,
    quiet: bool,
    say: Callable[[str], None],
    show: Callable[[str], None],
) -> dict[str, Any]:
    """Data, tokenizer, training, curve, sample, report; returns the run's results and what it said."""
    began = time.monotonic()
    say("1. Real text: all of Shakespeare that fits into a megabyte")
    folder = catalog.get("tiny-shakespeare", say=say)
    say("\n2. A tokenizer and a small Transformer learn from it, for a little under two minutes")
    with on_screen(quiet=quiet) as watch:
        results = pretrain(
            folder / "corpus.txt",
            out=out,
            preset="modern-nano",
            settings=SETTINGS | {"seed": seed},
            overwrite=overwrite,
            device=device,
            watch=watch,
            say=say,
        )
    run = Run(out)
    curve = [(row["step"], row["loss"]) for row in run.read_metrics() if "loss" in row]
    show("\n3. Training loss, in nats per token")
    show(draw(curve, name="step"))
    blind = math.log(run.config()["model"]["vocabulary"])
    show(
        f"\n   On text it never saw: perplexity {results['perplexity']:.1f}, "
        f"{results['bits_per_byte']:.2f} bits per byte\n"
        f"   (it began at {curve[0][1]:.2f} nats a token; a blind guess is {blind:.2f})\n"
    )
    show("4. What it says when it goes on by itself\n")
    spoken = load(out, device=device).generate(PROMPTS, max_tokens=100, temperature=0.8, top_p=0.95, seed=seed)
    samples = [sample.text for sample in spoken]
    show("\n\n".join(samples))
    write_run_report(run, samples)
    show(f"\n5. The same as a page: {run.report}   ({time.monotonic() - began:.0f} s in all)")
    show(f'   Go on by yourself: headstock generate {out} "JULIET:" --stream')
    return results | {"texts": samples, "report": str(run.report)}
