"""The course lab's checkpoint: a .pt file of tensors under the lab's names, and the dict.txt and model it was cut with.

In the lab a model is a `base` (embedding, sinusoids in a buffer, torch's own encoder layers) and a `classifier`, which
scores the next token after pretraining and the classes of a text after fine-tuning.
"""

import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstock import __version__, config
from headstock.data.sentencepiece_tokenizer import LAB_SPECIAL_TOKENS, SentencePieceBackend, open_lab_vocabulary
from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError
from headstock.inference.pipeline import load
from headstock.interop import LAYOUT, MARK
from headstock.interop.imported_run import complete, make_run
from headstock.io import atomic_folder, sha256, write_bytes, write_json, write_text
from headstock.model.model import Model
from headstock.train.pretrain import build_model
from headstock.train.run_folder import RunFolder
from headstock.train.settings import RunConfig, read_preset

Say = Callable[[str], None]
Tensors = dict[str, Tensor]

STATE = "model_state_dict"
MODEL, DICTIONARY, PIECES, CARD = "model.pt", "dict.txt", "sentencepiece.model", "README.md"
COUNTS = "piece_counts"  # in the run's data.json, what dict.txt says beside the pieces
POSITIONS = "base.pos_encoder.pe"  # (positions, 1, width): the lab's batches have their rows side by side
HEAD = "classifier.decoder"
BASE = {"backbone.tokens.weight": "base.encoder.weight", "backbone.waves": POSITIONS}
# of each layer: backbone.blocks.N.* here, base.transformer_encoder.layers.N.* there
LAYER = {
    "attention.inputs.weight": "self_attn.in_proj_weight",
    "attention.inputs.bias": "self_attn.in_proj_bias",
    "attention.output.weight": "self_attn.out_proj.weight",
    "attention.output.bias": "self_attn.out_proj.bias",
    "feed.up.weight": "linear1.weight",
    "feed.up.bias": "linear1.bias",
    "feed.down.weight": "linear2.weight",
    "feed.down.bias": "linear2.bias",
    "around_attention.norm.weight": "norm1.weight",
    "around_attention.norm.bias": "norm1.bias",
    "around_feed.norm.weight": "norm2.weight",
    "around_feed.norm.bias": "norm2.bias",
}
HEADS = {"causal": "heads.token", "classify": "heads.label.linear"}  # by task, what the lab's classifier is here
# what the lab's modules compute, which no file says: a run with other settings is another model
WANTED = {
    "norm": "post",
    "norm_kind": "layer",
    "norm_epsilon": 1e-5,
    "positions": "sinusoidal",
    "activation": "relu",
    "bias": True,
    "segments": 0,
    "embed_scale": True,
    "embed_norm": False,
    "qk_norm": False,
    "causal": True,
    "cross": False,
}


def names(depth: int, head: str | None) -> dict[str, str]:
    """What each tensor of ours is called in the lab; both directions read this table."""
    table = dict(BASE)
    for layer in range(depth):
        there = f"base.transformer_encoder.layers.{layer}"
        table |= {f"backbone.blocks.{layer}.{ours}": f"{there}.{theirs}" for ours, theirs in LAYER.items()}
    if head is not None:
        table |= {f"{head}.{part}": f"{HEAD}.{part}" for part in ("weight", "bias")}
    return table


# In


def import_lab(
    file: Path,
    out: Path,
    *,
    dictionary: str | Path | None = None,
    sentencepiece: str | Path | None = None,
    heads: int | None = None,
    say: Say = lambda line: None,
) -> RunFolder:
    """Make a run of a lab checkpoint: a language model, a classifier, or without the head a backbone alone.

    dict.txt and the SentencePiece model are those beside the file unless named. How many `heads` attention has is in
    no file: the lab's number is taken unless told otherwise.
    """
    state = read_state(file, say)
    words = Path(dictionary) if dictionary is not None else file.parent / DICTIONARY
    if not words.is_file():
        raise UserError(f"{words}: no such file; name the dict.txt that goes with {file} with --dictionary")
    engine, notes = open_lab_vocabulary(words, model=None if sentencepiece is None else Path(sentencepiece))
    tokenizer = Tokenizer(engine, notes)
    chosen = settings_of(file, state, tokenizer, heads=heads)
    notes = (*notes, f"attention is taken to have {chosen.model.heads} heads: no file says how many it has")
    for note in notes:
        say(note)
    model, _ = build_model(chosen, tokenizer)
    ours = as_ours(file, state, model, HEADS.get(chosen.objective))
    known = {"sha256": sha256(file), COUNTS: " ".join(counts_of(words))}
    return make_run(out, chosen, tokenizer, ours, source=str(file), notes=notes, known=known)


