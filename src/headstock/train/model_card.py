"""The run's README.md: what it was made from, what came out, what not to trust it with and how to use it.

All of it is taken from the run itself.
"""

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
UNKNOWN = "not known to Headstock: it is that of whoever wrote the text"


def write_card(run: RunFolder) -> None:
    run.write_card(render_card(run))


def render_card(run: RunFolder) -> str:
    """The card of a finished run: pretrained, fine-tuned or brought in from elsewhere."""
    results = run.results()
    kind = "import" if results.get("imported") else results.get("kind", "pretrain")
    parts = {"finetune": finetuned, "import": imported}.get(kind, pretrained)(run)
    return CARD.format(
        name=escape_markdown(run.path.name),
        tokenizer=tokenizer_of(run),
        architecture=architecture(run),
        there=elsewhere(run),
        **parts,
    )


# Language models


def pretrained(run: RunFolder) -> dict[str, str]:
    settings, data, results = run.config(), run.data(), run.results()
    objective, family = settings["task"]["name"], settings["model"]["family"]
    total, version = results["parameters"]["total"], results["versions"]["headstock"]
    measured, share = format_metrics(results["metrics"], results.get("intervals")), results.get("measured_share", 1)
    part = "all of it" if share == 1 else f"{share:.0%} of it, evenly spread"
    return {
        "title": f"A {objective} language model ({family}, {total:,} parameters), grown by Headstock {version}.",
        "data": table(corpus_rows(settings, data)),
        "training": table(budget(settings, results)),
        "results": f"On the held-out text, {part}: {measured.replace(' | ', ', ')}.{unknown_words(results)}",
        "limits": listed(language_limits(run)),
        "here": language_use(run),
    }


def unknown_words(results: dict[str, Any]) -> str:
    """What the bits per byte charge for unknown tokens, or why there are none."""
    if why := results.get("bits_per_byte_withheld"):
        return f" Bits per byte are withheld: {why}."
    unknown = results.get("unknown") or {}
    if not unknown.get("tokens") or results.get("bits_per_byte") is None:
        return ""
    return (
        f" The held-out text has {unknown['tokens']:,} unknown tokens; bits per byte include 8 bits for each of the "
        f"{unknown['bytes']:,} bytes that they hide, and 8 for each unknown token."
    )


def corpus_rows(settings: dict[str, Any], data: dict[str, Any]) -> dict[str, str]:
    files = data["corpus"]
    held = "held out by document before training" if not settings["data"]["valid"] else "from files of its own"
    rows = {
        "text": f"{some(files, 3)}; {escape_markdown(data['how'])}",
        "licence": licences([*files, *settings["data"]["corpus"]]),
        "to train on": f"{data['train_documents']:,} documents, {data['train_bytes']:,} bytes, "
        f"{data['train_tokens']:,} tokens",
        "to validate on": f"{data['valid_documents']:,} documents, {data['valid_bytes']:,} bytes, {held}",
    }
    if left := data.get("duplicates", 0) + data.get("in_validation", 0):
        rows["left out"] = f"{left:,} documents that were there twice"
    return rows | {"fingerprint": f"`{data['fingerprint']}`"}


def language_limits(run: RunFolder) -> Iterable[str]:
    settings = run.config()
    task = TASKS.get(settings["task"]["name"])
    yield "All it knows is the text above: its mistakes, its prejudices and what it leaves out are the model's too."
    yield "The held-out text is of the same sources: other text will be harder, and how much is not known."
    if context := settings["model"].get("context"):
        length = settings["train"].get("length") or context
        yield f"It learned from rows of {length:,} tokens; a row can have up to {context:,}."
    if task.generates:
        yield "What it writes is likely, not true; nothing was done to keep it from repeating its training text."


