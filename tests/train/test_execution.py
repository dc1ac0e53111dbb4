"""The execution mode of a run, recompilation, and padded vocabularies."""

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
from headstock.train.step import LossModule
from tests.model.small import small_model
from tests.train.test_graphed_step import NextToken, texts

GPU = DistributedContext(torch.device("cuda"))


class DenseTask:
    """A task whose heads read every token."""

    def head_passes(self, head, length):
        return 1


@pytest.fixture
def gpu(monkeypatch):
    """A simulated GPU of a hundred multiprocessors."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=100))


def choose(settings, distributed=GPU, *, lengths=None, model=None):
    sampler = SimpleNamespace(length=16, examples=SimpleNamespace(**({} if lengths is None else {"lengths": lengths})))
    budget, lines = Budget.of(settings, 10), []
    with messages_to(lines.append):
        return choose_execution_mode(model or small_model(), DenseTask(), settings, budget, sampler, distributed), lines


@pytest.fixture
def slow(monkeypatch):
    """Arithmetic that takes longer than kernel launches."""
    monkeypatch.setattr(execution, "LAUNCH_SECONDS", 0.0)
    monkeypatch.setattr(execution, "FLOPS", 1e6)


def test_a_short_run_is_not_compiled(gpu, slow):
    mode, messages = choose(TrainSettings(minutes=1.0))
    assert mode == "eager" and len(messages) == 1 and "60 s" in messages[0]
    assert choose(TrainSettings(minutes=30.0)) == ("compiled", [])
    assert choose(TrainSettings(steps=1))[0] == "eager"
    assert choose(TrainSettings(steps=60_000))[0] == "compiled"


def test_steps_dominated_by_kernel_launches_use_cuda_graphs(gpu):
    assert choose(TrainSettings(minutes=1.0)) == ("graphed", [])
    assert choose(TrainSettings(steps=10), lengths=[3, 4]) == ("graphed", [])
    assert choose(TrainSettings(minutes=30.0), lengths=[3, 4]) == ("graphed", [])


def test_a_long_run_of_small_steps_is_compiled_and_uses_cuda_graphs(gpu):
    assert choose(TrainSettings(minutes=30.0)) == ("both", [])
    assert choose(TrainSettings(steps=10))[0] == "graphed"
    assert choose(TrainSettings(steps=10**13))[0] == "both"
    assert choose(TrainSettings(minutes=30.0, unfreeze=1.0))[0] == "compiled"  # the trainable weights change
    assert choose(TrainSettings(minutes=30.0), DistributedContext(torch.device("cuda"), size=2))[0] == "compiled"


def test_varying_lengths_are_not_compiled(gpu, slow):
    assert choose(TrainSettings(minutes=30.0), lengths=[3, 4])[0] == "eager"
    assert choose(TrainSettings(minutes=30.0), DistributedContext(torch.device("cpu"))) == ("eager", [])


def test_a_head_on_cached_features_is_trained_eagerly(gpu):
    full = small_model()
    head = Model(CachedBackbone(full.backbone), full.heads)
    assert choose(TrainSettings(minutes=30.0), model=head) == ("eager", [])


def test_an_explicit_mode_is_used(gpu):
    cpu = DistributedContext(torch.device("cpu"))
    assert choose(TrainSettings(steps=1, compile=True), cpu) == ("compiled", [])
    assert choose(TrainSettings(minutes=99.0, compile=False)) == ("eager", [])
    assert choose(TrainSettings(steps=1, compile="replay")) == ("graphed", [])
    assert choose(TrainSettings(steps=1, compile="both")) == ("both", [])
    with pytest.raises(UserError, match="CUDA"):
        choose(TrainSettings(steps=1, compile="replay"), cpu)


def test_an_invalid_mode_is_rejected(corpus, tmp_path, tiny):
    with pytest.raises(UserError, match=r"train.compile: must be one of 'auto', True, False, 'replay'.*mean 'replay'"):
        headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"compile": "replayed"})


def test_padded_vocabulary_entries_are_never_generated(corpus, tmp_path, tiny, messages):
    settings = tiny | {"vocabulary": 301, "vocabulary_multiple": 64, "steps": 30, "lr": 1e-2}
    headstock.pretrain(corpus, out=tmp_path / "run", settings=settings)
    loaded = headstock.load(tmp_path / "run")
    assert loaded.config.model.vocabulary == 320 and loaded.tokenizer.vocabulary == 301
    assert any("19 unused entries" in line for line in messages)
    assert "19 unused entries" in (tmp_path / "run" / "README.md").read_text()
    (generated,) = loaded.generate(["Anne"], max_tokens=40, temperature=5.0)
    assert generated.text


@pytest.mark.parametrize(
    ("objective", "dtype"),
    [
        ({"task.name": "masked", "transform": True}, "float8"),
        ({"task.name": "hybrid", "causal_share": 0.5, "dropout": 0.1}, "float32"),
    ],
)
def test_a_changing_number_of_masked_tokens_is_compiled_once(objective, dtype, corpus, tmp_path, tiny, monkeypatch):
    """The masked fraction falls from step to step."""
    monkeypatch.setattr(cross_entropy, "MIN_LOGITS", 0)
    monkeypatch.setattr(cross_entropy, "updates_in_place", lambda x: True)  # as on a GPU
    monkeypatch.setattr(fp8, "MIN_ROWS", 1)
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(execution.torch, "compile", partial(torch.compile, backend=counter))
    options = objective | {"fraction_start": 0.9, "fraction": 0.6, "dtype": dtype}
    sizes = {"vocabulary": 304, "batch": 8, "length": 16, "depth": 1, "steps": 4, "log_every": 1}
    curves = []
    for compile in (False, True):
        torch._dynamo.reset()
        out = tmp_path / str(compile)
        headstock.pretrain(corpus, out=out, settings=tiny | options | sizes | {"compile": compile})
        curves.append([row["loss"] for row in RunFolder(out).read_metrics() if "loss" in row])
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)
    assert counter.frame_count == 1


def test_every_model_size_in_a_process_is_compiled(monkeypatch):
    """torch compiles a function up to a limit of times; models of one size share the compiled module."""
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(execution.torch, "compile", partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    batch = texts(5, 9)
    with torch._dynamo.config.patch(recompile_limit=1):  # instead of 8
        for width in (8, 16, 24, 24):
            execution.compile_module(LossModule(small_model(width=width, depth=1), NextToken(), smoothing=0.0))(batch)
    assert counter.frame_count == 3
