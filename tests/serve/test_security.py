"""Who may ask and how much: a real server process with small limits, asked over real sockets."""

import json
import signal
import socket
import threading
import time
from functools import partial

import pytest

from tests.serve.conftest import start_server
from tests.serve.sockets import connect, error_of, exchange, path_that_reads_a_body, read_to_end, request_bytes

TOKEN = "open-sesame"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
SECONDS = 1.5  # of the server's socket_timeout
KEEP_ALIVE = 5  # seconds after which uvicorn closes an idle connection
LIMITS = {"socket_timeout": SECONDS, "max_connections": 8, "max_body": 50_000, "max_file": 80_000, "grace": 1}


@pytest.fixture(scope="module")
def strict(runs, tmp_path_factory):
    """A server with a token and small limits."""
    pytest.importorskip("uvicorn", reason="needs headstock[serve]")
    limits = [word for name, value in LIMITS.items() for word in ("--set", f"{name}={value}")]
    options = ["--token", TOKEN, "--allow-host", "models.example", "--device", "cpu", *limits]
    server = start_server(tmp_path_factory.mktemp("strict") / "log.txt", runs["causal"], *options)
    yield server
    server.process.kill()
    server.process.wait(10)


@pytest.fixture
def url(strict) -> str:
    return strict.url


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD", "DELETE"])
def test_host_and_origin_must_be_our_own_on_every_method(url, method):
    """Another name that resolves to this machine is DNS rebinding; `null` is a sandboxed or local page."""

    def status(**headers):
        return exchange(url, method, "/health", **headers)[0]

    usual = status()
    assert usual == {"GET": 200, "HEAD": 405}.get(method, 401)  # without a token
    for host in ("localhost", "127.0.0.1:8000", "[::1]:8000", "MODELS.example", "models.example:443"):
        assert status(host=host) == usual
        assert status(host=host, Origin=f"http://{host}") == usual
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "192.0.2.1", "a@localhost", "[::"):
        assert status(host=host) == 403
        assert status(host=host, Origin=f"http://{host}") == 403
    for origin in (
        "null",
        "http://evil.example",
        "http://localhost:3000",
        "file://",
        "",
        "http://localhost@evil.example",
    ):
        assert status(Origin=origin) == 403


def test_only_the_page_and_health_are_public(url):
    for path in ("/v1/models", "/v1/completions", "/metrics", "/openapi.json", "/login", "/anything"):
        answer = exchange(url, "GET", path)
        assert error_of(answer)[0] == 401 and answer[1]["www-authenticate"] == "Bearer"
    assert exchange(url, "GET", "/health")[0] == 200
    assert exchange(url, "GET", "/openapi.json", **BEARER)[0] == 200
    for wrong in ("Bearer", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN, "Bearer \xfc"):
        assert exchange(url, "GET", "/openapi.json", Authorization=wrong)[0] == 401


def test_login_sets_a_cookie_that_stands_for_the_token(url):
    assert exchange(url, "POST", "/login", Authorization="Bearer wrong")[0] == 401
    status, headers, _ = exchange(url, "POST", "/login", **BEARER)
    cookie, *attributes = headers["set-cookie"].split("; ")
    assert status == 204 and {"HttpOnly", "SameSite=strict"} <= set(attributes) and TOKEN not in cookie
    assert exchange(url, "GET", "/openapi.json", Cookie=cookie)[0] == 200
    assert exchange(url, "GET", "/openapi.json", Cookie=cookie[:-1])[0] == 401
    assert exchange(url, "GET", "/openapi.json", Cookie=cookie, Origin="http://evil.example")[0] == 403


def chunked(size: int) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (1000, b"x" * 1000) for _ in range(size // 1000)) + b"0\r\n\r\n"


def test_a_body_above_the_limit_is_refused_announced_or_not(url):
    limit = LIMITS["max_body"]
    status, message = error_of(exchange(url, "POST", "/v1/completions", b"x" * (limit + 1), **BEARER))
    assert status == 413 and f"{limit:,} bytes" in message
    with connect(url) as connection:
        path = path_that_reads_a_body(url, **BEARER)
        connection.sendall(request_bytes("POST", path, Transfer_Encoding="chunked", **BEARER))
        connection.sendall(chunked(limit + 1000))
        assert b" 413 " in read_to_end(connection).split(b"\r\n")[0]
    status, message = error_of(exchange(url, "POST", "/v1/files", b"x" * 2 * LIMITS["max_file"], **BEARER))
    assert status == 422 and "larger than" in message
    assert exchange(url, "POST", "/v1/nothing", b"x" * (limit - 1), **BEARER)[0] == 404  # the control


def test_answers_carry_security_headers(url):
    for path, status in (("/health", 200), ("/nothing", 401)):
        code, headers, _ = exchange(url, "GET", path)
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert code == status and policy["default-src"] == "'none'" and policy["script-src"] == "'self'"
        assert headers["x-content-type-options"] == "nosniff" and "server" not in headers


def test_errors_have_one_form_and_name_no_path(url, runs):
    assert error_of(exchange(url, "GET", "/v1/nothing", **BEARER))[0] == 404
    assert error_of(exchange(url, "DELETE", "/health", **BEARER))[0] == 405
    for body in (b"{", b"[]", b"\xff", b'{"input": "a"}', b'{"model": "../../etc/passwd", "input": "a"}'):
        answer = exchange(url, "POST", "/v1/classify", body, Content_Type="application/json", **BEARER)
        status, message = error_of(answer)
        assert 400 <= status < 500 and str(runs["causal"].parent) not in message, body


def test_what_would_block_a_run_for_minutes_is_refused_with_the_limit_named(server):
    for path, body, words in (
        ("/v1/fill", {"input": "[MASK]" * 6, "top": 100}, "limit of 500"),
        ("/v1/classify", {"input": ["a"] * 257}, "limit of 256"),
        ("/v1/classify", {"input": "a" * 20_001}, "20000"),
        ("/v1/classify", {"input": []}, "0 rows"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1025}, "1024"),
        ("/v1/completions", {"prompt": "a", "n": 17}, "16"),
        ("/v1/completions", {"prompt": "a", "top_k": 101}, "100"),
    ):
        answer = exchange(server.url, "POST", path, json.dumps(body).encode(), Content_Type="application/json")
        status, message = error_of(answer)
        assert status == 422 and words in message, message


