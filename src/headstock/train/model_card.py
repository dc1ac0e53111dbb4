"""Model cards: a run's README.md with its data, training, results, limitations and use, from the run's own files."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from headstock.cost.parameter_table import formula_table
from headstock.data.catalog import licence_of
from headstock.data.tokenizer import Tokenizer
from headstock.data.tokenizer_backends import SentencePieceBackend
from headstock.errors import UserError, shell_quote
from headstock.io import write_text
from headstock.markdown import escape_markdown
from headstock.model.backbone import BACKBONES
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Task
from headstock.tasks.labelled import LabelledTask
from headstock.tasks.text_metrics import format_metric, metric_name
from headstock.train.metrics import format_labelled_metrics, format_metrics, majority_warning
from headstock.train.run_folder import RunFolder, open_run
from headstock.train.settings import kind_of_transfer, make_config

UNKNOWN_LICENCE = "unknown: the licence of the original text applies"
TOTALS = ("base", "total", "trainable", "frozen", "lora")  # keys of parameter counts that are not heads
INITIALIZATIONS = {
    "pretrained": "all weights were fine-tuned",
    "scratch": "its architecture, trained from scratch",
    "frozen": "a new head on its frozen weights",
    "setfit": "its weights were fine-tuned on pairs of rows, and the head is a logistic regression (SetFit)",
    "lora": "low-rank adapters (LoRA) and a head were trained, and the adapters merged into its weights",
}
TRUNCATIONS = {  # what is read of a text that is longer than the model's context
    "head": "the beginning",
    "tail": "the end",
    "head+tail": "the beginning (a quarter of the tokens) and the end",
    "windows": "overlapping windows, whose outputs are averaged",
}
SELECTION_NOTE = """The best epoch was selected on the validation rows, so their metrics are optimistic.
Intervals are 95% over the rows; they exclude the variation between seeds."""


@dataclass(frozen=True)
class RunFacts:
    """The files of a finished run that its card describes."""

    run: RunFolder
    settings: dict[str, Any]
    data: dict[str, Any]
    results: dict[str, Any]
    tokenizer: Tokenizer

    @property
    def task(self) -> type[Task]:
        return TASKS.get(self.settings["task"]["name"])

    @property
    def transfer(self) -> dict[str, Any]:
        return self.settings.get("transfer") or {}

    @property
    def version(self) -> str:
        return self.results["versions"]["headstock"]


def write_card(run: RunFolder) -> None:
    write_text(run.model_card, render_card(run))


def render_card(run: RunFolder) -> str:
    """The card of a finished run: pretrained, fine-tuned or imported."""
    facts = RunFacts(run, run.config(), run.data(), run.results(), run.tokenizer())
    if facts.results.get("imported"):
        title, sections = imported_sections(facts)
    elif facts.results.get("kind") == "finetune":
        title, sections = finetuned_sections(facts)
    else:
        title, sections = pretrained_sections(facts)
    sections = {
        "Data": sections["Data"],
        "Tokenizer": tokenizer_section(facts),
        "Architecture": architecture_section(facts),
        **sections,
        "Use it here": usage_section(facts),
        "Use it elsewhere": export_section(facts),
    }
    if run.step is not None:
        title += f" These are the weights and the validation of step {run.step:,}."
    body = "\n\n".join(f"## {heading}\n\n{text}" for heading, text in sections.items())
    return f"# {escape_markdown(run.title)}\n\n{title}\n\n{body}\n"


# Data, training, results and limits of each kind of run


def pretrained_sections(facts: RunFacts) -> tuple[str, dict[str, str]]:
    settings, data, results = facts.settings, facts.data, facts.results
    total, family = results["parameters"]["total"], settings["model"]["family"]
    held_out = "from separate files" if settings["data"]["valid"] else "held out by document before training"
    rows = {
        "text": f"{first_names(data['corpus'], 3)}; {escape_markdown(data['how'])}",
        "licence": licences([*data["corpus"], *settings["data"]["corpus"]]),
        "training": f"{data['train_documents']:,} documents, {data['train_bytes']:,} bytes, "
        f"{data['train_tokens']:,} tokens",
        "validation": f"{data['valid_documents']:,} documents, {data['valid_bytes']:,} bytes, {held_out}",
    }
    if duplicates := data.get("duplicates", 0) + data.get("in_validation", 0):
        rows["removed"] = f"{duplicates:,} duplicate documents"
    share = results.get("measured_share", 1)
    part = "all of it" if share == 1 else f"{share:.0%} of it, evenly sampled"
    metrics = format_metrics(results["metrics"], results.get("intervals")).replace(" | ", ", ")
    limits = [
        "It reproduces the errors, biases and gaps of the text it was trained on.",
        "The held-out text comes from the same sources; on other text the loss will be higher.",
    ]
    if context := settings["model"].get("context"):
        length = settings["train"].get("length") or context
        limits.append(f"It was trained on rows of {length:,} tokens; its context is {context:,}.")
    if facts.task.generates:
        limits.append("Generated text is plausible, not factual, and may repeat the training text.")
    article = "An" if facts.task.name.startswith(tuple("aeiou")) else "A"
    title = f"{article} {facts.task.name} language model ({family}, {total:,} parameters), "
    return f"{title}pretrained with Headstock {facts.version}.", {
        "Data": table(rows | {"fingerprint": f"`{data['fingerprint']}`"}),
        "Training": table(training_rows(facts)),
        "Results": f"On the held-out text, {part}: {metrics}.{unknown_note(results)}",
        "Limits": bullets(limits),
    }


def unknown_note(results: dict[str, Any]) -> str:
    """How unknown tokens enter the bits per byte."""
    if reason := results.get("bits_per_byte_withheld"):
        return f" Bits per byte are withheld: {reason}."
    unknown = results.get("unknown") or {}
    if not unknown.get("tokens") or results.get("bits_per_byte") is None:
        return ""
    return (
        f" The held-out text has {unknown['tokens']:,} unknown tokens; bits per byte include 8 bits for each of the "
        f"{unknown['bytes']:,} bytes that they replace, and 8 for each unknown token."
    )


def finetuned_sections(facts: RunFacts) -> tuple[str, dict[str, str]]:
    settings, results, transfer = facts.settings, facts.results, facts.transfer
    classes, init = results["classes"], kind_of_transfer(transfer)
    source = escape_markdown(transfer["run"] or f"the preset {transfer['preset']}")
    metrics = {f"{side} rows": format_labelled_metrics(results[side]) for side in ("valid", "test") if side in results}
    limits = ["It was evaluated on rows like its training rows; on other text it may perform worse."]
    if facts.task.predicts_values:
        limits.append("It may predict numbers outside the range of its training labels.")
    if classes:
        limits.append("It always predicts one of these classes, also for a text that belongs to none of them.")
    if length := settings["train"].get("length") or settings["model"].get("context"):
        part = TRUNCATIONS.get(settings["task"].get("long", ""))
        longer = f"Of a text longer than {length:,} tokens it reads {part}."
        limits.append(longer if part else f"A row has at most {length:,} tokens.")
    if warning := majority_warning(results["metrics"]):
        limits.append(escape_markdown(warning))
    if "test" not in results:
        limits.append("It was not evaluated on test rows, only on the rows that selected its best epoch.")
    title = f"A {facts.task.title}" + (f" ({first_names(classes, 12)})" if classes else "")
    return f"{title}, fine-tuned with Headstock {facts.version} from {source}: {INITIALIZATIONS[init]}.", {
        "Data": table(labelled_rows(facts.data) | backbone_rows(transfer["run"])),
        "Training": table(training_rows(facts)),
        "Results": f"{table(metrics)}\n\n{SELECTION_NOTE}",
        "Limits": bullets(limits),
    }


def labelled_rows(data: dict[str, Any]) -> dict[str, str]:
    splits = {"training": data["train"], "validation": data["valid"]} | (
        {"test": data["test"]} if "test" in data else {}
    )
    rows = {}
    for name, split in splits.items():
        by_class = [f"{label} {count:,}" for label, count in (split.get("classes") or {}).items()]
        classes = f" ({first_names(by_class, 12)})" if by_class else label_summary(split.get("labels"))
        rows[name] = f"{escape_markdown(split['file'])}: {split['rows']:,} rows{classes}"
    files = dict.fromkeys(split["file"] for split in splits.values())
    return rows | {"licence": licences(files), "fingerprint": f"`{data['fingerprint']}`"}


def label_summary(labels: dict[str, float] | None) -> str:
    """The range of labels that are numbers."""
    if not labels:
        return ""
    return f" (labels {labels['lowest']:g} to {labels['highest']:g}, mean {labels['mean']:g}, std {labels['std']:g})"


def backbone_rows(name: str) -> dict[str, str]:
    """The backbone's pretraining text, if its run still exists."""
    try:
        files = open_run(name, download=False).data().get("corpus", [])
    except UserError:
        files = []
    return {"pretrained on": f"{first_names(files, 3)} (licence: {licences(files)})"} if files else {}


