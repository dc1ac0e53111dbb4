"""HTTP by hand over a real socket, for requests that no well-behaved client sends."""

import json
import socket
from urllib.parse import urlsplit


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), timeout=20)


def request_bytes(method: str, path: str, body: bytes = b"", *, host: str = "localhost", **headers: str) -> bytes:
    """A request; `headers` are given with underscores for hyphens and replace the usual ones."""
    lines = {"Host": host} | ({"Content-Length": str(len(body))} if body else {})
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    return "\r\n".join([f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in lines.items()), "", ""]).encode() + body


def read_to_end(connection: socket.socket) -> bytes:
    """What arrives until the server closes the connection."""
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionError:
        pass
    return received


def exchange(url: str, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (names in lower case) and body of the answer to one request on a connection of its own."""
    with connect(url) as connection:
        connection.sendall(request_bytes(method, path, body, **{"Connection": "close"} | headers))
        head, _, content = read_to_end(connection).partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.split(": ", 1) for line in lines)
    return int(status.split()[1]), {name.lower(): value for name, value in pairs}, content


def error_of(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    """Status and message of an answer that must be an error in OpenAI's form."""
    status, _, content = answer
    error = json.loads(content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return status, error["message"]


def path_that_reads_a_body(url: str, **headers: str) -> str:
    """A path of the API whose handler waits for the body; others are answered before it arrives."""
    paths = json.loads(exchange(url, "GET", "/openapi.json", **headers)[2])["paths"]
    return next(path for path, methods in paths.items() if "requestBody" in methods.get("post", {}))
