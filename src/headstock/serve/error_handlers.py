"""What the application answers to errors."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from headstock.errors import HeadstockError, UserError
from headstock.serve.responses import INVALID, busy_response, error_response, internal_error
from headstock.serve.routes import ClientGoneError
from headstock.serve.served_models import ModelNotFoundError, ServedModels
from headstock.serve.worker import QueueFullError, TimeLimitError

CLIENT_GONE = 499  # nginx's status for a client that left; nobody reads it


def add_error_handlers(app: FastAPI, models: ServedModels) -> None:
    @app.exception_handler(HeadstockError)
    async def answer_error(request: Request, error: HeadstockError) -> JSONResponse:
        message = models.public_message(error)
        match error:
            case QueueFullError():
                return busy_response(message)
            case TimeLimitError():
                return error_response(504, message, "timeout")
            case ModelNotFoundError():
                return error_response(404, message, INVALID, param="model", code="model_not_found")
            case UserError():
                return error_response(422, message, INVALID)
        return internal_error(error)

    @app.exception_handler(RequestValidationError)
    async def answer_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        param, message = describe_validation(error.errors())
        return error_response(422, message, INVALID, param=param)

    @app.exception_handler(HTTPException)
    async def answer_http(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(error.status_code, message, INVALID, error.headers)

    @app.exception_handler(ClientGoneError)
    async def answer_nobody(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=CLIENT_GONE)


def describe_validation(errors: Sequence[Any]) -> tuple[str | None, str]:
    """The field and the message of the most telling problem: of a union of types, the one whose limit is exceeded."""
    telling = [error for error in errors if not error["type"].endswith("_type")]
    error = (telling or errors)[0]
    location = [part for part in error["loc"] if part != "body"]
    if error["type"] == "json_invalid" or not location:
        return None, f"the body is no valid JSON object: {error['msg']}"
    field = str(location[0])
    index = "".join(f"[{part}]" for part in location[1:] if isinstance(part, int))
    return field, f"{field}{index}: {error['msg']}"
