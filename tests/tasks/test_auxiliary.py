"""Losses beside a task's own: language-model labels of its rows, and the divergence of two readings."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from headstock.errors import UserError
from headstock.kernels.backends import paused_gc
from headstock.model.batch import IGNORE_INDEX, pad_to_multiple
from headstock.model.model import Model
from headstock.tasks.auxiliary import AuxiliaryLosses, TokenDropout, symmetric_divergence
from headstock.tasks.base import TASKS, padded_batch
from headstock.tasks.classify import Classify, ClassifyConfig
from headstock.tasks.labelled import EncodedRows
from headstock.train.models import with_lm_head
from tests.tasks.small import model_for

TEXTS = [
    "Anne sees home.",
    "Ben likes the sea. Zoë finds Paris. Anne likes home.",
    "Zoë finds Paris.",
    "Ben sees home.",
]
WEIGHTS = {"lm_loss": 0.5, "r_drop": 2.0}


@pytest.fixture(params=["causal", "masked", "hybrid"])
def objective(request, stores):
    config = TASKS.get(request.param).Config
    return TASKS.get(request.param)(config() if request.param == "causal" else config(fraction=0.4), stores[0])


@pytest.fixture
def rows(objective, stores):
    """A classifier with this objective beside its own loss, and its rows."""
    role = "start" if objective.name == "causal" else "cls"
    task = Classify(ClassifyConfig(classes=("a", "b"), pool="mean", opening=role, dropout=0.0), stores[0])
    tokens = stores[0].encode_batch(TEXTS)
    return AuxiliaryLosses(task, objective=objective, **WEIGHTS), EncodedRows(tokens, np.array([0, 1, 0, 1]), TEXTS)


def model_of(task, objective, *, seed=0) -> Model:
    model = model_for(task.task, causal=objective.name == "causal", context=32, seed=seed)
    torch.manual_seed(seed + 1)
    head = objective.heads(model.backbone)["token"]
    return Model(model.backbone, dict(model.heads.items()) | {"token": head}).train()


def labelled_part(batch):
    return batch if batch.masked is None else batch.masked


def test_rows_get_the_labels_of_the_objective(rows, objective, stores):
    task, data = rows
    batch = task.examples(data, length=32, seed=0).batch([0, 1, 2, 3])
    plain = task.task.examples(data, length=32).batch([0, 1, 2, 3])
    assert torch.equal(batch.tokens, plain.tokens)  # the task itself reads the rows as they are
    part = labelled_part(batch)
    labels, special = part.labels["token"], torch.tensor(sorted(stores[0].all_special_ids))
    given = labels != IGNORE_INDEX
    following = torch.cat([plain.tokens[:, 1:], torch.full((4, 1), IGNORE_INDEX)], 1)
    originals = plain.tokens if objective.name == "masked" else following  # a hybrid model predicts one place earlier
    assert torch.equal(labels[given], originals[given])
    if objective.name == "causal":
        assert batch.masked is None and int(given.sum()) == int((~plain.padding).sum()) - 4
    else:
        assert 0 < given.sum() < plain.tokens.numel() / 2
        assert not torch.isin(labels[given], special).any()
        changed = part.tokens != plain.tokens
        moved = given if objective.name == "masked" else given.roll(1, 1)
        assert changed.any() and not (changed & ~moved).any()
    assert task.examples(data, length=32).batch([0]).labels.keys() == {"label"}  # validation has none


def test_labels_depend_on_the_seed_epoch_and_row_alone(rows, objective):
    task, data = rows

    def tokens(epoch, *indices):
        part = labelled_part(task.examples(data, length=32, seed=3, epoch=epoch).batch(indices))
        return part.tokens[-1, : len(data.tokens[indices[-1]])]

    assert torch.equal(tokens(0, 2, 0, 1), tokens(0, 1))
    differs = not torch.equal(tokens(0, 1), tokens(1, 1))
    assert differs == (objective.name != "causal")


def test_windows_of_one_text_are_masked_differently(stores):
    objective = TASKS.get("masked")(TASKS.get("masked").Config(fraction=0.5), stores[0])
    config = ClassifyConfig(classes=("a", "b"), pool="mean", opening="cls", long="windows")
    task = AuxiliaryLosses(Classify(config, stores[0]), objective=objective, lm_loss=1.0)
    data = EncodedRows([stores[0].encode("home ")[:1] * 40], np.array([0]), ["row"])
    batch = task.examples(data, length=12, seed=0).batch([0])
    assert len(batch.tokens) > 2 and (batch.tokens[0] == batch.tokens[1]).all()
    assert (batch.masked.tokens[0] != batch.masked.tokens[1]).any()


@torch.no_grad()
def test_losses_are_sums_that_do_not_depend_on_the_micro_batches(rows, objective):
    task, data = rows
    model, examples = model_of(task, objective), task.examples(data, length=32, seed=0)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    whole = examples.batch([0, 1, 2, 3])
    parts = [padded_batch(examples, [0, 1, 2], 4, filler=0), pad_to_multiple(examples.batch([3]), 16)]
    sums, counts = task.losses(model, whole), task.counts(whole)
    assert set(counts) == {"label", "token", "r_drop"} and counts["label"] == counts["r_drop"] == 4
    for head, count in counts.items():
        assert sum(task.counts(part)[head] for part in parts) == count
        total = sum(float(task.losses(model, part)[head]) for part in parts)
        assert total == pytest.approx(float(sums[head]), rel=1e-4, abs=1e-6)
    assert float(sums["r_drop"]) == pytest.approx(0.0, abs=1e-9)  # nothing is dropped
    part = labelled_part(whole)
    logits = model.heads["token"](model(part).hidden)
    expected = F.cross_entropy(logits.flatten(0, 1), part.labels["token"].flatten(), reduction="sum")
    assert float(sums["token"]) == pytest.approx(float(expected), rel=1e-5)
    assert [task.weight(head) for head in ("label", "token", "r_drop")] == [1.0, 0.5, 2.0]
    model.eval()
    own = task.task.losses(model, whole)
    assert all(torch.equal(task.losses(model, whole)[name], value) for name, value in own.items())


@torch.no_grad()
def test_dropout_makes_two_readings_differ_and_their_losses_are_averaged(rows, objective):
    task, data = rows
    model, batch = model_of(task, objective), task.examples(data, length=32, seed=0).batch([0, 1, 2, 3])
    dropped = Classify(replace(task.config, dropout=0.5), task.tokenizer)
    model.heads["label"].dropout.p = 0.5
    task = AuxiliaryLosses(dropped, r_drop=1.0)
    torch.manual_seed(5)
    sums = task.losses(model, batch)
    torch.manual_seed(5)
    readings = [dropped.losses(model, batch) for _ in range(2)]
    assert float(sums["label"]) == pytest.approx(sum(float(part["label"]) for part in readings) / 2)
    assert float(sums["r_drop"]) > 0
    metrics = task.score({name: float(value) for name, value in sums.items()}, task.counts(batch), size=0)
    assert metrics["r_drop"] == pytest.approx(float(sums["r_drop"]) / 4) and "lm_loss" not in metrics


@pytest.fixture
def gaps(stores, monkeypatch):
    """A classifier with half of its tokens dropped, its rows, and the batches that it reads."""
    task = Classify(ClassifyConfig(classes=("a", "b"), pool="mean", opening="cls", dropout=0.0), stores[0])
    data, read = EncodedRows(stores[0].encode_batch(TEXTS), np.array([0, 1, 0, 1]), TEXTS), []
    losses = task.losses
    monkeypatch.setattr(task, "losses", lambda model, batch, **more: read.append(batch) or losses(model, batch, **more))
    return task, data, read


@torch.no_grad()
def test_dropped_tokens_are_masked_anew_in_every_reading_and_special_ones_never(gaps, stores):
    task, data, read = gaps
    model = model_for(task, causal=False, context=32).train()
    trained = AuxiliaryLosses(task, r_drop=1.0, token_dropout=0.5)
    batch = trained.examples(data, length=32, seed=0).batch([0, 1, 2, 3])
    original = batch.tokens.clone()
    torch.manual_seed(1)
    sums = trained.losses(model, batch)
    assert len(read) == 2 and torch.equal(batch.tokens, original)
    special = torch.isin(original, torch.tensor(sorted(stores[0].all_special_ids)))
    for reading in read:
        changed = reading.tokens != original
        assert (reading.tokens[changed] == stores[0].mask).all() and not (changed & special).any()
        assert 0.3 < float(changed.sum() / (~special).sum()) < 0.7
    assert not torch.equal(read[0].tokens, read[1].tokens) and float(sums["r_drop"]) > 0
    torch.manual_seed(1)
    assert torch.equal(trained.losses(model, batch)["label"], sums["label"])  # a function of the step's seed
    read.clear()
    trained.losses(model.eval(), batch)
    assert torch.equal(read[0].tokens, original)  # validation reads whole texts


@torch.no_grad()
def test_the_language_model_reads_the_tokens_that_the_classifier_misses(gaps, stores):
    task, data, _ = gaps
    objective = TASKS.get("causal")(TASKS.get("causal").Config(), stores[0])
    model = model_of(AuxiliaryLosses(task, objective=objective), objective)
    whole, dropped = (
        AuxiliaryLosses(task, objective=objective, lm_loss=1.0, token_dropout=share) for share in (0.0, 0.5)
    )
    batch = whole.examples(data, length=32, seed=0).batch([0, 1, 2, 3])
    expected, sums = whole.losses(model, batch), dropped.losses(model, batch)
    assert torch.allclose(sums["token"], expected["token"]) and not torch.allclose(sums["label"], expected["label"])


def test_a_tokenizer_without_mask_drops_no_tokens(stores):
    class Unmasked:
        mask = None

    with pytest.raises(UserError, match=r"token_dropout: this tokenizer has no \[MASK\]"):
        TokenDropout(0.1, Unmasked())


def test_a_step_frees_its_computation_without_garbage_collection(rows, objective):
    task, data = rows
    model, batch = model_of(task, objective), task.examples(data, length=32, seed=0).batch([0, 1, 2, 3])
    hidden = []
    model.backbone.register_forward_hook(lambda *call: hidden.append(weakref.ref(call[-1].hidden)))
    with paused_gc(True):
        sum(task.losses(model, batch).values()).backward()
        assert len(hidden) >= 2 and all(reference() is None for reference in hidden)


def test_no_loss_reads_a_value_from_the_device(rows, objective):
    """A CUDA graph captures no step that waits for a value; a fake tensor has none to give."""
    task, data = rows
    task = AuxiliaryLosses(task.task, objective=objective, **WEIGHTS, token_dropout=0.1)
    batch = task.examples(data, length=32, seed=0).batch([0, 1, 2, 3])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = replace(batch, **tree_map_only(torch.Tensor, mode.from_tensor, vars(batch)))
        sums = task.losses(model_of(task, objective), fake)
        with pytest.raises(DataDependentOutputException):
            task.counts(fake)
    assert sums.keys() >= {"label", "token", "r_drop"}


def test_the_divergence_is_the_mean_of_both_kl_divergences():
    a, b = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).unbind()
    labels = torch.tensor([0, 1, 2, 0, IGNORE_INDEX])
    p, q = a[:4].log_softmax(-1), b[:4].log_softmax(-1)
    kl = [F.kl_div(*pair, reduction="sum", log_target=True) for pair in ((p, q), (q, p))]
    assert float(symmetric_divergence(a, b, labels, multilabel=False)) == pytest.approx(float(sum(kl)) / 2, rel=1e-5)
    several = torch.where(labels[:, None] == IGNORE_INDEX, IGNORE_INDEX, 1).expand(5, 3)
    pairs = [torch.stack([x[:4].sigmoid(), 1 - x[:4].sigmoid()], -1).log() for x in (a, b)]
    kl = [F.kl_div(*pair, reduction="sum", log_target=True) / 3 for pair in (pairs, pairs[::-1])]
    assert float(symmetric_divergence(a, b, several, multilabel=True)) == pytest.approx(float(sum(kl)) / 2, rel=1e-5)


def test_the_head_comes_from_the_source(rows, objective):
    task, _ = rows
    source, model = model_of(task, objective, seed=1), model_for(task.task, causal=objective.name == "causal")
    extended = with_lm_head(model, objective, source.tensors(), source="source")
    own, head = extended.tensors(), {n: t for n, t in source.tensors().items() if n.startswith("heads.token.")}
    assert all(torch.equal(own[name], tensor) for name, tensor in (model.tensors() | head).items())
