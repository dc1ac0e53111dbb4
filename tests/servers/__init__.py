"""Real servers for the tests of URLs, S3, HTTP and SFTP, each a process of its own for the whole session."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

USER, PASSWORD = "anne", "correct-horse"
HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def server(*command: str, port: int, seconds: float = 60) -> Iterator[None]:
    """A process that listens on a port of this machine, after some seconds at most."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + seconds
        while True:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None and time.monotonic() < end, f"{command} does not listen"
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    port = free_port()
    with server(sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port), port=port):
        yield f"http://127.0.0.1:{port}"


@dataclass
class Bucket:
    """A bucket of its own for a test, with what is needed to fill it without the code under test."""

    name: str
    client: Any

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def put(self, name: str, data: bytes | Path) -> str:
        self.client.put_object(Bucket=self.name, Key=name, Body=data.read_bytes() if isinstance(data, Path) else data)
        return f"{self.url}/{name}"

    def put_folder(self, name: str, folder: Path) -> str:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{name}/{path.relative_to(folder).as_posix()}", path)
        return f"{self.url}/{name}"

    def names(self) -> list[str]:
        return [entry["Key"] for entry in self.client.list_objects_v2(Bucket=self.name).get("Contents", [])]

    def get(self, name: str) -> bytes:
        return self.client.get_object(Bucket=self.name, Key=name)["Body"].read()

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=name)


@cache
def _s3_client() -> Any:
    import botocore.session

    return botocore.session.get_session().create_client("s3")


@pytest.fixture
def bucket(s3_endpoint, monkeypatch, tmp_path) -> Bucket:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }.items():
        monkeypatch.setenv(name, value)
    client = _s3_client()
    name = f"bucket-{time.time_ns():x}"
    client.create_bucket(Bucket=name)
    return Bucket(name, client)


@dataclass
class WebFolder:
    """A folder that the web server shows at several addresses, which differ in what it does with a request."""

    folder: Path
    host: str

    def url(self, name: str, how: str = "ranges", *, user: str = "") -> str:
        """`ranges` answers range requests, `plain` does not, `dropped` closes the connection half-way at times, `short`
        always, `chunked` tells no size, `private` asks for user and password."""
        return f"http://{user and f'{user}@'}{self.host}/{how}/{name}"

    def requests(self) -> list[str]:
        """The requests since the server began: method, path, range."""
        return (self.folder / ".requests").read_text().splitlines()


@pytest.fixture(scope="session")
def web(tmp_path_factory) -> Iterator[WebFolder]:
    pytest.importorskip("aiohttp")
    folder, port = tmp_path_factory.mktemp("web"), free_port()
    (folder / ".requests").touch()
    with server(sys.executable, str(HERE / "http_server.py"), str(folder), str(port), USER, PASSWORD, port=port):
        yield WebFolder(folder, f"127.0.0.1:{port}")


@dataclass
class SFTPFolder:
    folder: Path
    port: int
    host_key: str  # as in known_hosts

    def url(self, name: str, *, user: str = f"{USER}:{PASSWORD}") -> str:
        return f"sftp://{user}@127.0.0.1:{self.port}/{name}"


@pytest.fixture(scope="session")
def sftp_server(tmp_path_factory) -> Iterator[SFTPFolder]:
    paramiko = pytest.importorskip("paramiko")
    pytest.importorskip("fsspec.implementations.sftp")
    folder, port, key_file = tmp_path_factory.mktemp("sftp"), free_port(), tmp_path_factory.mktemp("key") / "key"
    key = paramiko.ECDSAKey.generate()
    key.write_private_key_file(str(key_file))
    command = (sys.executable, str(HERE / "sftp_server.py"), str(folder), str(port), str(key_file), USER, PASSWORD)
    with server(*command, port=port):
        yield SFTPFolder(folder, port, f"[127.0.0.1]:{port} {key.get_name()} {key.get_base64()}")


@pytest.fixture
def sftp(sftp_server, monkeypatch, tmp_path) -> SFTPFolder:
    """The server, known to a user who has no other keys."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "known_hosts").write_text(f"{sftp_server.host_key}\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return sftp_server


@pytest.fixture(autouse=True)
def fresh_file_systems() -> Iterator[None]:
    """fsspec keeps its file systems, with the environment they were created in."""
    yield
    if "fsspec" in sys.modules:
        from fsspec import AbstractFileSystem

        for kind in [AbstractFileSystem, *_subclasses(AbstractFileSystem)]:
            kind.clear_instance_cache()


def _subclasses(kind: type) -> list[type]:
    return [each for child in kind.__subclasses__() for each in (child, *_subclasses(child))]
