"""Model cards: a run's README.md with its data, training, results, limitations and use, from the run's own files."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch

from headstock.cost.parameter_table import formula_table
from headstock.data.catalog import licence_of
from headstock.data.sentencepiece_tokenizer import SentencePieceBackend
from headstock.errors import UserError, shell_quote
from headstock.markdown import escape_markdown
from headstock.model.backbone import BACKBONES
from headstock.model.model import Model
from headstock.tasks.base import TASKS
from headstock.tasks.labelled import LabelledTask
from headstock.train.callbacks import format_metrics
from headstock.train.metrics import majority_warning
from headstock.train.resolve import labelled_task
from headstock.train.run_folder import RunFolder, open_run
from headstock.train.settings import make_config

CARD = """# {name}

{title}

## Data

{data}

## Tokenizer

{tokenizer}

## Architecture

{architecture}

## Training

{training}

## Results

{results}

## Limits

{limits}

## Use it here

{here}

## Use it elsewhere

{there}
"""

TEXT = '"..."'
UNKNOWN_LICENCE = "unknown: the licence of the original text applies"


def write_card(run: RunFolder) -> None:
    run.write_card(render_card(run))


def render_card(run: RunFolder) -> str:
    """The card of a finished run: pretrained, fine-tuned or imported."""
    results = run.results()
    kind = "import" if results.get("imported") else results.get("kind", "pretrain")
    parts = {"finetune": finetuned_parts, "import": imported_parts}.get(kind, pretrained_parts)(run)
    return CARD.format(
        name=escape_markdown(run.path.name),
        tokenizer=tokenizer_section(run),
        architecture=architecture_section(run),
        there=export_section(run),
        **parts,
    )


# Language models


def pretrained_parts(run: RunFolder) -> dict[str, str]:
    settings, data, results = run.config(), run.data(), run.results()
    objective, family = settings["task"]["name"], settings["model"]["family"]
    total, version = results["parameters"]["total"], results["versions"]["headstock"]
    measured, share = format_metrics(results["metrics"], results.get("intervals")), results.get("measured_share", 1)
    part = "all of it" if share == 1 else f"{share:.0%} of it, evenly sampled"
    return {
        "title": f"A {objective} language model ({family}, {total:,} parameters), pretrained with Headstock {version}.",
        "data": table(corpus_rows(settings, data)),
        "training": table(training_rows(settings, results)),
        "results": f"On the held-out text, {part}: {measured.replace(' | ', ', ')}.{unknown_note(results)}",
        "limits": listed(language_limits(run)),
        "here": language_use(run),
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


def corpus_rows(settings: dict[str, Any], data: dict[str, Any]) -> dict[str, str]:
    files = data["corpus"]
    held = "held out by document before training" if not settings["data"]["valid"] else "from separate files"
    rows = {
        "text": f"{some(files, 3)}; {escape_markdown(data['how'])}",
        "licence": licences([*files, *settings["data"]["corpus"]]),
        "training": f"{data['train_documents']:,} documents, {data['train_bytes']:,} bytes, "
        f"{data['train_tokens']:,} tokens",
        "validation": f"{data['valid_documents']:,} documents, {data['valid_bytes']:,} bytes, {held}",
    }
    if duplicates := data.get("duplicates", 0) + data.get("in_validation", 0):
        rows["removed"] = f"{duplicates:,} duplicate documents"
    return rows | {"fingerprint": f"`{data['fingerprint']}`"}


def language_limits(run: RunFolder) -> Iterable[str]:
    settings = run.config()
    task = TASKS.get(settings["task"]["name"])
    yield "It reproduces the errors, biases and gaps of the text it was trained on."
    yield "The held-out text comes from the same sources; on other text the loss will be higher."
    if context := settings["model"].get("context"):
        length = settings["train"].get("length") or context
        yield f"It was trained on rows of {length:,} tokens; its context is {context:,}."
    if task.generates:
        yield "Generated text is plausible, not factual, and may repeat the training text."


def language_use(run: RunFolder) -> str:
    name, task = run.path.name, TASKS.get(run.config()["task"]["name"])
    quoted = shell_quote(name)
    commands = [f'headstock generate {quoted} "..."'] if task.generates else []
    commands += [f'headstock fill {quoted} "... [MASK] ..."'] if task.fills_masks else []
    commands = commands or ([f'headstock embed {quoted} "..."'] if not task.needs_encoder_decoder else [])
    calls = (["generate"] if task.generates else []) + (["fill"] if task.fills_masks else [])
    train = "--task translate --train pairs.tsv" if task.needs_encoder_decoder else "--train labelled.csv"
    commands += [f"headstock evaluate {quoted} FILE"] if task.trainable else []
    commands += [f"headstock finetune {quoted} {train} --out ANOTHER"]
    if not task.needs_encoder_decoder:
        commands.append(f"headstock compare {quoted} --train labelled.csv --out COMPARISON     # worth it?")
    if not run.results().get("imported"):
        commands.append(
            f"headstock pretrain --config {shell_quote(f'{name}/config.json')} --out ANOTHER     # repeat this run"
        )
    return (
        lines(commands)
        + "\n\nIn Python:\n\n"
        + in_python(name, calls[:1] or ([] if task.needs_encoder_decoder else ["embed"]))
    )


# Fine-tuned models


def finetuned_parts(run: RunFolder) -> dict[str, str]:
    settings, data, results = run.config(), run.data(), run.results()
    transfer, task, classes = settings["transfer"], labelled_task(results["task"]), results["classes"]
    how = {
        "pretrained": "all weights were fine-tuned",
        "scratch": "its architecture, trained from scratch",
        "frozen": "a new head on its frozen weights",
    }["frozen" if transfer["freeze"] else transfer["init"]]
    source = escape_markdown(transfer["run"] or f"the preset {transfer['preset']}")
    title = f"A {task.title}" + (f" ({some(classes, 12)})" if classes else "")
    metrics = {f"{side} rows": with_intervals(results[side]) for side in ("valid", "test") if side in results}
    selection = "The best epoch was selected on the validation rows, so their metrics are optimistic."
    return {
        "title": f"{title}, fine-tuned with Headstock {results['versions']['headstock']} from {source}: {how}.",
        "data": table(labelled_rows(data) | backbone_rows(transfer["run"])),
        "training": table(training_rows(settings, results)),
        "results": f"{table(metrics)}\n\n{selection} Intervals are 95% over\nthe rows; they exclude the variation "
        "between seeds.",
        "limits": listed(task_limits(run)),
        "here": task_use(run.path.name, task),
    }


def labelled_rows(data: dict[str, Any]) -> dict[str, str]:
    rows = {}
    for side, name in (("train", "training"), ("valid", "validation"), ("test", "test")):
        if side in data:
            counts = data[side].get("classes") or {}
            by_class = some([f"{label} {count:,}" for label, count in counts.items()], 12)
            file = escape_markdown(data[side]["file"])
            rows[name] = f"{file}: {data[side]['rows']:,} rows" + (f" ({by_class})" if counts else "")
    files = dict.fromkeys(data[side]["file"] for side in ("train", "valid", "test") if side in data)
    return rows | {"licence": licences(files), "fingerprint": f"`{data['fingerprint']}`"}


def backbone_rows(name: str) -> dict[str, str]:
    """The backbone's pretraining text, if its run still exists."""
    try:
        files = open_run(name).data().get("corpus", [])
    except UserError:
        files = []
    return {"pretrained on": f"{some(files, 3)} (licence: {licences(files)})"} if files else {}


