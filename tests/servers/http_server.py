"""A web server for tests: FOLDER PORT USER PASSWORD. The first part of a path says how the rest is answered."""

import base64
import re
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

FOLDER, PORT, USER, PASSWORD = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
CREDENTIALS = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
dropped: dict[str, int] = {}


class Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        wanted = self.headers.get("Range", "")
        with (FOLDER / ".requests").open("a") as log:
            log.write(f"{self.command} {self.path} {wanted}\n")
        how, _, name = self.path.lstrip("/").partition("/")
        name = unquote(name.partition("?")[0])
        if how == "private" and self.headers.get("Authorization") != CREDENTIALS:
            return self.send_error(401)
        if how == "error":
            return self.send_error(int(name))
        path = FOLDER / name
        if path.is_dir() and self.path.endswith("/"):
            links = [
                f'<a href="{quote(each.name)}{"/" if each.is_dir() else ""}">x</a>' for each in sorted(path.iterdir())
            ]
            if (path / ".links").is_file():
                links += [f'<a href="{link}">x</a>' for link in (path / ".links").read_text().split()]
            return self.send(200, ["<html>" + "".join(links)], body, {"Content-Type": "text/html"})
        if not path.is_file():
            return self.send_error(404)
        data = path.read_bytes()
        headers = {"ETag": f'"{path.stat().st_mtime_ns}-{len(data)}"', "Content-Type": "text/plain"}
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        status, part = 200, data
        if match and how != "plain":
            first, last = int(match[1]), min(int(match[2]), len(data) - 1)
            status, part = 206, data[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        if how == "chunked":
            headers |= {"Transfer-Encoding": "chunked"}
            chunks = [f"{len(part):x}\r\n".encode() + part + b"\r\n0\r\n\r\n"] if part else [b"0\r\n\r\n"]
            return self.send(status, chunks, body, headers, length=None)
        request = f"{self.path} {wanted}"  # blocks are fetched side by side
        count = dropped[request] = dropped.get(request, 0) + body
        if body and (how == "short" or (how == "dropped" and count % 2)):
            self.send(status, [part[: len(part) // 2]], body, headers, length=len(part))
            self.close_connection = True
            return None
        return self.send(status, [part], body, headers)

    def send(self, status, parts, body, headers, length=0) -> None:
        parts = [part.encode() if isinstance(part, str) else part for part in parts]
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if length is not None:
            self.send_header("Content-Length", str(length or sum(map(len, parts))))
        self.end_headers()
        if body:
            for part in parts:
                self.wfile.write(part)

    def log_message(self, *arguments) -> None:
        pass


ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
