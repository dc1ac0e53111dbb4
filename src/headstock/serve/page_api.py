"""The web page: its files, the runs it shows, and what it needs beside the public API."""

import asyncio
import html
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, HTMLResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field

from headstock.data.mask_gaps import MASK
from headstock.errors import HeadstockError, UserError
from headstock.explain.attention import need_attention
from headstock.explain.hooks import need_block_stacks
from headstock.inference.pipeline import Pipeline
from headstock.serve.explain_api import explain_run, page_response, render_page
from headstock.serve.request_models import ExplainRequest, limited
from headstock.serve.served_models import ServedModel, ServedModels
from headstock.serve.settings import ServeSettings
from headstock.tasks.labelled import is_labelled
from headstock.tasks.widgets import Heatmap, InputField, Widget
from headstock.train.run_folder import RunFolder

STATIC = Path(__file__).parent / "static"
MAX_MAP_LINES = 200
MAX_EXAMPLE = 200  # characters
PATH_SETTINGS = ("data", "run", "file")
CURVE_NAMES = ("loss", "perplexity", "accuracy", "f1", "bleu", "lr")

PROBLEM_PAGE = """<!doctype html><meta charset="utf-8"><title>No explanation</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem; color: #1c2128; background: #fdfcfa; }}
@media (prefers-color-scheme: dark) {{ body {{ color: #e8e6e1; background: #15171b; }} }}
</style><p>{message}</p>
"""

router = APIRouter(include_in_schema=False)
static_files = StaticFiles(directory=STATIC)


@router.get("/")
async def index() -> FileResponse:
    return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})


# Runs


@router.get("/page/runs")
async def runs(request: Request) -> dict[str, Any]:
    """Every run with its widgets and views."""
    models, settings = served(request)
    return {"runs": [describe_run(model) for model in models], "limits": page_limits(settings)}


def describe_run(model: ServedModel) -> dict[str, Any]:
    pipeline = model.pipeline
    task, run = pipeline.task, pipeline.run
    return {
        "name": model.name,
        "task": task.name,
        "title": task.title,
        "family": pipeline.config.family,
        "parameters": sum(weight.numel() for weight in pipeline.model.parameters()),
        "device": str(pipeline.model.device),
        "length": pipeline.length,
        "widgets": [with_example(widget, run).to_dict() for widget in task.widgets],
        "embeds": "embeddings" in model.endpoints,
        "predicts": is_labelled(task),
        "columns": [field.name for field in task.input_fields] if is_labelled(task) else [],
        "texts_per_row": task.texts_per_row,
        "explains": [view.to_dict() for view in EXPLAIN_VIEWS if view.fits(model)],
        "explain_inputs": [asdict(field) for field in explain_inputs(pipeline)],
        "curves": run.metrics.is_file(),
        "reports": list(find_reports(run)),
    }


def with_example(widget: Widget, run: RunFolder) -> Widget:
    """The widget of a language model with the start of a text that the run was not trained on, if it has one."""
    samples = run.results().get("samples") or [] if run.is_finished() else []
    texts = [sample["given"].strip() for sample in samples if sample.get("kind") == "continued"]
    if widget.view != "generate" or not texts:
        return widget
    return replace(widget, inputs=(replace(widget.inputs[0], example=min(texts, key=len)[-MAX_EXAMPLE:]),))


@dataclass(frozen=True)
class ExplainView:
    """A kind of explanation that the page offers."""

    kind: str
    title: str
    needs: Callable[[Pipeline], None] = lambda pipeline: None  # raises for runs that cannot be explained so
    text: bool = True  # it is about a text, not about the model alone

    def fits(self, model: ServedModel) -> bool:
        if "explain" not in model.endpoints:
            return False
        try:
            self.needs(model.pipeline)
        except UserError:
            return False
        return True

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.kind, "title": self.title, "text": self.text}


def needs_attention(pipeline: Pipeline) -> None:
    need_attention(pipeline.model, "run")


def needs_blocks(pipeline: Pipeline) -> None:
    need_block_stacks(pipeline.model.backbone, "run")


def needs_answer(pipeline: Pipeline) -> None:
    task = pipeline.task
    if task.is_labelled and not (task.predicts_classes or task.translates):
        raise UserError("predictions are explained for classifiers, translators and language models")


