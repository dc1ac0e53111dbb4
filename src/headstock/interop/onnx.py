"""A run as ONNX: its graph, the same in 8-bit whole numbers on demand, and a card that says how to run it anywhere."""

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headstock.data.sentencepiece_tokenizer import SentencePieceBackend
from headstock.errors import UserError, WorkError
from headstock.inference.pipeline import Pipeline, load
from headstock.interop import LAYOUT, missing_dependency
from headstock.interop.onnx_card import card_of, describe_reading
from headstock.interop.onnx_graph import Graph, graph_of, write_graph
from headstock.io import atomic_folder, write_bytes, write_json, write_text
from headstock.model.backbone import CachedBackbone
from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.train.labelled_data import require_labels
from headstock.train.loop import sequence_length
from headstock.train.metrics import metrics_with_intervals
from headstock.train.run_folder import RunFolder

logger = logging.getLogger(__name__)

MODEL, SMALL, ABOUT, CARD = "model.onnx", "model_int8.onnx", "model.json", "README.md"
PRECISION = 1e-4  # how far ONNX Runtime's numbers may be from ours, as a share of those above 1
SHAPES = ((1, 1, 0), (1, 7, 0), (3, 5, 4), (2, 1, 6), (2, 256, 0))  # rows, new tokens, tokens before

LARGEST = 1_900_000_000  # bytes of weights in one ONNX file, whose format ends at 2 GiB

Session = Any


def export_onnx(
    run: RunFolder,
    folder: Path,
    *,
    int8: bool = False,
    measure: Path | None = None,
    embedding: bool = False,
) -> dict[str, Any]:
    """Write a folder that ONNX Runtime opens; what it computes is checked against the run before the folder is there.

    A run with a head is written with it, one that generates with its memory as inputs and outputs, any other (and
    with `embedding` every one) as a model that makes vectors of texts.
    """
    for library in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(library) is None:
            raise missing_dependency(library)
    loaded = open_single(run)
    if measure is not None and (embedding or not loaded.task.is_labelled):
        raise UserError(f"--measure {measure}: only a run that was fine-tuned on labels can be measured on a file")
    graph = graph_of(loaded.model, loaded.task, named=str(run), embedding=embedding)
    about = describe_reading(loaded, graph)
    logger.info(f"tracing the {graph.spec.kind} graph")
    with atomic_folder(folder, layout=LAYOUT) as beside:
        written = write_graph(graph, beside / MODEL)
        about |= {"inputs": written.inputs, "outputs": written.outputs}
        session = open_session(beside / MODEL)
        result: dict[str, Any] = {"kind": graph.spec.kind, "difference": check_same(graph, session)}
        logger.info(f"ONNX Runtime's numbers differ from ours by {result['difference']:.1e} at most")
        sessions = {"float32": session}
        if int8:
            quantise(beside / MODEL, beside / SMALL)
            sessions["int8"] = open_session(beside / SMALL)
            result["int8_difference"] = differences(graph, sessions["int8"])
        if measure is not None:
            result["measured"] = measured(loaded, measure, sessions)
        keep_tokenizer(loaded, beside)
        write_json(beside / ABOUT, about)
        result["files"] = {file.name: file.stat().st_size for file in sorted(beside.iterdir())}
        write_text(beside / CARD, card_of(loaded, graph, about, result))
    result["try"] = [f"its card has a script that runs it without torch: {folder / CARD}"]
    return result


def open_single(run: RunFolder) -> Pipeline:
    loaded = load(run.path, device="cpu")
    if len(loaded.models) > 1:
        raise UserError(f"{run}: is several models; export one of them, such as {run.member(0)}")
    size = 4 * loaded.model.parameter_counts()["total"]
    if size > LARGEST:
        raise UserError(f"{run}: its weights take {size / 1e9:.1f} GB, and an ONNX file holds less than 2 GB")
    return loaded


def open_session(file: Path, *, threads: int | None = None) -> Session:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def keep_tokenizer(loaded: Pipeline, folder: Path) -> None:
    """As the library it belongs to reads it."""
    engine = loaded.tokenizer.backend
    if not isinstance(engine, SentencePieceBackend):
        shutil.copyfile(loaded.run.tokenizer_file, folder / "tokenizer.json")
    elif engine.model is not None:
        write_bytes(folder / "sentencepiece.model", engine.model)