def seconds_until_closed(connection) -> tuple[float, bytes]:
    started = time.monotonic()
    received = read_to_end(connection)
    return time.monotonic() - started, received


def drip(connection, data: bytes, stop: threading.Event) -> None:
    """Send one byte at a time, each well within any limit on silence."""
    for number in range(len(data)):
        if stop.wait(0.1):
            return
        try:
            connection.sendall(data[number : number + 1])
        except OSError:
            return


def slow_requests(path: str) -> dict[str, tuple[int, bytes, bytes]]:
    """By kind: the status of the answer, what is sent at once and what is sent byte by byte."""
    post = request_bytes("POST", path, Content_Length="500", **BEARER)
    early = request_bytes("GET", "/v1/nothing", Content_Length="9", **BEARER)
    return {
        "nothing": (408, b"", b""),
        "slow headers": (408, b"", request_bytes("GET", "/health", X_Padding="x" * 500)),
        "slow body": (408, post, b" " * 500),
        "stalled body": (408, post + b"{", b""),
        "slow body without a token": (408, request_bytes("POST", path, Content_Length="500"), b" " * 500),
        "idle after an answer": (404, request_bytes("POST", "/v1/nothing", b"{}", **BEARER), b""),
        "idle after an answer that came before the body": (404, early, b" " * 9),
    }


def test_slow_requests_lose_their_connection_in_time(url):
    """All at once, so that the test waits once; a request in one piece is answered meanwhile."""
    slow, stop = slow_requests(path_that_reads_a_body(url, **BEARER)), threading.Event()
    connections = {name: connect(url) for name in slow}
    try:
        for name, (_, head, rest) in slow.items():
            connections[name].sendall(head)
            threading.Thread(target=drip, args=[connections[name], rest, stop], daemon=True).start()
        assert exchange(url, "GET", "/health")[0] == 200
        for name, connection in connections.items():
            seconds, received = seconds_until_closed(connection)
            assert seconds < KEEP_ALIVE + 5, name  # a busy machine is late, but does not wait for the 50 s of a drip
            assert received.startswith(b"HTTP/1.1 %d " % slow[name][0]), name
    finally:
        stop.set()
        for connection in connections.values():
            connection.close()


@pytest.mark.parametrize("limited", [True, False])
def test_bare_uvicorn_waits_for_ever(limited):
    """The control: without our protocol, a connection that sends nothing stays open."""
    import uvicorn

    from headstock.serve.protocol import TimedProtocol
    from headstock.serve.settings import ServeSettings

    protocol = partial(TimedProtocol, settings=ServeSettings(socket_timeout=0.2)) if limited else "h11"
    server = uvicorn.Server(uvicorn.Config(lambda: None, http=protocol, log_level="error", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        thread = threading.Thread(target=server.run, args=[[listener]], daemon=True)
        thread.start()
        with socket.create_connection(address, timeout=10 if limited else 1) as connection:
            if limited:
                assert read_to_end(connection).startswith(b"HTTP/1.1 408")
            else:
                with pytest.raises(TimeoutError):
                    connection.recv(1)
        server.should_exit = True
        thread.join(10)


def test_a_second_request_on_a_connection_has_its_own_time(url):
    with connect(url) as connection:
        for _ in range(3):  # together longer than the limit
            connection.sendall(request_bytes("GET", "/health"))
            while not connection.recv(65536).endswith(b'{"status":"ok"}'):
                pass
            time.sleep(SECONDS / 2)
        connection.sendall(b"GET /hea")  # and is then as limited as the first
        seconds, received = seconds_until_closed(connection)
        assert seconds < SECONDS + 5 and b" 408 " in received.split(b"\r\n")[0]


def test_too_many_connections_are_refused_and_the_server_recovers(url):
    idle = [connect(url) for _ in range(LIMITS["max_connections"])]
    try:
        answer = exchange(url, "GET", "/health")
        assert error_of(answer)[0] == 503 and int(answer[1]["retry-after"]) > 0
    finally:
        for connection in idle:
            connection.close()
    while exchange(url, "GET", "/health")[0] == 503:
        time.sleep(0.05)


def test_ctrl_c_stops_the_server_and_the_time_to_finish_is_limited(strict):
    """The last test here: the server stops cleanly after all that was done to it."""
    with connect(strict.url) as connection:
        path = path_that_reads_a_body(strict.url, **BEARER)
        connection.sendall(request_bytes("POST", path, Content_Length="50", **BEARER))
        exchange(strict.url, "GET", "/health")  # by now the server has read the other connection too
        strict.process.send_signal(signal.SIGINT)
        assert read_to_end(connection).startswith(b"HTTP/1.1 503")  # the rest of its body never comes
    assert strict.process.wait(30) == 0
    assert "Traceback" not in strict.log.read_text()
