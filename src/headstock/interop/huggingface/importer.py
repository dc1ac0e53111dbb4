"""Imports a Hugging Face folder as a run. Whatever is not imported is reported."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headstock.config import malformed_as_user_error, read_settings
from headstock.errors import HeadstockError, UserError
from headstock.interop.huggingface.architecture import Architecture, ExportSpec, SourceModel, all_architectures
from headstock.interop.huggingface.custom_code import MODEL_TYPE, CustomClassifier
from headstock.interop.huggingface.exporter import OWN_SECTION
from headstock.interop.huggingface.tokenizer import read_tokenizer
from headstock.interop.imported_run import imported_config, load_checkpoint, write_imported_run
from headstock.interop.tensor_map import TensorMap, Tensors, import_tensors
from headstock.tasks.base import TASKS
from headstock.train.models import build_model, build_task
from headstock.train.run_folder import RunFolder
from headstock.train.settings import RunConfig
from headstock.train.tensors import read_tensors

logger = logging.getLogger(__name__)

HEAD_MODULES = {"lm_head", "cls", "classifier", "score", "qa_outputs", "pre_classifier", "final_logits_bias", "dense"}
HEAD_MODULES |= {"vocab_transform", "vocab_layer_norm", "vocab_projector"}
HEAD_MODULES |= {"generator_predictions", "generator_lm_head", "discriminator_predictions"}  # ELECTRA
POOLER = "pooler."  # a part of BERT's heads that is stored within the backbone


@dataclass
class ConvertedModel:
    config: RunConfig
    tensors: Tensors
    unused: list[str]  # names of tensors that were not imported


def import_folder(
    folder: Path, out: Path, *, source: str | None = None, provenance: Mapping[str, Any] | None = None
) -> RunFolder:
    """Make a run of a folder saved by transformers; unsupported models raise, unused tensors are logged.

    `source` names the model in messages and in the run, by default the folder; `provenance` is added to data.json.
    """
    name, hf_config = source or str(folder), read_settings(folder / "config.json")
    architecture = find_architecture(hf_config, name)
    kind = hf_config["model_type"]
    tensors, tokenizer = add_prefix(read_weights(folder), architecture, kind), read_tokenizer(folder)
    with malformed_as_user_error(folder / "config.json", f"a {kind} model"):
        head = str((hf_config.get("architectures") or [f"{kind}Model"])[0])
        model = SourceModel(name, hf_config, head, tensors, tokenizer)
        converted = convert_exported(model, architecture) or convert(model, architecture)
    notes = list(tokenizer.notes)
    if converted.unused:
        notes.append(f"tensors not imported, because the run does not need them: {', '.join(converted.unused)}")
    for note in notes:
        logger.info(note)
    config, weights = converted.config, converted.tensors
    return write_imported_run(out, config, tokenizer, weights, source=name, notes=notes, provenance=provenance)


def find_architecture(hf_config: Mapping[str, Any], source: str) -> Architecture:
    architectures = {kind: architecture for architecture in all_architectures() for kind in architecture.model_types}
    kind = hf_config.get("model_type")
    if kind == MODEL_TYPE and isinstance(backbone := hf_config.get("backbone"), dict):
        return CustomClassifier(find_architecture(backbone, source))
    if not isinstance(kind, str) or kind not in architectures:
        supported = ", ".join(sorted(architectures))
        raise UserError(f"{source}/config.json: unsupported model_type {kind!r} (supported: {supported})")
    return architectures[kind]


def convert_exported(source: SourceModel, architecture: Architecture) -> ConvertedModel | None:
    """The run from which the folder was exported, if it was and has not been changed since."""
    run_settings = source.config.get(OWN_SECTION)
    if not isinstance(run_settings, dict):
        return None
    try:
        run_config = imported_config(run_settings["model"], run_settings["task"], source=source.path)
        if architecture.unsupported_settings(run_config):
            return None
        spec = architecture.export_spec(run_config)
        changed = differs(json.loads(json.dumps(spec.config)), source.config)
        if changed or spec.head not in source.config["architectures"]:
            return None
        return convert_tensors(source, architecture, run_config, spec)
    except (HeadstockError, LookupError, TypeError, ValueError, AttributeError):
        return None  # import it like any other folder


def differs(expected: Any, actual: Any) -> bool:
    """Whether a value of config.json is not the expected one; keys of either alone do not count."""
    if isinstance(expected, dict) and isinstance(actual, Mapping):
        return any(differs(value, actual.get(key, value)) for key, value in expected.items())
    return bool(expected != actual)


def convert(source: SourceModel, architecture: Architecture) -> ConvertedModel:
    """A run as config.json describes it."""
    settings = architecture.import_settings(source)
    task = TASKS.get(settings["task"]["name"])
    if task.needs_encoder_decoder and not task.is_labelled and source.tokenizer.mask is None:  # it cannot be denoised
        settings["task"] = {"name": "translate"}
    run_config = imported_config(settings["model"], settings["task"], source=source.path)
    return convert_tensors(source, architecture, run_config, architecture.export_spec(run_config))


def convert_tensors(
    source: SourceModel, architecture: Architecture, run_config: RunConfig, spec: ExportSpec
) -> ConvertedModel:
    kind = source.config["model_type"]
    layers = max(run_config.model.depth, getattr(run_config.model, "encoder_depth", None) or 0)
    if layers > len(source.tensors):  # before anything loops over them
        raise UserError(
            f"{source.path}: config.json has {layers} layers, but the weights only {len(source.tensors)} tensors"
        )
    spec = replace(spec, prefix=architecture.backbone_prefix(kind), model_type=kind)
    tensors = architecture.prepare_tensors(source, run_config, spec)
    entries = list(architecture.tensor_map(run_config, spec))
    with torch.device("meta"):  # for the shapes: a malformed config.json must not allocate memory
        model = build_model(run_config, build_task(run_config, source.tokenizer))
    unused = unused_tensors(tensors, entries, architecture)
    unknown = [name for name in unused if name.startswith(spec.prefix) and POOLER not in name]
    if unknown:
        raise UserError(f"{source.path}: its {kind} backbone has unsupported tensors: {', '.join(unknown)}")
    return ConvertedModel(run_config, import_tensors(entries, tensors, model.tensors(), source=source.path), unused)


def unused_tensors(tensors: Tensors, entries: list[TensorMap], architecture: Architecture) -> list[str]:
    """Tensors without an entry, except buffers and copies of a tensor with an entry."""
    used = {name for entry in entries for name in entry.theirs}
    imported = [tensors[name] for name in used if name in tensors]
    return [
        name
        for name, tensor in tensors.items()
        if name not in used
        and not name.endswith(architecture.buffers)
        and not any(torch.equal(tensor, other) for other in imported)
    ]


def add_prefix(tensors: Tensors, architecture: Architecture, kind: str) -> Tensors:
    """The tensors with the architecture's usual prefix, independent of the class that saved them."""
    matches = ((name, ending) for ending in architecture.embeddings for name in tensors if name.endswith(ending))
    name, ending = next(matches, (None, ""))
    if name is None:
        raise UserError(f"the weights have no {architecture.embeddings[0]}, so this is no {kind} model")
    prefix, usual_prefix = name.removesuffix(ending), architecture.backbone_prefix(kind)

    def in_backbone(name: str) -> bool:
        return name.startswith(prefix) if prefix else name.partition(".")[0] not in HEAD_MODULES

    return {
        usual_prefix + name.removeprefix(prefix) if in_backbone(name) else name: tensor
        for name, tensor in tensors.items()
    }


def read_weights(folder: Path) -> Tensors:
    """All tensors in single precision, from safetensors or else from .bin files with torch's weights-only loader."""
    for name, read in (("model.safetensors", read_tensors), ("pytorch_model.bin", read_pickled)):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return as_floats(read(folder / name))
        if index.is_file():
            with malformed_as_user_error(index, "sharded weights"):
                files = sorted(set(map(str, read_settings(index)["weight_map"].values())))
            if not files:
                raise UserError(f"{index}: expected file names in weight_map, found none")
            missing = [file for file in files if Path(file).name != file or not (folder / file).is_file()]
            if missing:
                raise UserError(f"{index}: names {', '.join(missing)}, which does not exist")
            return {key: value for file in files for key, value in as_floats(read(folder / file)).items()}
    raise UserError(f"{folder}: expected model.safetensors or pytorch_model.bin in this folder, found neither")


def as_floats(tensors: Tensors) -> Tensors:
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def read_pickled(path: Path) -> Tensors:
    content = load_checkpoint(path)
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise UserError(f"{path}: expected a dictionary of tensors, found {type(content).__name__}")
    for name, tensor in content.items():
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise UserError(f"{path}: {name} has shape {tuple(tensor.shape)}, but the file has fewer values")
    return dict(content)
