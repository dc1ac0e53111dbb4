"""Server-sent events, and errors as OpenAI's API sends them: {"error": {"message", "type", "param", "code"}}."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

RETRY_SECONDS = 1  # that a client is asked to wait when the server is busy
INVALID, SERVER = "invalid_request_error", "server_error"

logger = logging.getLogger("uvicorn.error")  # goes to stderr


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    status: int,
    message: str,
    kind: str,
    headers: Mapping[str, str] | None = None,
    *,
    param: str | None = None,
    code: str | None = None,
) -> JSONResponse:
    return JSONResponse(error_body(message, kind, param=param, code=code), status_code=status, headers=headers)


def busy_response(message: str) -> JSONResponse:
    return error_response(503, message, "overloaded", {"Retry-After": str(RETRY_SECONDS)})


def internal_error(error: BaseException) -> JSONResponse:
    """The answer to an error of ours: the traceback goes to the log, and nothing of it to the client."""
    logger.error("internal error", exc_info=error)
    return error_response(500, "internal error", SERVER)


def event(data: Mapping[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