def language_use(run: RunFolder) -> str:
    name, task = run.path.name, TASKS.get(run.config()["task"]["name"])
    typed = shell_quote(name)
    words = [f'headstock generate {typed} "..."'] if task.generates else []
    words += [f'headstock fill {typed} "... [MASK] ..."'] if task.fills_masks else []
    words = words or ([f'headstock embed {typed} "..."'] if not task.needs_encoder_decoder else [])
    calls = (["generate"] if task.generates else []) + (["fill"] if task.fills_masks else [])
    learn = "--task translate --train pairs.tsv" if task.needs_encoder_decoder else "--train labelled.csv"
    words += [f"headstock evaluate {typed} FILE"] if task.trainable else []
    words += [f"headstock finetune {typed} {learn} --out ANOTHER"]
    if not task.needs_encoder_decoder:
        words.append(f"headstock compare {typed} --train labelled.csv --out ANSWER     # whether it pays")
    if not run.results().get("imported"):
        words.append(
            f"headstock pretrain --config {shell_quote(f'{name}/config.json')} --out ANOTHER     # the same again"
        )
    return (
        lines(words)
        + "\n\nIn Python:\n\n"
        + in_python(name, calls[:1] or ([] if task.needs_encoder_decoder else ["embed"]))
    )


# Models of a task


def finetuned(run: RunFolder) -> dict[str, str]:
    settings, data, results = run.config(), run.data(), run.results()
    transfer, task, classes = settings["transfer"], labelled_task(results["task"]), results["classes"]
    how = {
        "pretrained": "all its weights went on learning",
        "scratch": "its architecture, but none of its weights",
        "frozen": "its weights stayed as they were, and a new head learned",
    }["frozen" if transfer["freeze"] else transfer["init"]]
    source = escape_markdown(transfer["run"] or f"the preset {transfer['preset']}")
    title = f"A {task.title}" + (f" ({some(classes, 12)})" if classes else "")
    measured = {f"on {side} rows": with_intervals(results[side]) for side in ("valid", "test") if side in results}
    chosen = "The epoch was chosen on the validation rows, so their numbers flatter; those of test rows do not."
    typed = shell_quote(run.path.name)
    words = [f"headstock {task.verb} {typed} {task.example}", f"headstock evaluate {typed} FILE"]
    return {
        "title": f"{title}, made by Headstock {results['versions']['headstock']} from {source}: {how}.",
        "data": table(labelled_rows(data) | backbone_rows(transfer["run"])),
        "training": table(budget(settings, results)),
        "results": f"{table(measured)}\n\n{chosen} Intervals are 95%, over the rows\nalone: another seed would give "
        "another model.",
        "limits": listed(task_limits(run)),
        "here": lines(words) + "\n\nIn Python:\n\n" + in_python(run.path.name, [call_of(task)]),
    }


def labelled_rows(data: dict[str, Any]) -> dict[str, str]:
    rows = {}
    for side, what in (("train", "to train on"), ("valid", "to validate on"), ("test", "to test on")):
        if side in data:
            counts = data[side].get("classes") or {}
            by_class = some([f"{name} {count:,}" for name, count in counts.items()], 12)
            file = escape_markdown(data[side]["file"])
            rows[what] = f"{file}: {data[side]['rows']:,} rows" + (f" ({by_class})" if counts else "")
    files = dict.fromkeys(data[side]["file"] for side in ("train", "valid", "test") if side in data)
    return rows | {"licence": licences(files), "fingerprint": f"`{data['fingerprint']}`"}


def backbone_rows(name: str) -> dict[str, str]:
    """What the backbone had learned from before, where the run it is of is still there."""
    try:
        files = open_run(name).data().get("corpus", [])
    except UserError:
        files = []
    return {"pretrained on": f"{some(files, 3)} (licence: {licences(files)})"} if files else {}


def task_limits(run: RunFolder) -> Iterable[str]:
    settings, results = run.config(), run.results()
    task = settings["task"]
    yield "It was measured on rows like those it learned from; on other text it may do worse and will not say so."
    if results["classes"]:
        yield "It knows these classes and no other: a text that is of none of them still gets one."
    if length := settings["train"].get("length") or settings["model"].get("context"):
        ways = {
            "head": f"Of a text longer than {length:,} tokens it reads the beginning.",
            "tail": f"Of a text longer than {length:,} tokens it reads the end.",
            "head+tail": f"Of a text longer than {length:,} tokens it reads a quarter from the beginning and the rest "
            "from the end.",
            "windows": f"A text longer than {length:,} tokens is read in rows that overlap, which are averaged.",
        }
        yield ways.get(task.get("long", ""), f"A row has at most {length:,} tokens.")
    if said := majority_warning(results["metrics"]):
        yield escape_markdown(said)
    if "test" not in results:
        yield "It was not measured on test rows, only on the rows that its best epoch was chosen by."