def imported_sections(facts: RunFacts) -> tuple[str, dict[str, str]]:
    data, total = facts.data, facts.results["parameters"]["total"]
    licence = data.get("hub", {}).get("license") or "unknown: that of the original model applies"
    rows = {"source": escape_markdown(data["imported"]), "licence": escape_markdown(licence)}
    rows |= {"sha256": f"`{data['sha256']}`"} if "sha256" in data else {}
    notes = f"\n\n{bullets(map(escape_markdown, data['notes']))}" if data.get("notes") else ""
    return f"A model of {total:,} parameters, imported with Headstock {facts.version}.", {
        "Data": table(rows | {"training data": "unknown"}) + notes,
        "Training": "Unknown.",
        "Results": "None are known; evaluate it on your own data.",
        "Limits": bullets(["Its training data is unknown, and so are its errors and biases."]),
    }


def training_rows(facts: RunFacts) -> dict[str, str]:
    """The training settings, time and versions."""
    train, results = facts.settings["train"], facts.results
    batch = f"{train['batch_tokens']:,} tokens" if train.get("batch_tokens") else f"{train['batch']:,} rows"
    best, speed, processes = results.get("best_epoch"), results.get("tokens_per_second"), results.get("processes", 1)
    return {
        "steps": f"{results['steps']:,} of {batch}" + (f"; best epoch {best}" if best is not None else ""),
        "tokens": f"{results['tokens']:,}" + (f", {speed:,.0f} per second" if speed else ""),
        "time": f"{results['seconds']:,.0f} s on {results['device']}"
        + (f", {processes} processes" if processes > 1 else ""),
        "optimizer": f"{train['optimizer']}, learning rate {train['lr']:g} ({train['schedule']}), weight decay "
        f"{train['weight_decay']:g}",
        **({"LoRA": describe_lora(results)} if results.get("lora") else {}),
        **({"soup": describe_soup(results)} if results.get("members") else {}),
        "seed": str(train["seed"]),
        "versions": ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
    }


