"""Task heads shared by the Hugging Face architectures: class names, labels, tensors and import settings."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headstock.interop.tensor_map import TensorMap, Tensors, affine, constant, rename, rescale
from headstock.tasks.base import TASKS
from headstock.train.settings import RunConfig

# endings of model classes
BASE, CAUSAL_LM, MASKED_LM = "Model", "ForCausalLM", "ForMaskedLM"
SEQUENCE, TOKEN, SPAN = "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"
SEQ2SEQ = "ForConditionalGeneration"
PIPELINES = {
    SEQUENCE: "text-classification",
    TOKEN: "token-classification",
    MASKED_LM: "fill-mask",
    "ForPreTraining": "fill-mask",
}


def task_head(config: RunConfig) -> str | None:
    """The ending of the Hugging Face model class that a run's task corresponds to."""
    return TASKS.get(config.objective).huggingface_head


def pipeline_name(config: RunConfig, head: str) -> str:
    """The `transformers.pipeline` task for a model class."""
    default = "text-generation" if TASKS.get(config.objective).generates else "feature-extraction"
    return next((name for ending, name in PIPELINES.items() if head.endswith(ending)), default)


def label_config(config: RunConfig) -> dict[str, Any]:
    """The class names and the dropout of a classifier in config.json."""
    if TASKS.get(config.objective).predicts_values:
        one_label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return {**one_label, "classifier_dropout": config.task.dropout, "problem_type": "regression"}
    classes = getattr(config.task, "classes", ())
    if not classes:
        return {}
    labels: dict[str, Any] = {
        "id2label": {str(i): name for i, name in enumerate(classes)},
        "label2id": {name: i for i, name in enumerate(classes)},
        "classifier_dropout": config.task.dropout,
    }
    if task_head(config) == SEQUENCE:
        multilabel = getattr(config.task, "separator", None) is not None
        labels["problem_type"] = "multi_label_classification" if multilabel else "single_label_classification"
    return labels


def outputs_of(task: Any) -> int:
    """The number of outputs of a sequence classifier; one if it predicts a number."""
    return len(getattr(task, "classes", ())) or 1


def in_label_units(entries: Iterable[TensorMap], config: RunConfig) -> Iterator[TensorMap]:
    """The entries of a head that predicts standardized labels, whose output layer elsewhere predicts the labels."""
    mean, std = getattr(config.task, "mean", None) or 0.0, getattr(config.task, "std", None) or 1.0
    for entry in entries:
        if entry.ours == "heads.label.linear.weight" and std != 1:
            yield rescale(entry, std)
        elif entry.ours == "heads.label.linear.bias" and (mean, std) != (0, 1):
            yield rescale(entry, std, mean)
        else:
            yield entry


def is_regression(hf_config: Mapping[str, Any]) -> bool:
    """Whether a sequence classifier has one output, which transformers trains by its squared error."""
    count = len(hf_config.get("id2label") or ()) or hf_config.get("num_labels", 2)
    return hf_config.get("problem_type") == "regression" or count == 1


def import_labels(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    names = hf_config.get("id2label") or {str(i): f"LABEL_{i}" for i in range(hf_config.get("num_labels", 2))}
    settings: dict[str, Any] = {"classes": [str(names[key]) for key in sorted(names, key=int)]}
    if hf_config.get("problem_type") == "multi_label_classification":
        settings["separator"] = ","
    return settings


def classifier_problems(task: Any, *, pools: Sequence[str], dense: Sequence[str], bias: bool) -> list[str]:
    """Why a classifier cannot be exported to a head with these kinds of pooling and hidden layer."""
    problems = []
    if task.pool not in pools:
        hint = f"fine-tune with --pool {pools[0]}"
        problems.append(f"task.pool is {task.pool!r}, not {' or '.join(map(repr, pools))} ({hint})")
    if task.dense not in dense:
        problems.append(f"task.dense is {task.dense!r}, not {' or '.join(map(repr, dense))} (--set dense={dense[0]})")
    if not bias and getattr(task, "mean", None):
        problems.append(f"task.mean is {task.mean:g}, but its head has no bias (use --set mean=0 --set std=1)")
    if task.head_bias is not bias:
        actual, expected = str(task.head_bias).lower(), str(bias).lower()
        problems.append(f"task.head_bias is {actual}, not {expected} (use --set head_bias={expected})")
    return problems


def two_layer_head(dense: str, output: str) -> Iterator[TensorMap]:
    """A sequence classifier with a hidden layer."""
    yield from affine("heads.label.dense", dense)
    yield from affine("heads.label.linear", output)


# A linear head z as a head with a hidden GELU layer: gelu(z) - gelu(-z) = z, with two features per class.


def gelu_head_problems(config: RunConfig, *, pools: Sequence[str], dense: Sequence[str]) -> list[str]:
    """Why a classifier cannot be written as one with a hidden layer, of GELU if it is linear."""
    problems = classifier_problems(config.task, pools=pools, dense=dense, bias=True)
    classes, width = outputs_of(config.task), config.model.width
    if config.task.dense == "none" and 2 * classes > width:
        problems.append(f"{classes} classes are more than half of model.width {width}")
    return problems


def gelu_head(config: RunConfig, dense: str, output: str) -> Iterator[TensorMap]:
    """A sequence classifier with a hidden GELU layer, to which a linear classifier is converted exactly."""
    if config.task.dense != "none":
        yield from two_layer_head(dense, output)
        return
    width, classes = config.model.width, outputs_of(config.task)

    def split(weight: Tensor) -> list[Tensor]:
        return [torch.cat([weight, -weight, weight.new_zeros(width - 2 * classes, width)])]

    yield TensorMap("heads.label.linear.weight", (f"{dense}.weight",), split, lambda parts: parts[0][:classes])
    yield constant(f"{dense}.bias", torch.zeros(width))
    yield constant(f"{output}.weight", difference_matrix(classes, width))
    yield rename("heads.label.linear.bias", f"{output}.bias")


def difference_matrix(classes: int, width: int) -> Tensor:
    """(C, D): feature c minus feature C + c."""
    return torch.cat([torch.eye(classes), -torch.eye(classes), torch.zeros(classes, width - 2 * classes)], 1)


def imported_dense(tensors: Tensors, dense: str, output: str) -> str:
    """The setting `dense` of an imported classifier: "none" if `gelu_head` converted a linear one."""
    weight, signs = tensors.get(f"{dense}.weight"), tensors.get(f"{output}.weight")
    if weight is None or signs is None or 2 * len(signs) > len(weight) or f"{dense}.bias" not in tensors:
        return "gelu"
    classes = len(signs)
    linear = (
        torch.equal(signs.float(), difference_matrix(classes, len(weight)))
        and not tensors[f"{dense}.bias"].any()
        and torch.equal(weight[:classes], -weight[classes : 2 * classes])
        and not weight[2 * classes :].any()
    )
    return "none" if linear else "gelu"