# Whether it is the same


def check_same(graph: Graph, session: Session) -> float:
    """The largest difference between what the run and ONNX Runtime make of some rows; too large a one is refused."""
    found = differences(graph, session)
    if not found <= PRECISION:  # also where it is not a number
        raise WorkError(f"ONNX Runtime's numbers differ from ours by {found:.1e}, wanted {PRECISION:.0e} or less")
    return found


@torch.inference_mode()
def differences(graph: Graph, session: Session) -> float:
    worst, context = 0.0, graph.model.backbone.config.context
    for rows, length, before in SHAPES:
        given = graph.example(rows, min(length, context), min(before, max(0, context - length)))
        ours = graph(*given)
        theirs = session.run(list(graph.outputs), feed(graph, given))
        for mine, other in zip(ours if isinstance(ours, tuple) else (ours,), theirs, strict=True):
            apart = (mine - torch.from_numpy(other)).abs() / mine.abs().clamp(min=1)
            worst = max(worst, float(apart.max()))
    return worst


def feed(graph: Graph, given: Sequence[Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in zip(graph.inputs, given, strict=True)}


# Whole numbers


def quantise(file: Path, small: Path) -> None:
    """Weights as 8-bit whole numbers, one scale for each column of a matrix; activations are scaled as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with without_warnings():
        quantize_dynamic(str(file), str(small), weight_type=QuantType.QInt8, per_channel=True)


@contextmanager
def without_warnings() -> Iterator[None]:
    """The library advises, on the root logger, a step that graphs traced here do not need."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def measured(loaded: Pipeline, file: Path, sessions: dict[str, Session]) -> dict[str, Any]:
    """The run's metrics on labelled rows as each graph gets them, and how many predictions differ between graphs.

    Rows are read one by one: the scales of 8-bit activations are taken over all that is read together, so that a
    neighbour would change a row's answer.
    """
    task = loaded.labelled_task()
    records = require_labels(task.read_file(file, config=task.config), task.target, "to measure by")
    task.check(records)
    data = task.prepare(records)
    logger.info(f"measuring on {len(records):,} rows of {records.source}")
    found = {name: outputs(loaded, session, data) for name, session in sessions.items()}
    told: dict[str, Any] = {"file": records.source, "headline": task.primary_metric}
    told |= {name: metrics_with_intervals(task, data, rows) for name, rows in found.items()}
    if "int8" in found:
        told["change"] = told["int8"][task.primary_metric] - told["float32"][task.primary_metric]
        said = [[task.predicted_target(row) for row in task.predictions(data, rows)] for rows in found.values()]
        told["changed"] = sum(a != b for a, b in zip(*said, strict=True))
        logger.info(f"8-bit numbers change {task.primary_metric} by {100 * told['change']:+.2f} points")
    return told


@torch.inference_mode()
def outputs(loaded: Pipeline, session: Session, data: Any) -> list[np.ndarray]:
    """What the task's predictions are made from, with the graph in the place of backbone and head."""
    task = loaded.labelled_task()
    heads = {name: nn.Identity() for name in loaded.model.heads}
    stand_in = Model(CachedBackbone(loaded.model.backbone), heads)
    examples = task.examples(data, length=sequence_length(loaded.model, loaded.config.train))
    found = []
    for index in range(len(examples)):
        batch = examples.batch([index])
        batch = replace(batch, features=scores_of(session, batch))
        found += [one.numpy() for one in task.outputs(stand_in, batch)]
    return found


def scores_of(session: Session, batch: Batch) -> Tensor:
    """The scores of one example's rows: (1, C) for a class, the mean over its rows, else (B, T, ...) of every token."""
    real = torch.ones_like(batch.tokens) if batch.padding is None else (~batch.padding).long()
    given = {"input_ids": batch.tokens, "attention_mask": real}
    given |= {} if batch.segments is None else {"token_type_ids": batch.segments}
    wanted = [one.name for one in session.get_inputs()]
    made = [torch.from_numpy(one) for one in session.run(None, {name: given[name].numpy() for name in wanted})]
    if len(made) == 2:
        return torch.stack(made, -1)  # starts and ends
    return made[0].mean(0, keepdim=True) if made[0].dim() == 2 else made[0]
