"""Files at URLs (s3, gs, hf, https, sftp, ...), opened by fsspec: listed, and downloaded into the cache once.

A download is written block after block to a hidden file beside its destination. One that was interrupted continues
where it stopped, and a file has its name only when all its bytes are there.
"""

import errno
import hashlib
import io
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote

from headstock.cache_use import mark_used
from headstock.data import urls
from headstock.errors import HeadstockError, UserError, WorkError
from headstock.io import cache_folder, write_json

logger = logging.getLogger(__name__)

BLOCK_BYTES = 8 << 20  # of one request
PARALLEL_FILES, PARALLEL_BLOCKS = 4, 4  # at once; together they bound memory: 4 x 4 blocks of 8 MiB
RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0)  # before each new try
TIMEOUT_SECONDS = 60  # without a byte
PROGRESS_SECONDS = 5.0
MAX_NAME_BYTES = 150
MAX_LISTED, MAX_DEPTH = 1_000_000, 20  # files below one URL, and folders within each other
# what identifies the content of a file, in order of preference; the size is always compared
VERSIONS = ("ETag", "etag", "md5Hash", "blob_id", "Last-Modified", "LastModified", "mtime", "updated", "created")
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "http": "aiohttp"}
PACKAGES |= {"https": "aiohttp", "sftp": "paramiko", "ssh": "paramiko", "abfs": "adlfs", "az": "adlfs"}
IN_EXTRA = ("s3fs", "aiohttp", "paramiko")  # of headstock[remote]
SIGN_IN = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or FSSPEC_S3_ANON=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS or run gcloud auth application-default login",
    "hf": "run hf auth login, or set HF_TOKEN",
    "http": "put user and password into the URL or into ~/.netrc",
    "sftp": "give the user in the URL, and a key in ~/.ssh or the ssh agent",
}
SIGN_IN |= {"https": SIGN_IN["http"], "gcs": SIGN_IN["gs"], "ssh": SIGN_IN["sftp"], "s3a": SIGN_IN["s3"]}
# classes of errors by name, because their libraries may not be installed
TRANSIENT = {"ClientConnectionError", "ClientPayloadError", "HTTPClientError", "SSHException", "IncompleteReadError"}
TRANSIENT |= {"TransferEncodingError", "ContentLengthError", "ConnectError", "ReadError", "RemoteProtocolError"}
TRANSIENT |= {"NoValidConnectionsError"}
DENIED = {"NoCredentialsError", "PartialCredentialsError", "AuthenticationException", "PasswordRequiredException"}
MAGIC = {False: r"[*?\[]", True: r"[*\[]"}  # of a glob; in HTTP (True) a question mark begins the query
RENAMING = ("file", "local", "sftp", "ssh")  # where a half written file would be visible under its name
Result = TypeVar("Result")


class NotFound(UserError):
    """There is no file at a URL."""


@dataclass(frozen=True)
class RemoteFile:
    """One file of a file system."""

    fs: Any
    path: str  # as the file system names it
    url: str  # without credentials, as it is shown
    name: str = ""  # relative to the folder that was listed
    listed: Mapping[str, Any] | None = None  # what the listing said about it

    def info(self) -> Mapping[str, Any]:
        """Size and version, as the server has them now."""
        self.fs.invalidate_cache()
        return retry(lambda: self.fs.info(self.path), self)


def open_url(url: str) -> RemoteFile:
    """The file or folder at a URL, which need not exist."""
    url = urls.normalize(url)
    shown, original = urls.redact(url), urls.with_credentials(url)
    fs, path = retry(lambda: _file_system(original), RemoteFile(None, "", shown))  # SFTP connects here
    return RemoteFile(fs, path, shown)


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec
    from fsspec.core import url_to_fs

    scheme = urls.scheme_of(url)
    if scheme in ("sftp", "ssh"):
        kind = _sftp_class()
        return kind(**kind._get_kwargs_from_urls(url)), kind._strip_protocol(url)
    if "::" not in url and scheme not in fsspec.available_protocols():
        raise UserError(f"{urls.redact(url)}: cannot be opened: the protocol {scheme} is not known")
    if scheme in urls.HTTP:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_SECONDS / 2, sock_read=TIMEOUT_SECONDS)
        # trust_env: proxies and ~/.netrc; identity: the size of the file is that of the answer
        options = {"client_kwargs": {"timeout": timeout, "trust_env": True}, "headers": {"Accept-Encoding": "identity"}}
        return url_to_fs(url, **options)
    return url_to_fs(url)


