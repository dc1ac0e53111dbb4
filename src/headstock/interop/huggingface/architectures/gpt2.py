"""GPT-2: causal, pre-norm with layer norms, learned position embeddings."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from headstock.interop import mismatches
from headstock.interop.huggingface import heads
from headstock.interop.huggingface.architecture import (
    ACTIVATIONS,
    ARCHITECTURES,
    Architecture,
    ConfigKeys,
    ExportSpec,
    Layers,
    SourceModel,
)
from headstock.interop.tensor_map import TensorMap, Tensors, rename
from headstock.tasks.base import TASKS
from headstock.train.settings import RunConfig

LAYERS: Layers = {
    "attention.inputs": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "feed.up": "mlp.c_fc",
    "feed.down": "mlp.c_proj",
    "around_attention.norm": "ln_1",
    "around_feed.norm": "ln_2",
}


@ARCHITECTURES.add("gpt2")
class GPT2(Architecture):
    title = "GPT-2"
    classes: ClassVar[dict[str, str]] = {"gpt2": "GPT2"}
    model_types = ("gpt2",)
    supported_heads = (heads.CAUSAL_LM, heads.BASE, heads.SEQUENCE, heads.TOKEN, heads.SPAN)
    config_keys: ClassVar[ConfigKeys] = {
        "vocabulary": ("vocab_size", 50257),
        "context": ("n_positions", 1024),
        "width": ("n_embd", 768),
        "depth": ("n_layer", 12),
        "heads": ("n_head", 12),
        "hidden": ("n_inner", 0),
        "norm_epsilon": ("layer_norm_epsilon", 1e-5),
        "activation": ("activation_function", "gelu_new"),
        "dropout": ("resid_pdrop", 0.1),
    }
    required: ClassVar[dict[str, Any]] = {
        "norm": "pre",
        "norm_kind": "layer",
        "positions": ("learned", "sinusoidal"),
        "activation": tuple(ACTIVATIONS),
        "segments": 0,
        "embed_scale": False,
        "embed_norm": False,
        "qk_norm": False,
        "cross": False,
    }
    required_config: ClassVar[dict[str, Any]] = {
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "scale_attn_weights": True,
    }
    prefix = "transformer."
    embeddings = ("wte.weight",)
    buffers = (".attn.bias", ".attn.masked_bias")
    transposed = True

    def unsupported_model(self, config: RunConfig) -> list[str]:
        # a task with both masks is exported with its causal one
        causal = {} if TASKS.get(config.objective).generates else {"causal": True}
        return mismatches(vars(config.model), causal, "model.")

    def export_head(self, config: RunConfig) -> str:
        head = super().export_head(config)
        return "LMHeadModel" if head == heads.CAUSAL_LM else head

    def export_config(self, config: RunConfig) -> dict[str, Any]:
        return dict.fromkeys(("embd_pdrop", "attn_pdrop"), config.model.dropout)

    def backbone_map(self, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        c, p = config.model, spec.prefix
        yield rename("backbone.tokens.weight", f"{p}wte.weight")
        yield rename("backbone.positions.weight" if c.positions == "learned" else "backbone.waves", f"{p}wpe.weight")
        for n in range(c.depth):
            yield from self.block_map(c, f"backbone.blocks.{n}", f"{p}h.{n}", LAYERS)
        yield from self.layer_map(c, "backbone.final_norm", f"{p}ln_f")

    def import_model(self, source: SourceModel) -> dict[str, Any]:
        model = super().import_model(source)
        return model | {"hidden": model["hidden"] or 4 * model["width"]}

    def prepare_tensors(self, source: SourceModel, config: RunConfig, spec: ExportSpec) -> Tensors:
        """Adds the zero bias of an untied LM head, which GPT-2 does not have."""
        if heads.task_head(config) != heads.CAUSAL_LM or config.model.tied or not config.model.bias:
            return source.tensors
        return {"lm_head.bias": torch.zeros(config.model.vocabulary)} | source.tensors
