"""What all endpoints share: routes with limited requests, and work that ends when the client leaves."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from headstock.io import finite
from headstock.serve.request_models import ApiRequest, limited
from headstock.serve.settings import ServeSettings

Result = TypeVar("Result")
ERROR_SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ERRORS = {
    400: "The body is not UTF-8",
    401: "No valid token",
    403: "Host or origin not allowed",
    404: "No such model",
    413: "The request is too large",
    422: "Invalid input; the message names the limit",
    503: "The queue is full; try again later",
    504: "The request took longer than the time limit",
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": ERROR_SCHEMA}}}
    for status, text in ERRORS.items()
}


class JsonResponse(JSONResponse):
    """JSON as the command line prints it: null in place of NaN and infinity."""

    def render(self, content: Any) -> bytes:
        try:
            return super().render(content)
        except ValueError:
            return super().render(finite(content))


class ClientGoneError(Exception):
    """The client closed its connection before the answer was ready."""


def add_route(
    router: APIRouter,
    path: str,
    request_class: type[ApiRequest],
    handler: Callable[..., Awaitable[Response]],
    settings: ServeSettings,
    *,
    summary: str,
) -> None:
    """A POST route whose body is a request with the limits of the server."""
    body_class = limited(request_class, settings)

    async def endpoint(request: Request, body: body_class) -> Response:  # type: ignore[valid-type]
        return await handler(request, body)

    router.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        name=path.strip("/").replace("/", "_"),
        summary=summary,
        responses=RESPONSES,
        response_model=None,
        route_class_override=BodyRoute,
    )


class BodyRoute(APIRoute):
    """A route that validates the bytes of a body at once, which takes half the time of FastAPI's dependencies."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        body_class: type[ApiRequest] = self.endpoint.__annotations__["body"]

        async def handle(request: Request) -> Response:
            try:
                body = body_class.model_validate_json(await request.body())
            except ClientDisconnect:
                raise ClientGoneError from None
            except ValidationError as error:
                raise RequestValidationError(error.errors(include_url=False, include_context=False)) from None
            response: Response = await self.endpoint(request, body)
            return response

        return handle


def unless_disconnected(request: Request, work: Awaitable[Result]) -> Awaitable[Result]:
    """The result of work, which is cancelled if the client closes its connection."""

    async def wait() -> Result:
        future, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request))
        gone.add_done_callback(lambda _: future.cancel())
        try:
            return await future
        except asyncio.CancelledError:
            if gone.done():
                raise ClientGoneError from None
            raise
        finally:
            future.cancel()
            gone.cancel()

    return wait()


async def disconnected(request: Request) -> None:
    """Return when the client closes its connection; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
