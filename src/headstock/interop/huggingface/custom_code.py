"""Sequence classifiers whose head no architecture of transformers has: the folder gets a module with the model class.

The backbone is one of transformers. Such a folder is loaded with `trust_remote_code=True`.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from headstock.errors import UserError
from headstock.interop import mismatches
from headstock.interop.huggingface.architecture import Architecture, ExportSpec, SourceModel
from headstock.interop.huggingface.heads import SEQUENCE, in_label_units, label_config, task_head
from headstock.interop.tensor_map import TensorMap, affine
from headstock.tasks.base import TASKS
from headstock.train.settings import RunConfig

MODULE = Path(__file__).with_name("modeling_headstock.py")  # is copied into the folder
MODEL_TYPE, MODEL_CLASS = "headstock", "HeadstockForSequenceClassification"  # of this module
AUTO_MAP = {
    "AutoConfig": f"{MODULE.stem}.HeadstockConfig",
    "AutoModelForSequenceClassification": f"{MODULE.stem}.{MODEL_CLASS}",
}


class CustomClassifier(Architecture):
    """Another architecture's backbone under the run's own classification head."""

    model_types = (MODEL_TYPE,)
    supported_heads = (SEQUENCE,)
    prefix = "backbone."

    def __init__(self, base: Architecture):
        self.base = base
        # instance attributes: those of the backbone
        self.name, self.title, self.family = base.name, base.title, base.family  # type: ignore[misc]
        self.embeddings, self.buffers = base.embeddings, base.buffers  # type: ignore[misc]

    def unsupported_settings(self, config: RunConfig) -> list[str]:
        if task_head(config) != SEQUENCE:
            return [f"custom code is for sequence classifiers, not for {config.objective}"]
        return self.base.unsupported_settings(headless(config)) + mismatches(
            vars(config.task), {"layers": "last"}, "task."
        )

    def export_spec(self, config: RunConfig) -> ExportSpec:
        backbone = self.base.export_spec(headless(config))
        settings: dict[str, Any] = {
            "auto_map": AUTO_MAP,
            "backbone": {"model_type": backbone.model_type, "use_cache": False, **backbone.config},
            **{name: getattr(config.task, name) for name in ("pool", "dense", "head_bias")},
            **label_config(config),
        }
        code = "the folder has code of its own and is loaded with trust_remote_code=True"
        return replace(
            backbone,
            model_type=MODEL_TYPE,
            head=MODEL_CLASS,
            prefix=self.prefix,
            config=settings,
            pipeline="text-classification",
            notes=(*backbone.notes, code),
        )

    def backbone_map(self, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        return self.base.backbone_map(headless(config), spec)

    def tensor_map(self, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        yield from self.backbone_map(config, spec)
        yield from in_label_units(self.classifier_map(config, spec), config)

    def classifier_map(self, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        if config.task.dense != "none":
            yield from affine("heads.label.dense", "dense")
        yield from affine("heads.label.linear", "linear", bias=config.task.head_bias)

    def import_settings(self, source: SourceModel) -> dict[str, Any]:
        """Only the run that was exported can be imported, from its own settings in config.json."""
        raise UserError(f"{source.path}: config.json is not as Headstock wrote it")


def headless(config: RunConfig) -> RunConfig:
    """The same model without a head."""
    task = TASKS.get("headless").Config(opening=config.task.opening, closed=config.task.closed)
    return replace(config, objective="headless", task=task)
