"""Writes run folders for models trained elsewhere; every command works on them that needs no training data."""

import pickle
import platform
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from headstock import __version__
from headstock.data.tokenizer import Tokenizer, TokenizerSettings
from headstock.errors import UserError
from headstock.tasks.base import TASKS, Task
from headstock.tasks.labelled import is_labelled
from headstock.train.model_card import write_card
from headstock.train.models import build_limited_model, build_task
from headstock.train.run_folder import RunFolder, tokenizer_fingerprints
from headstock.train.settings import RunConfig, make_config
from headstock.train.tensors import check_finite


def load_checkpoint(path: Path) -> Any:
    """The content of a .bin or .pt file that holds tensors only; no code in it is run."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                size = sum(member.file_size for member in archive.infolist())
            if size > path.stat().st_size:  # torch.save does not compress
                raise UserError(f"{path}: expands to {size:,} bytes, so torch.save did not write it; it is not loaded")
        with warnings.catch_warnings(action="ignore"):  # about pickle protocols, which the errors below name
            return torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        names = re.search(r"Unsupported (?:global|operand)[^.\n]*|GLOBAL \S+", str(error))
        detail = f" ({names[0]})" if names else ""
        raise UserError(f"{path}: contains more than tensors, so it is not loaded{detail}") from None
    except MemoryError:
        raise UserError(f"{path}: declares more data than fits in memory, so it is not loaded") from None
    except Exception as error:  # a damaged file makes the reader raise almost anything
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{path}: cannot be read as a torch checkpoint ({message[:200]})") from None


def imported_config(model: Mapping[str, Any], task: Mapping[str, Any], *, source: str) -> RunConfig:
    """The complete settings of an imported run from those of its model and task."""
    tree: dict[str, Any] = {"model": dict(model), "task": dict(task), "data": {}, "train": {}}
    if TASKS.get(str(task["name"])).is_labelled:
        tree["transfer"] = {"run": source}
    return make_config(tree)


def write_imported_run(
    out: Path,
    config: RunConfig,
    tokenizer: Tokenizer,
    tensors: Mapping[str, Tensor],
    *,
    source: str,
    notes: Sequence[str],
    provenance: Mapping[str, Any] | None = None,
) -> RunFolder:
    """Check that the tensors fit the model, then write the folder.

    `provenance` is recorded in data.json, such as the hash of the imported file.
    """
    if extra := range(config.model.vocabulary, tokenizer.vocabulary):
        if any(token not in tokenizer.all_special_ids for token in extra):
            raise UserError(
                f"{source}: its tokenizer has {tokenizer.vocabulary:,} entries, the model {config.model.vocabulary:,}"
            )
        names = ", ".join(tokenizer.id_to_token(token) for token in extra)
        notes = [*notes, f"the tokenizer has special tokens without an embedding: {names}"]
    if config.tokenizer is not None and tokenizer.kind in get_args(get_type_hints(TokenizerSettings)["kind"]):
        config = replace(config, tokenizer=replace(config.tokenizer, kind=tokenizer.kind))
    check_finite(tensors, source=source)
    task = build_task(config, tokenizer)
    values = sum(tensor.numel() for tensor in tensors.values())
    model = build_limited_model(config, task, values=values, source=source)
    model.load_tensors(tensors, source=source)
    run = RunFolder(out)
    data: dict[str, Any] = {"fingerprint": "imported", **tokenizer_fingerprints(tokenizer)}
    data |= {"imported": source, "corpus": [], "how": f"imported from {source}", "notes": list(notes)}
    data |= provenance or {}
    run.create(config.plain(), tokenizer, data)
    run.save_weights(model.tensors())
    run.write_results(imported_results(run, config, model.parameter_counts(), source, task))
    write_card(run)
    return run


def imported_results(
    run: RunFolder, config: RunConfig, parameters: dict[str, int], source: str, task: Task
) -> dict[str, Any]:
    """results.json of a run without training or metrics."""
    labelled: dict[str, Any] = {}
    if is_labelled(task):
        parameters = parameters | {"trainable": parameters["total"], "frozen": 0}
        labelled = {"kind": "finetune", "task": config.objective, "classes": list(getattr(config.task, "classes", ()))}
        labelled |= {"headline": task.primary_metric, "epochs": [], "best_epoch": None, "measured_on": None}
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
        **labelled,
        "parameters": parameters,
        "device": "cpu",
        "processes": 1,
        "versions": {"headstock": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
