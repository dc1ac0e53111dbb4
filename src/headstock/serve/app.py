"""The FastAPI application: routes, errors and middleware put together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from headstock import __version__
from headstock.serve import page_api
from headstock.serve.error_handlers import add_error_handlers
from headstock.serve.explain_api import explain_router
from headstock.serve.files import files_router
from headstock.serve.openai_api import openai_router
from headstock.serve.prometheus import MetricsMiddleware
from headstock.serve.security import SecurityMiddleware
from headstock.serve.served_models import ServedModels
from headstock.serve.settings import ServeSettings
from headstock.serve.task_api import task_router


def create_app(models: ServedModels, settings: ServeSettings) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        models.close()

    app = FastAPI(title="Headstock", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.models, app.state.settings = models, settings
    for make_router in (openai_router, task_router, files_router, explain_router):
        app.include_router(make_router(models, settings))
    app.include_router(page_api.router)
    app.mount("/static", page_api.static_files)
    add_error_handlers(app, models)
    app.add_middleware(SecurityMiddleware, settings=settings)
    app.add_middleware(MetricsMiddleware, metrics=models.metrics)  # around the other, so that it counts refusals

    @app.get("/health", summary="Whether the server answers")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", summary="Counters for Prometheus", response_class=Response)
    async def metrics() -> Response:
        return Response(models.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app
