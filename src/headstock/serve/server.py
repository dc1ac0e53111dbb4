"""Starts uvicorn with an application, and stops it once all requests are answered."""

import uvicorn

from headstock.serve.app import create_app
from headstock.serve.models import ServedModels
from headstock.serve.settings import ServeSettings


def run_server(models: ServedModels, settings: ServeSettings) -> None:
    config = uvicorn.Config(create_app(models, settings), host=settings.host, port=settings.port, log_level="warning")
    uvicorn.Server(config).run()
