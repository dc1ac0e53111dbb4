"""Endpoints of tasks and language models: one per labelled task, such as /v1/classify, and /v1/fill and /v1/score."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, cast

from fastapi import APIRouter, Request

from headstock.data.mask_gaps import MASK
from headstock.data.records import Records
from headstock.errors import UserError
from headstock.inference.inputs import iter_rows, list_texts
from headstock.inference.pipeline import Pipeline
from headstock.serve.request_models import FillRequest, PredictRequest, ScoreRequest, task_request
from headstock.serve.routes import JsonResponse, add_route, unless_disconnected
from headstock.serve.served_models import ABILITIES, ServedModel, ServedModels
from headstock.serve.settings import ServeSettings
from headstock.tasks.base import TASKS
from headstock.tasks.labelled import LabelledTask


def task_router(models: ServedModels, settings: ServeSettings) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["tasks"])

    def add_task(task: type[LabelledTask]) -> None:
        def is_task(pipeline: Pipeline) -> bool:
            return pipeline.task.name == task.name

        async def answer(request: Request, body: PredictRequest) -> JsonResponse:
            model = models.find(body.model, is_task, f"answer /v1/{task.name}")
            chosen = {name: getattr(body, name) for name in task.prediction_settings}
            return await predict_rows(request, body, model, {k: v for k, v in chosen.items() if v is not None})

        summary = f"Use a {task.title}"
        add_route(router, f"/{task.name}", task_request(task), answer, settings, summary=summary)

    for name in TASKS.names():
        task = TASKS.get(name)
        if task.is_labelled and task.trainable:
            add_task(cast(type[LabelledTask], task))

    async def predict(request: Request, body: PredictRequest) -> JsonResponse:
        return await predict_rows(request, body, models.find(body.model, *ABILITIES["predict"]), {})

    async def predict_rows(
        request: Request, body: PredictRequest, model: ServedModel, changed: Mapping[str, Any]
    ) -> JsonResponse:
        rows = encode_rows(model.pipeline, body.input, settings)
        if body.abstain_below is not None:
            model.pipeline.abstention_task()
        compute = partial(predictions, model.pipeline, abstain_below=body.abstain_below, **changed)
        options = {"abstain_below": body.abstain_below, **changed}
        work = model.compute("predict", compute, rows, timeout=settings.timeout, **options)
        return JsonResponse({"model": model.name, "predictions": await unless_disconnected(request, work)})

    async def fill(request: Request, body: FillRequest) -> JsonResponse:
        model, texts = models.find_for("fill", body.model), list_texts(body.input)
        masks = sum(text.count(MASK) for text in texts)
        if masks * body.top > settings.max_candidates:
            limit = f"the limit of {settings.max_candidates} candidates (max_candidates)"
            raise UserError(f"input: {masks} masks with top {body.top} are more than {limit}")
        if body.normalize and not body.among:
            raise UserError("normalize is only for among")
        options = {"top": body.top, "pieces": body.pieces, "among": tuple(body.among), "normalize": body.normalize}
        compute = partial(model.pipeline.fill, **options)  # type: ignore[arg-type]
        work = model.compute("fill", compute, texts, timeout=settings.timeout, **options)
        filled = [asdict(row) for row in await unless_disconnected(request, work)]
        fills = [fills for row in filled for fills in row["fills"]]
        return JsonResponse({"model": model.name, "fills": fills, "texts": filled})

    async def score(request: Request, body: ScoreRequest) -> JsonResponse:
        model, texts = models.find_for("score", body.model), list_texts(body.input)
        pseudo = body.pseudo or None
        kind = model.pipeline.likelihood_kind(pseudo)
        compute = partial(model.pipeline.score, pseudo=pseudo)
        work = model.compute("score", compute, texts, timeout=settings.timeout, pseudo=pseudo)
        scores = [
            {
                "text": row.text,
                "log_likelihood": row.log_likelihood,
                "tokens": [{"token": token, "log_likelihood": value} for token, value in row.tokens],
            }
            for row in await unless_disconnected(request, work)
        ]
        return JsonResponse({"model": model.name, "kind": kind, "scores": scores})

    add_route(router, "/predict", PredictRequest, predict, settings, summary="Use a run of any labelled task")
    add_route(router, "/fill", FillRequest, fill, settings, summary="Fill in each [MASK] with the most likely words")
    add_route(router, "/score", ScoreRequest, score, settings, summary="Score how likely texts are")
    return router


def encode_rows(pipeline: Pipeline, rows: Any, settings: ServeSettings) -> list[dict[str, Any]]:
    """The rows of a request as the columns that the task reads."""
    task = pipeline.labelled_task()
    inputs = [
        task.row_from_columns(row) if isinstance(row, Mapping) else row
        for row in (rows if isinstance(rows, list) else [rows])
    ]
    if not 1 <= len(inputs) <= settings.max_texts:
        raise UserError(f"input: {len(inputs)} rows, expected from 1 to the limit of {settings.max_texts}")
    columns = task.columns_of(list(iter_rows(inputs, task)))
    encoded = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for number, row in enumerate(encoded):
        if (size := sum(map(characters, row.values()))) > settings.max_characters:
            raise UserError(f"input[{number}]: {size} characters, more than the limit of {settings.max_characters}")
    return encoded


def characters(value: Any) -> int:
    return len(value) if isinstance(value, str) else sum(map(len, value or ()))


def predictions(
    pipeline: Pipeline, rows: list[dict[str, Any]], *, abstain_below: float | None, **changed: Any
) -> list[dict[str, Any]]:
    """The predictions for encoded rows by the run's task, with changed settings."""
    task = pipeline.labelled_task().with_settings(**changed)
    records = Records("row", list(range(1, len(rows) + 1)), {name: [row[name] for row in rows] for name in rows[0]})
    return pipeline.predictions_of(task, task.prepare(records, labelled=False), abstain_below)
