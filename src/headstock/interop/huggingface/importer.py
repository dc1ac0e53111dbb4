"""From a Hugging Face folder to a run: weights by name, settings by meaning, nothing dropped unsaid."""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headstock.config import malformed_as_user_error, read_settings
from headstock.data.tokenizer import Tokenizer
from headstock.errors import HeadstockError, UserError
from headstock.interop.huggingface.architecture import ARCHITECTURES, Architecture, Export
from headstock.interop.huggingface.exporter import OWN, as_json
from headstock.interop.huggingface.tensor_names import Row, Tensors, to_ours
from headstock.interop.huggingface.tokenizer import read_tokenizer
from headstock.interop.imported_run import complete, make_run
from headstock.train.pretrain import build_model
from headstock.train.run_folder import RunFolder
from headstock.train.settings import RunConfig
from headstock.train.tensors import read_tensors

Say = Callable[[str], None]
HEADS = {"lm_head", "cls", "classifier", "score", "qa_outputs", "pre_classifier", "final_logits_bias", "dense"}
HEADS |= {"vocab_transform", "vocab_layer_norm", "vocab_projector"}
HEADS |= {"generator_predictions", "generator_lm_head", "discriminator_predictions"}  # ELECTRA's
POOLER = "pooler."  # a part of BERT's heads that stands among its backbone


def import_folder(folder: str | Path, out: str | Path, *, say: Say = lambda line: None) -> RunFolder:
    """Make a run of a folder that transformers saved; what cannot be said here is refused, what is left over told."""
    source = Path(folder)
    config = read_settings(source / "config.json")
    architecture = find(config, source)
    kind = config["model_type"]
    raw = read_weights(source)
    tensors = with_prefix(raw, architecture, kind)
    tokenizer = read_tokenizer(source)
    notes = list(tokenizer.notes)
    with malformed_as_user_error(source / "config.json", f"a {kind} model"):
        head = str((config.get("architectures") or [f"{kind}Model"])[0])
        chosen, ours, left = as_it_was(architecture, config, tensors, tokenizer, str(source)) or as_it_says(
            architecture, config, head, tensors, tokenizer, str(source)
        )
    if left:
        notes.append(f"not taken over, because nothing here has a use for it: {', '.join(left)}")
    for note in notes:
        say(note)
    return make_run(Path(out), chosen, tokenizer, ours, source=str(source), notes=notes)


def find(config: Mapping[str, Any], source: Path) -> type[Architecture]:
    kind = config.get("model_type")
    for name in ARCHITECTURES.names():
        if kind in (architecture := ARCHITECTURES.get(name)).reads:
            return architecture
    known = sorted(word for name in ARCHITECTURES.names() for word in ARCHITECTURES.get(name).reads)
    raise UserError(f"{source / 'config.json'}: model_type {kind!r} cannot be read (can: {', '.join(known)})")


def as_it_was(
    architecture: type[Architecture], config: Mapping[str, Any], tensors: Tensors, tokenizer: Tokenizer, source: str
) -> tuple[RunConfig, Tensors, list[str]] | None:
    """The run that this folder was exported from, if it was one and nobody has changed it since."""
    own = config.get(OWN)
    if not isinstance(own, dict):
        return None
    try:
        chosen = complete(own["model"], own["task"], source=source)
        if architecture.misfits(chosen):
            return None
        export = architecture.export(chosen)
        said = as_json(export.config)
        if export.head not in config["architectures"] or any(config.get(key, said[key]) != said[key] for key in said):
            return None
        return converted(architecture, config, tensors, tokenizer, chosen, export, source)
    except (HeadstockError, LookupError, TypeError, ValueError, AttributeError):
        return None  # then it is read as any other folder


def as_it_says(
    architecture: type[Architecture],
    config: Mapping[str, Any],
    head: str,
    tensors: Tensors,
    tokenizer: Tokenizer,
    source: str,
) -> tuple[RunConfig, Tensors, list[str]]:
    """A run like what their own settings describe."""
    tree = architecture.settings(config, head, tensors)
    if tree["task"]["name"] == "denoise" and tokenizer.mask is None:
        tree["task"] = {"name": "translate"}
    chosen = complete(tree["model"], tree["task"], source=source)
    return converted(architecture, config, tensors, tokenizer, chosen, architecture.export(chosen), source)


