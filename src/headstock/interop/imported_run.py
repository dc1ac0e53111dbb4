"""Run folders of models that were made elsewhere: with them, every verb works that needs no training text."""

import platform
import typing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from headstock import __version__
from headstock.data.tokenizer import Tokenizer, TokenizerSettings
from headstock.errors import UserError
from headstock.tasks.base import TASKS
from headstock.tasks.labelled import LabelledTask
from headstock.train.model_card import write_card
from headstock.train.pretrain import build_model
from headstock.train.run_folder import RunFolder, check_finite, fingerprints
from headstock.train.settings import RunConfig, make_config


def complete(model: Mapping[str, Any], task: Mapping[str, Any], *, source: str) -> RunConfig:
    """The settings of a run that was not trained here, from those of its model and its task."""
    tree: dict[str, Any] = {"model": dict(model), "task": dict(task), "data": {}, "train": {}}
    if issubclass(TASKS.get(str(task["name"])), LabelledTask):
        tree["transfer"] = {"run": source}
    return make_config(tree)


def make_run(
    out: Path,
    chosen: RunConfig,
    tokenizer: Tokenizer,
    tensors: Mapping[str, Tensor],
    *,
    source: str,
    notes: Sequence[str],
    known: Mapping[str, Any] | None = None,
) -> RunFolder:
    """Write the folder, once the weights are known to fit the model; `tensors` have our names.

    `known` is what else is known of where they come from, such as the file's sha256.
    """
    if tokenizer.vocabulary > chosen.model.vocabulary:
        spare = [tokenizer.id_to_token(i) for i in range(chosen.model.vocabulary, tokenizer.vocabulary)]
        special = tokenizer.all_special_ids
        if any(i not in special for i in range(chosen.model.vocabulary, tokenizer.vocabulary)):
            many = f"{tokenizer.vocabulary:,} entries, the model {chosen.model.vocabulary:,}"
            raise UserError(f"{source}: its tokenizer has {many}; they do not belong together")
        notes = [*notes, f"the tokenizer has marks the model never learned: {', '.join(spare)}"]
    if chosen.tokenizer is not None and tokenizer.kind in get_args(typing.get_type_hints(TokenizerSettings)["kind"]):
        chosen = replace(chosen, tokenizer=replace(chosen.tokenizer, kind=tokenizer.kind))
    check_finite(tensors, source=source)
    model, task = build_model(chosen, tokenizer)
    model.load_tensors(tensors, source=source)
    run, sizes = RunFolder(out), model.parameter_counts()
    data: dict[str, Any] = {"fingerprint": "imported", **fingerprints(tokenizer), "imported": source, "corpus": []}
    data |= {"how": f"imported from {source}", "notes": list(notes), **(known or {})}
    run.begin(chosen.plain(), tokenizer, data)
    run.save_weights(model.tensors())
    run.write_results(results_of(run, chosen, sizes, source, labelled=isinstance(task, LabelledTask), task=task))
    write_card(run)
    return run


def results_of(
    run: RunFolder, chosen: RunConfig, sizes: dict[str, int], source: str, *, labelled: bool, task: Any
) -> dict[str, Any]:
    """What results.json has of every run, where nothing was measured."""
    more: dict[str, Any] = {}
    if labelled:
        sizes = sizes | {"trainable": sizes["total"], "frozen": 0}
        more = {"kind": "finetune", "task": chosen.objective, "classes": list(getattr(chosen.task, "classes", ()))}
        more |= {"headline": task.primary_metric, "epochs": [], "best_epoch": None, "measured_on": None}
    return {
        "run": str(run),
        "from": source,
        "imported": True,
        "steps": 0,
        "best_step": None,
        "tokens": 0,
        "seconds": 0.0,
        "tokens_per_second": None,
        "train_loss": None,
        "valid_loss": None,
        "metrics": {},
        **more,
        "parameters": sizes,
        "device": "cpu",
        "processes": 1,
        "versions": {"headstock": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
