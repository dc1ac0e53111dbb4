"""Exports a run as a folder that `AutoModel` and `AutoTokenizer` load, without custom code unless it is asked for."""

import json
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstock import __version__, config
from headstock.decoding.sampling import suppressed_tokens
from headstock.errors import UserError
from headstock.inference.pipeline import Pipeline, load
from headstock.interop import LAYOUT
from headstock.interop.huggingface.architecture import Architecture, ExportSpec, all_architectures
from headstock.interop.huggingface.custom_code import MODULE, CustomClassifier
from headstock.interop.huggingface.tokenizer import tokenizer_files, tokenizer_problems
from headstock.interop.tensor_map import export_tensors
from headstock.io import atomic_folder, write_json, write_text
from headstock.markdown import escape_markdown
from headstock.tasks.base import TASKS
from headstock.train.loop import sequence_length
from headstock.train.run_folder import RunFolder, source_run
from headstock.train.settings import RunConfig, make_config
from headstock.train.tensors import write_tensors

logger = logging.getLogger(__name__)

OWN_SECTION = "headstock"  # of config.json: the run's own settings, which transformers ignores
AUTO_CLASSES = {  # ending of the model class: Auto class
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForPreTraining": "AutoModelForPreTraining",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "MTModel": "AutoModelForSeq2SeqLM",
}
PIPELINE_CALLS = {  # pipeline: its arguments and a call, in the README's example
    "text-classification": '("text-classification", "FOLDER")("...")',
    "token-classification": '("token-classification", "FOLDER", aggregation_strategy="first")("...")',
    "fill-mask": '("fill-mask", "FOLDER")("... [MASK] ...")',
    "text-generation": '("text-generation", "FOLDER")("...")',
    "feature-extraction": '("feature-extraction", "FOLDER")("...")',
}


def export_folder(
    run: RunFolder, folder: Path, *, custom_code: bool = False, location: str | None = None
) -> dict[str, Any]:
    """Write a run as a Hugging Face folder; raises with every reason if no architecture represents it exactly.

    With `custom_code` a classification head that transformers does not have becomes a module in the folder. The card
    says how to load the model from `location`, ORG/NAME of the Hub, by default from the folder.
    """
    run_config = make_config(run.config())
    if run_config.transfer and run_config.transfer.ensemble > 1:
        raise UserError(f"{run}: is an ensemble; export one of its models, such as {run.member(0)}")
    architecture = choose_architecture(run, run_config, custom_code=custom_code)
    pipeline = load(run.path, device="cpu")
    spec = architecture.export_spec(run_config)
    logger.info(f"{run}: exporting as {spec.head}")
    notes = export_notes(run_config, spec)
    for note in notes:
        logger.info(note)
    tensors = export_tensors(architecture.tensor_map(run_config, spec), pipeline.model.tensors())
    task, length = pipeline.task, sequence_length(pipeline.model, run_config.train)
    segments = bool(getattr(run_config.model, "segments", 0))
    with atomic_folder(folder, layout=LAYOUT) as temporary:
        write_json(temporary / "config.json", config_json(pipeline, spec))
        write_tensors(temporary / "model.safetensors", tensors, metadata={"format": "pt"})
        for name, text in tokenizer_files(pipeline.tokenizer, task, length=length, segments=segments).items():
            write_text(temporary / name, text)
        if task.generates or task.needs_encoder_decoder:
            write_json(temporary / "generation_config.json", generation_config(pipeline))
        if "auto_map" in spec.config:
            shutil.copyfile(MODULE, temporary / MODULE.name)
        write_text(temporary / "README.md", export_card(run, spec, notes, location))
    return {
        "architecture": spec.head,
        "model_type": spec.model_type,
        "pipeline": spec.pipeline,
        "tensors": len(tensors),
        "remarks": notes,
        "try": [f'pipeline("{spec.pipeline}", "{folder}"{trust_argument(spec)})']
        if spec.pipeline in PIPELINE_CALLS
        else [],
    }