def task_limits(run: RunFolder) -> Iterable[str]:
    settings, results = run.config(), run.results()
    task = settings["task"]
    yield "It was evaluated on rows like its training rows; on other text it may perform worse."
    if results["classes"]:
        yield "It always predicts one of these classes, also for a text that belongs to none of them."
    if length := settings["train"].get("length") or settings["model"].get("context"):
        longer = f"Of a text longer than {length:,} tokens it reads"
        truncation = {
            "head": f"{longer} the beginning.",
            "tail": f"{longer} the end.",
            "head+tail": f"{longer} the beginning (a quarter of the tokens) and the end.",
            "windows": f"{longer} overlapping windows, whose outputs are averaged.",
        }
        yield truncation.get(task.get("long", ""), f"A row has at most {length:,} tokens.")
    if warning := majority_warning(results["metrics"]):
        yield escape_markdown(warning)
    if "test" not in results:
        yield "It was not evaluated on test rows, only on the rows that selected its best epoch."


SHOWN_METRICS = ("accuracy", "exact_match", "f1", "micro_f1", "macro_f1", "bleu", "chrf")


def measured_lines(name: str, metrics: Mapping[str, Any]) -> list[str]:
    """The metrics of a file as finetune and evaluate print them, with a warning if they do not beat the majority."""
    warning = majority_warning(metrics)
    return [f"{name}: {with_intervals(metrics)} (intervals: 95%)", *([f"{name}: {warning}"] if warning else [])]


