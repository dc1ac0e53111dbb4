"""A probe on a device that is made up: a clock that goes on by what a GPU was seen to take, so that nobody waits."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headstock.planner import probe
from headstock.planner.corpus_size import Extent, count
from headstock.planner.forecast import Costs, seconds_of
from headstock.planner.probe import (
    AGAIN,
    NEW,
    SECOND,
    Measured,
    corrected,
    how_many,
    kinds_of,
    measure,
    met_before,
    with_coming,
)
from headstock.train.budget import due
from headstock.train.compile import ASKED
from headstock.train.loop import Event
from headstock.train.pretrain import build_model
from headstock.train.sampler import BatchSampler
from headstock.train.settings import make_config
from headstock.train.state import TrainState

CPU = torch.device("cpu")
EACH = Costs(1000, 800, 6000.0, tokens=512, step=0.005, reading=1e-5, saving=0.2, peak=1 << 20)
TAKES = {NEW: 0.031, SECOND: 0.045, AGAIN: 0.005}  # seconds of a step of each kind
ROW = 4e-4  # seconds to read a row in a validation
SAVING = 0.05
STEPS = 1500
ASKED_FOR = {"valid_tokens": 2000, "steps_for": lambda found: STEPS, "device": CPU}


@pytest.fixture(scope="module")
def sample():
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list("aeioulmnrst"), size=draw.integers(2, 8))) for _ in range(400)]
    return tuple(" ".join(draw.choice(words, size=draw.integers(5, 40))) for _ in range(600))


@pytest.fixture(scope="module")
def tokenizer(sample):
    size = sum(map(len, sample))
    return count(Extent(size, len(sample), sample, read=True, whole=True), 500).tokenizer


def chosen_for(objective, tokenizer):
    shape = {"vocabulary": tokenizer.vocabulary, "context": 32, "depth": 1, "width": 8, "heads": 1, "hidden": 8}
    hiding = {} if objective == "causal" else {"fraction_start": 0.5, "fraction": 0.2}
    return make_config(
        {
            "model": shape | ({} if objective == "causal" else {"causal": False}),
            "task": {"name": objective, **hiding},
            "train": {"batch": 16, "steps": STEPS, "valid_tokens": 2000},
        }
    )


class Card:
    """Takes the place of training, and of the clock: recorded steps, and what a process does once."""

    def __init__(self):
        self.now, self.loaded, self.asked = 0.0, False, []

    def train(self, model, task, stores, settings, *, run, distributed, callbacks=(), say=lambda line: None):
        self.asked.append(settings)
        order = BatchSampler(task, stores.train, length=32, batch=settings.batch, seed=settings.seed)
        kinds = kinds_of(order, settings, "recorded", CPU, settings.steps)
        progress, rows = TrainState(), min(settings.valid_tokens // 32, len(task.examples(stores.valid, length=32)))
        began, self.now = self.now, self.now + (0.0 if self.loaded else 9.0)  # kernels are made
        for step, kind in enumerate(kinds):
            self.now += TAKES[kind] + (0.3 if step == 2 else 0.0)  # what moves the weights is recorded
            progress.step, progress.tokens = step + 1, progress.tokens + 512
            tell(callbacks, "step", progress)
            before, after = step / settings.steps, (step + 1) / settings.steps
            if due(settings.validate_every, 10, step=step + 1, before=before, after=after):
                paused = self.now
                self.now += ROW * rows + (0.0 if self.loaded else 0.8)
                self.loaded = True
                tell(callbacks, "valid", progress)
                self.now += SAVING
                progress.aside += self.now - paused
        progress.seconds = self.now - began
        return progress


def tell(callbacks, kind, progress):
    for callback in callbacks:
        callback(Event(kind, progress, 1, 1, progress.step, 0.0))


@pytest.fixture
def card(monkeypatch):
    made = Card()
    monkeypatch.setattr(probe, "train", made.train)
    monkeypatch.setattr(probe, "choose_execution_mode", lambda *_: "recorded")
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: made.now, process_time=lambda: made.now))
    return made


def real_run(card, chosen, tokenizer, sample, folder):
    """The whole of it on the same made-up card, as the run itself would tell it."""
    stores = probe.stores_of(sample, tokenizer, folder, chosen, 2000)
    model, task = build_model(chosen, tokenizer)
    return card.train(model, task, stores, chosen.train, run=None, distributed=None)


@pytest.mark.parametrize("objective", ["causal", "masked", "hybrid"])
def test_a_plan_takes_what_its_run_takes(objective, card, tokenizer, sample, tmp_path):
    chosen = chosen_for(objective, tokenizer)
    found = measure(chosen, tokenizer, sample, **ASKED_FOR)
    each = corrected(EACH, found)
    done = real_run(card, chosen, tokenizer, sample, tmp_path)
    assert each.step == pytest.approx(TAKES[AGAIN])
    assert seconds_of(each, STEPS, 2000) == pytest.approx(done.seconds, rel=0.03)
    assert STEPS * each.tokens / (each.starting + STEPS * each.step) == pytest.approx(
        done.tokens / (done.seconds - done.aside), rel=0.03
    )
    assert each.cold == pytest.approx(9.8, rel=0.01)  # told apart: this process has its kernels now
    if objective == "hybrid":  # the mean of 50 steps, nearly all of shapes that had not been met, is no measure
        fifty = kinds_of(order_of(chosen, tokenizer, sample, tmp_path), chosen.train, "recorded", CPU, 50)
        assert np.mean([TAKES[kind] for kind in fifty[probe.WARM :]]) > 2 * (done.seconds - done.aside) / STEPS


def order_of(chosen, tokenizer, sample, folder):
    stores = probe.stores_of(sample, tokenizer, folder, chosen, 2000)
    return BatchSampler(build_model(chosen, tokenizer)[1], stores.train, length=32, batch=16, seed=0)


def test_a_probe_is_run_as_the_run_will_be(card, monkeypatch, tokenizer, sample):
    chosen, asked = chosen_for("causal", tokenizer), []

    def decide(model, task, settings, budget, *rest):
        asked.append(budget.steps)
        return "both"

    monkeypatch.setattr(probe, "choose_execution_mode", decide)
    found = measure(chosen, tokenizer, sample, **ASKED_FOR)
    assert asked == [STEPS]  # the length of the run decides, not that of the probe
    assert found.way == "both" and {settings.compile for settings in card.asked} == {"both"}
    assert all(ASKED[word] == way for way, word in probe.WORDS.items())
    # a line every thirty steps, as in the run: a GPU is waited for at each
    assert {settings.log_every for settings in card.asked} == {STEPS // 50}


def test_held_out_text_is_as_long_as_the_runs(tokenizer, sample, tmp_path):
    chosen = chosen_for("causal", tokenizer)
    little, much = (probe.stores_of(sample, tokenizer, tmp_path, chosen, wish).valid.tokens for wish in (10, 8000))
    assert little < 8000 <= much


def test_quick_steps_are_tried_for_longer_and_slow_ones_less_often():
    assert how_many(0.005, 2500) == 600
    assert how_many(0.005, 80) == 80 and how_many(0.005, 8) == 50
    assert how_many(0.1, 2500) == 50 and how_many(4.0, 2500) == 22 and how_many(60.0, 2500) == 10


def test_shapes_beyond_the_room_for_recordings_stay_new(monkeypatch):
    monkeypatch.setattr(probe, "MOST", 1)
    met = Counter()
    assert [met_before(met, shape) for shape in "abaabb"] == [NEW, NEW, SECOND, AGAIN, NEW, NEW]


def test_steps_of_new_shapes_are_counted_as_often_as_the_run_has_them():
    kinds = [NEW, SECOND, AGAIN, AGAIN, AGAIN, NEW, AGAIN, AGAIN, SECOND, AGAIN, AGAIN]
    steps = [1.0, 0.5, 0.1, 0.1, 0.1, 0.4, 0.2, 0.1, 0.6, 0.3, 0.1]
    found = Measured(steps, 11, 0.5, 100, 0.1, 7, kinds=kinds, coming={NEW: 10, SECOND: 5})
    assert found.step == pytest.approx(0.1)  # 0.2 and 0.3 follow another kind
    assert found.starting == pytest.approx(1.3 + 10 * 0.3 + 5 * 0.5)
    assert replace(found, kinds=(), coming={}).step == pytest.approx(1.7 / 6)


def test_a_run_that_becomes_shorter_meets_fewer_new_shapes():
    kinds = [AGAIN] * 5 + [NEW, SECOND, AGAIN, AGAIN]
    found = Measured([0.1] * 5 + [1.1, 1.1, 0.1, 0.1], 9, 0.5, 100, 0.1, 7, kinds=kinds)

    def foresee(steps):  # one step in ten is new, and one recorded
        return ([NEW, SECOND] + [AGAIN] * 8) * (steps // 10)

    def steps_for(found):  # in a hundred seconds
        return int((100 - found.starting) / found.step)

    agreed = with_coming(found, foresee, steps_for)
    steps = steps_for(agreed)
    assert agreed.coming[NEW] == pytest.approx(steps / 10, rel=0.06) and steps < 400 < steps_for(found)
    assert steps == pytest.approx(100 / (0.1 + 2 * 0.1), rel=0.05)
    assert agreed.starting + steps * agreed.step <= 100
