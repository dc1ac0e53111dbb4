"""Some real steps of a planned run, on this device and this text: what they take is what the whole will take.

Steps are tried twice. The first time a few, with a validation and a checkpoint: they make and load kernels, which the
process then has. The second time is measured: it begins, goes on, validates and saves as the run will.
"""

import gc
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from headstock.data.corpus import read_corpus
from headstock.data.token_store import SplitStores, build_split_stores
from headstock.data.tokenizer import Tokenizer
from headstock.io import write_text
from headstock.planner.forecast import Costs
from headstock.planner.machine import wait
from headstock.tasks.base import TASKS
from headstock.train.budget import Budget
from headstock.train.callbacks import log_metrics
from headstock.train.compile import ASKED, ExecutionMode, choose_execution_mode
from headstock.train.distributed import DistributedContext
from headstock.train.graphed_step import MOST, shape_of
from headstock.train.loop import Event, cut_step, sequence_length, train
from headstock.train.peak_memory import PeakMemory
from headstock.train.pretrain import build_model
from headstock.train.run_folder import RunFolder
from headstock.train.sampler import BatchSampler
from headstock.train.settings import RunConfig, TrainSettings
from headstock.train.state import TrainState

STEPS, FEWEST, WARM = 50, 10, 5  # of which the first ones are left out
COLD = 4  # steps before all these, for what a process does once; recordings are made by the third
TRIED = 3.0  # seconds that quick steps are tried for
LONGEST = 90.0  # seconds that a probe may take, if its steps are slow
SETTLED = 40  # recorded steps that are wanted, or more are tried
VALIDATIONS = 2  # in the part that is measured
LOGS = 50  # lines of a run, at each of which a GPU is waited for
FORESEEN = 4000  # steps of the whole run whose shapes are looked at: later ones are hardly ever new
ROUNDS, CLOSE = 8, 0.03  # in which the run's length and its new shapes are made to agree, and how closely
NEW, SECOND, AGAIN = range(3)  # how often a step's shape came before: it is read as usual, then recorded, then played
WORDS = {way: word for word, way in ASKED.items()}  # how `compile` asks for a way

Say = Callable[[str], None]


@dataclass
class Measured:
    """How long each step took, and what stood still meanwhile."""

    steps: list[float]  # seconds of each, without validations and checkpoints
    tokens: int
    validation: float  # seconds
    validated: int  # tokens
    saving: float  # seconds
    peak: int
    processor: float = 0.0  # of a step, on all cores together: it hardly moves when others use the machine too
    kinds: Sequence[int] = ()  # NEW, SECOND or AGAIN of each step, where steps are recorded
    coming: dict[int, int] = field(default_factory=dict)  # how many NEW and SECOND ones the whole run has
    cold: float = 0.0  # seconds more that it takes to begin in a process that did not do so before
    way: ExecutionMode = "plain"

    @property
    def step(self) -> float:
        """A steady one: where steps are recorded, one that is played and does not follow another kind."""
        late = list(range(WARM, len(self.steps))) or list(range(len(self.steps)))
        if self.kinds:
            again = [at for at in late if self.kinds[at] == AGAIN]
            late = [at for at in again if self.kinds[at - 1] == AGAIN] or again or late
        return statistics.mean(self.steps[at] for at in late)

    @property
    def starting(self) -> float:
        """What the run's first steps, and its later ones of new shapes, take beyond so many steady ones."""
        more = max(0.0, sum(self.steps[:WARM]) - len(self.steps[:WARM]) * self.step)
        for kind, times in self.coming.items():
            alike = [self.steps[at] for at in range(WARM, len(self.steps)) if self.kinds[at] == kind]
            more += times * max(0.0, statistics.mean(alike) - self.step) if alike else 0.0
        return more


def probe(
    chosen: RunConfig,
    tokenizer: Tokenizer,
    sample: Sequence[str],
    forecast: Costs,
    *,
    valid_tokens: float,
    steps_for: Callable[[Costs], int],
    device: torch.device,
    say: Say = lambda line: None,
) -> Costs:
    """The forecast with what was measured in its place.

    `valid_tokens` are read in each validation of the run; `steps_for` says how many steps it will have at such costs.
    """
    return corrected(
        forecast,
        measure(
            chosen,
            tokenizer,
            sample,
            valid_tokens=valid_tokens,
            steps_for=lambda found: steps_for(corrected(forecast, found)),
            device=device,
            say=say,
        ),
    )


