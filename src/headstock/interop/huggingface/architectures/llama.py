"""Llama, Qwen3 and EuroBERT: pre-norm with RMS norms, rotary positions, SwiGLU.

A causal run is exported as Llama, or as Qwen3 if it normalizes queries and keys. A bidirectional one is exported as
EuroBERT, or where EuroBERT lacks the part as Llama or Qwen3 with `is_causal` false.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from headstock.interop import mismatches
from headstock.interop.huggingface import heads
from headstock.interop.huggingface.architecture import (
    ARCHITECTURES,
    Architecture,
    ConfigKeys,
    ExportSpec,
    Layers,
    SourceModel,
)
from headstock.interop.tensor_map import TensorMap, Tensors, constant, rename
from headstock.tasks.base import TASKS
from headstock.train.settings import RunConfig

POOLING = {"mean": "mean", "cls": "bos"}  # ours: theirs
LAYERS: Layers = {
    "around_attention.norm": "input_layernorm",
    "attention.inputs": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": "self_attn.o_proj",
    "around_feed.norm": "post_attention_layernorm",
    "feed.gate": "mlp.gate_proj",
    "feed.up": "mlp.up_proj",
    "feed.down": "mlp.down_proj",
}
QK_NORMS: Layers = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}


def is_causal(config: RunConfig) -> bool:
    return config.model.causal or TASKS.get(config.objective).generates  # a run with both masks is exported as causal


@ARCHITECTURES.add("llama")
class Llama(Architecture):
    title = "Llama, Qwen3 or EuroBERT"
    classes: ClassVar[dict[str, str]] = {"llama": "Llama", "qwen3": "Qwen3", "eurobert": "EuroBert"}
    model_types = ("llama", "qwen2", "qwen3", "mistral", "eurobert")
    supported_heads = (heads.CAUSAL_LM, heads.MASKED_LM, heads.BASE, heads.SEQUENCE, heads.TOKEN, heads.SPAN)
    config_keys: ClassVar[ConfigKeys] = {
        "vocabulary": ("vocab_size", None),
        "context": ("max_position_embeddings", 2048),
        "width": ("hidden_size", None),
        "depth": ("num_hidden_layers", None),
        "heads": ("num_attention_heads", None),
        "hidden": ("intermediate_size", None),
        "norm_epsilon": ("rms_norm_eps", 1e-6),
        "dropout": ("attention_dropout", 0.0),
    }
    required: ClassVar[dict[str, Any]] = {
        "norm": "pre",
        "norm_kind": "rms",
        "positions": "rotary",
        "activation": "swiglu",
        "segments": 0,
        "embed_scale": False,
        "embed_norm": False,
        "cross": False,
    }
    required_config: ClassVar[dict[str, Any]] = {"hidden_act": ("silu", "swish")}
    prefix = "model."
    embeddings = ("embed_tokens.weight",)
    buffers = ("rotary_emb.inv_freq",)
    always_biased = False

    def unsupported_model(self, config: RunConfig) -> list[str]:
        return mismatches(vars(config.model), {"bias": False} if config.model.qk_norm else {}, "model.")

    def unsupported_classifier(self, config: RunConfig) -> list[str]:
        if self.export_type(config) == "eurobert":
            return heads.gelu_head_problems(config, pools=tuple(POOLING), dense=("none", "gelu"))
        return super().unsupported_classifier(config)

    def unsupported_lm_head(self, config: RunConfig) -> list[str]:
        if self.export_type(config) == "eurobert":  # its LM head has a bias
            config = replace(config, model=replace(config.model, bias=False))
        return super().unsupported_lm_head(config)

    def export_type(self, config: RunConfig) -> str:
        if config.model.qk_norm:
            return "qwen3"
        head = heads.task_head(config)
        if is_causal(config) or head == heads.SPAN or (head == heads.SEQUENCE and config.task.pool == "last"):
            return "llama"  # EuroBERT has no such heads
        return "eurobert"

    def export_head(self, config: RunConfig) -> str:
        head = super().export_head(config)
        if head in (heads.CAUSAL_LM, heads.MASKED_LM):
            return heads.MASKED_LM if self.export_type(config) == "eurobert" else heads.CAUSAL_LM
        return head

    def export_config(self, config: RunConfig) -> dict[str, Any]:
        c, eurobert = config.model, self.export_type(config) == "eurobert"
        settings = {
            "num_key_value_heads": c.heads,
            "head_dim": c.width // c.heads,
            "hidden_act": "silu",
            "rope_theta": c.rotary_base,
            "rope_parameters": {"rope_type": "default", "rope_theta": c.rotary_base},
            "attention_bias": c.bias,
            "mlp_bias": c.bias,
        }
        if eurobert and heads.task_head(config) == heads.SEQUENCE:
            settings["classifier_pooling"] = POOLING[config.task.pool]
        return settings if eurobert or is_causal(config) else settings | {"is_causal": False}

    def export_spec(self, config: RunConfig) -> ExportSpec:
        spec = super().export_spec(config)
        if heads.task_head(config) == heads.SPAN:
            spec = replace(spec, prefix="transformer.")
        if spec.model_type == "eurobert":
            return replace(spec, token_ids=("mask",))
        if is_causal(config):
            return spec
        note = f"{spec.head} is bidirectional through is_causal=false, which older transformers versions ignore"
        return replace(spec, notes=(note,))

    def backbone_map(self, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        c, p = config.model, spec.prefix
        yield rename("backbone.tokens.weight", f"{p}embed_tokens.weight")
        layers = LAYERS | (QK_NORMS if c.qk_norm else {})
        for n in range(c.depth):
            yield from self.block_map(c, f"backbone.blocks.{n}", f"{p}layers.{n}", layers)
        yield from self.layer_map(c, "backbone.final_norm", f"{p}norm")

    def classifier_map(self, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        if spec.model_type == "eurobert":
            return heads.gelu_head(config, "dense", "classifier")
        return super().classifier_map(config, spec)

    def token_classifier(self, spec: ExportSpec) -> str:
        return "classifier" if spec.model_type == "eurobert" else "score"

    def lm_head_map(self, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        yield from super().lm_head_map(config, spec)
        if config.model.tied and config.model.bias and spec.model_type == "eurobert":
            yield constant("lm_head.bias", torch.zeros(config.model.vocabulary))

    def unsupported_import(self, source: SourceModel) -> list[str]:
        rope, problems = rope_parameters(source.config), []
        head_width = source.config["hidden_size"] // source.config["num_attention_heads"]
        if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
            problems.append(f"rope_type is {kind!r}, not 'default'")
        if (head_dim := source.config.get("head_dim")) not in (None, head_width):
            problems.append(f"head_dim is {head_dim}, not hidden_size / num_attention_heads = {head_width}")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            problems.append(f"partial_rotary_factor is {rope['partial_rotary_factor']}, not 1")
        if has_sliding_window(source.config):
            window = source.config["sliding_window"]
            problems.append(f"sliding_window is {window}, but only full attention is supported")
        if source.config["model_type"] == "eurobert" and source.head.endswith(heads.SEQUENCE):
            pooling = source.config.get("classifier_pooling", "late")
            if pooling not in POOLING.values():
                problems.append(f"classifier_pooling is {pooling!r}, not 'mean' or 'bos'")
        return problems

    def import_model(self, source: SourceModel) -> dict[str, Any]:
        rotary_base = rope_parameters(source.config).get("rope_theta", source.config.get("rope_theta", 10_000.0))
        return super().import_model(source) | {
            "rotary_base": float(rotary_base),
            "bias": any(name.endswith("_proj.bias") for name in source.tensors),
            "qk_norm": any(name.endswith("q_norm.weight") for name in source.tensors),
            "causal": is_causal_import(source.config),
        }

    def import_special_tokens(self, source: SourceModel) -> dict[str, Any]:
        return {"opening": "start" if is_causal_import(source.config) else "cls"}

    def import_classifier(self, source: SourceModel) -> dict[str, Any]:
        if source.config["model_type"] != "eurobert":
            return super().import_classifier(source)
        pool = next(ours for ours, theirs in POOLING.items() if theirs == source.config["classifier_pooling"])
        return {"pool": pool, "dense": heads.imported_dense(source.tensors, "dense", "classifier")}

    def import_lm_task(self, source: SourceModel) -> dict[str, Any] | None:
        if source.head.endswith(heads.MASKED_LM) or not is_causal_import(source.config):
            return {"name": "masked"} if source.head.endswith((heads.MASKED_LM, heads.CAUSAL_LM)) else None
        return super().import_lm_task(source)

    def prepare_tensors(self, source: SourceModel, config: RunConfig, spec: ExportSpec) -> Tensors:
        """Repeats keys and values shared by several heads (GQA) and adds zero biases to layers without one."""
        c, result = config.model, dict(source.tensors)
        groups = c.heads // (source.config.get("num_key_value_heads") or c.heads)
        for name, tensor in source.tensors.items():
            if groups > 1 and (".k_proj." in name or ".v_proj." in name):
                result[name] = repeat_heads(tensor, groups, c.width // c.heads)
        for name in (name for entry in self.tensor_map(config, spec) for name in entry.theirs):
            weight = result.get(f"{name.removesuffix('.bias')}.weight")
            if name.endswith(("_proj.bias", "lm_head.bias")) and weight is not None:
                result.setdefault(name, torch.zeros(len(weight)))
        return result


def repeat_heads(tensor: Tensor, times: int, head_width: int) -> Tensor:
    """(H K, ...) -> (H times K, ...): each head repeated."""
    return tensor.unflatten(0, (-1, head_width)).repeat_interleave(times, 0).flatten(0, 1)


def rope_parameters(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    return hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}


def is_causal_import(hf_config: Mapping[str, Any]) -> bool:
    return hf_config["model_type"] != "eurobert" and hf_config.get("is_causal", True)


def has_sliding_window(hf_config: Mapping[str, Any]) -> bool:
    """Whether some layer attends to fewer tokens than the context has."""
    if hf_config.get("sliding_window") is None or hf_config.get("use_sliding_window") is False:
        return False
    if layer_types := hf_config.get("layer_types"):
        return "sliding_attention" in layer_types
    return hf_config["sliding_window"] < hf_config.get("max_position_embeddings", 0)
