"""GPT-2: causal, pre-norm with layer norms, learned position embeddings."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from headstock.interop.huggingface.architecture import (
    ACTIVATIONS,
    ARCHITECTURES,
    Architecture,
    ExportSpec,
    Sizes,
    import_activation,
    is_tied,
    mismatches,
    reject,
    task_head,
)
from headstock.interop.huggingface.heads import (
    BASE,
    CAUSAL_LM,
    SEQUENCE,
    SPAN,
    TOKEN,
    classifier_problems,
    import_task,
    label_config,
    layer_problems,
    pipeline_name,
    token_or_span_head,
)
from headstock.interop.huggingface.tensor_map import TensorMap, Tensors, affine, rename, transpose
from headstock.tasks.base import TASKS
from headstock.train.settings import RunConfig


@ARCHITECTURES.add("gpt2")
class GPT2(Architecture):
    title = "GPT-2"
    model_types = ("gpt2",)
    heads = (CAUSAL_LM, BASE, SEQUENCE, TOKEN, SPAN)
    embeddings = ("wte.weight",)
    buffers = (".attn.bias", ".attn.masked_bias")
    sizes: ClassVar[Sizes] = {
        "vocabulary": ("vocab_size", 50257),
        "context": ("n_positions", 1024),
        "width": ("n_embd", 768),
        "depth": ("n_layer", 12),
        "heads": ("n_head", 12),
        "norm_epsilon": ("layer_norm_epsilon", 1e-5),
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

    @classmethod
    def backbone_prefix(cls, model_type: str) -> str:
        return "transformer."

    @classmethod
    def unsupported_model(cls, config: RunConfig) -> list[str]:
        # a task with both masks is exported with its causal one
        return [] if TASKS.get(config.objective).generates else mismatches(config.model, causal=True)

    @classmethod
    def unsupported_head(cls, config: RunConfig) -> list[str]:
        head = task_head(config)
        if head == SEQUENCE:
            return classifier_problems(config.task, pools=("last",), dense=("none",), bias=False)
        if head in (TOKEN, SPAN):
            return layer_problems(config.task)
        if head == CAUSAL_LM and not config.model.tied and config.model.bias:
            return ["model.tied is false and model.bias true, but its LM head has no bias (pretrain with tied=true)"]
        return []

    @classmethod
    def export_spec(cls, config: RunConfig) -> ExportSpec:
        c, head = config.model, task_head(config)
        hf_config = {
            **cls.export_sizes(c),
            "n_inner": c.hidden,
            "activation_function": ACTIVATIONS[c.activation],
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), c.dropout),
            "tie_word_embeddings": c.tied,
            **label_config(config),
        }
        if head == TOKEN:
            hf_config["classifier_dropout"] = config.task.dropout
        name = "GPT2LMHeadModel" if head == CAUSAL_LM else f"GPT2{head}"
        prefix = "" if head == BASE else "transformer."
        return ExportSpec("gpt2", name, prefix, hf_config, pipeline_name(config, name))

    @classmethod
    def tensor_map(cls, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        c, p, head = config.model, spec.prefix, task_head(config)

        def bias(count: int) -> bool | int:
            return True if c.bias else count

        yield rename("backbone.tokens.weight", f"{p}wte.weight")
        yield rename("backbone.positions.weight" if c.positions == "learned" else "backbone.waves", f"{p}wpe.weight")
        for n in range(c.depth):
            ours, theirs = f"backbone.blocks.{n}", f"{p}h.{n}"
            linears = {
                "attention.inputs": ("attn.c_attn", 3 * c.width),
                "attention.output": ("attn.c_proj", c.width),
                "feed.up": ("mlp.c_fc", c.hidden),
                "feed.down": ("mlp.c_proj", c.width),
            }
            for own, (name, size) in linears.items():
                yield from affine(f"{ours}.{own}", f"{theirs}.{name}", bias=bias(size), weight=transpose)
            yield from affine(f"{ours}.around_attention.norm", f"{theirs}.ln_1", bias=bias(c.width))
            yield from affine(f"{ours}.around_feed.norm", f"{theirs}.ln_2", bias=bias(c.width))
        yield from affine("backbone.final_norm", f"{p}ln_f", bias=bias(c.width))
        if head == SEQUENCE:
            yield from affine("heads.label.linear", "score", bias=config.task.head_bias)
        elif head in (TOKEN, SPAN):
            yield from token_or_span_head(config)
        elif head != BASE and not c.tied:
            yield from affine("heads.token", "lm_head", bias=c.bias)

    @classmethod
    def import_settings(cls, hf_config: Mapping[str, Any], head: str, tensors: Tensors) -> dict[str, Any]:
        flags = ("scale_attn_by_inverse_layer_idx", "add_cross_attention")
        problems = [f"{name} is true" for name in flags if hf_config.get(name)]
        problems += ["scale_attn_weights is false"] if hf_config.get("scale_attn_weights") is False else []
        reject(hf_config, problems)
        sizes = cls.import_sizes(hf_config)
        model = {
            "family": "transformer",
            **sizes,
            "hidden": hf_config.get("n_inner") or 4 * sizes["width"],
            "activation": import_activation(hf_config.get("activation_function", "gelu_new")),
            "dropout": float(hf_config.get("resid_pdrop", 0.1)),
            "inner_dropout": False,
            "tied": is_tied(tensors, hf_config, "lm_head.weight", "transformer.wte.weight"),
        }
        task = import_task(
            hf_config,
            head,
            classifier={"pool": "last", "head_bias": False},
            special={"opening": "start"},
            language={"name": "causal"} if head == "GPT2LMHeadModel" else None,
        )
        return {"model": model, "task": task}

    @classmethod
    def prepare_tensors(
        cls, hf_config: Mapping[str, Any], tensors: Tensors, config: RunConfig, spec: ExportSpec
    ) -> Tensors:
        """Adds the zero bias of an untied LM head, which GPT-2 does not have."""
        if task_head(config) != CAUSAL_LM or config.model.tied or not config.model.bias:
            return tensors
        return {"lm_head.bias": torch.zeros(config.model.vocabulary)} | tensors
