"""LoRA: exact at the start, the same merged and unmerged, trained in adapters and heads alone, for every family."""

import pytest
import torch
from torch.nn import functional as F

from headstock.cost.model import model_cost, model_dimensions
from headstock.cost.training_cost import adapter_weights, flops_per_token, lora_flops_per_token
from headstock.errors import UserError
from headstock.explain.subject import open_subject
from headstock.kernels.bare_modules import strip_modules
from headstock.model.batch import Batch
from headstock.model.lora import LoRAConfig, LoRALinear, LoRAModel, check_lora, is_adapter, replace_adapter
from headstock.model.model import Model
from tests.model.small import small_model, some_tokens, stir

CONFIG = LoRAConfig(rank=3, alpha=6.0, dropout=0.0, targets="attention")
ALL = LoRAConfig(rank=3, alpha=6.0, dropout=0.0, targets="all-linear")
SIZES = ["model.vocabulary=30", "depth=2", "width=16", "hidden=24"]
TRANSFORMER = [*SIZES, "heads=2", "context=12", "dropout=0.0"]
FAMILIES = {
    "gpt-nano": TRANSFORMER,
    "bert-nano": TRANSFORMER,
    "modern-nano": TRANSFORMER,
    "seq2seq-nano": TRANSFORMER,
    "lstm-nano": SIZES,
    "gru-nano": SIZES,
    "elmo-nano": SIZES,
    "gru-s2s-nano": SIZES,
    "rnn-nano": SIZES,
    "bilm-nano": TRANSFORMER,
}


def family(name):
    model = open_subject(None, name, FAMILIES[name], device="cpu").model
    stir(model, spread=0.1)
    return model.eval()


def batch_for(model):
    source = Batch(some_tokens(2, 7, vocabulary=30, seed=2)) if model.backbone.is_encoder_decoder else None
    return Batch(some_tokens(2, 8, vocabulary=30), source=source)


def hidden(model, batch):
    return model(batch).hidden


def with_trained_adapters(model, config, *, seed=0):
    """The model with adapters whose B is not zero."""
    adapted = LoRAModel(model, config, seed=seed).eval()
    generator = torch.Generator().manual_seed(5)
    for name, tensor in adapted.tensors().items():
        if name.endswith("lora_B"):
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return adapted


@pytest.mark.parametrize("config", [CONFIG, ALL], ids=["attention", "all-linear"])
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_start_exact_train_alone_and_merge(name, config):
    model = family(name)
    batch = batch_for(model)
    before, names = hidden(model, batch), list(model.tensors())
    weights = {name: tensor.clone() for name, tensor in model.tensors().items()}

    fresh = LoRAModel(model, config, seed=0)
    torch.testing.assert_close(hidden(fresh.eval(), batch), before, rtol=0, atol=0)
    fresh.merge()

    adapted = with_trained_adapters(model, config)
    unmerged = hidden(adapted, batch)
    assert (unmerged - before).abs().max() > 1e-3
    unmerged.square().sum().backward()
    trained = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, parameter in adapted.named_parameters() if name.endswith(("lora_A", "lora_B"))}
    assert all(parameter.grad.abs().sum() > 0 for parameter in adapted.parameters() if parameter.grad is not None)

    adapter = {name: tensor.clone() for name, tensor in adapted.tensors().items()}
    adapted.merge()
    torch.testing.assert_close(hidden(model, batch), unmerged, rtol=1e-6, atol=3e-6)
    assert list(model.tensors()) == names and all(parameter.requires_grad for parameter in model.parameters())
    changed = {name for name, tensor in model.tensors().items() if not torch.equal(tensor, weights[name])}
    assert changed == {name.removesuffix(".lora_A") for name in adapter if name.endswith("lora_A")}
    for name in changed:
        expected = weights[name] + 6.0 / 3 * adapter[f"{name}.lora_B"] @ adapter[f"{name}.lora_A"]
        torch.testing.assert_close(model.tensors()[name], expected, rtol=1e-6, atol=1e-6)
    wrong = {name: weights[name] + adapter[f"{name}.lora_B"] @ adapter[f"{name}.lora_A"] for name in changed}
    assert any((model.tensors()[name] - wrong[name]).abs().max() > 1e-2 for name in changed)  # without alpha / r


@pytest.mark.parametrize("config", [CONFIG, ALL], ids=["attention", "all-linear"])
@pytest.mark.parametrize("name", [*FAMILIES, "ngram-nano"])
def test_closed_forms_count_the_adapters(name, config):
    if name == "ngram-nano" and config is CONFIG:
        return
    subject = open_subject(None, name, FAMILIES.get(name, SIZES), device="cpu")
    cost = model_cost(subject.model, subject.task, model_dimensions(subject.model, length=8))
    expected = sum(tensor.count * tensor.times for tensor in adapter_weights(cost.weights(), config))
    adapted = LoRAModel(subject.model, config, seed=0)
    assert expected == sum(tensor.numel() for name, tensor in adapted.tensors().items() if is_adapter(name)) > 0


