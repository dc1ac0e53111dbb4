"""Endpoints of the fine-tuned tasks: one per labelled task, such as /v1/classify."""

from typing import Any

from fastapi import APIRouter, Request

from headstock.inference.inputs import iter_rows
from headstock.serve.models import ServedModels
from headstock.serve.settings import ServeSettings

router = APIRouter(prefix="/v1")


@router.post("/predict")
async def predict(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    models: ServedModels = request.app.state.models
    settings: ServeSettings = request.app.state.settings
    model = models.get(body.get("model"))
    task = model.pipeline.labelled_task()
    rows = list(iter_rows(body["input"], task))
    predictions = await model.compute("predict", model.pipeline.predict, rows, timeout=settings.timeout)
    return {"model": model.name, "predictions": predictions}
