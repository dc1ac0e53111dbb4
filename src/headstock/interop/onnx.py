"""Exports a run to ONNX, optionally quantized to int8, with a card that shows how to run it."""

import logging
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headstock.data.tokenizer_backends import SentencePieceBackend
from headstock.errors import UserError, WorkError
from headstock.inference.pipeline import Pipeline, load
from headstock.interop import LAYOUT, missing_dependency
from headstock.interop.onnx_card import folder_card, model_json
from headstock.interop.onnx_graph import Graph, make_graph, write_graph
from headstock.io import atomic_folder, write_bytes, write_json, write_text
from headstock.model.backbone import CachedBackbone
from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.train.labelled_data import require_labels
from headstock.train.metrics import metrics_with_intervals
from headstock.train.run_folder import RunFolder

logger = logging.getLogger(__name__)

MODEL, QUANTIZED, ABOUT, CARD = "model.onnx", "model_int8.onnx", "model.json", "README.md"
TOLERANCE = 1e-4  # largest allowed difference between ONNX Runtime and torch, relative above 1
SHAPES = ((1, 1, 0), (1, 7, 0), (3, 5, 4), (2, 1, 6), (2, 256, 0))  # rows, new tokens, past tokens
MAX_BYTES = 1_900_000_000  # of weights; an ONNX file is limited to 2 GiB

Session = Any


def export_onnx(
    run: RunFolder, folder: Path, *, int8: bool = False, measure: Path | None = None, embedding: bool = False
) -> dict[str, Any]:
    """Write a folder for ONNX Runtime, after checking its outputs against the run's.

    A labelled task is exported with its head, a generating one with its KV cache as inputs and outputs, any other (and
    with `embedding` every run) as a model that embeds texts.
    """
    for library in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(library) is None:
            raise missing_dependency(library)
    pipeline = open_single(run)
    if measure is not None and (embedding or not pipeline.task.is_labelled):
        raise UserError(f"--measure {measure}: only a run fine-tuned on labels can be measured on a file")
    graph = make_graph(pipeline.model, pipeline.task, source=str(run), embedding=embedding)
    about = model_json(pipeline, graph)
    logger.info(f"tracing the {graph.spec.kind} graph")
    with atomic_folder(folder, layout=LAYOUT) as temporary:
        about |= write_graph(graph, temporary / MODEL)
        session = open_session(temporary / MODEL)
        result: dict[str, Any] = {"kind": graph.spec.kind, "difference": check_parity(graph, session)}
        logger.info(f"the outputs of ONNX Runtime differ from torch by at most {result['difference']:.1e}")
        sessions = {"float32": session}
        if int8:
            quantize(temporary / MODEL, temporary / QUANTIZED)
            sessions["int8"] = open_session(temporary / QUANTIZED)
            result["int8_difference"] = largest_difference(graph, sessions["int8"])
        if measure is not None:
            result["measured"] = measure_metrics(pipeline, measure, sessions)
        copy_tokenizer(pipeline, temporary)
        write_json(temporary / ABOUT, about)
        result["files"] = {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}
        write_text(temporary / CARD, folder_card(pipeline, graph, about, result))
    result["try"] = [f"its card has a script that runs it without torch: {folder / CARD}"]
    return result


def open_single(run: RunFolder) -> Pipeline:
    pipeline = load(run.path, device="cpu")
    if len(pipeline.models) > 1:
        raise UserError(f"{run}: is an ensemble; export one of its models, such as {run.member(0)}")
    size = 4 * pipeline.model.parameter_counts()["total"]
    if size > MAX_BYTES:
        raise UserError(f"{run}: its weights take {size / 1e9:.1f} GB, and an ONNX file holds less than 2 GB")
    return pipeline


def open_session(file: Path, *, threads: int | None = None) -> Session:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def copy_tokenizer(pipeline: Pipeline, folder: Path) -> None:
    """Copy the tokenizer in its library's own format."""
    backend = pipeline.tokenizer.backend
    if not isinstance(backend, SentencePieceBackend):
        shutil.copyfile(pipeline.run.tokenizer_file, folder / "tokenizer.json")
    elif backend.model is not None:
        write_bytes(folder / "sentencepiece.model", backend.model)


# Parity


