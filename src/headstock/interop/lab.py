"""The course lab's checkpoints: a .pt file of tensors under the lab's names, with its dict.txt and SentencePiece model.

A lab model is a `base` (embedding, sinusoidal positions in a buffer, torch's encoder layers) and a `classifier`, which
scores the next token after pretraining and the classes of a text after fine-tuning.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstock import __version__
from headstock.data.tokenizer import Tokenizer
from headstock.data.tokenizer_backends import LAB_SPECIAL_TOKENS, SentencePieceBackend, open_lab_vocabulary
from headstock.errors import UserError
from headstock.inference.pipeline import Pipeline, load
from headstock.interop import LAYOUT, MARKER, mismatches
from headstock.interop.imported_run import imported_config, load_checkpoint, write_imported_run
from headstock.interop.tensor_map import TensorMap, Tensors, affine, export_tensors, import_tensors, rename, unsqueeze
from headstock.io import atomic_folder, sha256, write_bytes, write_json, write_text
from headstock.model.model import Model
from headstock.tasks.base import TASKS
from headstock.train.models import build_model, build_task
from headstock.train.run_folder import RunFolder
from headstock.train.settings import RunConfig, read_preset

logger = logging.getLogger(__name__)

STATE = "model_state_dict"
MODEL, DICTIONARY, SENTENCEPIECE = "model.pt", "dict.txt", "sentencepiece.model"
COUNTS = "piece_counts"  # key in the run's data.json for the second column of dict.txt
POSITIONS = "base.pos_encoder.pe"  # (positions, 1, width): the lab's batches are (T, B)
CLASSIFIER = "classifier.decoder"
LAYERS = {  # backbone.blocks.N.*: base.transformer_encoder.layers.N.*
    "attention.output": "self_attn.out_proj",
    "feed.up": "linear1",
    "feed.down": "linear2",
    "around_attention.norm": "norm1",
    "around_feed.norm": "norm2",
}
HEADS = {"causal": "heads.token", "classify": "heads.label.linear"}  # by objective: the lab's classifier in a run
REQUIRED = {  # what the lab's modules compute; its files do not say
    "norm": "post",
    "norm_kind": "layer",
    "norm_epsilon": 1e-5,
    "positions": "sinusoidal",
    "activation": "relu",
    "feed_activation": "inner",
    "residual": True,
    "bias": True,
    "segments": 0,
    "embed_scale": True,
    "embed_norm": False,
    "qk_norm": False,
    "causal": True,
    "cross": False,
}
# the lab's classifier is one linear layer on the last token's hidden state
REQUIRED_CLASSIFIER = {"pool": "last", "layers": "last", "opening": "start", "closed": False}
REQUIRED_CLASSIFIER |= {"dense": "none", "head_bias": True, "separator": None}


def tensor_map(depth: int, head: str | None) -> Iterator[TensorMap]:
    """An entry for each tensor of the run."""
    yield rename("backbone.tokens.weight", "base.encoder.weight")
    yield unsqueeze("backbone.waves", POSITIONS, 1)
    for n in range(depth):
        ours, theirs = f"backbone.blocks.{n}", f"base.transformer_encoder.layers.{n}"
        for part in ("weight", "bias"):
            yield rename(f"{ours}.attention.inputs.{part}", f"{theirs}.self_attn.in_proj_{part}")
        for layer, name in LAYERS.items():
            yield from affine(f"{ours}.{layer}", f"{theirs}.{name}")
    if head is not None:
        yield from affine(head, CLASSIFIER)


# Import


def import_lab(
    file: Path,
    out: Path,
    *,
    dictionary: str | Path | None = None,
    sentencepiece: str | Path | None = None,
    heads: int | None = None,
) -> RunFolder:
    """Import a lab checkpoint as a language model, a classifier, or without a head as a backbone.

    dict.txt and the SentencePiece model are by default those in the same folder. The number of attention `heads` is in
    no file: it is the lab's own unless given.
    """
    state = read_state(file)
    dictionary = Path(dictionary) if dictionary is not None else file.parent / DICTIONARY
    if not dictionary.is_file():
        raise UserError(f"{dictionary}: no such file; pass the dict.txt of {file} with --dictionary")
    backend, notes = open_lab_vocabulary(dictionary, model=None if sentencepiece is None else Path(sentencepiece))
    tokenizer = Tokenizer(backend, notes)
    config = lab_config(file, state, tokenizer, heads=heads)
    notes = (*notes, f"assuming {config.model.heads} attention heads, since no file of the lab states their number")
    for note in notes:
        logger.info(note)
    model = build_model(config, build_task(config, tokenizer))
    tensors = from_lab(file, state, model, HEADS.get(config.objective))
    provenance = {"sha256": sha256(file), COUNTS: " ".join(piece_counts(dictionary))}
    return write_imported_run(out, config, tokenizer, tensors, source=str(file), notes=notes, provenance=provenance)


def read_state(file: Path) -> Tensors:
    """The tensors of a checkpoint; code in the file is never run."""
    content = load_checkpoint(file)
    if not isinstance(content, dict) or not isinstance(content.get(STATE), Mapping):
        actual = ", ".join(map(str, list(content)[:8])) if isinstance(content, dict) else type(content).__name__
        raise UserError(f"{file}: expected a lab checkpoint with {STATE!r}, found {actual}")
    if ignored := [str(name) for name in content if name != STATE]:
        logger.info(f"{file.name} also contains {', '.join(ignored)}, which is ignored")
    if invalid := [str(name) for name, tensor in content[STATE].items() if not isinstance(tensor, Tensor)]:
        raise UserError(f"{file}: {', '.join(invalid)}: expected tensors")
    return dict(content[STATE])


def lab_config(file: Path, state: Tensors, tokenizer: Tokenizer, *, heads: int | None) -> RunConfig:
    """The preset `classic` with the sizes of the file; the size of the classifier tells the task."""
    needed = ("base.encoder.weight", POSITIONS, "base.transformer_encoder.layers.0.linear1.weight")
    if missing := [name for name in needed if name not in state]:
        raise UserError(f"{file}: has no {', '.join(missing)}, so it is no lab model (has {abbreviate(state)})")
    (vocabulary, width), hidden = state["base.encoder.weight"].shape, len(state[needed[2]])
    if vocabulary != tokenizer.vocabulary:
        pieces = f"{tokenizer.vocabulary - len(LAB_SPECIAL_TOKENS):,} pieces"
        raise UserError(
            f"{file}: has {vocabulary:,} embeddings, but dict.txt {pieces} and {len(LAB_SPECIAL_TOKENS)} special tokens"
        )
    layers = {int(name.split(".")[3]) for name in state if name.startswith("base.transformer_encoder.layers.")}
    context = len(state[POSITIONS])
    preset = read_preset("classic")
    sizes = {"vocabulary": vocabulary, "context": context, "depth": len(layers), "width": width, "hidden": hidden}
    sizes |= {} if heads is None else {"heads": heads}
    classifier = state.get(f"{CLASSIFIER}.weight")
    task: dict[str, Any] = {"name": "headless", "opening": "start"}
    if classifier is not None and len(classifier) == vocabulary:
        task = {"name": "causal"}
    elif classifier is not None:  # the lab's labels are the class numbers
        task = {"name": "classify", "classes": [str(i) for i in range(len(classifier))], "pool": "last", "dropout": 0.0}
    config = imported_config(preset["model"] | sizes, task, source=str(file))
    return replace(config, train=replace(config.train, length=min(preset["model"]["context"], context)))


def from_lab(file: Path, state: Tensors, model: Model, head: str | None) -> Tensors:
    """The lab's tensors under our names; all problems are reported together."""
    entries = list(tensor_map(model.backbone.depth, head))
    names = {name for entry in entries for name in entry.theirs}
    problems = [f"{name} is unknown" for name in state if name not in names]
    problems += [f"{name} is {t.dtype}, expected float32" for name, t in state.items() if t.dtype != torch.float32]
    return import_tensors(entries, state, model.tensors(), source=str(file), problems=problems)


