"""The server process from its start to its end: what it prints, how it stops, and what a crash loses."""

import json
import signal
import socket
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="needs headstock[serve]")

from headstock.errors import ConfigError
from headstock.serve.settings import ServeSettings
from tests.serve.conftest import start_server
from tests.serve.sockets import connect, exchange, path_that_reads_a_body, read_to_end, request_bytes


def test_a_public_address_needs_a_token():
    assert ServeSettings().host == "127.0.0.1"
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(ConfigError, match="token"):
            ServeSettings(host=host)
        assert ServeSettings(host=host, token="secret").host == host
    for problem in ({"port": 70_000}, {"timeout": 0.0}, {"max_body": -1}, {"workers": 0}, {"token": "two words"}):
        with pytest.raises(ConfigError, match=next(iter(problem))):
            ServeSettings(**problem)


def test_problems_are_one_line_before_anything_is_loaded(call, runs):
    run = str(runs["causal"])
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for arguments, words in (
            ([run, "--port", str(port)], f"--port {port}: is in use"),
            ([run, "--host", "192.0.2.1", "--token", "t"], "--host 192.0.2.1"),
            ([run, "--host", "0.0.0.0"], "--token"),
            ([run, "--set", "max_tokns=3"], "max_tokens"),
            ([run, "--set", "host=0.0.0.0"], "--set host"),
            (["no-such-run"], "no-such-run"),
        ):
            _, err = call("serve", *arguments, code=2)
            assert words in err and len(err.splitlines()) == 1


def test_nothing_is_lost_by_kill_9_and_running_requests_finish_at_sigterm(runs, tmp_path):
    first = start_server(tmp_path / "first.txt", runs["causal"], "--json", "--device", "cpu")
    started = json.loads(first.log.read_text().splitlines()[0])
    assert started == {"url": first.url, "models": ["causal"]}
    openapi, path = exchange(first.url, "GET", "/openapi.json"), path_that_reads_a_body(first.url)
    first.process.kill()
    first.process.wait(10)
    port = first.url.rpartition(":")[2]

    second = start_server(tmp_path / "second.txt", runs["causal"], "--device", "cpu", "--port", port)
    assert second.url == first.url  # at once, though connections of the first are not quite closed
    assert exchange(second.url, "GET", "/openapi.json")[2] == openapi[2]
    with connect(second.url) as running, connect(second.url) as idle:
        body = b'{"model": "no-such-model"}'
        request = request_bytes("POST", path, body, Content_Type="application/json")
        running.sendall(request[:-5])
        exchange(second.url, "GET", "/health")  # by now the server has read the other connections too
        second.process.send_signal(signal.SIGTERM)
        assert read_to_end(idle) == b""  # closed
        with pytest.raises(OSError):  # noqa: PT011  # refused
            connect(second.url)
        running.sendall(request[-5:])
        assert b"no-such-model" in read_to_end(running)
    assert second.process.wait(30) == 0
    assert "Traceback" not in second.log.read_text()


def test_several_workers_share_a_port_and_stop_together(runs, tmp_path):
    server = start_server(tmp_path / "log.txt", runs["causal"], "--workers", "2", "--device", "cpu", forked=False)
    if (children := Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")).exists():
        assert len(children.read_text().split()) >= 2  # beside the resource tracker of multiprocessing
    assert exchange(server.url, "GET", "/health")[0] == 200
    assert exchange(server.url, "GET", "/health", host="evil.example")[0] == 403  # workers have the same settings
    assert server.stop() == 0
    assert "Traceback" not in server.log.read_text()
