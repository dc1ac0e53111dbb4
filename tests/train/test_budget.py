"""A run in minutes does everything that is due, whatever its steps and validations cost."""

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
class Ticking(DistributedContext):
    """Its clock moves on by so many seconds whenever it is looked at."""

    tick: float = 1.0

    def stopwatch(self, before, *, shared):
        now = SimpleNamespace(seconds=before)

        def elapsed():
            now.seconds += self.tick
            return now.seconds

        return elapsed


@dataclass(frozen=True)
class Working(DistributedContext):
    """Its clock moves on by what was read: a second for a row in training, a third of it in a validation."""

    clock: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(seconds=0.0, validating=0.0, read=[]))

    def stopwatch(self, before, *, shared):
        return lambda: before + self.clock.seconds


class Reading(CausalLM):
    """Counts what is read on the clock above."""

    clock: SimpleNamespace

    def losses(self, model, batch, **options):
        rows = batch.tokens.size(0)
        self.clock.seconds += rows if model.training else rows / 3
        self.clock.validating += 0 if model.training else rows / 3
        return super().losses(model, batch, **options)


def trained(corpus, settings, callbacks=()):
    """A run on the clock that counts rows, half of whose text is held out."""
    tokenizer = train_tokenizer([corpus.read_text()], TokenizerSettings(vocabulary=300))
    stores = build_split_stores(read_corpus(corpus), tokenizer, seed=0, valid_fraction=0.5)
    distributed = Working(torch.device("cpu"))
    task = Reading(CausalLM.Config(), tokenizer)
    task.clock = distributed.clock
    backbone = small_backbone(vocabulary=tokenizer.vocabulary, context=16)
    model = Model(backbone, task.heads(backbone))
    done = train(model, task, stores, settings, run=None, distributed=distributed, callbacks=callbacks)
    return done, distributed.clock, len(task.examples(stores.valid, length=16))


@pytest.mark.parametrize("minutes", [2.0, 10.0])
def test_validations_take_about_a_twentieth_of_the_minutes_however_much_is_held_out(corpus, minutes):
    heard = []
    done, clock, held_out = trained(corpus, TrainSettings(minutes=minutes, batch=16, length=16), [heard.append])
    assert held_out / 3 > 0.05 * 60 * minutes  # one validation of everything would take longer than all may take
    fewest = 1000 // 16 / 3  # which one validation takes at least; there is one on the way and one at the end
    assert clock.validating <= max(0.07 * 60 * minutes, 2 * fewest)
    assert heard[-1].kind == "valid"
    assert done.valid_examples < held_out


def test_validations_of_a_run_in_steps_are_counted_in_tokens(corpus):
    settings = TrainSettings(steps=600, batch=64, length=256)
    budget = ValidationBudget(settings, Budget.of(settings, 1), 256)
    tokens = 600 * 64 * 256
    read = budget.examples(TrainState(step=60, seconds=1e9), on_cpu=True)
    assert read == budget.examples(TrainState(step=60, seconds=1e-9), on_cpu=False)  # whatever the clock says
    assert budget.count(TrainState(step=60, valid_examples=read, seconds_per_valid_example=1e9)) == 10
    assert 10 * read * 256 / 3 == pytest.approx(0.05 * tokens, rel=0.02)
    more = replace(settings, validate_every=6)  # a hundred of them
    often = ValidationBudget(more, budget.budget, 256).examples(TrainState(step=6), on_cpu=True)
    assert 100 * often * 256 / 3 == pytest.approx(0.05 * tokens, rel=0.05)
    asked = ValidationBudget(replace(settings, valid_tokens=512), budget.budget, 256)
    assert asked.examples(TrainState(step=60), on_cpu=True) == 2


def test_what_a_run_in_minutes_decided_holds_after_a_stop():
    settings = TrainSettings(minutes=10.0, batch=16, length=128)
    budget = ValidationBudget(settings, Budget.of(settings, 1), 128)
    begun = TrainState(step=100, seconds=60.0)
    read = budget.examples(begun, on_cpu=True)
    later = TrainState(**asdict(begun) | {"step": 150, "seconds": 600.0})  # slower since
    assert budget.examples(later, on_cpu=True) == read
    assert budget.examples(TrainState(step=150, seconds=600.0), on_cpu=True) < read


def test_the_last_measurement_is_of_all_unless_it_would_take_over_a_tenth_of_the_minutes(corpus, tmp_path, tiny):
    timed = TrainSettings(minutes=10.0)
    budget = ValidationBudget(timed, Budget.of(timed, 1), 256)
    assert budget.final_examples(TrainState(valid_examples=40, seconds_per_valid_example=0.5)) == 120
    assert budget.final_examples(TrainState(valid_examples=40, seconds_per_valid_example=500.0)) == 40
    counted = TrainSettings(steps=10)
    assert (
        ValidationBudget(counted, Budget.of(counted, 1), 256).final_examples(
            TrainState(seconds_per_valid_example=500.0)
        )
        is None
    )
    whole = headstock.pretrain(corpus, out=tmp_path / "steps", settings=tiny | {"steps": 2})
    assert whole["measured_share"] == 1
    short = {key: value for key, value in tiny.items() if key != "steps"} | {"minutes": 1e-9, "valid_tokens": 64}
    part = headstock.pretrain(corpus, out=tmp_path / "minutes", settings=short)
    assert 0 < part["measured_share"] < 1
    assert f"{part['measured_share']:.0%} of it" in (tmp_path / "minutes" / "README.md").read_text()


@pytest.mark.parametrize("tick", [0.3, 0.9, 1.4])
def test_nothing_that_is_due_is_passed_over(corpus, tick):
    tokenizer = train_tokenizer([corpus.read_text()], TokenizerSettings(vocabulary=300))
    stores = build_split_stores(read_corpus(corpus), tokenizer, seed=0)
    task = CausalLM(CausalLM.Config(), tokenizer)
    backbone = small_backbone(vocabulary=tokenizer.vocabulary, context=16)
    model = Model(backbone, task.heads(backbone))
    heard = []
    settings = TrainSettings(minutes=1.0, batch=2, length=16, valid_tokens=64)
    distributed = Ticking(torch.device("cpu"), tick=tick)
    done = train(model, task, stores, settings, run=None, distributed=distributed, callbacks=[heard.append])
    validations = [event for event in heard if event.kind == "valid"]
    assert len(validations) == 10
    steps = [event.state.step for event in heard if event.kind == "step"]
    assert len(steps) == done.step
    assert done.best_step is not None
    assert heard[-1].kind == "valid"  # the end is always measured
