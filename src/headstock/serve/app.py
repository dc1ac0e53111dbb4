"""The FastAPI application: routes, errors and middleware put together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from headstock import __version__
from headstock.errors import HeadstockError, UserError
from headstock.serve import task_api
from headstock.serve.models import ServedModels
from headstock.serve.security import SecurityMiddleware
from headstock.serve.settings import ServeSettings
from headstock.serve.worker import QueueFullError, TimeLimitError

RETRY_SECONDS = 1  # that a client is asked to wait when the queue is full


def create_app(models: ServedModels, settings: ServeSettings) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        models.close()

    app = FastAPI(title="Headstock", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.models, app.state.settings = models, settings
    app.include_router(task_api.router)
    add_error_handlers(app)
    app.add_middleware(SecurityMiddleware, settings=settings)

    @app.get("/health", summary="Whether the server answers")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def add_error_handlers(app: FastAPI) -> None:
    """Errors as OpenAI's API sends them: {"error": {"message": ..., "type": ...}}."""

    @app.exception_handler(HeadstockError)
    async def answer_error(request: Request, error: HeadstockError) -> JSONResponse:
        if isinstance(error, QueueFullError):
            return error_response(503, str(error), "overloaded", {"Retry-After": str(RETRY_SECONDS)})
        if isinstance(error, TimeLimitError):
            return error_response(504, str(error), "timeout")
        if isinstance(error, UserError):
            return error_response(422, str(error), "invalid_request_error")
        return error_response(500, str(error), "server_error")


def error_response(status: int, message: str, kind: str, headers: dict[str, str] | None = None) -> JSONResponse:
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return JSONResponse(body, status_code=status, headers=headers)
