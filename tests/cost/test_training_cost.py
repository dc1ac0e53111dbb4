"""Closed forms of FLOPs and memory agree with what torch counts and saves."""

import warnings
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from headstock.cost.formulas import ExecutionContext
from headstock.cost.model import model_cost, model_dimensions
from headstock.cost.training_cost import flops_per_token, training_memory
from headstock.explain.subject import open_subject
from headstock.kernels.backends import fast_cpu_kernels, onednn_is_slow
from headstock.model.batch import Batch
from headstock.tasks.base import cross_entropy
from headstock.train.optimizers import make_optimizers

ROWS, LENGTH = 4, 32
SIZES = ["model.vocabulary=120", "context=32", "depth=2", "width=32", "heads=4", "hidden=80", "dropout=0.0"]
CELLS = ["model.vocabulary=120", "depth=2", "width=48", "hidden=64", "dropout=0.0"]
CASES = {
    "gpt": ("gpt-nano", SIZES, {}),
    "untied": ("gpt-nano", [*SIZES, "tied=false", "bias=false"], {}),
    "classic": ("classic", SIZES, {}),
    "classic-dropout": ("classic", [*SIZES, "dropout=0.1"], {}),
    "gpt-dropout": ("gpt-nano", [*SIZES, "dropout=0.1"], {}),
    "classic-outer": ("classic", [*SIZES, "dropout=0.1", "inner_dropout=false"], {}),
    "gpt-inner": ("gpt-nano", [*SIZES, "dropout=0.1", "inner_dropout=true"], {}),
    "modern-outer": ("modern-nano", [*SIZES, "dropout=0.1", "inner_dropout=false"], {}),
    "modern": ("modern-nano", SIZES, {}),
    "modern-dropout": ("modern-nano", [*SIZES, "dropout=0.1"], {}),
    "rotary": ("gpt-nano", [*SIZES, "positions=rotary"], {}),
    "relative": ("gpt-nano", [*SIZES, "positions=relative"], {}),
    "relative-dropout": ("bert-nano", [*SIZES, "positions=relative", "dropout=0.1"], {}),
    "t5": ("seq2seq-nano", [*SIZES, "positions=relative", "norm_kind=rms", "activation=geglu", "bias=false"], {}),
    "qk-norm": ("gpt-nano", [*SIZES, "qk_norm=true"], {}),
    "no-norm": ("gpt-nano", [*SIZES, "dropout=0.1", "norm=none"], {}),
    "no-residual": ("gpt-nano", [*SIZES, "residual=false"], {}),
    "no-positions": ("gpt-nano", [*SIZES, "positions=none"], {}),
    "outer-relu": ("classic", [*SIZES, "dropout=0.1", "feed_activation=outer"], {}),
    "outer-gelu": ("gpt-nano", [*SIZES, "feed_activation=outer"], {}),
    "bert-nsp": ("bert-nano", [*SIZES, "nsp=true"], {}),
    "hybrid": ("bert-nano", SIZES, {"task": "hybrid"}),
    "seq2seq": ("seq2seq-nano", SIZES, {}),
    "seq2seq-qk": ("seq2seq-nano", [*SIZES, "qk_norm=true", "model.source_vocabulary=90", "encoder_depth=1"], {}),
    "lstm": ("lstm-nano", CELLS, {}),
    "lstm-narrow": ("lstm-nano", [*CELLS, "hidden=32", "width=64"], {}),
    "gru": ("gru-nano", CELLS, {}),
    "gru-square": ("gru-nano", [*CELLS, "hidden=48"], {}),
    "rnn": ("gru-nano", [*CELLS, "cell=rnn"], {}),
    "elmo": ("elmo-nano", CELLS, {}),
    "classes": ("gpt-nano", SIZES, {"task": "classify", "classes": 3}),
    "tags": ("bert-nano", SIZES, {"task": "tag", "classes": 5}),
}


def open_case(case):
    preset, sets, more = CASES[case]
    subject = open_subject(None, preset, sets, device="cpu", **more)
    subject.model.train()
    return subject


def some_batch(model, *, documents=False, source=LENGTH):
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(90, (ROWS, LENGTH), generator=draw)
    positions_in_row = torch.arange(LENGTH).expand(ROWS, -1)
    batch = Batch(tokens, positions=positions_in_row.clone())
    if documents:
        batch.document_ids, batch.positions = positions_in_row // 16, positions_in_row % 16
    if model.backbone.is_encoder_decoder:
        batch.source = Batch(torch.randint(90, (ROWS, source), generator=draw))
    return batch


