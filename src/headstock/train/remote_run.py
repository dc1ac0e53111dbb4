"""Runs at URLs: the files that a command needs, downloaded into the cache and verified by the run's manifest."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from headstock import config
from headstock.cache_use import mark_used
from headstock.data import remote, urls
from headstock.errors import UserError, WorkError
from headstock.io import cache_folder, checksum_mismatch, write_text
from headstock.train.tensors import MANIFEST

CONFIG = "config.json"
# what is read from a run; TensorBoard events and report.html stay where they are
JSON_FILES = ("data", "tokenizer", "source_tokenizer", "results", "calibration")
RUN_FILES = [f"{name}.json" for name in JSON_FILES]
RUN_FILES += ["model.safetensors", "adapter.safetensors", "metrics.jsonl", "predictions.jsonl", "README.md"]
CHECKPOINT = re.compile(r"(?P<run>.+)/(?P<checkpoint>checkpoints/step-\d+)")
FILE_NAME = re.compile(r"\w[\w.-]*")  # a name in the manifest of a checkpoint, which cannot lead to another folder
ADDRESS = "url.txt"
REPORTED_BYTES = 1_000_000  # smaller downloads are not worth a message


def remote_runs() -> Path:
    """The folder of the runs that were downloaded because a command named their URL."""
    return cache_folder() / "runs"


def url_of(path: Path) -> str | None:
    """The URL that a downloaded run, or a part of it, came from; None for a path elsewhere."""
    if not path.is_relative_to(remote_runs()):
        return None
    folder, _, *rest = path.relative_to(remote_runs()).parts or ("", "")
    address = remote_runs() / folder / ADDRESS
    return "/".join([address.read_text(encoding="utf-8"), *rest]) if address.is_file() else None


def fetch_run(url: str, *, download: bool = True) -> Path:
    """The local copy of a run or checkpoint, after all that has changed there was fetched again."""
    shown = urls.redact(url).rstrip("/")
    match = CHECKPOINT.fullmatch(shown)
    run_url, checkpoint = (match["run"], match["checkpoint"]) if match else (shown, "")
    root = mark_used(remote_runs() / remote.cache_name(run_url))
    run = root / remote.safe_name(urls.file_name(run_url) or "run")
    if download:
        write_text(root / ADDRESS, run_url)
        copy = FolderCopy(run_url, run, root / ".versions")
        copy.fetch_run(PurePosixPath())
        if checkpoint:
            copy.fetch_checkpoint(PurePosixPath(checkpoint))
    elif not (run / CONFIG).is_file():
        raise UserError(f"{shown}: has not been downloaded on this machine")
    return run / checkpoint


class FolderCopy:
    """The copy of a remote folder, file by file: no listing is needed, which web servers do not have."""

    def __init__(self, url: str, folder: Path, records: Path) -> None:
        self.url, self.folder, self.records = url, folder, records

    def fetch_run(self, part: PurePosixPath) -> None:
        """Fetch a run, or a member of an ensemble."""
        if not self.fetch(part, [CONFIG]):
            raise UserError(f"{urls.join(self.url, str(part)) if part.parts else self.url}: no such run (no {CONFIG})")
        self.fetch(part, [MANIFEST])
        self.fetch_verified(part, RUN_FILES)
        transfer = config.read_settings(self.folder / part / CONFIG, tables=("transfer",)).get("transfer", {})
        count = transfer.get("ensemble", 1)
        if isinstance(count, int) and 1 < count < 1000:
            for number in range(count):
                self.fetch_run(part / "members" / str(number))

    def fetch_checkpoint(self, part: PurePosixPath) -> None:
        if self.fetch(part, [MANIFEST]):
            names = config.read_settings(self.folder / part / MANIFEST)
            self.fetch_verified(part, [name for name in names if FILE_NAME.fullmatch(name)])

    def fetch_verified(self, part: PurePosixPath, names: list[str]) -> None:
        """Fetch files and compare them with the manifest beside them; those that differ are fetched once more."""
        self.fetch(part, names)
        for attempt in (1, 2):
            path = self.folder / part / MANIFEST
            manifest = config.read_settings(path) if path.is_file() else {}
            files = {name: self.folder / part / name for name in names if name in manifest}
            damage = {name: problem for name in files if (problem := checksum_mismatch(files[name], manifest[name]))}
            if not damage:
                return
            if attempt == 2:
                raise WorkError(f"{self.url}: {'; '.join(damage.values())}; the run there is damaged or being written")
            for name in damage:
                files[name].unlink(missing_ok=True)
            self.fetch(part, [MANIFEST, *damage])

    def fetch(self, part: PurePosixPath, names: list[str]) -> list[str]:
        """Fetch the files that exist; local copies of others are removed. Returns the names of those that exist."""

        def look_up(name: str) -> remote.RemoteFile | None:
            file = remote.open_url(urls.join(urls.with_credentials(self.url), str(part / name)))
            try:
                info = file.info()
            except UserError as error:  # servers that do not list their files deny access to those that do not exist
                if name == CONFIG and not isinstance(error, remote.NotFound):
                    raise
                return None
            return remote.RemoteFile(file.fs, file.path, file.url, name, info) if info["type"] == "file" else None

        with ThreadPoolExecutor(remote.PARALLEL_FILES) as threads:
            files = dict(zip(names, threads.map(look_up, names), strict=True))
        jobs = []
        for name, file in files.items():
            if file is None:
                (self.folder / part / name).unlink(missing_ok=True)
            else:
                jobs.append((file, self.folder / part / name, self.records / part / f"{name}.json"))
        remote.download_all(jobs, reported=REPORTED_BYTES)
        return [name for name, file in files.items() if file is not None]
