"""Some real steps of a planned run, on this device and this text: what they take is what the whole will take."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headstock.files import write_text
from headstock.study.forecast import Costs
from headstock.study.machine import wait
from headstock.tasks.task import TASKS
from headstock.text.reading import read_corpus
from headstock.text.store import Stores, build_stores
from headstock.text.tokenizer import Tokenizer
from headstock.train.loop import Event, row_length, train
from headstock.train.peak import Peak
from headstock.train.pretrain import build_model
from headstock.train.run import Run
from headstock.train.settings import RunConfig
from headstock.train.world import World

STEPS, FEWEST, WARM = 50, 10, 5  # of which the first ones are left out
LONGEST = 90.0  # seconds that a probe may take, if its steps are slow


@dataclass
class Measured:
    """When each step was done, and what stood still meanwhile."""

    steps: list[float]  # seconds of each
    tokens: int
    validation: float  # seconds
    validated: int  # tokens
    saving: float  # seconds
    peak: int
    processor: float = 0.0  # of a step, on all cores together: it hardly moves when others use the machine too

    @property
    def step(self) -> float:
        return statistics.mean(self.steps[WARM:] or self.steps)


def probe(
    chosen: RunConfig,
    tokenizer: Tokenizer,
    sample: Sequence[str],
    forecast: Costs,
    *,
    device: torch.device,
    say: Callable[[str], None] = lambda line: None,
) -> Costs:
    """The forecast with what was measured in its place."""
    count = max(FEWEST, min(STEPS, round(LONGEST / forecast.step)))
    say(f"trying {count} steps of {chosen.train.batch} rows here")
    found = measure(chosen, tokenizer, sample, count, device)
    return corrected(forecast, found)


def corrected(forecast: Costs, found: Measured) -> Costs:
    return replace(
        forecast,
        tokens=round(found.tokens / len(found.steps)),
        step=found.step,
        reading=found.validation / max(1, found.validated),
        saving=found.saving,
        peak=found.peak,
        processor=found.processor,
        starting=max(0.0, sum(found.steps[:WARM]) - len(found.steps[:WARM]) * found.step),
        measured=True,
    )


def measure(
    chosen: RunConfig, tokenizer: Tokenizer, sample: Sequence[str], count: int, device: torch.device
) -> Measured:
    """Train for so many steps in a folder that is thrown away, with one validation and one checkpoint at the end."""
    settings = replace(
        chosen.train,
        steps=count,
        epochs=None,
        minutes=None,
        validate_every=count + 1,  # beyond the end: so at the end alone
        checkpoint_every=count + 1,
        tensorboard=False,
    )
    moments: dict[str, list[float]] = {"step": [], "valid": []}
    processor: list[float] = []

    def hear(event: Event) -> None:
        if event.kind in moments:
            if event.progress.step == count or len(moments["step"]) <= WARM:
                wait(device)
            moments[event.kind].append(time.perf_counter())
        if event.kind == "step":
            processor.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        stores = stores_of(sample, tokenizer, Path(folder), chosen)
        model, task = build_model(chosen, tokenizer)
        run = Run(Path(folder) / "run")
        run.path.mkdir()
        peak = Peak(device)
        moments["step"] = [time.perf_counter()]
        progress = train(model, task, stores, settings, run=run, world=World(device), watch=[hear])
        length = row_length(model, settings)
    validation = moments["valid"][-1] - moments["step"][-1]
    return Measured(
        steps=[after - before for before, after in zip(moments["step"], moments["step"][1:], strict=False)],
        tokens=progress.tokens,
        validation=validation,
        validated=min(settings.valid_tokens, max(length, stores.valid.tokens)),
        saving=max(0.0, progress.aside - validation),
        peak=peak.bytes(),
        processor=(processor[-1] - processor[WARM - 1]) / (count - WARM),
    )


def stores_of(sample: Sequence[str], tokenizer: Tokenizer, folder: Path, chosen: RunConfig) -> Stores:
    """The sample as tokens, split as the run will split its text."""
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in sample]
    write_text(folder / "sample.jsonl", "\n".join(lines))
    task = TASKS.get(chosen.objective)(chosen.task, tokenizer)
    return build_stores(
        read_corpus(folder / "sample.jsonl"),
        tokenizer,
        valid_fraction=chosen.data.valid_fraction,
        sentences=task.sentences,
        cache=folder / "cache",
    )
