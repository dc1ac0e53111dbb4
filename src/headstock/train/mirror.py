"""Copies a run folder to a URL while it is trained (`mirror=URL`), and restores it from there on another machine.

A checkpoint's manifest is the last of its files to arrive and the first to be deleted, so that a reader never takes a
part of a checkpoint for a whole one. Transfers run in the background, one at a time; one that fails is made up for
after the next checkpoint and never stops the run.
"""

import logging
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from headstock import config
from headstock.data import remote, urls
from headstock.errors import HeadstockError, UserError
from headstock.io import FolderLayout, atomic_folder, layout_files, remove_folder
from headstock.train.run_folder import LAYOUT, RunFolder, is_step
from headstock.train.settings import RunConfig
from headstock.train.tensors import MANIFEST, find_damage

logger = logging.getLogger(__name__)

CONFIG, RESULTS = "config.json", "results.json"
SMALL_BYTES = 64 << 20  # a smaller file is read at once, because it may grow meanwhile
FINAL_TRIES = 3
Stamp = tuple[int, int]  # size and modification time of a local file

_mirrors: dict[Path, "Mirror"] = {}  # of this process, by run folder


# What the rest of a training command calls


def requested_mirror(options: Mapping[str, Any], config_file: str | Path | None = None) -> str | None:
    """The mirror that the settings of a command name, before they are resolved."""
    named = options.get("train.mirror", options.get("mirror"))
    if named is None and config_file is not None:
        named = config.read_settings(Path(config_file), tables=("train",)).get("train", {}).get("mirror")
    if not isinstance(named, str) or not urls.is_url(named) or urls.is_http(named):  # which the settings reject
        return None
    return urls.redact(named)


def reject_mirror(run_config: RunConfig) -> RunConfig:
    """Refuse the setting in a grid, whose many runs cannot have one mirror."""
    if run_config.train.mirror:
        raise UserError("train.mirror: is the copy of one run; compare and sweep write to their own folder")
    return run_config


def own_mirror(run: RunFolder) -> str | None:
    """The mirror in the settings of an existing run."""
    return run.config()["train"].get("mirror") if run.has_run_config() else None


@contextmanager
def mirrored(run: RunFolder, url: str | None) -> Iterator[None]:
    """Mirror a run while it is trained; at the end, also after an error, wait until everything has arrived."""
    if url is None:
        yield
        return
    mirror = _mirrors[run.path.resolve()] = Mirror(run, url)
    mirror.update()
    try:
        yield
    finally:
        mirror.finish()


def checkpoint_saved(run: RunFolder) -> None:
    """Start a transfer if the run, or the run that it is part of, has a mirror."""
    for folder, mirror in _mirrors.items():
        if run.path.resolve().is_relative_to(folder):
            mirror.update()


def finish_mirror(run: RunFolder) -> dict[str, Any]:
    """Copy what was written after training, such as report.html. Returns the key "mirror" of a command's results."""
    mirror = _mirrors.get(run.path.resolve())
    if mirror is None:
        return {}
    mirror.finish(quiet=True)
    return {"mirror": mirror.summary()}


# Writing