def test_flops_are_those_that_torch_counts():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    subject = open_subject(None, "gpt-nano", [*TRANSFORMER, "depth=6", "width=32", "heads=4"], device="cpu")
    model, batch = subject.model, Batch(some_tokens(2, 12, vocabulary=30))
    cost = model_cost(model, subject.task, model_dimensions(model, length=12))

    def counted(model):
        counter = FlopCounterMode(display=False)
        with counter, sdpa_kernel(SDPBackend.MATH):
            output = model(batch).hidden
            (output * output.detach()).sum().backward()
        return counter.get_total_flops() / 24

    head = cost.parts[1].total_flops()
    full, expected_full = counted(model), float(flops_per_token(cost, training=True) - 3 * head)
    lora, expected = counted(LoRAModel(model, ALL, seed=0)), float(lora_flops_per_token(cost, ALL) - 3 * head)
    assert full == pytest.approx(expected_full, rel=0.02)
    assert lora == pytest.approx(expected, rel=0.05)  # the first layer's input needs no gradient
    assert lora < 0.85 * full


def test_projections_that_read_the_weight_are_adapted():
    """Attention at one position slices the weight, and decoding copies it."""
    adapted = with_trained_adapters(small_model(), CONFIG)
    batch = Batch(some_tokens(2, 6))
    positions = torch.tensor([5, 3])
    whole = adapted(batch).hidden
    one = adapted(batch, query_positions=positions).hidden
    torch.testing.assert_close(one[:, 0], whole[torch.arange(2), positions])
    torch.testing.assert_close(strip_modules(adapted.backbone)(batch).hidden, whole)
    assert any(isinstance(module, LoRALinear) for module in adapted.modules())


def test_a_tied_head_stays_frozen_and_another_is_trained():
    tied = LoRAModel(small_model(tied=True), CONFIG, seed=0)
    assert not any(name.startswith("heads.") for name in tied.tensors() if not name.endswith("bias"))
    untied = LoRAModel(small_model(tied=False), CONFIG, seed=0)
    assert "heads.token.weight" in untied.tensors()


def test_the_seed_determines_the_adapters():
    first, same, other = (LoRAModel(small_model(), CONFIG, seed=seed).tensors() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_dropout_acts_in_training_only():
    config = LoRAConfig(rank=3, alpha=6.0, dropout=0.5, targets="attention")
    model, batch = small_model(), Batch(some_tokens(2, 6))
    adapted = with_trained_adapters(model, config)
    calm = hidden(adapted, batch)
    torch.testing.assert_close(hidden(adapted, batch), calm, rtol=0, atol=0)
    assert not torch.equal(hidden(adapted.train(), batch), calm)
    adapted.merge()
    torch.testing.assert_close(hidden(model, batch), calm, rtol=1e-5, atol=1e-5)


def test_adapters_of_another_checkpoint_replace_those_in_merged_weights():
    model = small_model()
    weights = {name: tensor.clone() for name, tensor in model.tensors().items()}
    adapted = with_trained_adapters(model, CONFIG)
    old = {name: tensor.clone() for name, tensor in adapted.tensors().items()}
    adapted.merge()
    merged = {name: tensor.clone() for name, tensor in model.tensors().items()}
    new = {name: tensor + 0.1 for name, tensor in old.items()}
    result = replace_adapter(merged, old, new, CONFIG.scale)
    name = "backbone.blocks.0.attention.inputs.weight"
    expected = weights[name] + CONFIG.scale * new[f"{name}.lora_B"] @ new[f"{name}.lora_A"]
    torch.testing.assert_close(result[name], expected, rtol=1e-5, atol=1e-6)
    same = replace_adapter(merged, old, old, CONFIG.scale)
    assert all(torch.equal(same[name], merged[name]) for name in merged)


def test_a_rank_that_is_not_low_and_a_model_without_targets_are_refused():
    with pytest.raises(UserError, match="at most 7"):
        check_lora(small_model().backbone, LoRAConfig(rank=8, alpha=16, dropout=0, targets="attention"))
    ngram = open_subject(None, "ngram-nano", SIZES, device="cpu").model
    with pytest.raises(UserError, match="all-linear"):
        check_lora(ngram.backbone, CONFIG)
    check_lora(ngram.backbone, ALL)


def test_adapters_learn_what_the_head_alone_cannot():
    """A target that needs the backbone: LoRA fits it, a head on frozen features and untrained adapters do not."""
    batch = Batch(some_tokens(16, 6, seed=3))
    target = torch.randint(2, (16,), generator=torch.Generator().manual_seed(9))

    def final_loss(trained):
        base = small_model()
        model = Model(base.backbone, {"label": torch.nn.Linear(8, 2)})
        torch.nn.init.zeros_(model.heads["label"].weight)
        adapted = LoRAModel(model, ALL, seed=0)
        names = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
        parameters = [p for name, p in adapted.named_parameters() if name in names and trained(name)]
        optimizer = torch.optim.Adam(parameters, lr=0.02)
        for _ in range(60):
            loss = F.cross_entropy(model.heads["label"](adapted(batch).hidden[:, -1]), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    lora, head, only_a = (
        final_loss(rule)
        for rule in (lambda name: True, lambda name: "heads" in name, lambda name: "lora_B" not in name)
    )
    assert lora < 0.5 * head
    assert only_a == pytest.approx(head, rel=1e-4)  # without B, the product stays zero