def step(subject, batch):
    """The loss of every head on as many positions as its task predicts."""
    model, task, total = subject.model, subject.task, torch.zeros(())
    hidden = model(batch).hidden
    for name, head in model.heads.items():
        positions = round(task.head_passes(name, LENGTH) * ROWS * LENGTH)
        if task.needs_bilm:
            for half in hidden.chunk(2, -1):
                total = total + cross_entropy(head(half), batch.tokens)
            continue
        vectors = hidden if positions == ROWS * LENGTH else hidden.flatten(0, 1)[torch.arange(positions)]
        scores = head(vectors)
        labels = torch.zeros(scores.shape[:-1], dtype=torch.long)
        total = total + cross_entropy(scores, labels)
    return total


@pytest.mark.parametrize("case", CASES)
def test_flops_match_the_flop_counter(case):
    subject, source = open_case(case), LENGTH // 2
    batch = some_batch(subject.model, source=source)
    d = model_dimensions(subject.model, length=LENGTH, source_length=source)
    parts = model_cost(subject.model, subject.task, d)
    # torch does not count matmuls inside fused attention and recurrent kernels
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):
            with FlopCounterMode(display=False) as forward:
                loss = step(subject, batch)
            with FlopCounterMode(display=False) as backward:
                loss.backward()
    counted = forward.get_total_flops() / (ROWS * LENGTH)
    both = counted + backward.get_total_flops() / (ROWS * LENGTH)
    assert flops_per_token(parts) == pytest.approx(counted, rel=0.01)
    assert flops_per_token(parts, training=True) == pytest.approx(both, rel=0.01)


def saved_bytes(model, work):
    """Bytes of all storages that autograd saves, without parameters and token ids."""
    parameters, saved = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tensor.dtype != torch.int64:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work()
    return sum(size for size, _ in saved.values())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_activations_match_what_autograd_saves(case, packed):
    subject, source = open_case(case), LENGTH // 2
    if packed and (subject.model.backbone.is_encoder_decoder or not hasattr(subject.model.backbone.config, "heads")):
        pytest.skip("only self-attention builds a mask for packed rows")
    d = model_dimensions(subject.model, length=LENGTH, source_length=source)
    batch = some_batch(subject.model, documents=packed, source=source)
    workspace = getattr(subject.config.model, "cell", None) == "lstm" and not onednn_is_slow()
    with fast_cpu_kernels():  # as in training
        counted = saved_bytes(subject.model, lambda: step(subject, batch))
    memory = training_memory(
        subject.model, subject.task, d, rows=ROWS, context=ExecutionContext(packed=packed, workspace=workspace)
    ).activations
    assert memory == pytest.approx(counted, rel=0.04 if workspace else 0.005)  # the workspace is padded


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("case", ["gpt", "untied", "modern", "bert-nsp", "seq2seq", "lstm", "elmo", "classes"])
def test_weights_gradients_and_optimizer_are_exact(case, optimizer):
    preset, settings, options = CASES[case]
    subject = open_subject(None, preset, [*settings, f"optimizer={optimizer}"], device="cpu", **options)
    model = subject.model.train()
    memory = training_memory(
        model, subject.task, model_dimensions(model, length=LENGTH), rows=ROWS, optimizer=optimizer
    )
    step(subject, some_batch(model)).backward()
    optimizers = make_optimizers(model, subject.config.train)
    for instance in optimizers:
        instance.step()
    states = [state for instance in optimizers for state in instance.state.values()]
    assert memory.optimizer == sum(tensor.nbytes for state in states for tensor in state.values())
    assert memory.gradients == sum(p.grad.nbytes for p in model.parameters())
    assert memory.weights == sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())


def test_a_frozen_backbone_costs_its_weights_only():
    subject = open_case("classes")
    memory_of = partial(training_memory, subject.model, subject.task, model_dimensions(subject.model), rows=ROWS)
    memory = memory_of(frozen=True)
    head = sum(p.nbytes for p in subject.model.heads.parameters())
    assert memory.gradients == head
    assert memory.optimizer == 2 * head + 4 * len(list(subject.model.heads.parameters()))
    assert memory.activations < memory_of().activations / 50
