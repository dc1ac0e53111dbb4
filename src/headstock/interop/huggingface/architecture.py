"""What every Hugging Face architecture promises here, and where they are found: a new one is one new file."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from headstock.errors import UserError
from headstock.interop.huggingface.tensor_names import Row, Tensors
from headstock.registry import Registry
from headstock.train.settings import RunConfig

# ours: theirs; several of their names mean the same function
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}
THEIR_ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
THEIR_ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh", "swish": "silu", "gelu_python": "gelu"}
LANGUAGE = ("causal", "masked", "hybrid", "headless")


@dataclass(frozen=True)
class Export:
    """A run as an architecture has it."""

    model_type: str
    head: str  # the class that opens it, such as BertForMaskedLM
    prefix: str  # before the names of the backbone's tensors
    config: dict[str, Any]  # what config.json says of the model's shape
    pipeline: str | None  # the task word of `pipeline(...)`, where there is one


class Architecture(ABC):
    """One architecture, or several whose tensors have the same names."""

    name: ClassVar[str]
    title: ClassVar[str]
    reads: ClassVar[tuple[str, ...]]  # the model_type words that it can import
    anchors: ClassVar[tuple[str, ...]]  # how the name of its embedding ends, after the prefix of its backbone
    buffers: ClassVar[tuple[str, ...]] = ()  # ends of names of tensors that hold no weights

    @classmethod
    @abstractmethod
    def misfits(cls, chosen: RunConfig) -> list[str]:
        """Every reason why a run of these settings cannot be said exactly; none where it can."""

    @classmethod
    @abstractmethod
    def export(cls, chosen: RunConfig) -> Export:
        """What a run that fits is called there."""

    @classmethod
    @abstractmethod
    def rows(cls, chosen: RunConfig, export: Export) -> Iterator[Row]:
        """The table of all its tensors."""

    @classmethod
    @abstractmethod
    def settings(cls, config: Mapping[str, Any], head: str, tensors: Tensors) -> dict[str, Any]:
        """The sections `model` and `task` of a run like theirs; refuses what we cannot be told."""

    @classmethod
    @abstractmethod
    def prefix_of(cls, kind: str) -> str:
        """Before the names of its backbone's tensors in files of this model_type."""

    @classmethod
    def as_read(cls, export: Export) -> Export:
        """How a folder is called in the words of the table, where several model_types share one."""
        return export

    @classmethod
    def prepare(cls, config: Mapping[str, Any], tensors: Tensors, chosen: RunConfig, export: Export) -> Tensors:
        """Their tensors, spelled as this architecture's table has them."""
        return tensors


ARCHITECTURES: Registry[type[Architecture]] = Registry(
    "Hugging Face architecture", "headstock.interop.huggingface.architectures"
)


def unlike(settings: Any, section: str = "model", **wanted: Any) -> list[str]:
    """The settings that are not what they must be; a tuple names several that will do."""
    problems = []
    for name, value in wanted.items():
        able = value if isinstance(value, tuple) else (value,)
        have = getattr(settings, name)
        if have not in able:
            told = " or ".join(str(one).lower() if isinstance(one, bool) else repr(one) for one in able)
            problems.append(
                f"{section}.{name} is {str(have).lower() if isinstance(have, bool) else repr(have)}, not {told}"
            )
    return problems


def family_problem(chosen: RunConfig, family: str) -> list[str]:
    return [] if chosen.family == family else [f"model.family is {chosen.family!r}, not {family!r}"]


def refuse(config: Mapping[str, Any], problems: list[str]) -> None:
    """Their settings that nothing of ours can say, all at once."""
    if problems:
        raise UserError(
            f"config.json: this {config.get('model_type')} model is more than can be said here: " + "; ".join(problems)
        )


def activation_of(word: str) -> str:
    if word not in THEIR_ACTIVATIONS:
        raise UserError(
            f"config.json: the activation {word!r} is not known here (known: {', '.join(THEIR_ACTIVATIONS)})"
        )
    return THEIR_ACTIVATIONS[word]


def tied_with(tensors: Mapping[str, Tensor], config: Mapping[str, Any], head: str, embedding: str) -> bool:
    """Whether a head shares the embedding's weights: as the settings say, unless the file has two that differ."""
    if head in tensors and embedding in tensors:
        same = tensors[head].shape == tensors[embedding].shape and bool((tensors[head] == tensors[embedding]).all())
        return same and config.get("tie_word_embeddings", True) is not False
    return head not in tensors


def labels_of(config: Mapping[str, Any]) -> list[str]:
    """The names of the classes, in the order of their numbers."""
    names = config.get("id2label") or {str(i): f"LABEL_{i}" for i in range(config.get("num_labels", 2))}
    return [str(names[key]) for key in sorted(names, key=int)]