def with_intervals(metrics: Mapping[str, Any]) -> str:
    """`accuracy 81.2% (79.8 to 82.5), macro F1 ...`."""
    parts = []
    for name in SHOWN_METRICS:
        if name in metrics:
            low, high = metrics["intervals"].get(name, (None, None))
            interval = f" ({100 * low:.1f} to {100 * high:.1f})" if low is not None else ""
            label = {"bleu": "BLEU", "chrf": "chrF"}.get(name, name.replace("f1", "F1").replace("_", " "))
            unit = "" if name in ("bleu", "chrf") else "%"
            parts.append(f"{label} {100 * metrics[name]:.1f}{unit}{interval}")
    if "majority" in metrics:
        parts.append(f"majority class {100 * metrics['majority']:.1f}%")
    loss = [f"loss {metrics['loss']:.4f}"] if "loss" in metrics else []
    return ", ".join([*parts, *loss, f"{metrics['rows']:,} rows"])


# Imported models


def imported_parts(run: RunFolder) -> dict[str, str]:
    data, results, name = run.data(), run.results(), run.path.name
    total, version = results["parameters"]["total"], results["versions"]["headstock"]
    rows = {"source": escape_markdown(data["imported"]), "licence": "unknown: that of the original model applies"}
    rows |= {"sha256": f"`{data['sha256']}`"} if "sha256" in data else {}
    rows |= {"training data": "unknown"}
    notes = f"\n\n{listed(map(escape_markdown, data['notes']))}" if data.get("notes") else ""
    task, here = TASKS.get(run.config()["task"]["name"]), language_use(run)
    if task.is_labelled:
        here = task_use(name, cast(type[LabelledTask], task))
    return {
        "title": f"A model of {total:,} parameters, imported with Headstock {version}.",
        "data": table(rows) + notes,
        "training": "Unknown.",
        "results": "None are known; evaluate it on your own data.",
        "limits": listed(["Its training data is unknown, and so are its errors and biases."]),
        "here": here,
    }


def task_use(name: str, task: type[LabelledTask]) -> str:
    quoted = shell_quote(name)
    commands = [f"headstock {task.verb} {quoted} {task.example}", f"headstock evaluate {quoted} FILE"]
    call = "translate" if task.needs_encoder_decoder else "predict"
    return lines(commands) + "\n\nIn Python:\n\n" + in_python(name, [call])


# All models


def tokenizer_section(run: RunFolder) -> str:
    tokenizer, data = run.tokenizer(), run.data()
    text = f"{tokenizer.kind}, {tokenizer.vocabulary:,} entries, fingerprint `{data['tokenizer']}`."
    if tokenizer.source_tokenizer is not None:
        source = tokenizer.source_tokenizer
        text += f" The source side has its own: {source.kind}, {source.vocabulary:,} entries."
    if (unused := run.config()["model"].get("vocabulary", 0) - tokenizer.vocabulary) > 0:
        text += f" The model's vocabulary has {unused:,} unused entries more."
    settings = run.config().get("tokenizer") or {}
    return text + (f" Taken from {escape_markdown(settings['file'])}." if settings.get("file") else "")


def model_without_weights(run: RunFolder) -> Model:
    """The run's model on the meta device."""
    config = make_config(run.config())
    with torch.device("meta"):
        backbone = BACKBONES.get(config.family)(config.model)
        return Model(backbone, TASKS.get(config.objective)(config.task, run.tokenizer()).heads(backbone))