@cache
def _sftp_class() -> Any:
    """fsspec's SFTP with the user's ~/.ssh/config and known_hosts, without which it would accept any server.

    One request at a time: paramiko loses answers if several threads wait for them on one channel.
    """
    import paramiko
    from fsspec.implementations.sftp import SFTPFileSystem

    class SFTP(SFTPFileSystem):
        def _connect(self) -> None:
            settings, file = paramiko.SSHConfig(), Path("~/.ssh/config").expanduser()
            if file.is_file():
                settings = paramiko.SSHConfig.from_path(str(file))
            host = settings.lookup(self.host)
            options = {"port": int(host.get("port", 22)), "timeout": TIMEOUT_SECONDS / 2}
            options |= {"username": host["user"]} if "user" in host else {}
            options |= {"key_filename": host["identityfile"]} if "identityfile" in host else {}
            self.client = paramiko.SSHClient()
            self.client.load_system_host_keys()
            self.client.set_missing_host_key_policy(paramiko.RejectPolicy())
            given = {name: value for name, value in self.ssh_kwargs.items() if value is not None}
            self.client.connect(host["hostname"], **options | given)
            self.ftp = self.client.open_sftp()
            self.ftp.get_channel().settimeout(TIMEOUT_SECONDS)

        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
            with self.ftp.open(path, "rb") as opened:
                begin, stop = start or 0, opened.stat().st_size if end is None else end
                return b"".join(opened.readv([(begin, stop - begin)]))  # without waiting for each packet of 32 KB

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
            self.ftp.putfo(io.BytesIO(value), path, len(value))  # without waiting, and checks the size

        def reconnect(self) -> None:
            if not self.client.get_transport().is_active():
                self._connect()

    lock = threading.RLock()
    for name in ("info", "ls", "cat_file", "pipe_file", "put_file", "mv", "_rm", "makedirs", "rmdir", "reconnect"):
        setattr(SFTP, name, _locked(getattr(SFTP, name), lock))
    return SFTP


def _locked(method: Callable[..., Any], lock: threading.RLock) -> Callable[..., Any]:
    def locked(*arguments: Any, **options: Any) -> Any:
        with lock:
            return method(*arguments, **options)

    return locked


# Errors


@contextmanager
def one_line_errors(url: str) -> Iterator[None]:
    """Turn whatever a file system raises into one line without credentials."""
    try:
        yield
    except HeadstockError:
        raise
    except Exception as error:
        raise describe_error(error, url) from None