EXPLAIN_VIEWS = (
    ExplainView("attention", "Attention weights", needs_attention),
    ExplainView("prediction", "Why this prediction?", needs_answer),
    ExplainView("residual", "Residual stream and logit lens", needs_blocks),
    ExplainView("layer", "One layer, step by step", needs_blocks),
    ExplainView("gradients", "Gradients"),
    ExplainView("mask", "Attention mask", needs_attention),
    ExplainView("model", "Architecture", text=False),
    ExplainView("params", "Parameters and cost", text=False),
)


def explain_inputs(pipeline: Pipeline) -> tuple[InputField, ...]:
    if is_labelled(pipeline.task):
        return pipeline.task.input_fields
    example = f"The film was {MASK}." if pipeline.task.fills_masks else "Once upon a time"
    return (InputField("text", "Text", example=example),)


def page_limits(settings: ServeSettings) -> dict[str, int]:
    return {"max_file": settings.max_file, "max_map_lines": min(MAX_MAP_LINES, settings.max_texts)}


def find_reports(run: RunFolder) -> dict[str, Path]:
    """The reports that a run is part of: its own, and that of the comparison or sweep that contains it."""
    reports = {"run": run.report, "comparison": run.path.parent.parent / "report.html"}
    if run.path.parent.name != "runs" or not (run.path.parent.parent / "results.json").is_file():
        del reports["comparison"]
    return {name: path for name, path in reports.items() if path.is_file()}


@router.get("/page/runs/{name}/card")
async def card(request: Request, name: str) -> dict[str, Any]:
    """The model card, the settings and the metrics with their intervals."""
    models, _ = served(request)
    run = models.get(name).pipeline.run
    results = run.results() if run.is_finished() else {}
    metrics = results.get("test") or results.get("valid") or results.get("metrics") or {}
    return {
        "card": run.model_card.read_text(encoding="utf-8") if run.model_card.is_file() else "",
        "settings": flat_settings(run.config()),
        "metrics": metric_rows(metrics),
        "measured_on": "test rows" if results.get("test") else "validation data",
    }


