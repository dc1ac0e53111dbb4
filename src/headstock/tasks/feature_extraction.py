"""Feature extraction: a backbone without a head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from torch import Tensor, nn

from headstock.errors import UserError
from headstock.model.backbone import Backbone
from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Task


@dataclass(frozen=True)
class FeatureExtractionConfig:
    opening: Literal["start", "cls"] = "cls"  # the first special token
    closed: bool = False  # a separator ends the text


@TASKS.add("headless")
class FeatureExtraction(Task):
    """The task of a run without a head, such as a sentence encoder from Hugging Face."""

    Config = FeatureExtractionConfig
    trainable = False
    huggingface_head = "Model"

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        return {}

    def examples(self, data: Any, *, length: int, seed: int | None = None, epoch: int = 0) -> NoReturn:
        raise UserError("a model without a head makes no predictions to evaluate; fine-tune it first")

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        return {}

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        return {}