class Mirror:
    """The copy of one run folder."""

    def __init__(self, run: RunFolder, url: str) -> None:
        self.run, self.url = run, url
        self.sent: dict[str, Stamp] = {}  # files that are at the URL, with the state in which they were sent
        self.there: set[str] | None = None  # the names of all files there, once listed
        self.problem: str | None = None  # of the last transfer
        self.files = self.bytes = self.failures = 0
        self.seconds = 0.0
        self.lock, self.pending = threading.Lock(), False
        self.thread: threading.Thread | None = None

    @cached_property
    def root(self) -> remote.RemoteFile:
        return remote.open_url(self.url)

    def update(self) -> None:
        """Start a transfer in the background, or have the present one followed by another."""
        with self.lock:
            self.pending = True
            if self.thread is None:
                self.thread = threading.Thread(target=self._work, daemon=True)
                self.thread.start()

    def wait(self) -> None:
        while (thread := self.thread) is not None:
            thread.join(0.1)  # Ctrl-C is noticed in between

    def finish(self, *, quiet: bool = False) -> None:
        """Wait until the mirror equals the folder, and say so."""
        if self.thread is not None:
            logger.info(f"waiting for the mirror {self.url} (Ctrl-C to leave it incomplete)")
        for _ in range(FINAL_TRIES):
            self.update()
            self.wait()
            if self.problem is None:
                break
        else:
            logger.warning(f"the mirror is incomplete: {self.problem}; the same command with --resume completes it")
            return
        if not quiet:
            megabytes = remote.megabytes(self.bytes)
            logger.info(f"mirrored to {self.url}: {self.files:,} files, {megabytes} in {self.seconds:.1f} s")

    def summary(self) -> dict[str, Any]:
        facts = {"files": self.files, "bytes": self.bytes, "seconds": round(self.seconds, 3)}
        return {"url": self.url, "complete": self.problem is None, **facts, "failures": self.failures}

    def _work(self) -> None:
        while True:
            with self.lock:
                if not self.pending:
                    self.thread = None
                    return
                self.pending = False
            began = time.monotonic()
            try:
                self.transfer()
                self.problem = None
            except Exception as error:
                described = error if isinstance(error, HeadstockError) else remote.describe_error(error, self.url)
                self.problem, self.there = str(described), None
                self.failures += 1
                logger.warning(f"mirror: {self.problem}")
            self.seconds += time.monotonic() - began

    def transfer(self) -> None:
        """Make the copy equal to the folder as it is now."""
        if self.there is None:
            self.there = set(list_run(self.root))
        local = {path.relative_to(self.run.path).as_posix(): path for path in layout_files(self.run.path, LAYOUT)}
        checkpoints = checkpoints_of(local)
        for folder, names in checkpoints.items():
            self.adopt(folder, local)
            manifest = f"{folder}/{MANIFEST}"
            if manifest in self.there and any(self.has_changed(name, local[name]) for name in names):
                self.delete(manifest)  # another version of a damaged checkpoint
            for name in names - {manifest}:
                self.send(name, local[name])
        inside = set().union(*checkpoints.values())
        last = (MANIFEST, RESULTS)  # results.json says that a run is finished
        others = (name for name in local if name not in inside and not in_checkpoint(name))
        for name in sorted(others, key=lambda name: (name in last, name)):
            self.send(name, local[name])
        for folder in checkpoints:
            self.send(f"{folder}/{MANIFEST}", local[f"{folder}/{MANIFEST}"])
        self.prune(local)

    def adopt(self, folder: str, local: Mapping[str, Path]) -> None:
        """Take a checkpoint that an earlier process mirrored for sent: the manifests are equal."""
        manifest, there = f"{folder}/{MANIFEST}", self.there or set()
        if manifest in self.sent or manifest not in there:
            return
        path = self.path_of(manifest)
        data = remote.retry(lambda: self.root.fs.cat_file(path), self.root)
        with suppress(FileNotFoundError):
            if data == local[manifest].read_bytes():
                names = [name for name in local if name.startswith(f"{folder}/") and name in there]
                self.sent |= {name: stamp(local[name]) for name in names}

    def has_changed(self, name: str, path: Path) -> bool:
        try:
            return self.sent.get(name) != stamp(path)
        except FileNotFoundError:  # pruned meanwhile
            return False

    def send(self, name: str, path: Path) -> None:
        try:
            state = stamp(path)
            if self.sent.get(name) == state:
                return
            data = path.read_bytes() if state[0] <= SMALL_BYTES else None
        except FileNotFoundError:  # pruned meanwhile: the next transfer deletes the rest of it
            self.pending = True
            return
        self.put(name, path if data is None else data)
        self.sent[name] = state
        assert self.there is not None
        self.there.add(name)
        self.files += 1
        self.bytes += state[0]

    def put(self, name: str, content: Path | bytes) -> None:
        remote.upload(self.root, name, content)

    def prune(self, local: Mapping[str, Path]) -> None:
        """Delete checkpoints that are no longer in the folder, except those that are ahead of it."""
        assert self.there is not None
        for name in sorted(self.there - local.keys(), key=lambda name: not name.endswith(f"/{MANIFEST}")):
            folder = in_checkpoint(name)
            run = folder.removesuffix(PurePosixPath(folder).name).removesuffix("checkpoints/") if folder else ""
            if folder and (step_number(folder) < newest_step(local, run) or f"{run}{RESULTS}" in local):
                self.delete(name)
                if urls.scheme_of(self.url) in remote.RENAMING and not any(
                    n.startswith(f"{folder}/") for n in self.there
                ):
                    with suppress(OSError):
                        self.root.fs.rmdir(self.path_of(folder))

    def delete(self, name: str) -> None:
        def remove() -> None:
            with suppress(FileNotFoundError):
                self.root.fs.rm_file(self.path_of(name))

        remote.retry(remove, self.root)
        self.sent.pop(name, None)
        assert self.there is not None
        self.there.discard(name)

    def path_of(self, name: str) -> str:
        return f"{self.root.path.rstrip('/')}/{name}"


def stamp(path: Path) -> Stamp:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


# Names