def describe_error(error: BaseException, url: str) -> HeadstockError:
    causes = list(_causes(error))
    scheme = urls.scheme_of(url)
    names = {kind.__name__ for cause in causes for kind in type(cause).__mro__}
    reason = urls.hide_credentials(" ".join(str(causes[-1]).split())) or type(causes[-1]).__name__
    codes = [code for cause in causes if (code := _status(cause))]
    if isinstance(error, ImportError):
        package = PACKAGES.get(scheme, getattr(error, "name", None) or scheme)
        what = "'headstock[remote]'" if package in IN_EXTRA else package
        return UserError(f"{url}: this needs {package}, which is not installed: pip install {what}")
    if names & DENIED or "PermissionError" in names or {401, 403} & set(codes):
        status = f" ({codes[0]})" if codes else ""
        hint = f"; {SIGN_IN[scheme]}" if scheme in SIGN_IN else ""
        return UserError(f"{url}: access denied{status}{hint}")
    if "BadHostKeyException" in names:
        return UserError(f"{url}: the server's host key differs from the one in ~/.ssh/known_hosts")
    if "not found in known_hosts" in reason:
        host = urls.host_of(url).rpartition("/")[2].rpartition("@")[2]
        hint = f"connect once with ssh ssh://{host}"
        return UserError(f"{url}: the server's host key is not in ~/.ssh/known_hosts; {hint}")
    if {404, 410} & set(codes) or ("FileNotFoundError" in names and not codes and not is_transient(error)):
        return NotFound(f"{url}: no such {'bucket' if 'bucket does not exist' in reason else 'file'}")
    if any(isinstance(cause, socket.gaierror) for cause in causes) or "ClientConnectorDNSError" in names:
        return WorkError(f"{url}: cannot be reached: the name of the host is not known ({reason})")
    if any(isinstance(cause, TimeoutError) for cause in causes):
        return WorkError(f"{url}: cannot be reached: no response within {TIMEOUT_SECONDS} s")
    if is_transient(error) or codes:
        return WorkError(f"{url}: cannot be reached: {reason}")
    return UserError(f"{url}: cannot be opened ({reason})")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and those that it was raised from."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error stands for, which each library keeps elsewhere."""
    response = getattr(error, "response", None)
    boto = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    own = error.status if hasattr(error, "status") else getattr(error, "code", 0)
    values = map(str, (own, boto, getattr(response, "status_code", 0)))
    return next((int(value) for value in values if value.isdecimal() and 400 <= int(value) < 600), None)


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    for cause in _causes(error):
        if (code := _status(cause)) is not None:
            return code in (408, 425, 429) or code >= 500
        names = {kind.__name__ for kind in type(cause).__mro__}
        if names & DENIED or "BadHostKeyException" in names or "not found in known_hosts" in str(cause):
            return False
        if isinstance(cause, ConnectionError | TimeoutError | EOFError | socket.gaierror) or names & TRANSIENT:
            return True
        if isinstance(cause, OSError) and cause.errno in (errno.EIO, None) and type(cause) is OSError:
            return "closed" in str(cause).lower()  # paramiko's "Socket is closed"
    return False


def retry(request: Callable[[], Result], file: RemoteFile) -> Result:
    """The result of a request that is repeated while its errors are transient."""
    for wait in (*RETRY_SECONDS, None):
        try:
            return request()
        except HeadstockError:
            raise
        except Exception as error:
            if wait is None or not is_transient(error):
                raise describe_error(error, file.url) from None
            logger.info(f"{file.url}: trying again in {wait:g} s ({type(error).__name__})")
        time.sleep(wait)
        if hasattr(file.fs, "reconnect"):
            with one_line_errors(file.url):
                file.fs.reconnect()
    raise AssertionError


# Folders and globs


def is_folder(file: RemoteFile) -> bool:
    """Whether a URL names a folder. One of HTTP does if it ends with a slash, as in the index pages of servers."""
    if urls.is_http(file.url):
        return urls.split_query(file.url)[0].endswith("/")
    return file.info()["type"] == "directory"


def has_magic(url: str) -> bool:
    """Whether a URL is a glob."""
    base, _ = urls.split_query(urls.normalize(url))
    return re.search(MAGIC[urls.is_http(url)], base.removeprefix(urls.host_of(base))) is not None


def list_folder(url: str) -> list[RemoteFile]:
    """All files below a URL, sorted like those of a local folder."""
    return sorted(_files_below(url), key=lambda file: PurePosixPath(file.name))


def list_glob(url: str) -> list[RemoteFile]:
    """The files that a URL with * ? [ ] or ** matches, sorted."""
    from fsspec.utils import glob_translate

    base, query = urls.split_query(urls.with_credentials(url))
    host, is_http = urls.host_of(base), urls.is_http(url)
    parts = base.removeprefix(host).split("/")
    fixed = next(number for number, part in enumerate(parts) if re.search(MAGIC[is_http], part))
    root, pattern = f"{host}{'/'.join(parts[:fixed])}/{query}", "/".join(parts[fixed:])
    depth = None if "**" in pattern else len(parts) - fixed
    matches = re.compile(glob_translate(unquote(pattern) if is_http else pattern)).fullmatch
    files = [file for file in _files_below(root, depth) if matches(file.name)]
    return sorted(files, key=lambda file: file.name)