def flat_settings(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Settings as `section.name` and text, without the paths of this machine."""
    rows: list[tuple[str, str]] = []
    for name, value in settings.items():
        if isinstance(value, dict):
            rows += [] if name in PATH_SETTINGS else flat_settings(value, f"{prefix}{name}.")
        elif name not in PATH_SETTINGS:
            rows.append((prefix + name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
    return rows


def metric_rows(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    intervals = metrics.get("intervals") or {}
    return [
        {"name": name, "value": value, "interval": intervals.get(name)}
        for name, value in metrics.items()
        if isinstance(value, int | float) and np.isfinite(value)
    ]


@router.get("/page/runs/{name}/curves")
async def curves(request: Request, name: str) -> dict[str, Any]:
    """The values of metrics.jsonl by step: one chart per metric, with a line for training and one for validation."""
    models, _ = served(request)
    rows = models.get(name).pipeline.run.read_metrics()
    charts = []
    for metric in CURVE_NAMES:
        # the smoothed training metric of every log line, or what was measured at each validation
        training = max((metric_points(rows, name) for name in (metric, f"train_{metric}")), key=len)
        lines = {"training": training, "validation": metric_points(rows, f"valid_{metric}")}
        if lines := {line: points for line, points in lines.items() if len(points) > 1}:
            charts.append({"metric": metric, "lines": lines})
    return {"charts": charts}


def metric_points(rows: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    values = ((row["step"], row.get(key)) for row in rows)
    return [(step, value) for step, value in values if isinstance(value, int | float) and np.isfinite(value)]


# Predictions with their display


class DisplayRequest(BaseModel):
    model: str | None = None
    input: Annotated[dict[str, str], Field(description="texts by column names")]


@router.post("/page/predict")
async def predict(request: Request, body: DisplayRequest) -> dict[str, Any]:
    """A prediction and the parts by which it is displayed."""
    models, settings = served(request)
    model = models.find_for("predict", body.model)
    task = model.pipeline.labelled_task()
    texts = [body.input.get(field.name, "") for field in task.input_fields]
    check_characters(texts, settings)
    row = task.row_from_texts(texts)
    if any(widget.aligned for widget in task.widgets):
        (alignment,) = await model.compute("align", align_rows(model.pipeline), [row], timeout=settings.timeout)
        prediction = {"text": alignment.text}
        weights = np.round(alignment.weights.astype(float), 3).tolist()
        picture = [Heatmap("Alignment by cross-attention", alignment.target, alignment.source, weights)]
    else:
        (prediction,) = await model.compute("predict", model.pipeline.predict_values, [row], timeout=settings.timeout)
        picture = []
    parts = [part.to_dict() for part in [*task.display(row, prediction), *picture]]
    return {"model": model.name, "prediction": prediction, "parts": parts}


def align_rows(pipeline: Pipeline) -> Any:
    return lambda rows: [pipeline.align(row) for row in rows]


# Map of texts


class MapRequest(BaseModel):
    model: str | None = None
    input: list[str]
    query: str = ""


@router.post("/page/map")
async def embedding_map(request: Request, body: MapRequest) -> dict[str, Any]:
    """Texts on a plane, by the first two principal components of their embeddings, and their similarity to a query."""
    models, settings = served(request)
    model, limit = models.find_for("embeddings", body.model), page_limits(settings)["max_map_lines"]
    if not 2 <= len(body.input) <= limit:
        raise UserError(f"input: needs 2 to {limit} lines, not {len(body.input)}")
    texts = [*body.input, *([body.query] if body.query.strip() else [])]
    check_characters(texts, settings)
    compute = lambda rows: list(model.pipeline.embed(rows))  # noqa: E731
    vectors = np.stack(await model.compute("embed", compute, texts, timeout=settings.timeout))
    lines = vectors[: len(body.input)]
    answer: dict[str, Any] = {"model": model.name, "points": principal_components(vectors).tolist()}
    if len(texts) > len(lines):
        answer["similarities"] = [round(float(value), 4) for value in cosine(lines, vectors[-1])]
    return answer


def principal_components(vectors: np.ndarray, count: int = 2) -> np.ndarray:
    """(N, 2) coordinates from -1 to 1; the sign is fixed by the largest one, so that a map does not flip."""
    centered = vectors.astype(np.float64) - vectors.mean(0)
    left, values, _ = np.linalg.svd(centered, full_matrices=False)
    points = (left * values)[:, :count]
    points = np.pad(points, ((0, 0), (0, count - points.shape[1])))
    points = points * np.sign(points[np.abs(points).argmax(0), np.arange(count)])
    return np.round(points / max(float(np.abs(points).max()), 1e-9), 4)


def cosine(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(query)
    return vectors @ query / np.maximum(norms, 1e-12)


# Pages in a sandboxed frame


@router.get("/page/report")
async def report(request: Request, model: str, name: str, dark: bool = False) -> HTMLResponse:
    models, _ = served(request)
    reports = find_reports(models.get(model).pipeline.run)
    if name not in reports:
        raise UserError(f"name: {model} has no such report")
    return framed(reports[name].read_text(encoding="utf-8"), dark=dark)


@router.get("/page/explain")
async def explain(request: Request, model: str, kind: str, input: str = "null", dark: bool = False) -> HTMLResponse:
    """The page of an explanation; the input is JSON. A frame shows the answer, so that an error is a page as well."""
    models, settings = served(request)
    try:
        values = {"kind": kind, "input": json.loads(input)}
        body = cast(ExplainRequest, limited(ExplainRequest, settings).model_validate(values))
        document = await explain_run(models.find_for("explain", model), body, settings)
        return framed(await asyncio.to_thread(render_page, document), dark=dark)
    except (HeadstockError, ValueError) as error:
        message = models.public_message(error) if isinstance(error, HeadstockError) else "the input is not valid"
        return framed(PROBLEM_PAGE.format(message=html.escape(message)), dark=dark)


def framed(page: str, *, dark: bool) -> HTMLResponse:
    """A self-contained page in the theme of the page around it."""
    return page_response(page.replace("prefers-color-scheme: dark", "min-width: 0" if dark else "max-width: 0"))


def check_characters(texts: list[str], settings: ServeSettings) -> None:
    limit = settings.max_characters
    for text in texts:
        if len(text) > limit:
            raise UserError(f"input: a text has {len(text):,} characters, at most {limit:,} are allowed")


def served(request: Request) -> tuple[ServedModels, ServeSettings]:
    return request.app.state.models, request.app.state.settings