def converted(
    architecture: type[Architecture],
    config: Mapping[str, Any],
    tensors: Tensors,
    tokenizer: Tokenizer,
    chosen: RunConfig,
    export: Export,
    source: str,
) -> tuple[RunConfig, Tensors, list[str]]:
    """The settings, our tensors, and the names of those of theirs that nobody asked for."""
    export = replace(export, prefix=architecture.prefix_of(config["model_type"]), model_type=config["model_type"])
    export = architecture.as_read(export)
    spelled = architecture.prepare(config, tensors, chosen, export)
    layers = max(chosen.model.depth, getattr(chosen.model, "encoder_depth", None) or 0)
    if layers > len(tensors):
        raise UserError(f"{source}: config.json has {layers} layers, the weights have {len(tensors)} tensors in all")
    rows = list(architecture.rows(chosen, export))
    with torch.device("meta"):  # only the shapes are looked at: whatever sizes config.json names, they take no memory
        model, _ = build_model(chosen, tokenizer)
    left = left_over(spelled, rows, architecture, export.prefix)
    within = [name for name in left if name.startswith(export.prefix) and POOLER not in name]
    if within:
        raise UserError(f"{source}: its {config['model_type']} has parts that are not known here: {', '.join(within)}")
    return chosen, to_ours(rows, spelled, model.tensors(), source=source), left


def left_over(tensors: Tensors, rows: list[Row], architecture: type[Architecture], prefix: str) -> list[str]:
    """What no row asks for and is not merely a second name for something that one does, or no weight at all."""
    asked = {name for row in rows for name in row.theirs}
    known = [tensors[name] for name in asked if name in tensors]
    return [
        name
        for name, tensor in tensors.items()
        if name not in asked
        and not name.endswith(architecture.buffers)
        and not any(tensor.shape == other.shape and torch.equal(tensor, other) for other in known)
    ]


def with_prefix(tensors: Tensors, architecture: type[Architecture], kind: str) -> Tensors:
    """All of the backbone's tensors under its usual prefix, whatever class they were saved from."""
    usual = architecture.prefix_of(kind)
    found = next((name for anchor in architecture.anchors for name in tensors if name.endswith(anchor)), None)
    if found is None:
        raise UserError(f"its weights have no {architecture.anchors[0]}, so they are not of a {kind} model")
    anchor = next(anchor for anchor in architecture.anchors if found.endswith(anchor))
    prefix = found.removesuffix(anchor)
    return {
        usual + name.removeprefix(prefix)
        if name.startswith(prefix) and (prefix or name.partition(".")[0] not in HEADS)
        else name: tensor
        for name, tensor in tensors.items()
    }


def read_weights(folder: Path) -> Tensors:
    """All tensors in single precision; safetensors first, else .bin through torch's weights-only loader."""
    for name, read in (("model.safetensors", read_tensors), ("pytorch_model.bin", read_pickled)):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return {key: as_float(tensor) for key, tensor in read(folder / name).items()}
        if index.is_file():
            with malformed_as_user_error(index, "weights in parts"):
                parts = sorted(set(map(str, read_settings(index)["weight_map"].values())))
            if not parts:
                raise UserError(f"{index}: wanted names of files in weight_map, found none")
            missing = [part for part in parts if Path(part).name != part or not (folder / part).is_file()]
            if missing:
                raise UserError(f"{index}: names {', '.join(missing)}, which is not there")
            return {key: as_float(tensor) for part in parts for key, tensor in read(folder / part).items()}
    raise UserError(f"{folder}: wanted model.safetensors or pytorch_model.bin in this folder, found neither")


def as_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def read_pickled(path: Path) -> Tensors:
    """A .bin or .pt file, of which only tensors are ever made: what else it would run is refused."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as wrong:
        first = str(wrong).strip().splitlines()[0]
        raise UserError(f"{path}: holds more than weights, so it is not opened ({first})") from None
    except (RuntimeError, EOFError, ValueError, OSError) as wrong:
        raise UserError(f"{path}: cannot be read as weights ({str(wrong).splitlines()[0]})") from None
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise UserError(f"{path}: wanted tensors by name, got {type(found).__name__}")
    return dict(found)
