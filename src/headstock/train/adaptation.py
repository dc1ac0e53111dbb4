"""Continues pretraining on the texts of a task before fine-tuning (task-adaptive pretraining)."""

import json
import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from headstock.data.records import Records
from headstock.errors import UserError
from headstock.io import write_text
from headstock.tasks.base import TASKS
from headstock.train.callbacks import Callback
from headstock.train.distributed import DistributedContext
from headstock.train.pretrain import pretrain
from headstock.train.resolve import source_settings
from headstock.train.run_folder import RunFolder
from headstock.train.settings import RunConfig, setting_names

logger = logging.getLogger(__name__)


def check_adaptation(source: RunFolder, run_config: RunConfig) -> None:
    """Reject a source that cannot be pretrained further, and a masking rate for one that masks nothing."""
    objective = source_settings(source)["task"]["name"]
    if run_config.transfer.adapt_fraction is not None and "fraction" not in setting_names(TASKS.get(objective).Config):
        raise UserError(f"transfer.adapt_fraction: the objective {objective!r} of {source} masks no tokens")


def adapt(
    target: RunFolder,
    source: RunFolder,
    run_config: RunConfig,
    records: Records,
    distributed: DistributedContext,
    device: str,
    callbacks: Sequence[Callback],
) -> dict[str, Tensor]:
    """Continue pretraining on the task's own texts, in a run folder inside the target; returns the adapted weights."""
    adapted, transfer = target.adapted, run_config.transfer
    if not adapted.is_complete():
        steps, source_config = transfer.adapt_steps, source.config()
        further = f" and {', '.join(transfer.adapt_text)}" if transfer.adapt_text else ""
        logger.info(f"adapting to the {len(records):,} training texts{further} for {steps:,} steps")
        lines = [" ".join(text.split()) for text in records.documents]
        texts = target.path / "adapt.txt"
        settings: dict[str, Any] = {
            "train.steps": steps,
            "train.lr": transfer.adapt_lr or source_config["train"]["lr"] / 3,
            "train.seed": run_config.train.seed,
            "train.compile": "auto",  # the source's run was long enough to compile for
            "train.tensorboard": False,
            "train.track": "none",
            "data.documents": "line",
        }
        if transfer.adapt_text:  # a document of the other files need not be a line, but one of a .jsonl file always is
            texts, lines = target.path / "adapt.jsonl", [json.dumps({"text": line}) for line in lines]
            del settings["data.documents"]
        if "nsp" in source_config["task"]:  # a labelled text is often a single sentence, which has no next one
            settings |= {"task.nsp": False}
        if transfer.adapt_fraction is not None:
            settings |= {"task.fraction": transfer.adapt_fraction, "task.fraction_start": None}
        if distributed.is_main:
            write_text(texts, "\n".join(lines) + "\n")
        distributed.barrier()
        pretrain(
            [texts, *transfer.adapt_text],
            out=adapted.path,
            start=source.path,
            settings=settings,
            resume=True,
            device=device,
            callbacks=callbacks,
        )
    return adapted.weights()
