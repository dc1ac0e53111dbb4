"""/v1/explain: what `headstock explain` shows of a run and a text, as facts or as a page."""

import asyncio
import base64
import hashlib
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from headstock.errors import UserError, did_you_mean
from headstock.explain import masks
from headstock.explain.attention import explain_attention, need_attention, select_heads
from headstock.explain.attention_document import attention_document
from headstock.explain.diagram import model_document
from headstock.explain.document import ExplainDocument
from headstock.explain.gradients import block_settings, depth_study, explain_gradients
from headstock.explain.gradients_document import gradient_document, recurrence_document
from headstock.explain.hooks import need_block_stacks
from headstock.explain.inputs import EncodedInput, encode_input, training_target
from headstock.explain.layer_walkthrough import explain_layer
from headstock.explain.layer_walkthrough_document import layer_document
from headstock.explain.logit_attribution import explain_logits, logit_document
from headstock.explain.parameters import explain_parameters
from headstock.explain.parameters_document import parameter_document
from headstock.explain.patching import explain_patch, patch_document
from headstock.explain.prediction import explain_prediction, prediction_document
from headstock.explain.recurrence import explain_recurrence, recurrent_stacks
from headstock.explain.render_document import page
from headstock.explain.residual import explain_residual
from headstock.explain.residual_document import residual_document
from headstock.explain.subject import ExplainSubject
from headstock.serve.request_models import ExplainRequest
from headstock.serve.routes import JsonResponse, add_route, unless_disconnected
from headstock.serve.served_models import ServedModel, ServedModels
from headstock.serve.settings import ServeSettings
from headstock.tasks.labelled import is_labelled

RENDERING = threading.Lock()  # matplotlib draws one page at a time
SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL)


def explain_router(models: ServedModels, settings: ServeSettings) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["explanations"])

    async def explain(request: Request, body: ExplainRequest) -> Response:
        model = models.find_for("explain", body.model)
        document = await unless_disconnected(request, explain_run(model, body, settings))
        if body.format == "json":
            return JsonResponse({"model": model.name, "kind": body.kind, **document.json})
        return page_response(await asyncio.to_thread(render_page, document))

    add_route(router, "/explain", ExplainRequest, explain, settings, summary="Explain what a run computes for a text")
    return router


async def explain_run(model: ServedModel, body: ExplainRequest, settings: ServeSettings) -> ExplainDocument:
    if body.kind not in KINDS:
        names = ", ".join(KINDS)
        raise UserError(f"kind: no explanation {body.kind!r}{did_you_mean(body.kind, KINDS)} (have: {names})")

    def compute(requests: list[ExplainRequest]) -> list[ExplainDocument]:
        return [KINDS[item.kind](model, item) for item in requests]

    (document,) = await model.compute("explain", compute, [body], timeout=settings.timeout)
    return document


def render_page(document: ExplainDocument) -> str:
    with RENDERING:
        return page(document)


def page_response(html: str) -> HTMLResponse:
    return HTMLResponse(html, headers={"Content-Security-Policy": page_policy(html)})


