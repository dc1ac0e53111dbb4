"""BERT: bidirectional, post-norm with layer norms, learned positions and segments, normalized embeddings.

ELECTRA and RoBERTa share its tensors under other prefixes. A sequence classifier whose hidden layer is not BERT's tanh
pooler is exported as ELECTRA. RoBERTa is import only, because its positions have an offset.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
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
    MASKED_LM,
    SEQUENCE,
    SPAN,
    TOKEN,
    classifier_problems,
    gelu_head,
    import_task,
    imported_dense,
    label_config,
    layer_problems,
    pipeline_name,
    token_or_span_head,
    two_layer_head,
    two_layer_problems,
)
from headstock.interop.huggingface.tensor_map import (
    TensorMap,
    Tensors,
    affine,
    constant,
    fused_qkv,
    rename,
    repeat,
    reverse_rows,
)
from headstock.train.settings import RunConfig

SEGMENTS = 2  # if the run has none: BERT's tokenizers number the second text of a pair with 1
HEAD_BIAS = ("cls.predictions.bias", "cls.predictions.decoder.bias")  # the second only if the head is not tied
ROBERTA = ("roberta", "xlm-roberta", "camembert")
LAYERS = {  # ours: theirs
    "attention.output": "attention.output.dense",
    "around_attention.norm": "attention.output.LayerNorm",
    "feed.up": "intermediate.dense",
    "feed.down": "output.dense",
    "around_feed.norm": "output.LayerNorm",
}


@ARCHITECTURES.add("bert")
class Bert(Architecture):
    title = "BERT"
    model_types = ("bert", "electra", *ROBERTA)
    heads = (MASKED_LM, BASE, SEQUENCE, TOKEN, SPAN)
    embeddings = ("embeddings.word_embeddings.weight",)
    buffers = ("embeddings.position_ids", "embeddings.token_type_ids")
    sizes: ClassVar[Sizes] = {
        "vocabulary": ("vocab_size", 30522),
        "context": ("max_position_embeddings", 512),
        "width": ("hidden_size", 768),
        "depth": ("num_hidden_layers", 12),
        "heads": ("num_attention_heads", 12),
        "hidden": ("intermediate_size", 3072),
        "norm_epsilon": ("layer_norm_eps", 1e-12),
    }
    required: ClassVar[dict[str, Any]] = {
        "norm": "post",
        "norm_kind": "layer",
        "positions": ("learned", "sinusoidal"),
        "embed_norm": True,
        "activation": tuple(ACTIVATIONS),
        "embed_scale": False,
        "qk_norm": False,
        "causal": False,
        "cross": False,
    }

    @classmethod
    def backbone_prefix(cls, model_type: str) -> str:
        return "roberta." if model_type in ROBERTA else f"{model_type}."

    @classmethod
    def import_spec(cls, spec: ExportSpec) -> ExportSpec:
        return replace(spec, model_type="bert", prefix="bert.") if spec.model_type in ROBERTA else spec

    @classmethod
    def unsupported_head(cls, config: RunConfig) -> list[str]:
        head, task = task_head(config), config.task
        if head == SEQUENCE:
            problems = classifier_problems(task, pools=("cls",), dense=("none", "tanh", "gelu"))
            return problems + two_layer_problems(config) + mismatches(task, "task", head_bias=True)
        if head in (TOKEN, SPAN):
            return layer_problems(task)
        return mismatches(task, "task", transform=True) if head == MASKED_LM else []

    @classmethod
    def export_spec(cls, config: RunConfig) -> ExportSpec:
        c, head = config.model, task_head(config)
        kind = "electra" if head == SEQUENCE and config.task.dense != "tanh" else "bert"
        hf_config = {
            **cls.export_sizes(c),
            "hidden_act": ACTIVATIONS[c.activation],
            "type_vocab_size": c.segments or SEGMENTS,
            "hidden_dropout_prob": c.dropout,
            "attention_probs_dropout_prob": c.dropout,
            "tie_word_embeddings": c.tied,
            **({"embedding_size": c.width} if kind == "electra" else {}),
            **label_config(config),
        }
        if hasattr(config.task, "classes"):
            hf_config["classifier_dropout"] = config.task.dropout
        ending = "ForPreTraining" if getattr(config.task, "nsp", False) else head
        name = f"{kind.capitalize()}{ending}"
        notes = ("its pooler has no weights, because the run has none: read last_hidden_state",) if head == BASE else ()
        prefix = "" if head == BASE else f"{kind}."
        return ExportSpec(kind, name, prefix, hf_config, pipeline_name(config, name), notes)

    @classmethod
    def tensor_map(cls, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        c = config.model
        zeros: bool | int = True if c.bias else c.width
        embeddings = f"{spec.prefix}embeddings"
        yield rename("backbone.tokens.weight", f"{embeddings}.word_embeddings.weight")
        positions = "backbone.positions.weight" if c.positions == "learned" else "backbone.waves"
        yield rename(positions, f"{embeddings}.position_embeddings.weight")
        if c.segments:
            yield rename("backbone.segments.weight", f"{embeddings}.token_type_embeddings.weight")
        else:
            yield constant(f"{embeddings}.token_type_embeddings.weight", torch.zeros(SEGMENTS, c.width))
        yield from affine("backbone.embed_norm", f"{embeddings}.LayerNorm", bias=zeros)
        for n in range(c.depth):
            ours, theirs = f"backbone.blocks.{n}", f"{spec.prefix}encoder.layer.{n}"
            names = [f"{theirs}.attention.self.{part}" for part in ("query", "key", "value")]
            yield from fused_qkv(f"{ours}.attention.inputs", *names, bias=zeros)
            for own, name in LAYERS.items():
                size = c.hidden if own == "feed.up" else c.width
                yield from affine(f"{ours}.{own}", f"{theirs}.{name}", bias=True if c.bias else size)
        yield from head_map(config, spec)

    @classmethod
    def import_settings(cls, hf_config: Mapping[str, Any], head: str, tensors: Tensors) -> dict[str, Any]:
        kind, sizes = hf_config["model_type"], cls.import_sizes(hf_config)
        problems = []
        if hf_config.get("embedding_size", sizes["width"]) != sizes["width"]:
            problems.append("embedding_size is not hidden_size")
        if (positions := hf_config.get("position_embedding_type", "absolute")) != "absolute":
            problems.append(f"position_embedding_type is {positions!r}, not 'absolute'")
        problems += ["is_decoder is true"] if hf_config.get("is_decoder") else []
        reject(hf_config, problems)
        roberta = kind in ROBERTA
        segments = hf_config.get("type_vocab_size", 2)
        lm_head = "lm_head.decoder.weight" if roberta else "cls.predictions.decoder.weight"
        embedding = f"{cls.backbone_prefix(kind)}embeddings.word_embeddings.weight"
        model = {
            "family": "transformer",
            **sizes,
            "context": sizes["context"] - (position_offset(hf_config) if roberta else 0),
            "dropout": float(hf_config.get("hidden_dropout_prob", 0.1)),
            "inner_dropout": False,
            "norm": "post",
            "activation": import_activation(hf_config.get("hidden_act", "gelu")),
            "segments": segments if segments > 1 else 0,
            "embed_norm": True,
            "causal": False,
            "tied": is_tied(tensors, hf_config, lm_head, embedding),
        }
        if roberta and model["activation"] != "gelu" and head.endswith(MASKED_LM):
            reject(hf_config, [f"hidden_act is {hf_config['hidden_act']!r}, but its LM head uses 'gelu'"])
        dense = imported_dense(tensors, "classifier.dense", "classifier.out_proj") if kind == "electra" else "tanh"
        language: dict[str, Any] | None = None
        if head.endswith("ForPreTraining") and kind == "bert":
            language = {"name": "masked", "transform": True, "closed": True, "nsp": True}
        elif head.endswith(MASKED_LM) and kind != "electra":
            language = {"name": "masked", "transform": True, "closed": True}
        task = import_task(
            hf_config,
            head,
            classifier={"pool": "cls", "dense": dense},
            special={"opening": "cls", "closed": True},
            language=language,
        )
        return {"model": model, "task": task}

    @classmethod
    def prepare_tensors(
        cls, hf_config: Mapping[str, Any], tensors: Tensors, config: RunConfig, spec: ExportSpec
    ) -> Tensors:
        """Gives RoBERTa's tensors BERT's names and adds a single segment embedding to every position."""
        roberta = hf_config["model_type"] in ROBERTA
        result = {bert_name(name, spec.prefix) if roberta else name: tensor for name, tensor in tensors.items()}
        positions = f"{spec.prefix}embeddings.position_embeddings.weight"
        segments = f"{spec.prefix}embeddings.token_type_embeddings.weight"
        if roberta and positions in result:
            result[positions] = result[positions][position_offset(hf_config) :]
        if hf_config.get("type_vocab_size", 2) == 1 and positions in result and segments in result:
            result[positions] = result[positions] + result[segments]
            result[segments] = torch.zeros(SEGMENTS, result[segments].size(1))
        biases = [result.pop(name) for name in HEAD_BIAS if name in result]  # two names for one tensor
        if biases:
            result |= dict.fromkeys(HEAD_BIAS[: 1 if config.model.tied else 2], biases[0])
        return result


def position_offset(hf_config: Mapping[str, Any]) -> int:
    """RoBERTa's positions start after the id of its padding token."""
    padding = hf_config.get("pad_token_id")
    return 2 if padding is None else padding + 1


