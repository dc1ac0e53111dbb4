"""The heads of fine-tuned runs as Hugging Face has them.  D width, C classes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headstock.interop.huggingface.architecture import labels_of
from headstock.interop.huggingface.tensor_names import Row, Tensors, constant, layer, same
from headstock.train.settings import RunConfig

PIPELINES = {"classify": "text-classification", "pair": "text-classification", "tag": "token-classification"}
CLASSES = ("classify", "pair")
ENDINGS = {  # of their class names: the task that is
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "tag",
    "ForQuestionAnswering": "answer",
}


def class_problems(task: Any, *, pools: Sequence[str], dense: Sequence[str], bias: bool = True) -> list[str]:
    """Why a classifier's head cannot be said by one that pools, bends and shifts like this."""
    problems = layer_problems(task)
    if task.pool not in pools:
        hint = f"fine-tune with --pool {pools[0]}"
        problems.append(f"task.pool is {task.pool!r}, not {' or '.join(map(repr, pools))} ({hint})")
    if task.dense not in dense:
        problems.append(f"task.dense is {task.dense!r}, not {' or '.join(map(repr, dense))} (--set dense={dense[0]})")
    if task.head_bias and not bias:
        problems.append("task.head_bias is true, and its classifiers have none (fine-tune with --set head_bias=false)")
    return problems


def layer_problems(task: Any) -> list[str]:
    """Heads there read the last layer, and a text in one row."""
    return [] if task.layers == "last" else [f"task.layers is {task.layers!r}, not 'last'"]


def label_config(chosen: RunConfig) -> dict[str, Any]:
    """Names and numbers of the classes, as config.json has them."""
    classes = getattr(chosen.task, "classes", ())
    if not classes:
        return {}
    found: dict[str, Any] = {
        "id2label": {str(i): name for i, name in enumerate(classes)},
        "label2id": {name: i for i, name in enumerate(classes)},
    }
    if chosen.objective in CLASSES:
        several = getattr(chosen.task, "separator", None) is not None
        found["problem_type"] = "multi_label_classification" if several else "single_label_classification"
    return found


def label_settings(config: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The same, back."""
    if task == "answer":
        return {"name": task, "opening": "cls"}
    found: dict[str, Any] = {"name": task, "classes": labels_of(config)}
    if config.get("problem_type") == "multi_label_classification":
        found["separator"] = ","
    return found


def task_of(head: str) -> str | None:
    return next((task for ending, task in ENDINGS.items() if head.endswith(ending)), None)


def plain_head(name: str, theirs: str, *, bias: bool = True) -> Iterator[Row]:
    """A linear layer and no more."""
    yield from layer(f"heads.{name}.linear", theirs, bias=bias)


def mirrored(ours: str, dense: str, scores: str, *, width: int, classes: int) -> Iterator[Row]:
    """A linear head in a place that has a layer bent by GELU before the scores.

    Each class has two features there, z and -z, and gelu(z) - gelu(-z) = z.
    """

    def out(weight: Tensor) -> list[Tensor]:
        return [torch.cat([weight, -weight, weight.new_zeros(width - 2 * classes, width)])]

    signs = torch.cat([torch.eye(classes), -torch.eye(classes), torch.zeros(classes, width - 2 * classes)], 1)
    yield Row(f"{ours}.weight", (f"{dense}.weight",), out, lambda parts: parts[0][:classes])
    yield constant(f"{dense}.bias", torch.zeros(width))
    yield constant(f"{scores}.weight", signs)
    yield same(f"{ours}.bias", f"{scores}.bias")


def is_mirrored(tensors: Tensors, dense: str, scores: str) -> bool:
    """Whether a head of theirs is what `mirrored` makes of one of ours."""
    weight, signs = tensors.get(f"{dense}.weight"), tensors.get(f"{scores}.weight")
    if weight is None or signs is None or 2 * len(signs) > len(weight) or f"{dense}.bias" not in tensors:
        return False
    classes, width = len(signs), len(weight)
    made = torch.cat([torch.eye(classes), -torch.eye(classes), torch.zeros(classes, width - 2 * classes)], 1)
    return (
        torch.equal(signs.float(), made)
        and not tensors[f"{dense}.bias"].any()
        and torch.equal(weight[:classes], -weight[classes : 2 * classes])
        and not weight[2 * classes :].any()
    )


def dense_head(ours: str, dense: str, scores: str, *, bias: bool) -> Iterator[Row]:
    """A layer, bent, and the scores."""
    yield from layer(f"{ours}.dense", dense)
    yield from layer(f"{ours}.linear", scores, bias=bias)
