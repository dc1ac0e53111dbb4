"""BERT: post-norm, layer norms, tables of positions and segments, a norm after the embeddings, looking both ways.

ELECTRA and RoBERTa have the same tensors under other prefixes. ELECTRA's classifiers have no tanh between, so that a
linear head can be said; RoBERTa is read only: its positions begin elsewhere.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from headstock.interop.huggingface.architecture import (
    ACTIVATIONS,
    ARCHITECTURES,
    Architecture,
    Export,
    activation_of,
    family_problem,
    refuse,
    tied_with,
    unlike,
)
from headstock.interop.huggingface.heads import (
    CLASSES,
    PIPELINES,
    class_problems,
    dense_head,
    is_mirrored,
    label_config,
    label_settings,
    layer_problems,
    mirrored,
    plain_head,
    task_of,
)
from headstock.interop.huggingface.tensor_names import Row, Tensors, constant, flipped, layer, same, thirds
from headstock.train.settings import RunConfig

TASKS = ("masked", "headless", "classify", "pair", "tag", "answer")
KINDS = 2  # of text, where ours knows none: BERT's tokenizers number the second text of a pair with 1
BIAS = ("cls.predictions.bias", "cls.predictions.decoder.bias")  # the second only where the head is not tied
ROBERTA = ("roberta", "xlm-roberta", "camembert")


def kind_of(chosen: RunConfig) -> str:
    """BERT, or where a classifier's head is no pooler with tanh ELECTRA."""
    return "electra" if chosen.objective in CLASSES and chosen.task.dense != "tanh" else "bert"


