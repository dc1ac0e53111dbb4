"""The base class of Hugging Face architectures. A new architecture is one file in `architectures/`.

"Ours" are names and settings of this library, "theirs" those of Hugging Face transformers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError
from headstock.interop import mismatches
from headstock.interop.huggingface.heads import (
    BASE,
    CAUSAL_LM,
    SEQUENCE,
    SPAN,
    TOKEN,
    classifier_problems,
    import_labels,
    in_label_units,
    is_regression,
    label_config,
    pipeline_name,
    task_head,
)
from headstock.interop.tensor_map import TensorMap, Tensors, affine, rename, transpose
from headstock.registry import Registry
from headstock.train.settings import RunConfig

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}  # ours: theirs
THEIR_ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
THEIR_ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh", "swish": "silu", "gelu_python": "gelu"}

STANDARD = {"residual": True, "feed_activation": "inner"}  # model settings of every architecture

ConfigKeys = dict[str, tuple[str, Any]]  # our model setting: (key in config.json, default or None if required)
Layers = dict[str, str | tuple[str, ...]]  # our layer: theirs, or the three of a fused query-key-value projection


@dataclass
class SourceModel:
    """A Hugging Face folder, read into memory."""

    path: str
    config: Mapping[str, Any]
    head: str  # the model class, such as BertForMaskedLM
    tensors: Tensors  # those of the backbone with its architecture's usual prefix
    tokenizer: Tokenizer


@dataclass(frozen=True)
class ExportSpec:
    """How a run is stored in an architecture."""

    model_type: str
    head: str  # the model class, such as BertForMaskedLM
    prefix: str  # of the backbone's tensor names
    config: dict[str, Any]  # the model's part of config.json
    pipeline: str | None  # the task name for `transformers.pipeline`
    notes: tuple[str, ...] = ()  # limitations that users of the export should know
    token_ids: tuple[str, ...] = ()  # token roles whose ids config.json also needs, such as "mask"


class Architecture(ABC):
    """One Hugging Face architecture, or several that share their tensor names.

    The class attributes are the tables that every architecture has; the methods are overridden for the exceptions.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    family: ClassVar[str] = "transformer"  # the backbone family it corresponds to
    classes: ClassVar[dict[str, str]]  # exported model type: the beginning of its class names
    model_types: ClassVar[tuple[str, ...]]  # values of `model_type` that can be imported
    supported_heads: ClassVar[tuple[str, ...]]  # endings of the model classes that can be exported
    import_only: ClassVar[bool] = False

    config_keys: ClassVar[ConfigKeys]
    required: ClassVar[dict[str, Any]] = {}  # model settings; of a tuple of alternatives, imports get the first
    required_config: ClassVar[dict[str, Any]] = {}  # values in config.json that an import must have, if it has the key

    prefix: ClassVar[str]  # of the backbone's tensor names
    embeddings: ClassVar[tuple[str, ...]]  # endings of the name of its token embedding, which locate the prefix
    lm_head: ClassVar[str] = "lm_head.weight"  # absent or a copy of the embedding if the head is tied
    buffers: ClassVar[tuple[str, ...]] = ()  # endings of tensor names that hold no weights
    always_biased: ClassVar[bool] = True  # a run without biases is stored with zeros
    transposed: ClassVar[bool] = False  # linear layers are stored transposed

    # Export

    def unsupported_settings(self, config: RunConfig) -> list[str]:
        """Every reason why the architecture cannot represent a run exactly."""
        if self.import_only:
            return ["it can only be imported"]
        if config.family != self.family:
            return [f"model.family is {config.family!r}, not {self.family!r}"]
        standard = {name: value for name, value in STANDARD.items() if hasattr(config.model, name)}
        problems = mismatches(vars(config.model), standard | self.required, "model.") + self.unsupported_model(config)
        head = task_head(config)
        if head not in self.supported_heads:
            return [*problems, f"it has no head for {config.objective}"]
        if head in (SEQUENCE, TOKEN, SPAN):
            problems += mismatches(vars(config.task), {"layers": "last"}, "task.")
        if head == SEQUENCE:
            return problems + self.unsupported_classifier(config)
        return problems if head in (BASE, TOKEN, SPAN) else problems + self.unsupported_lm_head(config)

    def unsupported_model(self, config: RunConfig) -> list[str]:
        return []

    def unsupported_classifier(self, config: RunConfig) -> list[str]:
        """By default, a sequence classifier is one linear layer without bias on the last token."""
        return classifier_problems(config.task, pools=("last",), dense=("none",), bias=False)

    def unsupported_lm_head(self, config: RunConfig) -> list[str]:
        """By default, the LM head is one linear layer without bias."""
        extra = {name: False for name in ("transform", "nsp") if hasattr(config.task, name)}
        problems = mismatches(vars(config.task), extra, "task.")
        if not config.model.tied and config.model.bias:
            problems.append("model.tied is false and model.bias true, but its LM head has no bias (use tied=true)")
        return problems

    def export_type(self, config: RunConfig) -> str:
        """The model type as which a run is stored."""
        return next(iter(self.classes))

    def export_head(self, config: RunConfig) -> str:
        """The ending of the model class."""
        return task_head(config) or BASE

    def export_config(self, config: RunConfig) -> dict[str, Any]:
        """Entries of config.json that are not in a table."""
        return {}

    def export_spec(self, config: RunConfig) -> ExportSpec:
        """How a supported run is stored."""
        kind = self.export_type(config)
        head = f"{self.classes[kind]}{self.export_head(config)}"
        hf_config = {theirs: getattr(config.model, ours) for ours, (theirs, _) in self.config_keys.items()}
        if "activation" in self.config_keys:
            hf_config[self.config_keys["activation"][0]] = ACTIVATIONS.get(config.model.activation)
        hf_config |= {"tie_word_embeddings": config.model.tied, **label_config(config), **self.export_config(config)}
        prefix = "" if task_head(config) == BASE else self.backbone_prefix(kind)
        return ExportSpec(kind, head, prefix, hf_config, pipeline_name(config, head))

    # Tensors

    def backbone_prefix(self, model_type: str) -> str:
        """The prefix of the backbone's tensor names in files of this model type."""
        return self.prefix

    def tensor_map(self, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        """An entry for each tensor of the run."""
        yield from self.backbone_map(config, spec)
        head = task_head(config)
        if head == SEQUENCE:
            yield from in_label_units(self.classifier_map(config, spec), config)
        elif head == TOKEN:
            yield from affine("heads.tag.linear", self.token_classifier(spec))
        elif head == SPAN:
            yield from affine("heads.span.linear", "qa_outputs")
        elif head != BASE:
            yield from self.lm_head_map(config, spec)

    @abstractmethod
    def backbone_map(self, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        """An entry for each tensor of the backbone."""

    def classifier_map(self, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        yield from affine("heads.label.linear", "score", bias=config.task.head_bias)

    def token_classifier(self, spec: ExportSpec) -> str:
        return "classifier"

    def lm_head_map(self, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        if not config.model.tied:
            yield from affine("heads.token", "lm_head", bias=config.model.bias)

    def layer_map(self, model: Any, ours: str, *theirs: str) -> Iterator[TensorMap]:
        """Weight and bias of one linear layer or norm of the backbone."""
        is_norm = ours.endswith("norm")
        bias: bool | int = model.bias and not (is_norm and model.norm_kind == "rms")
        if self.always_biased and not bias:
            bias = model.hidden if ours.endswith("feed.up") else model.width
            bias *= 3 // len(theirs) if ours.endswith("inputs") else 1  # queries, keys and values
        return affine(ours, *theirs, bias=bias, weight=transpose if self.transposed and not is_norm else rename)

    def block_map(self, model: Any, ours: str, theirs: str, layers: Layers) -> Iterator[TensorMap]:
        """The layers of one block."""
        for layer, names in layers.items():
            parts = (names,) if isinstance(names, str) else names
            yield from self.layer_map(model, f"{ours}.{layer}", *(f"{theirs}.{part}" for part in parts))

    # Import

    def import_settings(self, source: SourceModel) -> dict[str, Any]:
        """The sections `model` and `task` of the run; raises UserError for unsupported models."""
        actual = first_alternatives(self.required_config) | dict(source.config)
        problems = mismatches(actual, self.required_config) + self.unsupported_import(source)
        if problems:
            kind = source.config["model_type"]
            raise UserError(f"config.json: this {kind} model has unsupported settings: {'; '.join(problems)}")
        return {"model": self.import_model(source), "task": self.import_task(source)}

    def unsupported_import(self, source: SourceModel) -> list[str]:
        """Settings of config.json that this library does not support, except those in `required_config`."""
        return []

    def import_model(self, source: SourceModel) -> dict[str, Any]:
        model = {"family": self.family, **first_alternatives(self.required), "inner_dropout": False}
        for ours, (theirs, default) in self.config_keys.items():
            model[ours] = source.config[theirs] if default is None else source.config.get(theirs, default)
        if "activation" in self.config_keys:
            if (name := model["activation"]) not in THEIR_ACTIVATIONS:
                raise UserError(f"config.json: unknown activation {name!r} (known: {', '.join(THEIR_ACTIVATIONS)})")
            model["activation"] = THEIR_ACTIVATIONS[name]
        embedding = self.backbone_prefix(source.config["model_type"]) + self.embeddings[0]
        return model | {"tied": is_tied(source, self.lm_head, embedding)}

    def import_task(self, source: SourceModel) -> dict[str, Any]:
        """The section `task` of the run."""
        special_tokens = self.import_special_tokens(source)
        if source.head.endswith(SEQUENCE):
            head = self.import_classifier(source) | special_tokens
            if is_regression(source.config):
                return {"name": "regress", "mean": 0.0, "std": 1.0} | head
            return {"name": "classify"} | import_labels(source.config) | head
        if source.head.endswith(TOKEN):
            return {"name": "tag"} | import_labels(source.config) | special_tokens
        if source.head.endswith(SPAN):
            return {"name": "answer", "opening": special_tokens["opening"]}
        return self.import_lm_task(source) or {"name": "headless"} | special_tokens

    def import_special_tokens(self, source: SourceModel) -> dict[str, Any]:
        """Settings of the special tokens around a text."""
        return {"opening": "start"}

    def import_classifier(self, source: SourceModel) -> dict[str, Any]:
        """Settings of a sequence classifier."""
        return {"pool": "last", "head_bias": False}

    def import_lm_task(self, source: SourceModel) -> dict[str, Any] | None:
        """The section `task` for a class with an LM head; None for another."""
        return {"name": "causal"} if source.head.endswith((CAUSAL_LM, "LMHeadModel")) else None

    def prepare_tensors(self, source: SourceModel, config: RunConfig, spec: ExportSpec) -> Tensors:
        """Imported tensors as the tensor map expects them."""
        return source.tensors


ARCHITECTURES: Registry[type[Architecture]] = Registry(
    "Hugging Face architecture", "headstock.interop.huggingface.architectures"
)


def all_architectures() -> list[Architecture]:
    return [ARCHITECTURES.get(name)() for name in ARCHITECTURES.names()]


def first_alternatives(required: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[0] if isinstance(value, tuple) else value for name, value in required.items()}


def is_tied(source: SourceModel, lm_head: str, embedding: str) -> bool:
    """Whether the LM head shares the embedding's weights. Two different tensors override the config."""
    if lm_head in source.tensors and embedding in source.tensors:
        equal = torch.equal(source.tensors[lm_head], source.tensors[embedding])
        return equal and source.config.get("tie_word_embeddings", True) is not False
    return lm_head not in source.tensors
