"""From keywords to the settings of a run."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from headstock.errors import UserError, did_you_mean
from headstock.model.backbone import BACKBONES
from headstock.tasks.base import TASKS
from headstock.train.settings import FROM_SCRATCH, PRETRAINING, override_flat

SET_HINT = " (settings are keywords: lr=3e-4)"  # for those who know --set


def merged_settings(
    function: Callable[..., Any],
    settings: Mapping[str, Any] | None,
    keywords: Mapping[str, Any],
    *,
    seed: int | None = None,
) -> dict[str, Any]:
    """The `settings` of a call with its keywords, which win; a keyword that is no setting is refused."""
    names = setting_names()
    if unknown := [name for name in keywords if name not in names]:
        candidates = sorted({*inspect.signature(function).parameters, *names} - {"keywords"})
        hints = [f"{name!r}{SET_HINT if name == 'set' else did_you_mean(name, candidates)}" for name in unknown]
        raise UserError(f"{function.__name__}: unknown keyword {', '.join(hints)}")
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in keywords.items()}
    return override_flat(settings or {}, plain) | ({} if seed is None else {"train.seed": seed})


def setting_names() -> set[str]:
    """The names of all settings of all kinds of runs, also of backbones and tasks that other packages add."""
    sections = [*PRETRAINING.values(), *FROM_SCRATCH.values()]
    sections += [BACKBONES.get(name).Config for name in BACKBONES.names()]
    sections += [TASKS.get(name).Config for name in TASKS.names()]
    return {"family"} | {part.name for section in sections for part in fields(section)}