def page_policy(html: str) -> str:
    """A policy under which a page runs its own scripts, without access to the server or anything else."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in SCRIPT.findall(html)]
    scripts = " ".join(f"'sha256-{digest}'" for digest in hashes) or "'none'"
    sources = f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; font-src data:"
    return f"{sources}; base-uri 'none'; form-action 'none'; frame-ancestors 'self'; sandbox allow-scripts"


# Kinds


def input_texts(model: ServedModel, row: Any, name: str = "input") -> list[str]:
    """The texts of one row: a text, a list of texts, or columns by name."""
    if row is None:
        raise UserError(f"{name}: this explanation needs {model.pipeline.task.row_description}")
    if isinstance(row, str):
        return [row]
    if isinstance(row, Mapping):
        task = model.pipeline.task
        columns = task.input_columns if is_labelled(task) else ("text",)
        if set(row) != set(columns):
            raise UserError(f"{name}: expected the columns {', '.join(columns)}, found {', '.join(row)}")
        row = [row[column] for column in columns]
    return [text if isinstance(text, str) else " ".join(text) for text in row]


def subject_of(model: ServedModel) -> ExplainSubject:
    pipeline = model.pipeline
    return ExplainSubject(pipeline.model, pipeline.tokenizer, pipeline.task, pipeline.config, model.name)


def params(model: ServedModel, request: ExplainRequest) -> ExplainDocument:
    return parameter_document(explain_parameters(subject_of(model)))


def architecture(model: ServedModel, request: ExplainRequest) -> ExplainDocument:
    return model_document(subject_of(model), explain_parameters(subject_of(model)))


def mask(model: ServedModel, request: ExplainRequest) -> ExplainDocument:
    need_attention(model.pipeline.model, model.name)
    row = encoded_input(model, request)
    return masks.mask_document(masks.explain_model_masks(model.pipeline.model, row, model.name, where=request.where))


def attention(model: ServedModel, request: ExplainRequest) -> ExplainDocument:
    pipeline = model.pipeline
    need_attention(pipeline.model, model.name, None if request.left_to_right else request.where)
    facts = explain_attention(pipeline.model, encoded_input(model, request), model.name, where=request.where)
    facts = select_heads(facts, layer=request.layer, head=request.head)
    return attention_document(facts, " / ".join(input_texts(model, request.input)))


def encoded_input(model: ServedModel, request: ExplainRequest) -> EncodedInput:
    texts = input_texts(model, request.input)
    return encode_input(model.pipeline, texts, target=request.target, left_to_right=request.left_to_right)


def layer(model: ServedModel, request: ExplainRequest) -> ExplainDocument:
    texts = input_texts(model, request.input)
    options: dict[str, Any] = {"word": request.word, "where": request.where, "label": request.label}
    facts = explain_layer(model.pipeline, texts, layer=request.layer or 1, head=request.head or 1, **options)
    return layer_document(facts, model.name, " / ".join(texts), steps=(), direction=None)


def gradients(model: ServedModel, request: ExplainRequest) -> ExplainDocument:
    pipeline, texts = model.pipeline, input_texts(model, request.input)
    target, title = training_target(pipeline, texts, label=request.label), " / ".join(texts)
    if recurrent_stacks(pipeline.model.backbone):
        return recurrence_document(explain_recurrence(pipeline.model, target), model.name, title)
    need_block_stacks(pipeline.model.backbone, model.name)
    facts = explain_gradients(pipeline.model, target)
    if request.depths:
        facts = replace(facts, depths=depth_study(block_settings(pipeline.model.backbone.config)))
    return gradient_document(facts, model.name, title)


def residual(model: ServedModel, request: ExplainRequest) -> ExplainDocument:
    texts = input_texts(model, request.input)
    facts = explain_residual(model.pipeline, texts, label=request.label)
    return residual_document(facts, model.name, " / ".join(texts))


def prediction(model: ServedModel, request: ExplainRequest) -> ExplainDocument:
    texts = input_texts(model, request.input)
    facts = explain_prediction(model.pipeline, texts, label=request.label, at=request.at)
    return prediction_document(facts, model.name)


def logits(model: ServedModel, request: ExplainRequest) -> ExplainDocument:
    texts = input_texts(model, request.input)
    options: dict[str, Any] = {"label": request.label, "versus": request.versus, "at": request.at}
    return logit_document(explain_logits(model.pipeline, texts, **options), model.name, " / ".join(texts))


def patch(model: ServedModel, request: ExplainRequest) -> ExplainDocument:
    texts, corrupted = input_texts(model, request.input), input_texts(model, request.corrupted, "corrupted")
    if len(texts) != len(corrupted):
        raise UserError(f"corrupted: found {len(corrupted)} texts; expected as many as the clean ones, {len(texts)}")
    facts = explain_patch(model.pipeline, texts, corrupted, label=request.label, versus=request.versus)
    return patch_document(facts, model.name, " / ".join(texts), " / ".join(corrupted))


# By the names of the verbs of `headstock explain`
KINDS: dict[str, Callable[[ServedModel, ExplainRequest], ExplainDocument]] = {
    "prediction": prediction,
    "attention": attention,
    "mask": mask,
    "layer": layer,
    "gradients": gradients,
    "residual": residual,
    "logits": logits,
    "patch": patch,
    "params": params,
    "model": architecture,
}