def describe_soup(results: Mapping[str, Any]) -> str:
    """The models whose weights were averaged, and how each scores alone, as the card and the command line report it."""
    members, metric = results["members"], results["headline"]
    scores = ", ".join(format_metric(metric, member[f"valid_{metric}"]) for member in members)
    seeds = f"seeds {members[0]['seed']} to {members[-1]['seed']}"
    return f"mean weights of {len(members)} models ({seeds}); {metric_name(metric)} of each alone on valid: {scores}"


def describe_lora(results: Mapping[str, Any]) -> str:
    """Settings, trained parameters, memory and time, as the card and the command line report them."""
    lora, counts = results["lora"], results["parameters"]
    state, full = (f"{lora[key] / 1e6:,.2f} MB" for key in ("optimizer_bytes", "full_optimizer_bytes"))
    return (
        f"rank {lora['rank']}, alpha {lora['alpha']:g}, {lora['targets']}; trained {counts['trainable']:,} parameters, "
        f"{counts['trainable'] / counts['total']:.1%} of {counts['total']:,}; optimizer state {state} instead of "
        f"{full}; {1000 * lora['step_seconds']:.1f} ms per step with {lora['flops_ratio']:.0%} of the FLOPs of full "
        "fine-tuning"
    )


# Sections of every card


def tokenizer_section(facts: RunFacts) -> str:
    tokenizer = facts.tokenizer
    text = f"{tokenizer.kind}, {tokenizer.vocabulary:,} entries, fingerprint `{facts.data['tokenizer']}`."
    if (source := tokenizer.source_tokenizer) is not None:
        text += f" The source side has its own: {source.kind}, {source.vocabulary:,} entries."
    if (unused := facts.settings["model"].get("vocabulary", 0) - tokenizer.vocabulary) > 0:
        text += f" The model's vocabulary has {unused:,} unused entries more."
    file = (facts.settings.get("tokenizer") or {}).get("file")
    return text + (f" Taken from {escape_markdown(file)}." if file else "")


def architecture_section(facts: RunFacts) -> str:
    settings, parameters = facts.settings["model"], facts.results["parameters"]
    sizes = ", ".join(f"{key} {value}" for key, value in settings.items() if key != "family")
    parts = [f"backbone {parameters['base']:,}"]
    parts += [f"head `{name}` {count:,}" for name, count in parameters.items() if name not in TOTALS and count]
    trained = parameters.get("trainable", parameters["total"])
    trainable = f", {trained:,} of them trained" if trained != parameters["total"] else ""
    total = f"{parameters['total']:,} parameters{trainable}: {', '.join(parts)}."
    if (ensemble := facts.transfer.get("ensemble", 1)) > 1:
        total += f" The run is an ensemble of {ensemble} models; these numbers are for one."
    return f"{settings['family']}: {sizes}.\n\n{total}\n\n{formula_table(model_without_weights(facts.run))}"


