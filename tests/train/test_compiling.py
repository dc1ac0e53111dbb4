"""When a run is compiled: as asked, or where it is long enough; and a vocabulary that is rounded up."""

from types import SimpleNamespace

import pytest
import torch

import headstock
from headstock.errors import UserError
from headstock.train import compiling
from headstock.train.budget import Budget
from headstock.train.compiling import compiles
from headstock.train.settings import TrainSettings
from headstock.train.world import World
from tests.model.small import small_model

GPU = World(torch.device("cuda"))


class AllPass:
    """A task that sends every token through every head."""

    def passes(self, head, length):
        return 1


@pytest.fixture
def machine(monkeypatch):
    """A GPU of a hundred multiprocessors, as far as anyone asks."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=100))


def decided(settings, world=GPU, *, lengths=None):
    order = SimpleNamespace(length=16, examples=SimpleNamespace(**({} if lengths is None else {"lengths": lengths})))
    said = []
    budget = Budget.of(settings, 10)
    return compiles(small_model(), AllPass(), settings, budget, order, world, said.append), said


def test_a_short_run_is_not_compiled_and_says_so(machine):
    yes, said = decided(TrainSettings(minutes=1.0))
    assert not yes and len(said) == 1 and "60 s" in said[0]
    assert decided(TrainSettings(minutes=30.0)) == (True, [])
    assert decided(TrainSettings(steps=100))[0] is False  # two layers, each of two thousandths of a second
    assert decided(TrainSettings(steps=60_000))[0] is True
    assert decided(TrainSettings(steps=60_000 // 2, batch=32, micro_batch=16))[0] is True  # twice as many calls


def test_large_models_take_long_by_their_arithmetic(machine, monkeypatch):
    monkeypatch.setattr(compiling, "FLOPS", 1.0)
    assert decided(TrainSettings(steps=1))[0] is True


def test_what_would_be_compiled_over_and_over_is_not(machine):
    assert decided(TrainSettings(minutes=30.0), lengths=[3, 4])[0] is False
    assert decided(TrainSettings(minutes=30.0), World(torch.device("cpu"))) == (False, [])


def test_what_was_asked_is_done(machine):
    cpu = World(torch.device("cpu"))
    assert decided(TrainSettings(steps=1, compile=True), cpu) == (True, [])
    assert decided(TrainSettings(minutes=99.0, compile=False)) == (False, [])
    assert decided(TrainSettings(steps=1, compile="graphs")) == (True, [])
    with pytest.raises(UserError, match="CUDA"):
        decided(TrainSettings(steps=1, compile="graphs"), cpu)


def test_a_wrong_word_is_named(corpus, tmp_path, tiny):
    with pytest.raises(UserError, match=r"train.compile: must be one of 'auto', True, False, 'graphs'.*mean 'graphs'"):
        headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"compile": "graph"})


def test_a_padded_vocabulary_has_entries_that_are_never_said(corpus, tmp_path, tiny):
    said = []
    settings = tiny | {"vocabulary": 301, "vocabulary_multiple": 64, "steps": 30, "lr": 1e-2}
    headstock.pretrain(corpus, out=tmp_path / "run", settings=settings, say=said.append)
    loaded = headstock.load(tmp_path / "run")
    assert loaded.config.model.vocabulary == 320 and loaded.tokenizer.vocabulary == 301
    assert any("19 entries stand for no token" in line for line in said)
    (made,) = loaded.generate(["Anne"], max_tokens=40, temperature=5.0)
    assert made.text
