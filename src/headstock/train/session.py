"""What every training command does before and after training: checks, lock, processes, resuming, results, card."""

import json
import logging
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from errno import EACCES, EEXIST, ENAMETOOLONG, ENOENT, ENOTDIR, EPERM
from pathlib import Path
from typing import Any

import torch

from headstock import __version__, config
from headstock.data import urls
from headstock.data.tokenizer import open_tokenizer
from headstock.errors import UserError, WorkError
from headstock.io import check_inputs, check_replaceable, lock_folder, rank_and_size, remove_stale, start_time
from headstock.train.distributed import DistributedContext, process_group
from headstock.train.mirror import own_mirror, prepare_mirror
from headstock.train.model_card import write_card
from headstock.train.run_folder import LAYOUT, RunFolder
from headstock.train.settings import RunConfig, assign_sections, make_config

logger = logging.getLogger(__name__)

DATA_PATHS = {"corpus", "valid", "train", "test"}  # settings of the data section that are paths
INVALID_PATH = (ENOENT, ENOTDIR, EEXIST, EACCES, EPERM, ENAMETOOLONG)  # where no folder can be created


@dataclass(frozen=True)
class Session:
    """One training command: the run folder, this process, and whether the run continues an earlier one."""

    run: RunFolder
    distributed: DistributedContext
    resuming: bool


@contextmanager
def open_session(
    out: str | Path, *, device: str, resume: bool, overwrite: bool, mirror: str | None = None
) -> Iterator[Session]:
    """Lock the output folder, check it, and join the other processes. A missing run is started, also with `resume`.

    With `resume`, a run that is missing here or behind its mirror is restored from there.
    """
    if urls.is_url(out):
        raise UserError(f"{urls.redact(str(out))}: a run is written to a local folder; copy it with mirror=URL")
    run = RunFolder(Path(out))
    with locked_run(run):
        resume = resume or was_started_by_this_job(run)
        check_output_folder(run, resume=resume, overwrite=overwrite)
        resuming = resume and run.exists()
        if resuming and rank_and_size()[0] == 0:
            for folder in (run.path, run.checkpoints):
                remove_stale(folder)
        mirror = mirror or (own_mirror(run) if resuming else None)
        with process_group(device) as distributed:  # waits until every process has checked the folder
            if mirror is not None:
                if distributed.is_main:
                    prepare_mirror(run, mirror, resume=resume, overwrite=overwrite)
                distributed.barrier()
                resuming = resume and run.exists()
                distributed.barrier()  # before the run is created
            yield Session(run, distributed, resuming)


def was_started_by_this_job(run: RunFolder) -> bool:
    """Whether the torchrun that started this process also started the run, before it restarted its processes.

    No process creates a run before all of them have asked this. An older run is of an earlier job, also if a restart
    finds it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not run.exists():
        return False
    return (run.path / "data.json").stat().st_mtime > start_time(os.getppid())


@contextmanager
def locked_run(run: RunFolder) -> Iterator[None]:
    """Hold the lock on a run folder, so that no other command trains in it. With torchrun, rank 0 holds it."""
    if rank_and_size()[0] > 0:
        yield
        return
    with ExitStack() as stack:
        try:
            acquired = stack.enter_context(lock_folder(run.path))
        except OSError as error:  # names the lock file rather than the folder
            kind = UserError if error.errno in INVALID_PATH else WorkError
            raise kind(f"{run}: cannot be written: {error.strerror}") from None
        if not acquired:
            raise UserError(f"{run}: another process is using this folder")
        yield


def check_output_folder(run: RunFolder, *, resume: bool, overwrite: bool) -> None:
    """Reject a folder that contains something else, or a run that is neither resumed nor overwritten."""
    if not run.path.exists():
        return
    if not run.path.is_dir():
        raise UserError(f"{run}: is a file; a run is a folder")
    if not resume and not overwrite:
        raise UserError(
            f"{run}: exists already; use --resume to continue it, --overwrite to replace it, or name another folder"
        )
    if not run.exists() and any(run.path.iterdir()):
        raise UserError(f"{run}: is not a run folder (no config.json) and not empty, so it is not replaced")
    if not resume:
        if run.exists() and not run.has_run_config():
            raise UserError(f"{run}: its config.json is not that of a run, so it is not replaced; name another folder")
        check_replaceable(run.path, LAYOUT)


def check_inputs_outside(run: RunFolder, inputs: Iterable[str | Path | None]) -> None:
    """Reject a run folder that contains one of the new run's inputs."""
    if run.path.exists():
        check_inputs(run.path, [path for path in inputs if path])


