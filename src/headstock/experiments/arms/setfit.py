"""The SetFit arm: contrastive fine-tuning on pairs of the labelled rows, then logistic regression."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from headstock.experiments.arms.base import ARM_KINDS
from headstock.experiments.arms.finetuned import FinetunedArm
from headstock.train.resolve import labelled_task

if TYPE_CHECKING:
    from headstock.experiments.compare_settings import CompareSettings


@ARM_KINDS.add("setfit")
class SetfitArm(FinetunedArm):
    title = "SetFit"
    options: ClassVar[Mapping[str, Any]] = {"transfer.method": "setfit"}
    ignored: ClassVar[frozenset[str]] = frozenset({"linear_probe", "token_dropout"})

    @classmethod
    def unsupported(cls, settings: "CompareSettings") -> str | None:
        if settings.separator is not None:
            return "does not support several labels per text"
        if not labelled_task(settings.task).linear_classes:
            return f"fits a logistic regression of classes and does not apply to {settings.task}"
        return None
