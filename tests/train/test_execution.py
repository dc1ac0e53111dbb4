"""When a run is compiled or recorded: as asked, or as it pays; and a vocabulary that is rounded up."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import headstock
from headstock.errors import UserError
from headstock.kernels import cross_entropy, fp8
from headstock.logs import messages_to
from headstock.model.backbone import CachedBackbone
from headstock.model.model import Model
from headstock.train import execution
from headstock.train.budget import Budget
from headstock.train.distributed import DistributedContext
from headstock.train.execution import choose_execution_mode
from headstock.train.run_folder import RunFolder
from headstock.train.settings import TrainSettings
from tests.model.small import small_model

GPU = DistributedContext(torch.device("cuda"))


class AllPass:
    """A task that sends every token through every head."""

    def head_passes(self, head, length):
        return 1


@pytest.fixture
def machine(monkeypatch):
    """A GPU of a hundred multiprocessors, as far as anyone asks."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=100))


def decided(settings, distributed=GPU, *, lengths=None, model=None):
    order = SimpleNamespace(length=16, examples=SimpleNamespace(**({} if lengths is None else {"lengths": lengths})))
    budget, lines = Budget.of(settings, 10), []
    with messages_to(lines.append):
        return choose_execution_mode(model or small_model(), AllPass(), settings, budget, order, distributed), lines


@pytest.fixture
def slow(monkeypatch):
    """Arithmetic that takes longer than the calls."""
    monkeypatch.setattr(execution, "LAUNCH_SECONDS", 0.0)
    monkeypatch.setattr(execution, "FLOPS", 1e6)


def test_a_short_run_is_not_compiled_and_says_so(machine, slow):
    way, said = decided(TrainSettings(minutes=1.0))
    assert way == "plain" and len(said) == 1 and "60 s" in said[0]
    assert decided(TrainSettings(minutes=30.0)) == ("compiled", [])
    assert decided(TrainSettings(steps=1))[0] == "plain"
    assert decided(TrainSettings(steps=60_000))[0] == "compiled"


def test_where_calls_take_longest_steps_are_recorded(machine):
    assert decided(TrainSettings(minutes=1.0)) == ("recorded", [])
    assert decided(TrainSettings(steps=10), lengths=[3, 4]) == ("recorded", [])
    assert decided(TrainSettings(minutes=30.0), lengths=[3, 4]) == ("recorded", [])


def test_a_long_run_of_small_steps_is_compiled_and_recorded(machine):
    assert decided(TrainSettings(minutes=30.0)) == ("both", [])
    assert decided(TrainSettings(steps=10))[0] == "recorded"
    assert decided(TrainSettings(steps=10**13))[0] == "both"
    assert decided(TrainSettings(minutes=30.0, unfreeze=1.0))[0] == "compiled"  # other weights move as it goes on
    assert decided(TrainSettings(minutes=30.0), DistributedContext(torch.device("cuda"), size=2))[0] == "compiled"


def test_what_would_be_compiled_over_and_over_is_not(machine, slow):
    assert decided(TrainSettings(minutes=30.0), lengths=[3, 4])[0] == "plain"
    assert decided(TrainSettings(minutes=30.0), DistributedContext(torch.device("cpu"))) == ("plain", [])


def test_a_head_on_kept_features_is_trained_plainly(machine):
    whole = small_model()
    assert decided(TrainSettings(minutes=30.0), model=Model(CachedBackbone(whole.backbone), whole.heads)) == (
        "plain",
        [],
    )


def test_what_was_asked_is_done(machine):
    cpu = DistributedContext(torch.device("cpu"))
    assert decided(TrainSettings(steps=1, compile=True), cpu) == ("compiled", [])
    assert decided(TrainSettings(minutes=99.0, compile=False)) == ("plain", [])
    assert decided(TrainSettings(steps=1, compile="replay")) == ("recorded", [])
    assert decided(TrainSettings(steps=1, compile="both")) == ("both", [])
    with pytest.raises(UserError, match="CUDA"):
        decided(TrainSettings(steps=1, compile="replay"), cpu)


def test_a_wrong_word_is_named(corpus, tmp_path, tiny):
    with pytest.raises(UserError, match=r"train.compile: must be one of 'auto', True, False, 'replay'.*mean 'replay'"):
        headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"compile": "replayed"})


def test_a_padded_vocabulary_has_entries_that_are_never_said(corpus, tmp_path, tiny, messages):
    settings = tiny | {"vocabulary": 301, "vocabulary_multiple": 64, "steps": 30, "lr": 1e-2}
    headstock.pretrain(corpus, out=tmp_path / "run", settings=settings)
    loaded = headstock.load(tmp_path / "run")
    assert loaded.config.model.vocabulary == 320 and loaded.tokenizer.vocabulary == 301
    assert any("19 unused entries" in line for line in messages)
    assert "19 unused entries" in (tmp_path / "run" / "README.md").read_text()
    (made,) = loaded.generate(["Anne"], max_tokens=40, temperature=5.0)
    assert made.text


@pytest.mark.parametrize("dtype", ["float32", "float8"])
@pytest.mark.parametrize("objective", [{"task.name": "masked", "transform": True}, {"task.name": "hybrid"}])
def test_however_many_are_hidden_it_is_compiled_once(objective, dtype, corpus, tmp_path, tiny, monkeypatch):
    """What is hidden becomes less from step to step, and a loss made in parts is made in as many."""
    monkeypatch.setattr(cross_entropy, "MIN_LOGITS", 0)
    monkeypatch.setattr(cross_entropy, "updates_in_place", lambda x: True)  # as on a GPU
    monkeypatch.setattr(fp8, "MIN_ROWS", 1)
    counted = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(execution.torch, "compile", partial(torch.compile, backend=counted))
    options = objective | {"fraction_start": 0.9, "fraction": 0.6, "dtype": dtype}
    sizes = {"vocabulary": 304, "batch": 8, "length": 16, "depth": 1, "steps": 4, "log_every": 1}
    curves = []
    for compile in (False, True):
        torch._dynamo.reset()
        out = tmp_path / str(compile)
        headstock.pretrain(corpus, out=out, settings=tiny | options | sizes | {"compile": compile})
        curves.append([row["loss"] for row in RunFolder(out).read_metrics() if "loss" in row])
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)
    assert counted.frame_count == 1


def test_however_many_sizes_a_process_trains_each_is_compiled(corpus, tmp_path, tiny, monkeypatch):
    """torch compiles one function eight times, whosever it is; runs of one size share what was compiled."""
    counted = CompileCounterWithBackend("eager")
    monkeypatch.setattr(execution.torch, "compile", partial(torch.compile, backend=counted))
    sizes = {"vocabulary": 300, "batch": 2, "length": 8, "depth": 1, "heads": 1, "steps": 1, "compile": True}
    for width in (*range(8, 8 * 11, 8), 80):
        headstock.pretrain(corpus, out=tmp_path / f"{width}", settings=tiny | sizes | {"width": width}, overwrite=True)
    assert counted.frame_count == 10