def model_without_weights(run: RunFolder) -> Model:
    """The run's model on the meta device."""
    config = make_config(run.config())
    with torch.device("meta"):
        backbone = BACKBONES.get(config.family)(config.model)
        return Model(backbone, TASKS.get(config.objective)(config.task, run.tokenizer()).heads(backbone))


def usage_section(facts: RunFacts) -> str:
    """Commands and a call in Python that suit the run's task."""
    name, task = facts.run.path.name, facts.task
    quoted = shell_quote(name)
    call: tuple[str, str] | None  # the method of a pipeline and its argument
    if task.is_labelled:
        labelled = cast(type[LabelledTask], task)
        call = ("translate" if task.needs_encoder_decoder else "predict", "...")
        commands = [f"headstock {labelled.verb} {quoted} {labelled.example}", f"headstock evaluate {quoted} FILE"]
    else:
        calls = [("generate", "...")] if task.generates else []
        calls += [("fill", "... [MASK] ...")] if task.fills_masks else []
        calls = calls or ([] if task.needs_encoder_decoder else [("embed", "...")])
        call = calls[0] if calls else None
        data = "--task translate --train pairs.tsv" if task.needs_encoder_decoder else "--train labelled.csv"
        commands = [f'headstock {verb} {quoted} "{argument}"' for verb, argument in calls]
        commands += [f"headstock evaluate {quoted} FILE"] if task.trainable else []
        commands += [f"headstock finetune {quoted} {data} --out ANOTHER"]
        if not task.needs_encoder_decoder:
            commands += [
                "# is pretraining worth it?",
                f"headstock compare {quoted} --train labelled.csv --out COMPARISON",
            ]
        if not facts.results.get("imported"):
            config_file = shell_quote(f"{name}/config.json")
            commands += ["# repeat this run", f"headstock pretrain --config {config_file} --out ANOTHER"]
    python = ["import headstock", "", f"model = headstock.load({json.dumps(name, ensure_ascii=False)})"]
    python += [f'model.{call[0]}("{call[1]}")'] if call else []
    return f"{code_block(commands)}\n\nIn Python:\n\n{code_block(python)}"


def export_section(facts: RunFacts) -> str:
    """The commands for the formats that a run of this family can be exported to."""
    run, tokenizer, family = facts.run, facts.tokenizer, facts.settings["model"]["family"]
    name = run.path.name
    if facts.transfer.get("ensemble", 1) > 1:
        name = run.member(0).path.relative_to(run.path.parent).as_posix()
    is_transformer, has_lab_tokenizer = family == "transformer", tokenizer.kind == "lab"
    in_huggingface = family in ("transformer", "seq2seq") and not isinstance(tokenizer.backend, SentencePieceBackend)
    formats = {
        "huggingface": ("for transformers' from_pretrained", in_huggingface),
        "onnx": ("for ONNX Runtime, without torch", is_transformer),
        "lab": ("for the course lab's own modules", is_transformer and has_lab_tokenizer),
    }
    commands = []
    for kind, (purpose, possible) in formats.items():
        if possible:
            commands += [f"# {purpose}", f"headstock export {shell_quote(name)} --to {kind} FOLDER"]
    if not commands:
        kind = f"of the family {family} with a {tokenizer.kind} tokenizer"
        return f"It runs in Headstock only: no export format supports a model {kind}."
    return code_block(commands) + "\n\nExport fails with a reason if a format cannot represent the model exactly."


# Markdown


def licences(files: Iterable[str]) -> str:
    names = dict.fromkeys(licence for file in files if (licence := licence_of(file)))
    return "; ".join(map(escape_markdown, names)) or UNKNOWN_LICENCE


def first_names(names: Iterable[str], count: int) -> str:
    """The first names, escaped, and the number of the others."""
    names = list(names)
    others = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(map(escape_markdown, names[:count])) + others


def table(rows: Mapping[str, str]) -> str:
    lines = [f"| {name} | {value.replace('|', '&#124;')} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


def bullets(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def code_block(lines: Iterable[str]) -> str:
    return "\n".join(f"    {line}".rstrip() for line in lines)