def _files_below(url: str, depth: int | None = None) -> list[RemoteFile]:
    """Visible files below a folder. Names that lead out of it are ignored, whoever wrote them."""
    root = open_url(url)
    root.fs.invalidate_cache()
    if urls.is_http(url):
        entries = _crawl(root, depth)
    else:
        found = retry(lambda: root.fs.find(root.path, maxdepth=depth, detail=True), root)
        entries = ((_relative(name, root.path), name, info) for name, info in found.items())
    files = []
    for name, path, info in entries:
        if name is not None and info.get("type") != "directory" and not any(p[0] == "." for p in name.split("/")):
            full = path if urls.is_http(url) else urls.join(urls.with_credentials(url), name)
            files.append(RemoteFile(root.fs, path, urls.redact(full), name, info))
            if len(files) > MAX_LISTED:
                raise UserError(f"{root.url}: more than {MAX_LISTED:,} files")
    return files


def _relative(path: str, root: str) -> str | None:
    """A path below a root, relative to it; None for a path that is not below it."""
    root = root.rstrip("/") + "/"
    name = path.removeprefix(root)
    if name == path or not name or any(part in ("", ".", "..") for part in name.split("/")):
        return None
    return name


def _crawl(root: RemoteFile, depth: int | None) -> Iterator[tuple[str | None, str, Mapping[str, Any]]]:
    """The links of index pages that lead to files below them."""
    folders, visited = deque([(root.path, 1)]), {root.path}
    base = urls.split_query(root.path)[0]
    while folders:
        folder, level = folders.popleft()
        for info in retry(partial(root.fs.ls, folder, detail=True), root):
            link = info["name"]
            if re.search(r"[?#]", link.removeprefix(root.path)):  # other orders of the same page
                continue
            name = _relative(link.rstrip("/"), base)
            if name is None or _relative(unquote(link.rstrip("/")), unquote(base)) is None:
                continue
            if link.endswith("/"):
                if link not in visited and level < (depth or MAX_DEPTH):
                    visited.add(link)
                    folders.append((link, level + 1))
            else:
                yield unquote(name), link, {"type": "file"}


def find_sibling(url: str, names: Iterable[str]) -> RemoteFile | None:
    """The first of these files that exists in the folder of a URL."""

    def existing(name: str) -> RemoteFile | None:
        file = open_url(urls.sibling(urls.with_credentials(url), name))
        try:
            return file if file.info()["type"] != "directory" else None
        except UserError:
            return None

    with ThreadPoolExecutor(PARALLEL_FILES) as threads:
        return next((file for file in threads.map(existing, names) if file is not None), None)


# The cache


def cached_copy(url: str) -> Path:
    """The local copy of a file at a URL, downloaded if it is missing or the server has another version."""
    return cached_copies([open_url(url)])[0]


def cached_copies(files: list[RemoteFile]) -> list[Path]:
    """The local copies of files, several downloaded at once."""
    return download_all([(file, *_cache_paths(file)) for file in files])


def download_all(jobs: list[tuple[RemoteFile, Path, Path]], *, reported: int = 0) -> list[Path]:
    """Bring files to their targets, unless they are there already; a record beside each says which version it is.

    Downloads of at least `reported` bytes are logged.
    """
    progress = Progress()
    with ThreadPoolExecutor(PARALLEL_FILES) as threads:
        copies = [threads.submit(_update, file, target, record, progress) for file, target, record in jobs]
        paths = [copy.result() for copy in copies]
    if progress.files and progress.bytes >= reported:
        logger.info(progress.summary())
    return paths


def cache_name(url: str) -> str:
    """The name of a cache folder for a URL; it depends on no credentials."""
    return hashlib.sha256(urls.redact(url).encode()).hexdigest()[:16]


_owners: dict[Path, str] = {}  # the URL of each cached file that this process has used


def _cache_paths(file: RemoteFile) -> tuple[Path, Path]:
    """Where a file is cached, and its record. Files of one folder share one, and keep their names for the format."""
    base, query = urls.split_query(file.url)
    folder = mark_used(cache_folder() / "urls" / cache_name(base.rpartition("/")[0] + query))
    target = folder / safe_name(urls.file_name(file.url))
    original = urls.split_query(urls.with_credentials(file.url))[1] if MASKED_QUERY.search(query) else ""
    if _owners.setdefault(target, original) != original:
        raise UserError(f"{file.url}: two URLs that differ only in a token or key cannot be told apart in the cache")
    return target, folder / f".{target.name}.json"


MASKED_QUERY = re.compile(re.escape(urls.MASK))