def read_state(file: Path, say: Say) -> Tensors:
    """The tensors of a checkpoint. Only tensors are ever made of it: a file that asks to run code is refused."""
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as wrong:
        why = str(wrong).split("\n")[0]
        raise UserError(f"{file}: holds more than tensors, and what it holds was not run ({why})") from None
    except (RuntimeError, EOFError, OSError, ValueError) as wrong:
        raise UserError(f"{file}: cannot be read as a checkpoint of torch ({str(wrong).splitlines()[0]})") from None
    if not isinstance(found, dict) or not isinstance(found.get(STATE), Mapping):
        there = ", ".join(map(str, list(found)[:8])) if isinstance(found, dict) else type(found).__name__
        raise UserError(f"{file}: wanted a checkpoint of the lab, which has {STATE!r}, found {there}")
    beside = [str(name) for name in found if name != STATE]
    if beside:
        say(f"{file.name} also holds {', '.join(beside)}, which a finished model has no use for: left aside")
    odd = [str(name) for name, tensor in found[STATE].items() if not isinstance(tensor, Tensor)]
    if odd:
        raise UserError(f"{file}: {', '.join(odd)}: wanted tensors")
    return dict(found[STATE])


def settings_of(file: Path, state: Tensors, tokenizer: Tokenizer, *, heads: int | None) -> RunConfig:
    """The preset `classic` with the sizes of the file; what the classifier scores says what the run is."""
    needed = ("base.encoder.weight", POSITIONS, "base.transformer_encoder.layers.0.linear1.weight")
    if missing := [name for name in needed if name not in state]:
        raise UserError(f"{file}: has no {', '.join(missing)}, so it is no model of the lab (has {some(state)})")
    (vocabulary, width), hidden = state["base.encoder.weight"].shape, len(state[needed[2]])
    if vocabulary != tokenizer.vocabulary:
        counted = f"{tokenizer.vocabulary - len(LAB_SPECIAL_TOKENS):,} pieces and {len(LAB_SPECIAL_TOKENS)} marks"
        raise UserError(f"{file}: has {vocabulary:,} embeddings, its dict.txt {counted}: they do not belong together")
    layers = {int(name.split(".")[3]) for name in state if name.startswith("base.transformer_encoder.layers.")}
    context = len(state[POSITIONS])
    preset = read_preset("classic")
    sizes = {"vocabulary": vocabulary, "context": context, "depth": len(layers), "width": width, "hidden": hidden}
    sizes |= {} if heads is None else {"heads": heads}
    scored = None if f"{HEAD}.weight" not in state else len(state[f"{HEAD}.weight"])
    task: dict[str, Any] = {"name": "headless", "opening": "start"}
    if scored == vocabulary:
        task = {"name": "causal"}
    elif scored is not None:  # the lab's labels are the numbers themselves
        task = {"name": "classify", "classes": [str(i) for i in range(scored)], "pool": "last", "dropout": 0.0}
    chosen = complete(preset["model"] | sizes, task, source=str(file))
    return replace(chosen, train=replace(chosen.train, length=min(preset["model"]["context"], context)))


def as_ours(file: Path, state: Tensors, model: Model, head: str | None) -> Tensors:
    """The tensors under our names; all that are missing, unknown or of another shape are named together."""
    mine = model.tensors()
    table = names(model.backbone.depth, head)
    problems = [f"{theirs} is missing" for theirs in table.values() if theirs not in state]
    problems += [f"{name} is unknown" for name in state if name not in table.values()]
    for ours, theirs in table.items():
        if theirs in state and (wanted := shape_there(mine[ours], theirs)) != (got := tuple(state[theirs].shape)):
            problems.append(f"{theirs} has shape {got}, wanted {wanted}")
    problems += [f"{name} holds {t.dtype}, wanted float32" for name, t in state.items() if t.dtype != torch.float32]
    if problems:
        raise UserError(f"{file}: does not fit the lab's model: {'; '.join(problems)}")
    return {ours: state[theirs].reshape(mine[ours].shape) for ours, theirs in table.items()}