@ARCHITECTURES.add("bert")
class Bert(Architecture):
    title = "BERT"
    reads = ("bert", "electra", *ROBERTA)
    anchors = ("embeddings.word_embeddings.weight",)
    buffers = ("embeddings.position_ids", "embeddings.token_type_ids")

    @classmethod
    def prefix_of(cls, kind: str) -> str:
        return "roberta." if kind in ROBERTA else f"{kind}."

    @classmethod
    def as_read(cls, export: Export) -> Export:
        return replace(export, model_type="bert", prefix="bert.") if export.model_type in ROBERTA else export

    @classmethod
    def misfits(cls, chosen: RunConfig) -> list[str]:
        if problems := family_problem(chosen, "transformer"):
            return problems
        c, task = chosen.model, chosen.task
        problems = unlike(c, norm="post", norm_kind="layer", positions=("learned", "sinusoidal"), embed_norm=True)
        problems += unlike(
            c, activation=tuple(ACTIVATIONS), embed_scale=False, qk_norm=False, causal=False, cross=False
        )
        if chosen.objective not in TASKS:
            problems.append(f"it is not made for {chosen.objective}")
        elif chosen.objective in CLASSES:
            problems += class_problems(task, pools=("cls",), dense=("none", "tanh", "gelu"))
            if task.dense == "none" and 2 * len(task.classes) > c.width:
                problems.append(f"{len(task.classes)} classes are more than half of model.width {c.width}")
            problems += unlike(task, "task", head_bias=True)
        elif chosen.objective in ("tag", "answer"):
            problems += layer_problems(task)
        elif chosen.objective == "masked":
            problems += unlike(task, "task", transform=True)
        return problems

    @classmethod
    def export(cls, chosen: RunConfig) -> Export:
        c, kind = chosen.model, kind_of(chosen)
        config = {
            "vocab_size": c.vocabulary,
            "max_position_embeddings": c.context,
            "hidden_size": c.width,
            "num_hidden_layers": c.depth,
            "num_attention_heads": c.heads,
            "intermediate_size": c.hidden,
            "hidden_act": ACTIVATIONS[c.activation],
            "layer_norm_eps": c.norm_epsilon,
            "type_vocab_size": c.segments or KINDS,
            "hidden_dropout_prob": c.dropout,
            "attention_probs_dropout_prob": c.dropout,
            "tie_word_embeddings": c.tied,
            **({"embedding_size": c.width} if kind == "electra" else {}),
            **label_config(chosen),
        }
        if hasattr(chosen.task, "classes"):
            config["classifier_dropout"] = chosen.task.dropout
        endings = {"headless": "Model", "tag": "ForTokenClassification", "answer": "ForQuestionAnswering"}
        endings |= dict.fromkeys(CLASSES, "ForSequenceClassification")
        masked = "ForPreTraining" if getattr(chosen.task, "nsp", False) else "ForMaskedLM"
        head = {"bert": "Bert", "electra": "Electra"}[kind] + endings.get(chosen.objective, masked)
        pipeline = "fill-mask" if chosen.objective == "masked" else PIPELINES.get(chosen.objective)
        prefix = "" if chosen.objective == "headless" else f"{kind}."
        return Export(kind, head, prefix, config, pipeline or "feature-extraction")

    @classmethod
    def rows(cls, chosen: RunConfig, export: Export) -> Iterator[Row]:
        c, p = chosen.model, export.prefix
        yield from embedding_rows(chosen, f"{p}embeddings")
        for n in range(c.depth):
            yield from block_rows(chosen, f"backbone.blocks.{n}", f"{p}encoder.layer.{n}")
        yield from head_rows(chosen, export)

    @classmethod
    def settings(cls, config: Mapping[str, Any], head: str, tensors: Tensors) -> dict[str, Any]:
        kind = config["model_type"]
        width = config.get("hidden_size", 768)
        problems = [] if config.get("embedding_size", width) == width else ["embedding_size is not hidden_size"]
        if (positions := config.get("position_embedding_type", "absolute")) != "absolute":
            problems.append(f"position_embedding_type is {positions!r}, not 'absolute'")
        problems += ["is_decoder is true"] if config.get("is_decoder") else []
        refuse(config, problems)
        roberta = kind in ROBERTA
        context = config.get("max_position_embeddings", 512)
        segments = config.get("type_vocab_size", 2)
        head_weight = "lm_head.decoder.weight" if roberta else "cls.predictions.decoder.weight"
        prefix = {"bert": "bert", "electra": "electra"}.get(kind, "roberta")
        model = {
            "family": "transformer",
            "vocabulary": config.get("vocab_size", 30522),
            "context": context - offset_of(config) if roberta else context,
            "depth": config.get("num_hidden_layers", 12),
            "width": width,
            "heads": config.get("num_attention_heads", 12),
            "hidden": config.get("intermediate_size", 3072),
            "dropout": float(config.get("hidden_dropout_prob", 0.1)),
            "inner_dropout": False,
            "norm": "post",
            "norm_epsilon": config.get("layer_norm_eps", 1e-12),
            "activation": activation_of(config.get("hidden_act", "gelu")),
            "segments": segments if segments > 1 else 0,
            "embed_norm": True,
            "causal": False,
            "tied": tied_with(tensors, config, head_weight, f"{prefix}.embeddings.word_embeddings.weight"),
        }
        if roberta and model["activation"] != "gelu" and head.endswith("ForMaskedLM"):
            refuse(config, [f"hidden_act is {config['hidden_act']!r}, but its head of tokens has 'gelu'"])
        return {"model": model, "task": task_settings(config, head, tensors)}

    @classmethod
    def prepare(cls, config: Mapping[str, Any], tensors: Tensors, chosen: RunConfig, export: Export) -> Tensors:
        """RoBERTa's names and positions as BERT's, and a single kind of text as part of every position."""
        made = dict(tensors)
        if config["model_type"] in ROBERTA:
            made = {as_berts(name, export.prefix): tensor for name, tensor in made.items()}
        places = f"{export.prefix}embeddings.position_embeddings.weight"
        kinds = f"{export.prefix}embeddings.token_type_embeddings.weight"
        if config["model_type"] in ROBERTA and places in made:
            made[places] = made[places][offset_of(config) :]
        if config.get("type_vocab_size", 2) == 1 and places in made and kinds in made:
            made[places] = made[places] + made[kinds]
            made[kinds] = torch.zeros(KINDS, made[kinds].size(1))
        known = [made.pop(name) for name in BIAS if name in made]  # two names for the same
        return made | dict.fromkeys(BIAS[: 1 if chosen.model.tied else 2], known[0]) if known else made


def offset_of(config: Mapping[str, Any]) -> int:
    """RoBERTa counts positions from after the number of its padding token."""
    padding = config.get("pad_token_id")
    return 2 if padding is None else padding + 1


def as_berts(name: str, prefix: str) -> str:
    """A tensor of RoBERTa's under BERT's name."""
    for theirs, berts in (
        ("roberta.", prefix),
        ("lm_head.dense.", "cls.predictions.transform.dense."),
        ("lm_head.layer_norm.", "cls.predictions.transform.LayerNorm."),
        ("lm_head.decoder.", "cls.predictions.decoder."),
        ("lm_head.bias", "cls.predictions.bias"),
        ("classifier.dense.", f"{prefix}pooler.dense."),
        ("classifier.out_proj.", "classifier."),
    ):
        if name.startswith(theirs):
            return berts + name.removeprefix(theirs)
    return name


