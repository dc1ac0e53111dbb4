"""The SetFit arm: contrastive fine-tuning on pairs of the labelled rows, then logistic regression."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from headstock.experiments.arms.base import ARM_KINDS
from headstock.experiments.arms.finetuned import FinetunedArm
from headstock.experiments.arms.tfidf import TfidfArm

if TYPE_CHECKING:
    from headstock.experiments.compare_settings import CompareSettings


@ARM_KINDS.add("setfit")
class SetfitArm(FinetunedArm):
    title = "SetFit"
    options: ClassVar[Mapping[str, Any]] = {"transfer.method": "setfit"}

    @classmethod
    def unsupported(cls, settings: "CompareSettings") -> str | None:
        return TfidfArm.unsupported(settings)  # it needs one class per row too
