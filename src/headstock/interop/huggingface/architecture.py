"""The interface of a Hugging Face architecture. A new architecture is one file in `architectures/`.

"Ours" are names and settings of this library, "theirs" those of Hugging Face transformers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from headstock.errors import UserError
from headstock.interop.huggingface.tensor_map import TensorMap, Tensors
from headstock.registry import Registry
from headstock.tasks.base import TASKS
from headstock.train.settings import RunConfig

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}  # ours: theirs
THEIR_ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
THEIR_ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh", "swish": "silu", "gelu_python": "gelu"}


Sizes = dict[str, tuple[str, Any]]  # our model setting: (key in config.json, default or None if required)


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
    """One Hugging Face architecture, or several that share their tensor names."""

    name: ClassVar[str]
    title: ClassVar[str]
    family: ClassVar[str] = "transformer"  # the backbone family it corresponds to
    model_types: ClassVar[tuple[str, ...]]  # values of `model_type` that can be imported
    heads: ClassVar[tuple[str, ...]]  # endings of the model classes that can be exported
    embeddings: ClassVar[tuple[str, ...]]  # endings of the name of its token embedding, which locate the prefix
    buffers: ClassVar[tuple[str, ...]] = ()  # endings of tensor names that hold no weights
    import_only: ClassVar[bool] = False
    sizes: ClassVar[Sizes]
    required: ClassVar[dict[str, Any]] = {}  # model settings that an export must have; a tuple lists alternatives

    @classmethod
    def unsupported_settings(cls, config: RunConfig) -> list[str]:
        """Every reason why the architecture cannot represent a run exactly."""
        if cls.import_only:
            return ["it can only be imported"]
        if config.family != cls.family:
            return [f"model.family is {config.family!r}, not {cls.family!r}"]
        problems = mismatches(config.model, **cls.required) + cls.unsupported_model(config)
        head = task_head(config)
        return problems + (
            cls.unsupported_head(config) if head in cls.heads else [f"it has no head for {config.objective}"]
        )

    @classmethod
    def unsupported_model(cls, config: RunConfig) -> list[str]:
        return []

    @classmethod
    def unsupported_head(cls, config: RunConfig) -> list[str]:
        return []

    @classmethod
    @abstractmethod
    def export_spec(cls, config: RunConfig) -> ExportSpec:
        """How a supported run is stored."""

    @classmethod
    @abstractmethod
    def tensor_map(cls, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        """An entry for each tensor of the run."""

    @classmethod
    @abstractmethod
    def import_settings(cls, hf_config: Mapping[str, Any], head: str, tensors: Tensors) -> dict[str, Any]:
        """The sections `model` and `task` of the run; raises UserError for unsupported models."""

    @classmethod
    @abstractmethod
    def backbone_prefix(cls, model_type: str) -> str:
        """The prefix of the backbone's tensor names in files of this model type."""

    @classmethod
    def import_spec(cls, spec: ExportSpec) -> ExportSpec:
        """The spec by which imported tensors are named, if several model types share one table."""
        return spec

    @classmethod
    def prepare_tensors(
        cls, hf_config: Mapping[str, Any], tensors: Tensors, config: RunConfig, spec: ExportSpec
    ) -> Tensors:
        """Imported tensors as the tensor map expects them."""
        return tensors

    @classmethod
    def export_sizes(cls, model: Any) -> dict[str, Any]:
        return {theirs: getattr(model, ours) for ours, (theirs, _) in cls.sizes.items()}

    @classmethod
    def import_sizes(cls, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        return {
            ours: hf_config[theirs] if default is None else hf_config.get(theirs, default)
            for ours, (theirs, default) in cls.sizes.items()
        }


ARCHITECTURES: Registry[type[Architecture]] = Registry(
    "Hugging Face architecture", "headstock.interop.huggingface.architectures"
)


def task_head(config: RunConfig) -> str | None:
    """The ending of the Hugging Face model class that a run's task corresponds to."""
    return TASKS.get(config.objective).huggingface_head


def mismatches(settings: Any, section: str = "model", **required: Any) -> list[str]:
    """The settings that differ from what is required; a tuple lists alternatives."""
    problems = []
    for name, value in required.items():
        alternatives = value if isinstance(value, tuple) else (value,)
        actual = getattr(settings, name)
        if actual not in alternatives:
            problems.append(f"{section}.{name} is {show(actual)}, not {' or '.join(map(show, alternatives))}")
    return problems


def show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def reject(hf_config: Mapping[str, Any], problems: list[str]) -> None:
    """Raise one error for all settings of an imported model that are not supported."""
    if problems:
        kind = hf_config.get("model_type")
        raise UserError(f"config.json: this {kind} model has unsupported settings: {'; '.join(problems)}")


def import_activation(name: str) -> str:
    if name not in THEIR_ACTIVATIONS:
        raise UserError(f"config.json: unknown activation {name!r} (known: {', '.join(THEIR_ACTIVATIONS)})")
    return THEIR_ACTIVATIONS[name]


def is_tied(tensors: Mapping[str, Tensor], hf_config: Mapping[str, Any], head: str, embedding: str) -> bool:
    """Whether the output head shares the embedding's weights. Two different tensors override the config."""
    if head in tensors and embedding in tensors:
        equal = tensors[head].shape == tensors[embedding].shape and bool((tensors[head] == tensors[embedding]).all())
        return equal and hf_config.get("tie_word_embeddings", True) is not False
    return head not in tensors