def biased(chosen: RunConfig, count: int) -> bool | int:
    return True if chosen.model.bias else count


def embedding_rows(chosen: RunConfig, theirs: str) -> Iterator[Row]:
    c = chosen.model
    yield same("backbone.tokens.weight", f"{theirs}.word_embeddings.weight")
    places = "backbone.positions.weight" if c.positions == "learned" else "backbone.waves"
    yield same(places, f"{theirs}.position_embeddings.weight")
    kinds = f"{theirs}.token_type_embeddings.weight"
    if c.segments:
        yield same("backbone.segments.weight", kinds)
    else:
        yield constant(kinds, torch.zeros(KINDS, c.width))
    yield from layer("backbone.embed_norm", f"{theirs}.LayerNorm", bias=biased(chosen, c.width))


def block_rows(chosen: RunConfig, ours: str, theirs: str) -> Iterator[Row]:
    c = chosen.model
    names = [f"{theirs}.attention.self.{part}" for part in ("query", "key", "value")]
    zeros = biased(chosen, c.width)
    yield from thirds(f"{ours}.attention.inputs", *names, bias=zeros)
    yield from layer(f"{ours}.attention.output", f"{theirs}.attention.output.dense", bias=zeros)
    yield from layer(f"{ours}.around_attention.norm", f"{theirs}.attention.output.LayerNorm", bias=zeros)
    yield from layer(f"{ours}.feed.up", f"{theirs}.intermediate.dense", bias=biased(chosen, c.hidden))
    yield from layer(f"{ours}.feed.down", f"{theirs}.output.dense", bias=zeros)
    yield from layer(f"{ours}.around_feed.norm", f"{theirs}.output.LayerNorm", bias=zeros)


def head_rows(chosen: RunConfig, export: Export) -> Iterator[Row]:
    c, task = chosen.model, chosen.task
    if chosen.objective in CLASSES and export.model_type == "electra":
        if task.dense == "none":
            sizes = {"width": c.width, "classes": len(task.classes)}
            yield from mirrored("heads.label.linear", "classifier.dense", "classifier.out_proj", **sizes)
        else:
            yield from dense_head("heads.label", "classifier.dense", "classifier.out_proj", bias=True)
    elif chosen.objective in CLASSES:
        yield from dense_head("heads.label", f"{export.prefix}pooler.dense", "classifier", bias=True)
    elif chosen.objective in ("tag", "answer"):
        name, theirs = ("tag", "classifier") if chosen.objective == "tag" else ("span", "qa_outputs")
        yield from plain_head(name, theirs)
    elif chosen.objective == "masked":
        transform = "cls.predictions.transform"
        yield from layer("heads.token.transform.dense", f"{transform}.dense", bias=biased(chosen, c.width))
        yield from layer("heads.token.transform.norm", f"{transform}.LayerNorm", bias=biased(chosen, c.width))
        if c.tied:
            yield same("heads.token.bias", BIAS[0])
        else:
            yield Row("heads.token.bias", BIAS, lambda tensor: [tensor, tensor.clone()], lambda parts: parts[0])
            yield same("heads.token.weight", "cls.predictions.decoder.weight")
        if task.nsp:
            yield from layer("heads.next.pooler", f"{export.prefix}pooler.dense")
            for part in ("weight", "bias"):  # their class 0 says that the second text follows, ours is 1
                yield flipped(f"heads.next.linear.{part}", f"cls.seq_relationship.{part}")


def task_settings(config: Mapping[str, Any], head: str, tensors: Tensors) -> dict[str, Any]:
    marks = {"opening": "cls", "closed": True}
    task = task_of(head)
    if task == "classify":
        dense = "tanh"
        if config["model_type"] == "electra":
            dense = "none" if is_mirrored(tensors, "classifier.dense", "classifier.out_proj") else "gelu"
        return label_settings(config, task) | {"pool": "cls", "dense": dense} | marks
    if task == "tag":
        return label_settings(config, task) | marks
    if task == "answer":
        return label_settings(config, task)
    if head.endswith("ForPreTraining") and config["model_type"] == "bert":
        return {"name": "masked", "transform": True, "closed": True, "nsp": True}
    if head.endswith("ForMaskedLM") and config["model_type"] != "electra":
        return {"name": "masked", "transform": True, "closed": True}
    return {"name": "headless"} | marks
