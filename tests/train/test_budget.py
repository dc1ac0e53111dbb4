"""Budgets in minutes: validation takes its share of the time, and nothing that is due is skipped."""

from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch

import headstock
from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.model.model import Model
from headstock.tasks.causal import CausalLM
from headstock.train.budget import Budget, ValidationBudget
from headstock.train.checkpoint import TrainState
from headstock.train.distributed import DistributedContext
from headstock.train.loop import train
from headstock.train.settings import TrainSettings
from tests.model.small import small_backbone


@dataclass(frozen=True)
class TickingContext(DistributedContext):
    """A clock that advances by `tick` seconds whenever it is read."""

    tick: float = 1.0

    def stopwatch(self, before, *, shared):
        now = SimpleNamespace(seconds=before)

        def elapsed():
            now.seconds += self.tick
            return now.seconds

        return elapsed


@dataclass(frozen=True)
class RowClock(DistributedContext):
    """A clock that advances by a second per training row, and a third of a second per validation row."""

    clock: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(seconds=0.0, validating=0.0))

    def stopwatch(self, before, *, shared):
        return lambda: before + self.clock.seconds


class TimedCausalLM(CausalLM):
    """Advances a `RowClock`."""

    clock: SimpleNamespace

    def losses(self, model, batch, **options):
        rows = batch.tokens.size(0)
        self.clock.seconds += rows if model.training else rows / 3
        self.clock.validating += 0 if model.training else rows / 3
        return super().losses(model, batch, **options)


def train_model(corpus, settings, callbacks=()):
    """The state, clock and number of validation examples of a run with half of the text held out."""
    tokenizer = train_tokenizer([corpus.read_text()], TokenizerSettings(vocabulary=300))
    stores = build_split_stores(read_corpus(corpus), tokenizer, seed=0, valid_fraction=0.5)
    distributed = RowClock(torch.device("cpu"))
    task = TimedCausalLM(CausalLM.Config(), tokenizer)
    task.clock = distributed.clock
    backbone = small_backbone(vocabulary=tokenizer.vocabulary, context=16)
    model = Model(backbone, task.heads(backbone))
    state = train(model, task, stores, settings, run=None, distributed=distributed, callbacks=callbacks)
    return state, distributed.clock, len(task.examples(stores.valid, length=16))


@pytest.mark.parametrize("minutes", [2.0, 10.0])
def test_validation_takes_about_5_percent_of_the_minutes(corpus, minutes):
    events = []
    state, clock, held_out = train_model(corpus, TrainSettings(minutes=minutes, batch=16, length=16), [events.append])
    assert held_out / 3 > 0.05 * 60 * minutes  # one full validation would take longer
    shortest = 1000 // 16 / 3  # seconds of a validation; there are at least two
    assert clock.validating <= max(0.07 * 60 * minutes, 2 * shortest)
    assert events[-1].kind == "valid"
    assert state.valid_examples < held_out


def test_validations_of_a_run_in_steps_are_counted_in_tokens(corpus):
    settings = TrainSettings(steps=600, batch=64, length=256)
    budget = ValidationBudget(settings, Budget.of(settings, 1), 256)
    tokens = 600 * 64 * 256
    examples = budget.examples(TrainState(step=60, seconds=1e9), on_cpu=True)
    assert examples == budget.examples(TrainState(step=60, seconds=1e-9), on_cpu=False)  # independent of the clock
    assert budget.count(TrainState(step=60, valid_examples=examples, seconds_per_valid_example=1e9)) == 10
    assert 10 * examples * 256 / 3 == pytest.approx(0.05 * tokens, rel=0.02)
    frequent = replace(settings, validate_every=6)  # a hundred validations
    examples = ValidationBudget(frequent, budget.budget, 256).examples(TrainState(step=6), on_cpu=True)
    assert 100 * examples * 256 / 3 == pytest.approx(0.05 * tokens, rel=0.05)
    explicit = ValidationBudget(replace(settings, valid_tokens=512), budget.budget, 256)
    assert explicit.examples(TrainState(step=60), on_cpu=True) == 2


def test_a_resumed_run_in_minutes_keeps_its_number_of_validation_tokens():
    settings = TrainSettings(minutes=10.0, batch=16, length=128)
    budget = ValidationBudget(settings, Budget.of(settings, 1), 128)
    first = TrainState(step=100, seconds=60.0)
    examples = budget.examples(first, on_cpu=True)
    later = TrainState(**asdict(first) | {"step": 150, "seconds": 600.0})  # slower
    assert budget.examples(later, on_cpu=True) == examples
    assert budget.examples(TrainState(step=150, seconds=600.0), on_cpu=True) < examples


def test_the_final_evaluation_takes_at_most_a_tenth_of_the_minutes(corpus, tmp_path, tiny):
    in_minutes = TrainSettings(minutes=10.0)
    budget = ValidationBudget(in_minutes, Budget.of(in_minutes, 1), 256)
    assert budget.final_examples(TrainState(valid_examples=40, seconds_per_valid_example=0.5)) == 120
    assert budget.final_examples(TrainState(valid_examples=40, seconds_per_valid_example=500.0)) == 40
    in_steps = TrainSettings(steps=10)
    assert (
        ValidationBudget(in_steps, Budget.of(in_steps, 1), 256).final_examples(
            TrainState(seconds_per_valid_example=500.0)
        )
        is None
    )
    complete = headstock.pretrain(corpus, out=tmp_path / "steps", settings=tiny | {"steps": 2})
    assert complete["measured_share"] == 1
    short = {key: value for key, value in tiny.items() if key != "steps"} | {"minutes": 1e-9, "valid_tokens": 64}
    partial = headstock.pretrain(corpus, out=tmp_path / "minutes", settings=short)
    assert 0 < partial["measured_share"] < 1
    assert f"{partial['measured_share']:.0%} of it" in (tmp_path / "minutes" / "README.md").read_text()


@pytest.mark.parametrize("tick", [0.3, 0.9, 1.4])
def test_no_due_validation_is_skipped(corpus, tick):
    tokenizer = train_tokenizer([corpus.read_text()], TokenizerSettings(vocabulary=300))
    stores = build_split_stores(read_corpus(corpus), tokenizer, seed=0)
    task = CausalLM(CausalLM.Config(), tokenizer)
    backbone = small_backbone(vocabulary=tokenizer.vocabulary, context=16)
    model = Model(backbone, task.heads(backbone))
    events = []
    settings = TrainSettings(minutes=1.0, batch=2, length=16, valid_tokens=64)
    distributed = TickingContext(torch.device("cpu"), tick=tick)
    state = train(model, task, stores, settings, run=None, distributed=distributed, callbacks=[events.append])
    validations = [event for event in events if event.kind == "valid"]
    assert len(validations) == 10
    steps = [event.state.step for event in events if event.kind == "step"]
    assert len(steps) == state.step
    assert state.best_step is not None
    assert events[-1].kind == "valid"  # always at the end