def check_parity(graph: Graph, session: Session) -> float:
    """The largest difference between torch and ONNX Runtime on example inputs; raises if it is too large."""
    difference = largest_difference(graph, session)
    if not difference <= TOLERANCE:  # also for NaN
        raise WorkError(f"the outputs of ONNX Runtime differ from torch by {difference:.1e}, more than {TOLERANCE:.0e}")
    return difference


@torch.inference_mode()
def largest_difference(graph: Graph, session: Session) -> float:
    largest, context = 0.0, graph.model.backbone.config.context
    for rows, length, past in SHAPES:
        inputs = graph.example(rows, min(length, context), min(past, max(0, context - length)))
        expected = graph(*inputs)
        feeds = {name: tensor.numpy() for name, tensor in zip(graph.inputs, inputs, strict=True)}
        outputs = session.run(list(graph.outputs), feeds)
        for reference, output in zip(expected if isinstance(expected, tuple) else (expected,), outputs, strict=True):
            difference = (reference - torch.from_numpy(output)).abs() / reference.abs().clamp(min=1)
            largest = max(largest, float(difference.max()))
    return largest


# Quantization


def quantize(file: Path, quantized: Path) -> None:
    """Quantize weights to int8 with a scale per channel; activations are quantized dynamically."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it recommends a step that these graphs do not need
    try:
        quantize_dynamic(str(file), str(quantized), weight_type=QuantType.QInt8, per_channel=True)
    finally:
        logging.disable(disabled)


def measure_metrics(pipeline: Pipeline, file: Path, sessions: dict[str, Session]) -> dict[str, Any]:
    """The run's metrics on labelled rows for each graph, and how many predictions differ between graphs.

    Rows are read one at a time: dynamic quantization scales activations over the whole batch, so that the other rows
    of a batch would change a prediction.
    """
    task = pipeline.labelled_task()
    records = require_labels(task.read_file(file, config=task.config), task.target, "to measure by")
    task.check(records)
    data = task.prepare(records)
    logger.info(f"measuring on {len(records):,} rows of {records.source}")
    outputs = {name: session_outputs(pipeline, session, data) for name, session in sessions.items()}
    result: dict[str, Any] = {"file": records.source, "headline": task.primary_metric}
    result |= {name: metrics_with_intervals(task, data, rows) for name, rows in outputs.items()}
    if "int8" in outputs:
        result["change"] = result["int8"][task.primary_metric] - result["float32"][task.primary_metric]
        targets = [[task.predicted_target(row) for row in task.predictions(data, rows)] for rows in outputs.values()]
        result["changed"] = sum(a != b for a, b in zip(*targets, strict=True))
        logger.info(f"int8 weights change {task.primary_metric} by {100 * result['change']:+.2f} points")
    return result


@torch.inference_mode()
def session_outputs(pipeline: Pipeline, session: Session, data: Any) -> list[np.ndarray]:
    """The task's raw outputs, computed by the graph instead of the backbone and heads."""
    task = pipeline.labelled_task()
    heads = {name: nn.Identity() for name in pipeline.model.heads}
    model = Model(CachedBackbone(pipeline.model.backbone), heads)  # returns the scores it is given
    examples = task.examples(data, length=pipeline.length)
    rows = []
    for index in range(len(examples)):
        batch = examples.batch([index])
        batch = replace(batch, features=session_scores(session, batch))
        rows += [row.numpy() for row in task.outputs(model, batch)]
    return rows


def session_scores(session: Session, batch: Batch) -> Tensor:
    """The scores of one example: (1, C) for a class, averaged over its windows, otherwise (B, T, ...) per token."""
    mask = torch.ones_like(batch.tokens) if batch.padding is None else (~batch.padding).long()
    inputs = {"input_ids": batch.tokens, "attention_mask": mask}
    inputs |= {} if batch.segments is None else {"token_type_ids": batch.segments}
    feeds = {node.name: inputs[node.name].numpy() for node in session.get_inputs()}
    scores = [torch.from_numpy(output) for output in session.run(None, feeds)]
    if len(scores) == 2:
        return torch.stack(scores, -1)  # span starts and ends
    return scores[0].mean(0, keepdim=True) if scores[0].dim() == 2 else scores[0]
