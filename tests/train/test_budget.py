"""A run in minutes does everything that is due, whatever its steps and validations cost."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from headstock.model.model import Model
from headstock.tasks.causal import Causal
from headstock.text.reading import read_corpus
from headstock.text.store import build_stores
from headstock.text.tokenizer import TokenizerSettings, train_tokenizer
from headstock.train.loop import train
from headstock.train.settings import TrainSettings
from headstock.train.world import World
from tests.model.small import small_backbone


@dataclass(frozen=True)
class Ticking(World):
    """Its clock moves on by so many seconds whenever it is looked at."""

    tick: float = 1.0

    def stopwatch(self, before, *, shared):
        now = SimpleNamespace(seconds=before)

        def elapsed():
            now.seconds += self.tick
            return now.seconds

        return elapsed


@pytest.mark.parametrize("tick", [0.3, 0.9, 1.4])
def test_nothing_that_is_due_is_passed_over(corpus, tick):
    tokenizer = train_tokenizer([corpus.read_text()], TokenizerSettings(vocabulary=300))
    stores = build_stores(read_corpus(corpus), tokenizer, seed=0)
    task = Causal(Causal.Config(), tokenizer)
    backbone = small_backbone(vocabulary=tokenizer.vocabulary, context=16)
    model = Model(backbone, task.heads(backbone))
    heard = []
    settings = TrainSettings(minutes=1.0, batch=2, length=16, valid_tokens=64)
    world = Ticking(torch.device("cpu"), tick=tick)
    done = train(model, task, stores, settings, run=None, world=world, watch=[heard.append])
    validations = [event for event in heard if event.kind == "valid"]
    assert len(validations) == 10
    steps = [event.progress.step for event in heard if event.kind == "step"]
    assert len(steps) == done.step
    assert done.best_step is not None
    assert heard[-1].kind == "valid"  # the end is always measured