def corrected(forecast: Costs, found: Measured) -> Costs:
    return replace(
        forecast,
        tokens=round(found.tokens / len(found.steps)),
        step=found.step,
        reading=found.validation / max(1, found.validated),
        saving=found.saving,
        peak=found.peak,
        processor=found.processor,
        starting=found.starting,
        cold=found.cold,
        way=found.way,
        measured=True,
    )


def measure(
    chosen: RunConfig,
    tokenizer: Tokenizer,
    sample: Sequence[str],
    *,
    valid_tokens: float,
    steps_for: Callable[[Measured], int],
    device: torch.device,
    say: Say = lambda line: None,
) -> Measured:
    """Train in a folder that is thrown away, in the way that the whole run will be trained in."""
    settings = chosen.train
    assert settings.valid_tokens is not None  # the plan has decided
    with tempfile.TemporaryDirectory() as name:
        stores = stores_of(sample, tokenizer, Path(name), chosen, valid_tokens)
        model, task = build_model(chosen, tokenizer)
        length = sequence_length(model, settings)
        sizes: dict[str, Any] = {"batch": settings.batch, "batch_tokens": settings.batch_tokens}
        order = BatchSampler(task, stores.train, length=length, seed=settings.seed, **sizes)
        whole = Budget.of(settings, order.steps_per_epoch)
        # asked of the whole run: by itself a probe is too short to be compiled
        way = choose_execution_mode(model, task, settings, whole, order, DistributedContext(device), say)
        del model  # or it would count as memory of the run
        trial = Trial(chosen, tokenizer, stores, Path(name), way, whole.steps or STEPS, device)
        before = trial.train(COLD)
        foresee = partial(kinds_of, order, settings, way, device)
        count, kinds = how_many(before.steps[-1], trial.whole), []
        if way in ("recorded", "both"):
            kinds = foresee(count)
            while settled(kinds) < SETTLED and 2 * count * before.steps[-1] < LONGEST:
                count *= 2
                kinds = foresee(count)
        say(f"trying {count} steps of {settings.batch} rows here")
        peak = PeakMemory(device)
        timed = trial.train(count)
        rows = min(max(1, settings.valid_tokens // length), len(task.examples(stores.valid, length=length)))
        found = Measured(
            steps=timed.steps,
            tokens=timed.tokens,
            validation=timed.validation,
            validated=rows * length,
            saving=timed.saving,
            peak=peak.bytes(),
            processor=timed.processor,
            kinds=kinds,
            cold=max(0.0, before.beginning() - timed.beginning()),
            way=way,
        )
        return with_coming(found, foresee, steps_for) if kinds else found


def with_coming(found: Measured, foresee: Callable[[int], list[int]], steps_for: Callable[[Measured], int]) -> Measured:
    """With the new shapes of the whole run: how many they are depends on its steps, and these on what they take."""
    low, high = 1, steps_for(found)  # new shapes only make it shorter
    steps = high
    for _ in range(ROUNDS):
        kinds = Counter(foresee(min(steps, FORESEEN))[WARM:])
        found = replace(found, coming={kind: kinds[kind] for kind in (NEW, SECOND)})
        room = steps_for(found)
        if abs(room - steps) <= CLOSE * steps:
            break
        low, high = (steps, high) if room > steps else (low, steps)
        steps = min(max(room, (3 * low + high) // 4), (low + 3 * high) // 4)
    return found


@dataclass
class Timed:
    """What one training took."""

    steps: list[float]  # seconds
    tokens: int
    validation: float  # seconds of one
    saving: float
    processor: float

    def beginning(self) -> float:
        """The first steps, a validation and a checkpoint."""
        return sum(self.steps[:COLD]) + self.validation + self.saving


@dataclass(frozen=True)
class Trial:
    """The planned run, cut short."""

    chosen: RunConfig
    tokenizer: Tokenizer
    stores: SplitStores
    folder: Path
    way: ExecutionMode
    whole: int  # steps that the run itself has
    device: torch.device

    def train(self, count: int) -> Timed:
        """So many steps of a new model, validated at the end, and half-way too where there are enough."""
        every = -(-count // VALIDATIONS) if count > COLD else count
        settings = replace(
            self.chosen.train,
            steps=count,
            epochs=None,
            minutes=None,
            compile=WORDS[self.way],
            validate_every=every,
            checkpoint_every=None,
            log_every=max(1, self.whole // LOGS),  # as often as in the run
            tensorboard=False,
        )
        moments, processor, validations = [0.0], [0.0], []

        def hear(event: Event) -> None:
            step, aside = event.state.step, event.state.aside
            if event.kind == "step":
                if step <= WARM or step % every == 0 or step == count:
                    wait(self.device)
                moments.append(time.perf_counter() - aside)
                processor.append(time.process_time())
            if event.kind == "valid":
                validations.append(time.perf_counter() - aside - moments[-1])

        run = RunFolder(self.folder / f"run-{count}")
        run.path.mkdir()
        model, task = build_model(self.chosen, self.tokenizer)
        moments[0], processor[0] = time.perf_counter(), time.process_time()
        callbacks = [hear, log_metrics(run)]
        progress = train(
            model,
            task,
            self.stores,
            settings,
            run=run,
            distributed=DistributedContext(self.device),
            callbacks=callbacks,
        )
        del model
        self.tidy()
        validation = statistics.mean(validations)
        return Timed(
            steps=[after - before for before, after in pairwise(moments)],
            tokens=progress.tokens,
            validation=validation,
            saving=max(0.0, progress.aside / len(validations) - validation),
            processor=statistics.median(after - before for before, after in pairwise(processor)),
        )

    def tidy(self) -> None:
        """Leave nothing that the next training would find: neither memory nor what was compiled for this model."""
        if self.way in ("compiled", "both"):
            torch.compiler.reset()
        gc.collect()


def how_many(pace: float, whole: int) -> int:
    """Steps to try where one takes about so long: no more than the run has, unless that is very few."""
    wanted = min(max(STEPS, round(TRIED / pace)), max(STEPS, whole))
    return max(FEWEST, min(wanted, round(LONGEST / pace)))


def kinds_of(
    order: BatchSampler, settings: TrainSettings, way: ExecutionMode, device: torch.device, steps: int
) -> list[int]:
    """Of each step of a run of so many, whether batches of its shape came before: known without a model."""
    met: Counter[Any] = Counter()
    kinds = []
    for step in range(steps):
        batches = cut_step(
            order, Budget(steps, None), TrainState(), DistributedContext(device), way, step, settings.micro_batch
        )
        kinds.append(min(met_before(met, shape_of(batch)) for batch in batches))
    return kinds


def met_before(met: Counter[Any], shape: Any) -> int:
    met[shape] += 1
    if met[shape] == 2 and sum(times > 1 for times in met.values()) > MOST:  # there is room for no more recordings
        met[shape] = 1
    return min(met[shape] - 1, AGAIN)


def settled(kinds: Sequence[int]) -> int:
    return sum(one == two == AGAIN for one, two in pairwise(kinds[WARM - 1 :]))


def stores_of(
    sample: Sequence[str], tokenizer: Tokenizer, folder: Path, chosen: RunConfig, valid_tokens: float
) -> SplitStores:
    """The sample as tokens, with enough of it held out for validations as long as the run's."""
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in sample]
    write_text(folder / "sample.jsonl", "\n".join(lines))
    task = TASKS.get(chosen.objective)(chosen.task, tokenizer)
    tokens = sum(map(len, tokenizer.encode_batch(list(sample))))
    return build_split_stores(
        read_corpus(folder / "sample.jsonl"),
        tokenizer,
        valid_fraction=max(chosen.data.valid_fraction, min(0.5, 1.2 * valid_tokens / max(1, tokens))),
        sentences=task.needs_sentences,
        cache=folder / "cache",
    )