def safe_name(name: str) -> str:
    """A name that stays inside its folder, is visible and not too long; its suffixes, which tell the format, stay."""
    clean = re.sub(r"[\x00-\x1f\x7f/\\:*?\"<>|]", "_", name).lstrip(".")
    if clean == name and name and len(name.encode()) <= MAX_NAME_BYTES:
        return name
    suffixes = "".join(re.findall(r"\.[A-Za-z0-9]{1,8}", clean)[-2:])
    return hashlib.sha256(name.encode()).hexdigest()[:16] + suffixes


def _update(file: RemoteFile, target: Path, record: Path, progress: "Progress") -> Path:
    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    record.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(record.with_name(f"{record.name}.lock")):  # several processes may start at once
        # some servers list files with another ETag than the file itself has
        listed = _version(file.listed or {})
        size = target.stat().st_size if target.is_file() else None
        if listed and _read_record(record, "listed") == listed | {"bytes": size}:
            return target
        try:
            info = file.info()
        except WorkError as error:  # no connection; a file that no longer exists is an error of the user
            if not target.is_file():
                raise
            logger.warning(
                f"{error}; using the copy of {time.strftime('%F %R', time.localtime(target.stat().st_mtime))}"
            )
            return target
        if info.get("type") == "directory":
            raise UserError(f"{file.url}: expected a file, found a folder")
        version = _version(info)
        if version and _read_record(record) == version | {"bytes": size}:
            return target
        for _ in range(2):
            download(file, info, target, record, progress)
            after = file.info()
            if _version(after).get("version") == version.get("version"):
                break
            info, version = after, _version(after)
        else:
            target.unlink(missing_ok=True)
            raise WorkError(f"{file.url}: changes while it is downloaded")
        size = target.stat().st_size
        write_json(record, {"url": file.url, "info": version | {"bytes": size}, "listed": listed | {"bytes": size}})
        return target