def shape_there(tensor: Tensor, name: str) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    return (shape[0], 1, shape[1]) if name == POSITIONS else shape


def counts_of(dictionary: Path) -> Iterable[str]:
    """How often each piece came in the lab's text: nothing here needs it, but an export gives it back."""
    lines = dictionary.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return [line.rstrip("\r").rpartition(" ")[2] for line in lines]


# Out


def export_lab(run: RunFolder, folder: Path, say: Say = lambda line: None) -> dict[str, Any]:
    """Write a run as the lab loads it: model.pt, its dict.txt and its SentencePiece model."""
    loaded = load(run.path, device="cpu")
    check_fits(run, loaded.config, loaded.tokenizer, models=len(loaded.models))
    table = names(loaded.model.backbone.depth, HEADS.get(loaded.config.objective))
    mine = loaded.model.tensors()
    state = {theirs: mine[ours].reshape(shape_there(mine[ours], theirs)).clone() for ours, theirs in table.items()}
    engine = loaded.tokenizer.backend
    assert isinstance(engine, SentencePieceBackend)
    pieces = engine.pieces[len(LAB_SPECIAL_TOKENS) :]
    known = run.data().get(COUNTS)
    counts = known.split() if known else ["1"] * len(pieces)
    if not known:
        say("how often each piece came is not known here: dict.txt says 1 of all")
    with atomic_folder(folder, layout=LAYOUT) as beside:
        torch.save({STATE: state}, beside / MODEL)
        write_json(beside / MARK, {"format": "lab", "version": __version__})
        listed = "".join(f"{piece} {count}\n" for piece, count in zip(pieces, counts, strict=True))
        write_text(beside / DICTIONARY, listed)
        if engine.model is not None:
            write_bytes(beside / PIECES, engine.model)
    opened = f'torch.load("{folder / MODEL}", weights_only=True)["{STATE}"]'
    return {"tensors": len(state), "heads": loaded.config.model.heads, "try": [f"model.load_state_dict({opened})"]}


def check_fits(run: RunFolder, chosen: RunConfig, tokenizer: Tokenizer, *, models: int) -> None:
    """Refuse what the lab's modules would compute otherwise, every setting that differs named."""
    problems = []
    if chosen.family != "transformer":
        raise UserError(f"{run}: is of the family {chosen.family!r}; the lab's model is a transformer")
    settings = config.to_dict(chosen.model)
    problems += [
        f"model.{name} is {settings[name]!r}, not {wanted!r}"
        for name, wanted in WANTED.items()
        if name in settings and settings[name] != wanted
    ]
    if chosen.objective not in (*HEADS, "headless"):
        problems.append(f"the task is {chosen.objective}, not one of {', '.join([*HEADS, 'headless'])}")
    if chosen.objective == "causal" and chosen.model.tied:
        problems.append("model.tied is True, but the lab's classifier has weights of its own")
    if chosen.objective == "classify":
        problems += classifier_problems(chosen.task)
    if tokenizer.kind != "lab":
        problems.append(f"the tokenizer is {tokenizer.kind}, not the lab's dict.txt")
    if models > 1:
        problems.append(f"it is {models} models; name one of them, such as {run.member(0)}")
    if problems:
        raise UserError(f"{run}: is not a model of the lab: {'; '.join(problems)}")


def classifier_problems(task: Any) -> list[str]:
    """The lab's classifier is one linear layer on the last token's last vector."""
    wanted = {"pool": "last", "layers": "last", "opening": "start", "closed": False, "dense": "none", "head_bias": True}
    found = {name: getattr(task, name, value) for name, value in wanted.items()}
    told = [f"task.{name} is {found[name]!r}, not {value!r}" for name, value in wanted.items() if found[name] != value]
    return told if task.separator is None else [*told, "a text may be of several classes"]


def some(values: Iterable[str]) -> str:
    every = list(values)
    return ", ".join(every[:4]) + (f" and {len(every) - 4} more" if len(every) > 4 else "")