def architecture_section(run: RunFolder) -> str:
    settings, parameters = run.config()["model"], run.results()["parameters"]
    shape = ", ".join(f"{key} {value}" for key, value in settings.items() if key != "family")
    ensemble = (run.config().get("transfer") or {}).get("ensemble", 1)
    several = f" The run is an ensemble of {ensemble} models; these numbers are for one." if ensemble > 1 else ""
    parts = [f"backbone {parameters['base']:,}"]
    parts += [f"head `{name}` {count:,}" for name, count in parameters.items() if name not in TOTALS and count]
    trained = parameters.get("trainable", parameters["total"])
    trainable = f", {trained:,} of them trained" if trained != parameters["total"] else ""
    total = f"{parameters['total']:,} parameters{trainable}: {', '.join(parts)}."
    return f"{settings['family']}: {shape}.\n\n{total}{several}\n\n{formula_table(model_without_weights(run))}"


TOTALS = ("base", "total", "trainable", "frozen")  # keys of parameter counts that are not heads


def training_rows(settings: dict[str, Any], results: dict[str, Any]) -> dict[str, str]:
    """The training settings, time and versions."""
    train = settings["train"]
    rows = f"{train['batch_tokens']:,} tokens" if train.get("batch_tokens") else f"{train['batch']:,} rows"
    best = results.get("best_epoch")
    steps = f"{results['steps']:,} of {rows}" + (f"; best epoch {best}" if best is not None else "")
    speed = results.get("tokens_per_second")
    processes = f", {results['processes']} processes" if results.get("processes", 1) > 1 else ""
    return {
        "steps": steps,
        "tokens": f"{results['tokens']:,}" + (f", {speed:,.0f} per second" if speed else ""),
        "time": f"{results['seconds']:,.0f} s on {results['device']}{processes}",
        "optimizer": f"{train['optimizer']}, learning rate {train['lr']:g} ({train['schedule']}), weight decay "
        f"{train['weight_decay']:g}",
        "seed": str(train["seed"]),
        "versions": ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
    }


def export_section(run: RunFolder) -> str:
    """The commands for the formats that a run of this family can be exported to."""
    settings, name = run.config(), run.path.name
    family = BACKBONES.get(settings["model"]["family"])
    if (settings.get("transfer") or {}).get("ensemble", 1) > 1:
        name = run.member(0).path.relative_to(run.path.parent).as_posix()
    name, commands, tokenizer = shell_quote(name), [], run.tokenizer()
    if family.name in ("transformer", "seq2seq") and not isinstance(tokenizer.backend, SentencePieceBackend):
        commands.append(f"headstock export {name} --to huggingface FOLDER     # for transformers' from_pretrained")
    if family.name == "transformer":
        commands.append(f"headstock export {name} --to onnx FOLDER            # for ONNX Runtime, without torch")
    if family.name == "transformer" and tokenizer.kind == "lab":
        commands.append(f"headstock export {name} --to lab FOLDER             # for the course lab's own modules")
    if not commands:
        kind = f"of the family {family.name} with a {tokenizer.kind} tokenizer"
        return f"It runs in Headstock only: no export format supports a model {kind}."
    return lines(commands) + "\n\nExport fails with a reason if a format cannot represent the model exactly."


def licences(files: Iterable[str]) -> str:
    names = dict.fromkeys(licence for file in files if (licence := licence_of(file)))
    return "; ".join(map(escape_markdown, names)) or UNKNOWN_LICENCE


def some(names: Iterable[str], most: int) -> str:
    """The first names, escaped, and the number of the others."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(escape_markdown, names[:most])) + more


def table(rows: Mapping[str, str]) -> str:
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {name} | {value.replace('|', '&#124;')} |" for name, value in rows.items())]
    )


def listed(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def lines(commands: Iterable[str]) -> str:
    """An indented code block."""
    return "\n".join(f"    {line}".rstrip() for line in commands)


def in_python(name: str, calls: Iterable[str]) -> str:
    arguments = {"fill": '"... [MASK] ..."'}
    used = [f"model.{call}({arguments.get(call, TEXT)})" for call in calls]
    return lines(["import headstock", "", f"model = headstock.load({json.dumps(name, ensure_ascii=False)})", *used])