def check_not_source(target: RunFolder, source: RunFolder) -> None:
    """Reject a folder for a new run that is, or contains, the run it starts from."""
    if source.path.resolve().is_relative_to(target.path.resolve()):
        raise UserError(f"{target}: {source}, the source of the new run, would be overwritten; name another folder")


def check_resumable(run: RunFolder, mirror: str | None = None) -> None:
    """Reject a missing or empty folder without a mirror; everything else is checked like a new run."""
    if mirror is not None:
        return
    if not run.path.exists() or (run.path.is_dir() and not any(run.path.iterdir())):
        raise UserError(f"{run}: nothing to resume; leave out --resume to start a new run")


def resumed_config(run: RunFolder, options: dict[str, Any]) -> RunConfig:
    """A run's own configuration, with the data paths of the options: the caller compares the contents."""
    return make_config(check_same_settings(run, options, moved=True))


def check_same_settings(run: RunFolder, options: dict[str, Any], *, moved: bool = False) -> dict[str, Any]:
    """The run's settings, which the options must not contradict. With `moved`, data paths and URLs may differ."""
    tree, options = run.config(), dict(options)
    objective = options.pop("task.name", tree["task"]["name"])
    sections = config.merge({"task": {"name": objective}}, assign_sections(options, tree))
    if moved:
        for section, name in (("train", "mirror"), ("data", "stores")):
            if url := sections.get(section, {}).pop(name, None):
                tree[section][name] = url
        for name in DATA_PATHS & sections.get("data", {}).keys():
            if tree["data"][name] and sections["data"][name]:
                tree["data"][name] = config.to_dict(sections["data"].pop(name))
        file = sections.get("tokenizer", {}).get("file")
        if file and tree["tokenizer"]["file"] and open_tokenizer(Path(file)).fingerprint == run.data()["tokenizer"]:
            del sections["tokenizer"]["file"]
    conflicts = [
        f"{section}.{key} is {json.dumps(tree[section].get(key))}, not {json.dumps(value)}"
        for section, values in sections.items()
        for key, value in values.items()
        if config.to_dict(value) != tree[section].get(key)
    ]
    if conflicts:
        raise UserError(f"{run}: a resumed run keeps its own settings; {'; '.join(conflicts)}")
    return tree


def save_data_paths(run: RunFolder, run_config: RunConfig) -> None:
    """Update the data paths and the mirror of a resumed run that were moved."""
    tree = run.config()
    data, mirror = run_config.plain()["data"], run_config.train.mirror
    updated = config.merge(tree, {"data": {name: data[name] for name in DATA_PATHS & tree["data"].keys()}})
    updated = config.merge(updated, {"train": {"mirror": mirror}} if mirror else {})
    if updated != tree:
        run.write("config.json", updated)


def environment_results(distributed: DistributedContext) -> dict[str, Any]:
    """The device, processes and versions of a run, for results.json."""
    return {
        "device": str(distributed.device),
        "processes": distributed.size,
        "versions": {"headstock": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def finish_run(run: RunFolder, distributed: DistributedContext, results: dict[str, Any]) -> dict[str, Any]:
    """Write results and model card; returns the results."""
    if distributed.is_main:
        run.write_results(results)
        write_card(run)
    return results


def finished_results(run: RunFolder, distributed: DistributedContext) -> dict[str, Any]:
    """The results of a complete run; writes its model card if it was interrupted just before."""
    logger.info(f"{run} is finished: nothing to resume")
    if distributed.is_main and not run.model_card.is_file():
        write_card(run)
    return run.results()