def bert_name(name: str, prefix: str) -> str:
    """BERT's name for a RoBERTa tensor."""
    for roberta, bert in (
        ("roberta.", prefix),
        ("lm_head.dense.", "cls.predictions.transform.dense."),
        ("lm_head.layer_norm.", "cls.predictions.transform.LayerNorm."),
        ("lm_head.decoder.", "cls.predictions.decoder."),
        ("lm_head.bias", "cls.predictions.bias"),
        ("classifier.dense.", f"{prefix}pooler.dense."),
        ("classifier.out_proj.", "classifier."),
    ):
        if name.startswith(roberta):
            return bert + name.removeprefix(roberta)
    return name


def head_map(config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
    c, head = config.model, task_head(config)
    if head == SEQUENCE and spec.model_type == "electra":
        yield from gelu_head(config, "classifier.dense", "classifier.out_proj")
    elif head == SEQUENCE:
        yield from two_layer_head(f"{spec.prefix}pooler.dense", "classifier")
    elif head in (TOKEN, SPAN):
        yield from token_or_span_head(config)
    elif head == MASKED_LM:
        zeros: bool | int = True if c.bias else c.width
        yield from affine("heads.token.transform.dense", "cls.predictions.transform.dense", bias=zeros)
        yield from affine("heads.token.transform.norm", "cls.predictions.transform.LayerNorm", bias=zeros)
        yield repeat("heads.token.bias", *HEAD_BIAS[: 1 if c.tied else 2])
        if not c.tied:
            yield rename("heads.token.weight", "cls.predictions.decoder.weight")
        if config.task.nsp:
            yield from affine("heads.next.pooler", f"{spec.prefix}pooler.dense")
            for part in ("weight", "bias"):  # BERT's class 0 is "is next", ours is 1
                yield reverse_rows(f"heads.next.linear.{part}", f"cls.seq_relationship.{part}")