TOLD = ("accuracy", "exact_match", "f1", "micro_f1", "macro_f1", "bleu", "chrf")


def measured_lines(name: str, metrics: Mapping[str, Any]) -> list[str]:
    """What finetune and evaluate print of a file's rows, and a line where no more than the commonest class is known."""
    said = majority_warning(metrics)
    return [f"{name}: {with_intervals(metrics)} (intervals: 95%)", *([f"{name}: {said}"] if said else [])]


def with_intervals(metrics: Mapping[str, Any]) -> str:
    """`accuracy 81.2% (79.8 to 82.5), macro F1 ...`."""
    told = []
    for name in TOLD:
        if name in metrics:
            low, high = metrics["intervals"].get(name, (None, None))
            around = f" ({100 * low:.1f} to {100 * high:.1f})" if low is not None else ""
            called = {"bleu": "BLEU", "chrf": "chrF"}.get(name, name.replace("f1", "F1").replace("_", " "))
            unit = "" if name in ("bleu", "chrf") else "%"
            told.append(f"{called} {100 * metrics[name]:.1f}{unit}{around}")
    if "majority" in metrics:
        told.append(f"majority class {100 * metrics['majority']:.1f}%")
    loss = [f"loss {metrics['loss']:.4f}"] if "loss" in metrics else []
    return ", ".join([*told, *loss, f"{metrics['rows']:,} rows"])


# Models made elsewhere


def imported(run: RunFolder) -> dict[str, str]:
    data, results, name = run.data(), run.results(), run.path.name
    total, version = results["parameters"]["total"], results["versions"]["headstock"]
    known = {"from": escape_markdown(data["imported"])}
    known |= {"licence": "not known here: it is that of whoever made the model"}
    known |= {"sha256": f"`{data['sha256']}`"} if "sha256" in data else {}
    known |= {"learned from": "not known here"}
    notes = f"\n\n{listed(map(escape_markdown, data['notes']))}" if data.get("notes") else ""
    task, here = TASKS.get(run.config()["task"]["name"]), language_use(run)
    if task.is_labelled:
        task = cast(type[LabelledTask], task)
        typed = shell_quote(name)
        words = [f"headstock {task.verb} {typed} {task.example}", f"headstock evaluate {typed} FILE"]
        here = lines(words) + "\n\nIn Python:\n\n" + in_python(name, [call_of(task)])
    return {
        "title": f"A model of {total:,} parameters that was made elsewhere, brought in by Headstock {version}.",
        "data": table(known) + notes,
        "training": "Not known here.",
        "results": "None came along; ask those who made it, or measure it on rows of your own.",
        "limits": listed(["What it learned from is not known here, and so neither are its mistakes and prejudices."]),
        "here": here,
    }


def call_of(task: type[LabelledTask]) -> str:
    return "translate" if task.needs_encoder_decoder else "predict"


# What all have


def tokenizer_of(run: RunFolder) -> str:
    tokenizer, data = run.tokenizer(), run.data()
    told = f"{tokenizer.kind}, {tokenizer.vocabulary:,} entries, fingerprint `{data['tokenizer']}`."
    if tokenizer.source_tokenizer is not None:
        source = tokenizer.source_tokenizer
        told += f" What it reads is cut by another: {source.kind}, {source.vocabulary:,} entries."
    if (unused := run.config()["model"].get("vocabulary", 0) - tokenizer.vocabulary) > 0:
        told += f" The model has room for {unused:,} more, which stand for nothing and are never said."
    settings = run.config().get("tokenizer") or {}
    return told + (f" Taken from {escape_markdown(settings['file'])}." if settings.get("file") else "")


def model_without_weights(run: RunFolder) -> Model:
    """The run's model on the meta device."""
    config = make_config(run.config())
    with torch.device("meta"):
        backbone = BACKBONES.get(config.family)(config.model)
        return Model(backbone, TASKS.get(config.objective)(config.task, run.tokenizer()).heads(backbone))