def _read_record(path: Path, key: str = "info") -> dict[str, Any]:
    """What is known about a cached file, as the server said in answer to a listing or to a request for it alone."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return {}
    return record if isinstance(record, dict) else {}


def _version(info: Mapping[str, Any]) -> dict[str, Any]:
    """What tells one version of a file from another; empty if the server says nothing but the size."""
    name = next((name for name in VERSIONS if info.get(name)), None)
    return {} if name is None else {"version": f"{name} {info[name]}", "size": info.get("size")}


# Downloads


class Progress:
    """Counts the bytes of several downloads and logs them every few seconds."""

    def __init__(self) -> None:
        self.files, self.bytes, self.total, self.known = 0, 0, 0, True
        self.began = self.logged = time.monotonic()
        self.lock = threading.Lock()

    def start(self, size: int | None, done: int) -> None:
        with self.lock:
            self.files += 1
            self.known = self.known and size is not None
            self.total += (size or 0) - done

    def add(self, size: int) -> None:
        with self.lock:
            self.bytes += size
            now = time.monotonic()
            if now - self.logged >= PROGRESS_SECONDS:
                self.logged = now
                total = f" of {megabytes(self.total)}" if self.known else ""
                logger.info(f"downloaded {megabytes(self.bytes)}{total}, {self.speed()}")

    def speed(self) -> str:
        return f"{megabytes(self.bytes / max(1e-3, time.monotonic() - self.began))}/s"

    def summary(self) -> str:
        return f"downloaded {self.files:,} file{'s' * (self.files > 1)}, {megabytes(self.bytes)} ({self.speed()})"


def megabytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def download(file: RemoteFile, info: Mapping[str, Any], target: Path, record: Path, progress: Progress) -> None:
    """Write all bytes of a file to its target; what an interrupted download of the same version left is used."""
    size, version = info.get("size"), _version(info)
    partial, note = record.with_name(f"{record.name}.part"), record.with_name(f"{record.name}.part.json")
    resumable = size is not None and version and _read_record(note) == version
    done = partial.stat().st_size if resumable and partial.is_file() else 0
    if size is not None:
        _check_space(file, target.parent, size - done)
    try:
        write_json(note, {"info": version})
        with partial.open("ab" if done else "wb") as out:
            progress.start(size, done)
            _write_blocks(file, size, out, done, progress)
            out.flush()
            os.fsync(out.fileno())
        if size is not None and partial.stat().st_size != size:
            found = partial.stat().st_size
            partial.unlink()
            raise WorkError(f"{file.url}: {found:,} bytes arrived, expected {size:,}; try again")
        os.replace(partial, target)
        note.unlink(missing_ok=True)
    except OSError as error:
        raise WorkError(f"{file.url}: could not be saved in {target.parent} ({error.strerror or error})") from None


def _check_space(file: RemoteFile, folder: Path, size: int) -> None:
    if (free := shutil.disk_usage(folder).free) < size:
        raise WorkError(
            f"{file.url}: needs {megabytes(size)}, but the cache {cache_folder()} has {megabytes(free)} left; "
            "set HEADSTOCK_CACHE to a larger disk"
        )


def _write_blocks(file: RemoteFile, size: int | None, out: BinaryIO, done: int, progress: Progress) -> None:
    """Fetch blocks in parallel and write them in order, so that the length of the file says what is there."""
    if size is None or (urls.is_http(file.url) and size > BLOCK_BYTES and not _has_ranges(file, size)):
        _write_stream(file, size, out, progress)
        return
    starts = iter(range(done, size, BLOCK_BYTES))
    pending: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(PARALLEL_BLOCKS) as threads:
        try:
            while True:
                while len(pending) < PARALLEL_BLOCKS and (start := next(starts, None)) is not None:
                    pending.append(threads.submit(_fetch_block, file, start, min(start + BLOCK_BYTES, size), size))
                if not pending:
                    break
                data = pending.popleft().result()
                out.write(data)
                progress.add(len(data))
        finally:
            for future in pending:
                future.cancel()


def _fetch_block(file: RemoteFile, start: int, end: int, size: int) -> bytes:
    def request() -> bytes:
        whole = (start, end) == (0, size)
        data = file.fs.cat_file(file.path) if whole else file.fs.cat_file(file.path, start=start, end=end)
        if len(data) != end - start:
            raise ConnectionError(f"{len(data):,} of {end - start:,} bytes arrived")
        return data

    return retry(request, file)


def _has_ranges(file: RemoteFile, size: int) -> bool:
    """Whether an HTTP server answers with a part of a file; others would send the whole file for each block."""

    def request() -> bool:
        with file.fs.open(file.path, "rb", size=size, cache_type="none") as opened:
            try:
                opened.seek(size - 1)
                return len(opened.read(1)) == 1
            except ValueError:
                return False

    return retry(request, file)


def _write_stream(file: RemoteFile, size: int | None, out: BinaryIO, progress: Progress) -> None:
    """Read a file from its beginning to its end, once more after each lost connection."""

    def request() -> None:
        out.seek(0)
        out.truncate()
        with file.fs.open(file.path, "rb", block_size=0) as opened:
            while data := opened.read(1 << 20):
                out.write(data)
                progress.add(len(data))
        if size is not None and out.tell() != size:
            raise ConnectionError(f"{out.tell():,} of {size:,} bytes arrived")

    retry(request, file)
    if size is None:
        logger.warning(f"{file.url}: the server does not tell the size, so a lost connection may go unnoticed")


# Uploads


def upload(folder: RemoteFile, name: str, content: Path | bytes) -> None:
    """Write a file below a folder, and compare its size with what arrived; half a file is never visible."""
    retry(lambda: _upload(folder, name, content), folder)


def _upload(folder: RemoteFile, name: str, content: Path | bytes) -> None:
    fs, target = folder.fs, f"{folder.path.rstrip('/')}/{name}"
    parent, _, last = target.rpartition("/")
    renames = urls.scheme_of(folder.url) in RENAMING
    written = f"{parent}/.{last}.partial" if renames else target
    if renames:
        fs.makedirs(parent, exist_ok=True)
    if isinstance(content, bytes):
        fs.pipe_file(written, content)
    else:
        fs.put_file(str(content), written)
    if renames:
        fs.mv(written, target)
    fs.invalidate_cache()
    size, expected = fs.info(target)["size"], len(content) if isinstance(content, bytes) else content.stat().st_size
    if size != expected:
        raise ConnectionError(f"{name}: {size:,} of {expected:,} bytes arrived")