def choose_architecture(run: RunFolder, run_config: RunConfig, *, custom_code: bool = False) -> Architecture:
    """The first architecture that represents the run exactly; otherwise the error names the closest one."""
    architectures = all_architectures()
    candidates = [a for a in architectures if not a.import_only and a.family == run_config.family]
    if not candidates:
        supported = ", ".join(sorted({a.family for a in architectures}))
        raise UserError(
            f"{run}: no Hugging Face architecture for the family {run_config.family!r} (supported: {supported})"
        )
    closest, reasons = closest_architecture(candidates, run_config)
    if reasons:
        custom, remaining = closest_architecture([CustomClassifier(a) for a in candidates], run_config)
        if custom_code:
            closest, reasons = custom, remaining
        elif not remaining:
            reasons.append("with --custom-code the folder can have a model class of its own")
    if reasons := tokenizer_problems(run.tokenizer()) + reasons:
        raise UserError(
            f"{run}: no exact export. The closest architecture is {closest.title}, but {'; '.join(reasons)}"
        )
    return closest


def closest_architecture(candidates: Sequence[Architecture], run_config: RunConfig) -> tuple[Architecture, list[str]]:
    """The architecture with the fewest reasons why it cannot represent the run, and these."""
    problems = {a: a.unsupported_settings(run_config) for a in candidates}
    closest = min(candidates, key=lambda a: (len(problems[a]), a.name))
    return closest, problems[closest]


def export_notes(run_config: RunConfig, spec: ExportSpec) -> list[str]:
    """Differences that a user of the folder should know."""
    task, notes = TASKS.get(run_config.objective), list(spec.notes)
    if task.fills_masks and not task.generates and spec.pipeline != "fill-mask":
        notes.append(f"{spec.head} scores masked tokens, but the fill-mask pipeline does not support it")
    if task.fills_masks and task.generates:
        notes.append("a hybrid model is exported with its causal mask only")
    long = getattr(run_config.task, "long", None)
    if long in ("head+tail", "windows"):
        notes.append(f"long texts are read with long={long} here, but truncated at the end by transformers")
    return notes


def config_json(pipeline: Pipeline, spec: ExportSpec) -> dict[str, Any]:
    tokenizer, task, run_config = pipeline.tokenizer, pipeline.task, pipeline.config
    token_ids = {f"{role}_token_id": getattr(tokenizer, role) for role in ("bos", "eos", "pad", *spec.token_ids)}
    if task.needs_encoder_decoder:
        token_ids |= {"decoder_start_token_id": task.bos}  # type: ignore[attr-defined]
        token_ids |= {"forced_bos_token_id": None, "forced_eos_token_id": None}
    run_settings = {"version": __version__, "model": {"family": run_config.family, **config.to_dict(run_config.model)}}
    run_settings |= {"task": {"name": run_config.objective, **config.to_dict(run_config.task)}}
    model = {"architectures": [spec.head], "model_type": spec.model_type, **spec.config}
    if "backbone" in spec.config:
        model["backbone"] = {**spec.config["backbone"], **token_ids}
    return model | token_ids | {"dtype": "float32", OWN_SECTION: run_settings}


def generation_config(pipeline: Pipeline) -> dict[str, Any]:
    tokenizer, task, vocabulary = pipeline.tokenizer, pipeline.task, pipeline.config.model.vocabulary
    settings: dict[str, Any] = {
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.eos,
        "pad_token_id": tokenizer.eos if tokenizer.pad is None else tokenizer.pad,
        "suppress_tokens": sorted(suppressed_tokens(tokenizer, vocabulary)),
    }
    if task.needs_encoder_decoder:
        settings |= {"decoder_start_token_id": task.bos, "max_length": pipeline.config.model.context}  # type: ignore[attr-defined]
        if hasattr(task.config, "beams"):
            settings |= {"num_beams": task.config.beams, "length_penalty": task.config.length_penalty}
            settings |= {"no_repeat_ngram_size": task.config.no_repeat}
    return settings