def list_run(root: remote.RemoteFile) -> dict[str, remote.RemoteFile]:
    """The files of a run at a URL, by name; others that may be there are ignored."""
    try:
        files = {file.name: file for file in remote.list_folder(root.url)}
    except remote.NotFound:
        return {}
    return {name: file for name, file in files.items() if in_layout(PurePosixPath(name).parts, LAYOUT)}


def in_layout(parts: tuple[str, ...], layout: FolderLayout) -> bool:
    inner = next((inner for pattern, inner in layout.items() if fnmatchcase(parts[0], pattern)), {})
    return inner is None if len(parts) == 1 else bool(inner) and in_layout(parts[1:], inner or {})


def in_checkpoint(name: str) -> str | None:
    """The folder of the checkpoint that a file belongs to."""
    folder = PurePosixPath(name).parent
    return str(folder) if folder.parent.name == "checkpoints" and is_step(folder.name) else None


def checkpoints_of(names: Mapping[str, Any]) -> dict[str, set[str]]:
    """The files of each whole checkpoint, by its folder."""
    folders: dict[str, set[str]] = {}
    for name in names:
        if folder := in_checkpoint(name):
            folders.setdefault(folder, set()).add(name)
    return {folder: files for folder, files in folders.items() if f"{folder}/{MANIFEST}" in files}


def step_number(folder: str) -> int:
    return int(folder.rpartition("-")[2])


def newest_step(names: Mapping[str, Any], run: str = "") -> int:
    """The step of the newest whole checkpoint of the run, or of one inside it, such as members/0/; -1 for none."""
    folders = [folder for folder in checkpoints_of(names) if folder.rpartition("/")[0] == f"{run}checkpoints"]
    return max(map(step_number, folders), default=-1)


# Reading


def prepare_mirror(run: RunFolder, url: str, *, resume: bool, overwrite: bool) -> None:
    """Before a run starts: restore it from its mirror where that is ahead, or refuse to write over another run."""
    try:
        root = remote.open_url(url)
        files = list_run(root)
    except HeadstockError as error:
        if not (resume and run.exists()):
            raise
        logger.warning(f"mirror: {error}; the run continues from {run}")
        return
    if CONFIG not in files:
        check_writable(Mirror(run, url))
    elif resume:
        if not run.exists() or (is_same_run(run, files) and newest_step(files) > newest_valid_step(run)):
            restore(run, root, files)
    elif overwrite:
        mirror = Mirror(run, url)
        mirror.there = set(files)
        for name in sorted(files, key=lambda name: name not in (CONFIG, RESULTS)):
            mirror.delete(name)
    else:
        raise UserError(
            f"{root.url}: holds a run already; use --resume to continue it, --overwrite to replace it, or another URL"
        )


def check_writable(mirror: Mirror) -> None:
    """Fail before the run starts if nothing can be written to the URL."""
    probe, mirror.there = ".headstock", set()
    try:
        mirror.put(probe, b"")
        mirror.delete(probe)
    except HeadstockError as error:
        raise UserError(f"train.mirror: cannot be written to: {error}") from None


def is_same_run(run: RunFolder, files: Mapping[str, remote.RemoteFile]) -> bool:
    """Whether the mirror belongs to the run; another one is refused."""
    if "data.json" not in files:
        return False
    with tempfile.TemporaryDirectory(prefix="headstock-") as folder:
        copy = Path(folder) / "data.json"
        remote.download_all([(files["data.json"], copy, Path(folder) / "record")], reported=SMALL_BYTES)
        if config.read_settings(copy).get("fingerprint") != run.data().get("fingerprint"):
            raise UserError(f"{run}: its mirror holds a run on other data; name another URL")
    return True


def newest_valid_step(run: RunFolder) -> int:
    steps = (name for name in reversed(run.whole_checkpoints()) if find_damage(run.checkpoints / name) is None)
    return next((step_number(name) for name in steps), -1)


def restore(run: RunFolder, root: remote.RemoteFile, files: Mapping[str, remote.RemoteFile]) -> None:
    """Replace the run folder by its mirror; checkpoints that are not whole or damaged are left out."""
    logger.info(f"restoring {run} from its mirror {root.url}")
    whole = set().union(*checkpoints_of(files).values())
    wanted = [file for name, file in files.items() if name in whole or not in_checkpoint(name)]
    with atomic_folder(run.path, layout=LAYOUT) as folder, tempfile.TemporaryDirectory(prefix="headstock-") as records:
        jobs = [(file, folder / file.name, Path(records) / f"{file.name}.record") for file in wanted]
        remote.download_all(jobs)
        for name in checkpoints_of(files):
            if damage := find_damage(folder / name):
                logger.warning(f"{root.url}/{name} is damaged ({damage}): left out")
                remove_folder(folder / name)
