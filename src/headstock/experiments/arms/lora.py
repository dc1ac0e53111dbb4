"""LoRA: low-rank adapters and the head are trained, between a frozen backbone and full fine-tuning."""

from collections.abc import Mapping
from typing import Any, ClassVar

from headstock.experiments.arms.base import ARM_KINDS
from headstock.experiments.arms.finetuned import FinetunedArm


@ARM_KINDS.add("lora")
class LoRAArm(FinetunedArm):
    """Adapters of rank `lora` in the frozen backbone, and a new head."""

    title = "LoRA"
    defaults: ClassVar[Mapping[str, Any]] = {
        "lora": 8,
        "lora_alpha": 16.0,
        "lora_dropout": 0.0,
        "lora_targets": "attention",
    }