# README.md: Hugging Face metadata, how to load the model, and the run's own model card


def trust_argument(spec: ExportSpec) -> str:
    """The argument with which transformers loads a folder with code of its own."""
    return ", trust_remote_code=True" if "auto_map" in spec.config else ""


def auto_class(head: str) -> str:
    return next((name for ending, name in AUTO_CLASSES.items() if head.endswith(ending)), "AutoModel")


def export_card(run: RunFolder, spec: ExportSpec, notes: list[str], location: str | None = None) -> str:
    name, auto = escape_markdown(run.title), auto_class(spec.head)
    lines = ["---", *(f"{key}: {yaml_value(value)}" for key, value in card_metadata(run, spec).items()), "---"]
    lines += ["", f"# {name}", ""]
    lines += [f"The Headstock run {name} as `{spec.head}`, with identical weights, tokens and outputs."]
    lines += ["", *(f"- {note}." for note in notes)] if notes else []
    lines += ["", "```python", f"from transformers import AutoTokenizer, {auto}", ""]
    path = f'"FOLDER"{trust_argument(spec)}'
    lines += [f"model = {auto}.from_pretrained({path})", f"tokenizer = AutoTokenizer.from_pretrained({path})"]
    if spec.pipeline in PIPELINE_CALLS:
        call = PIPELINE_CALLS[spec.pipeline].replace('"FOLDER"', path)
        lines += ["", "from transformers import pipeline", "", f"print(pipeline{call})"]
    source = "FOLDER" if location is None else f"hf://{location}"
    lines = [line.replace("FOLDER", location or "FOLDER") for line in lines]
    lines += ["```", "", f"`headstock import {source} --out RUN` restores the run bit for bit.", ""]
    return "\n".join([*lines, *model_card_body(run)])


def card_metadata(run: RunFolder, spec: ExportSpec) -> dict[str, Any]:
    """The front matter by which the Hub finds and shows a model."""
    origin, results = hub_origin(run), run.results()
    metadata: dict[str, Any] = {"library_name": "transformers", "tags": ["headstock", spec.model_type]}
    if "auto_map" in spec.config:
        metadata["tags"] = ["headstock", "custom_code"]
    if spec.pipeline:
        metadata["pipeline_tag"] = spec.pipeline
    if origin is not None:
        metadata |= {"base_model": origin["repo"], **({"license": origin["license"]} if origin.get("license") else {})}
    if spec.pipeline and "test" in results:
        scores = {name: value for name, value in results["test"].items() if isinstance(value, float)}
        dataset = {"name": Path(run.data()["test"]["file"]).name, "type": "private"}
        metrics = [{"type": name, "value": value} for name, value in scores.items()]
        result = {"task": {"type": spec.pipeline}, "dataset": dataset, "metrics": metrics}
        metadata["model-index"] = [{"name": run.title, "results": [result]}]
    return metadata


def yaml_value(value: Any) -> str:
    """JSON is YAML; a name such as text-generation needs no quotes."""
    plain = isinstance(value, str) and re.fullmatch(r"[a-z]+([-_./][\w.-]+)+|transformers", value)
    return value if plain else json.dumps(value, ensure_ascii=False)


def hub_origin(run: RunFolder) -> dict[str, Any] | None:
    """The model of the Hub that a run was imported or fine-tuned from, as recorded by its import."""
    if "hub" in (data := run.data()):
        return dict(data["hub"])
    source = source_run(run)
    return None if source is None else source.data().get("hub")


def model_card_body(run: RunFolder) -> list[str]:
    """The run's own card without its front matter, headings one level down."""
    file = run.path / "README.md"
    if not file.is_file():
        return []
    text = file.read_text(encoding="utf-8")
    if text.startswith("---\n"):
        text = text.partition("\n---\n")[2]
    return [*(f"#{line}" if line.startswith("#") else line for line in text.strip().splitlines()), ""]