def architecture(run: RunFolder) -> str:
    settings, parameters = run.config()["model"], run.results()["parameters"]
    shape = ", ".join(f"{key} {value}" for key, value in settings.items() if key != "family")
    ensemble = (run.config().get("transfer") or {}).get("ensemble", 1)
    several = f" {ensemble} models are averaged; the numbers are those of one." if ensemble > 1 else ""
    parts = [f"backbone {parameters['base']:,}"]
    parts += [f"head `{name}` {count:,}" for name, count in parameters.items() if name not in SUMS and count]
    trained = parameters.get("trainable", parameters["total"])
    learned = f", {trained:,} of them trained" if trained != parameters["total"] else ""
    counted = f"{parameters['total']:,} parameters{learned}: {', '.join(parts)}."
    return f"{settings['family']}: {shape}.\n\n{counted}{several}\n\n{formula_table(model_without_weights(run))}"


SUMS = ("base", "total", "trainable", "frozen")  # not of a head


def budget(settings: dict[str, Any], results: dict[str, Any]) -> dict[str, str]:
    """What training took, and how it was done."""
    train = settings["train"]
    rows = f"{train['batch_tokens']:,} tokens" if train.get("batch_tokens") else f"{train['batch']:,} rows"
    best = results.get("best_epoch")
    steps = f"{results['steps']:,} of {rows}" + (f"; best epoch {best}" if best is not None else "")
    speed = results.get("tokens_per_second")
    processes = f", {results['processes']} processes" if results.get("processes", 1) > 1 else ""
    return {
        "steps": steps,
        "tokens": f"{results['tokens']:,}" + (f", {speed:,.0f} a second" if speed else ""),
        "time": f"{results['seconds']:,.0f} s on {results['device']}{processes}",
        "optimizer": f"{train['optimizer']}, learning rate {train['lr']:g} ({train['schedule']}), weight decay "
        f"{train['weight_decay']:g}",
        "seed": str(train["seed"]),
        "made with": ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
    }


def elsewhere(run: RunFolder) -> str:
    """The formats that a run of this family has a place in; what does not fit exactly is refused there, with why."""
    settings, name = run.config(), run.path.name
    family = BACKBONES.get(settings["model"]["family"])
    if (settings.get("transfer") or {}).get("ensemble", 1) > 1:
        name = run.member(0).path.relative_to(run.path.parent).as_posix()
    name, words, tokenizer = shell_quote(name), [], run.tokenizer()
    if family.name in ("transformer", "seq2seq") and not isinstance(tokenizer.backend, SentencePieceBackend):
        words.append(f"headstock export {name} --to huggingface FOLDER     # for transformers' from_pretrained")
    if family.name == "transformer":
        words.append(f"headstock export {name} --to onnx FOLDER            # for ONNX Runtime, without torch")
    if family.name == "transformer" and tokenizer.kind == "lab":
        words.append(f"headstock export {name} --to lab FOLDER             # for the course lab's own modules")
    if not words:
        like = f"of the family {family.name} with a {tokenizer.kind} tokenizer"
        return f"It runs in Headstock only: a model {like} has no place in the formats that are written."
    return lines(words) + "\n\nWhat a format cannot say exactly is refused there, with the reason."


def licences(files: Iterable[str]) -> str:
    known = dict.fromkeys(found for file in files if (found := licence_of(file)))
    return "; ".join(map(escape_markdown, known)) or UNKNOWN


def some(names: Iterable[str], most: int) -> str:
    """The first names, escaped, and how many more there are."""
    every = list(names)
    return ", ".join(map(escape_markdown, every[:most])) + (
        f" and {len(every) - most} more" if len(every) > most else ""
    )


def table(rows: Mapping[str, str]) -> str:
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {name} | {value.replace('|', '&#124;')} |" for name, value in rows.items())]
    )


def listed(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def lines(words: Iterable[str]) -> str:
    return "\n".join(f"    {line}".rstrip() for line in words)


def in_python(name: str, calls: Iterable[str]) -> str:
    shown = {"fill": '"... [MASK] ..."'}
    used = [f"model.{call}({shown.get(call, TEXT)})" for call in calls]
    return lines(["import headstock", "", f"model = headstock.load({json.dumps(name, ensure_ascii=False)})", *used])
