"""Middleware that decides who may ask and how much they may send, and adds security headers to every answer."""

import asyncio
import hashlib
import hmac
import ipaddress
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstock.serve.responses import INVALID, busy_response, error_response, internal_error
from headstock.serve.settings import LOCAL_HOSTS, ServeSettings

PUBLIC_PATHS = ("/", "/health", "/favicon.ico")  # read without a token, as is everything under STATIC
STATIC = "/static/"
LOGIN = "/login"  # POST with a token: sets a cookie for what a page loads by its address, such as frames and downloads
COOKIE = "headstock_session"
UPLOAD_PATHS = ("/v1/files",)  # take a file, limited by `max_file`
DRAIN = 20_000_000  # bytes of a refused body that are read, because many clients see an answer only after sending all
HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[\w.-]+)(:\d{1,5})?", re.ASCII)
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; frame-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class SecurityMiddleware:
    """Checks the Host and Origin headers, the token and the size of a request, in this order."""

    def __init__(self, app: ASGIApp, settings: ServeSettings):
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer: Response | None
        try:
            if answer := self.refusal(scope) or self.login(scope):
                await drain(receive, Headers(scope=scope))
            else:
                await self.app(scope, self.limited(scope, receive), send_with_headers)
        except asyncio.CancelledError:  # uvicorn cancels what still runs when the time to stop is over
            answer = busy_response("the server is stopping")
        except Exception as error:
            answer = internal_error(error)
        if answer and not started:
            await answer(scope, receive, send_with_headers)

    def refusal(self, scope: Scope) -> JSONResponse | None:
        """The answer to a request that is not allowed; None if it is."""
        headers = Headers(scope=scope)
        host, origins = headers.get("host", ""), headers.getlist("origin")
        if not self.is_own_host(host):
            message = f"Host {host!r} is not a name of this server; --allow-host NAME allows another"
            return error_response(403, message, INVALID)
        if any(not is_same_origin(origin, host) for origin in origins):
            return error_response(403, f"Origin {origins[0]!r} is not this server", INVALID)
        if not self.is_public(scope) and not self.has_token(scope):
            message = "missing or wrong token: send Authorization: Bearer TOKEN"
            return error_response(401, message, "authentication_error", {"WWW-Authenticate": "Bearer"})
        limit, status = self.body_limit(scope)
        if int(headers.get("content-length", 0)) > limit:
            return error_response(status, too_large(limit), INVALID, {"Connection": "close"})
        return None

    def is_own_host(self, header: str) -> bool:
        """Whether a Host header names this server. A page of another site that resolves its name to this machine (DNS
        rebinding) sends that name."""
        name = host_name(header)
        if name in LOCAL_HOSTS or name in (self.settings.host.lower(), *map(str.lower, self.settings.allow_hosts)):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or self.settings.host not in LOCAL_HOSTS  # an address cannot be resolved anew

    def is_public(self, scope: Scope) -> bool:
        path = scope["path"]
        return scope["method"] in ("GET", "HEAD") and (path in PUBLIC_PATHS or path.startswith(STATIC))

    def has_token(self, scope: Scope) -> bool:
        token = self.settings.token
        if token is None:
            return True
        request = HTTPConnection(scope)
        kind, _, value = request.headers.get("authorization", "").partition(" ")
        by_header = kind.lower() == "bearer" and equal(value.strip(), token)
        return by_header or equal(request.cookies.get(COOKIE, ""), session_of(token))

    def login(self, scope: Scope) -> Response | None:
        """Sets the session cookie for a request that has sent the token."""
        if (scope["method"], scope["path"]) != ("POST", LOGIN) or self.settings.token is None:
            return None
        response = Response(status_code=204)
        response.set_cookie(COOKIE, session_of(self.settings.token), httponly=True, samesite="strict")
        return response

    def body_limit(self, scope: Scope) -> tuple[int, int]:
        """Bytes that a request may have, and the status of the answer to one that has more."""
        if scope["path"] in UPLOAD_PATHS:
            return self.settings.max_file, 422
        return self.settings.max_body, 413

    def limited(self, scope: Scope, receive: Receive) -> Receive:
        """`receive` that counts the bytes of a body whose length was not announced."""
        size, (limit, status) = 0, self.body_limit(scope)

        async def receive_limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                if message["more_body"]:
                    await drain(receive, Headers(scope=scope))
                raise HTTPException(status, too_large(limit), {"Connection": "close"})
            return message

        return receive_limited


def host_name(header: str) -> str:
    """The name in a Host header, without the port and the brackets of an IPv6 address."""
    match = HOST.fullmatch(header.lower())
    return match["name"].strip("[]").rstrip(".") if match else ""


def is_same_origin(origin: str, host: str) -> bool:
    """Whether an Origin header names the server that the Host header names; `null` does not."""
    scheme, _, netloc = origin.lower().partition("://")
    return scheme in ("http", "https") and netloc == host.lower()


def equal(text: str, secret: str) -> bool:
    return hmac.compare_digest(text.encode("utf-8", "surrogateescape"), secret.encode())


def session_of(token: str) -> str:
    """The cookie's value: derived from the token, so that the browser does not keep the token itself."""
    return hmac.new(token.encode(), b"headstock session", hashlib.sha256).hexdigest()


def too_large(limit: int) -> str:
    return f"the request is larger than {limit:,} bytes"


async def drain(receive: Receive, headers: Headers) -> None:
    """Read the rest of a body that nobody needs, up to a size, unless its sender waits for permission to send it."""
    size = 0
    while "expect" not in headers and size < DRAIN:
        message = await receive()
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            return