def piece_counts(dictionary: Path) -> list[str]:
    """How often each piece occurred in the lab's corpus; kept only for a later export."""
    lines = dictionary.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return [line.rstrip("\r").rpartition(" ")[2] for line in lines]


# Export


def export_lab(run: RunFolder, folder: Path) -> dict[str, Any]:
    """Write model.pt, dict.txt and the SentencePiece model as the lab loads them."""
    pipeline = load(run.path, device="cpu")
    check_supported(pipeline)
    entries = tensor_map(pipeline.model.backbone.depth, HEADS.get(pipeline.config.objective))
    state = {name: tensor.clone() for name, tensor in export_tensors(entries, pipeline.model.tensors()).items()}
    backend = pipeline.tokenizer.backend
    assert isinstance(backend, SentencePieceBackend)
    pieces = backend.pieces[len(LAB_SPECIAL_TOKENS) :]
    counts = run.data().get(COUNTS, "").split()
    if not counts:
        counts = ["1"] * len(pieces)
        logger.info("the counts of the pieces are unknown: dict.txt has 1 for each")
    with atomic_folder(folder, layout=LAYOUT) as temporary:
        torch.save({STATE: state}, temporary / MODEL)
        write_json(temporary / MARKER, {"format": "lab", "version": __version__})
        lines = "".join(f"{piece} {count}\n" for piece, count in zip(pieces, counts, strict=True))
        write_text(temporary / DICTIONARY, lines)
        if backend.model is not None:
            write_bytes(temporary / SENTENCEPIECE, backend.model)
    loading = f'torch.load("{folder / MODEL}", weights_only=True)["{STATE}"]'
    return {"tensors": len(state), "heads": pipeline.config.model.heads, "try": [f"model.load_state_dict({loading})"]}


def check_supported(pipeline: Pipeline) -> None:
    """Refuse a run whose outputs the lab's modules would not reproduce, naming every setting that differs."""
    run, config = pipeline.run, pipeline.config
    if config.family != "transformer":
        raise UserError(f"{run}: is of the family {config.family!r}; the lab's model is a transformer")
    problems = mismatches(vars(config.model), REQUIRED, "model.")
    if config.objective not in (*HEADS, "headless"):
        problems.append(f"the task is {config.objective}, not one of {', '.join([*HEADS, 'headless'])}")
    if TASKS.get(config.objective).generates and config.model.tied:
        problems.append("model.tied is true, but the lab's classifier has its own weights")
    if TASKS.get(config.objective).predicts_classes:
        problems += mismatches(vars(config.task), REQUIRED_CLASSIFIER, "task.")
    if pipeline.tokenizer.kind != "lab":
        problems.append(f"the tokenizer is {pipeline.tokenizer.kind}, not the lab's dict.txt")
    if len(pipeline.models) > 1:
        problems.append(f"it is an ensemble; export one of its models, such as {run.member(0)}")
    if problems:
        raise UserError(f"{run}: is not a model of the lab: {'; '.join(problems)}")


def abbreviate(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
