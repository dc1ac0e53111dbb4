"""Chooses the model of a run whose length is given in minutes and whose model is not named."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headstock import config
from headstock.io import rank_and_size
from headstock.planner.machine import busy_warning
from headstock.planner.planner import plan
from headstock.planner.summary import plan_reason
from headstock.train.distributed import choose_device
from headstock.train.run_folder import RunFolder
from headstock.train.session import check_output_folder
from headstock.train.settings import TrainSettings

logger = logging.getLogger(__name__)

# settings that fix the size of a model, which then is not planned
SIZES = ("vocabulary", "depth", "width", "context", "heads", "hidden", "family")
SIZE_SETTINGS = ("model.", "tokenizer.", "task.", *SIZES)
FEWER_STEPS = "training ends after the same number of minutes, with fewer steps than when idle"


def with_planned_size(
    settings: Mapping[str, Any],
    corpus: Sequence[str],
    *,
    out: str | Path,
    named: bool,
    objective: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
) -> dict[str, Any]:
    """Add the planner's model size to the settings of `pretrain`, unless they have no minutes or already name a size.

    `named` says that a preset, a file of settings, a tokenizer or another run decides about the model. With minutes,
    a busy machine is warned about in either case.
    """
    settings = dict(settings)
    minutes = settings.get("train.minutes", settings.get("minutes"))
    if not minutes or rank_and_size()[0] > 0:
        return settings
    has_size = named or any(key.startswith(SIZE_SETTINGS) for key in settings)
    if has_size or not corpus or "-" in corpus or (resume and Path(out).exists()):
        if warning := busy_warning(choose_device(device), effect=FEWER_STEPS):
            logger.warning(warning)
        return settings
    # report wrong settings before the plan, which takes seconds and prints a message
    check_output_folder(RunFolder(Path(out)), resume=resume, overwrite=overwrite)
    train_settings = {key.removeprefix("train."): value for key, value in settings.items()}
    names = TrainSettings.__dataclass_fields__.keys() & train_settings.keys()
    config.from_dict(TrainSettings, {name: train_settings[name] for name in names}, prefix="train")
    proposal = plan(
        corpus,
        device=device,
        minutes=minutes,
        objective=objective,
        documents=settings.get("data.documents", settings.get("documents")),
        column=settings.get("data.column", settings.get("column")),
    )
    logger.info(plan_reason(proposal))
    kept = {key.rpartition(".")[2] for key in settings} | {"steps", "corpus"}
    planned = config.flatten_tables(proposal.config)
    return {key: value for key, value in planned.items() if key.rpartition(".")[2] not in kept} | settings
