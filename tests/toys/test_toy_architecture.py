"""A new Hugging Face architecture is one class: a toy one exports and imports a run without touching another file."""

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import headstock
from headstock.interop.huggingface.architecture import ARCHITECTURES, Architecture, ConfigKeys, Layers
from headstock.interop.huggingface.heads import CAUSAL_LM
from headstock.interop.tensor_map import rename
from headstock.model.batch import Batch
from tests.interop.small import small_run, some_texts

transformers = pytest.importorskip("transformers")

SETTINGS = {"norm": "post", "positions": "learned", "activation": "relu"}  # which no other architecture has


class ToyConfig(transformers.PretrainedConfig):
    model_type = "toy"

    def __init__(self, toy_size=8, toy_layers=1, toy_heads=1, toy_hidden=8, toy_length=8, **kwargs):
        super().__init__(**kwargs)
        self.toy_size, self.toy_layers, self.toy_heads = toy_size, toy_layers, toy_heads
        self.toy_hidden, self.toy_length = toy_hidden, toy_length


class ToyBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, self.heads = config.toy_size, config.toy_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, config.toy_hidden), nn.Linear(config.toy_hidden, width)

    def forward(self, x):  # (B, T, D)
        query, key, value = self.qkv(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = self.norm1(x + self.out(attended.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(self.up(x).relu()))


class ToyForCausalLM(transformers.PreTrainedModel):
    config_class = ToyConfig
    base_model_prefix = "toy"
    _tied_weights_keys: ClassVar[dict[str, str]] = {}

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.toy_size)
        self.layers = nn.ModuleList(ToyBlock(config) for _ in range(config.toy_layers))
        self.positions = nn.Embedding(config.toy_length, config.toy_size)
        self.post_init()

    def forward(self, input_ids, **_):
        x = self.embed(input_ids) + self.positions.weight[: input_ids.size(1)]
        for layer in self.layers:
            x = layer(x)
        return transformers.modeling_outputs.CausalLMOutput(logits=x @ self.embed.weight.T)


class Toy(Architecture):
    title = "a toy"
    classes: ClassVar[dict[str, str]] = {"toy": "Toy"}
    model_types = ("toy",)
    supported_heads = (CAUSAL_LM,)
    config_keys: ClassVar[ConfigKeys] = {
        "vocabulary": ("vocab_size", None),
        "context": ("toy_length", None),
        "depth": ("toy_layers", None),
        "width": ("toy_size", None),
        "heads": ("toy_heads", None),
        "hidden": ("toy_hidden", None),
    }
    required: ClassVar[dict[str, Any]] = SETTINGS | {"bias": True, "tied": True, "causal": True}
    prefix = ""
    embeddings = ("embed.weight",)
    layers: ClassVar[Layers] = {
        "around_attention.norm": "norm1",
        "attention.inputs": "qkv",
        "attention.output": "out",
        "around_feed.norm": "norm2",
        "feed.up": "up",
        "feed.down": "down",
    }

    def backbone_map(self, config, spec):
        yield rename("backbone.tokens.weight", "embed.weight")
        yield rename("backbone.positions.weight", "positions.weight")
        for n in range(config.model.depth):
            yield from self.block_map(config.model, f"backbone.blocks.{n}", f"layers.{n}", self.layers)


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ARCHITECTURES.names()
    monkeypatch.setattr(ARCHITECTURES, "_classes", dict(ARCHITECTURES._classes))
    ARCHITECTURES.add("toy")(Toy)
    transformers.AutoConfig.register("toy", ToyConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM, exist_ok=True)


@torch.no_grad()
def logits(run, tokens):
    model = headstock.load(run.path, device="cpu").model
    return model.heads["token"](model(Batch(tokens)).hidden)


def test_a_toy_architecture_exports_and_imports_a_run(toy, tmp_path):
    run = small_run(tmp_path / "run", SETTINGS, {"name": "causal"})
    assert headstock.export_run(run, tmp_path / "toy")["architecture"] == "ToyForCausalLM"

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "toy").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "toy")
    tokens = tokenizer(some_texts(1, seed=3), truncation=True, max_length=24, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        theirs = model(tokens).logits
    assert torch.allclose(logits(run, tokens), theirs, atol=1e-4)
    assert not torch.allclose(logits(run, tokens.flip(1)), theirs, atol=1e-2)  # the control

    again = headstock.import_run(tmp_path / "toy", out=tmp_path / "again")
    assert torch.equal(logits(again, tokens), logits(run, tokens))

    config = transformers.AutoConfig.from_pretrained(tmp_path / "toy")
    del config.headstock  # as if saved by transformers alone
    model.config = config
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    imported = headstock.import_run(tmp_path / "saved", out=tmp_path / "imported")
    assert torch.allclose(logits(imported, tokens), theirs, atol=1e-4)
