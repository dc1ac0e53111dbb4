"""The reports of single runs: a pretrained language model, and a fine-tuned model."""

import re
from collections.abc import Callable
from typing import Any

from headstock.data.mask_gaps import MASK
from headstock.errors import UserError
from headstock.report import charts, error_section
from headstock.report.format import is_finite, score
from headstock.report.highlighted_text import make_passage
from headstock.report.render import render
from headstock.report.theme import NARROW, WIDE, ArmStyle, Gallery, arm_styles
from headstock.tasks.labelled import Nouns, nouns_of
from headstock.tasks.text_metrics import DEFINITIONS, METRICS, metric_name
from headstock.train.metrics import majority_warning
from headstock.train.run_folder import RunFolder
from headstock.train.settings import kind_of_transfer

Rows = list[dict[str, Any]]

SAMPLE_SECTIONS = {  # by kind: heading and description
    "continued": ("Continuations", "The beginnings of held-out texts, and highlighted what the model generates."),
    "filled": ("Filled masks", "Held-out texts with masked words, and below each the most likely words, highlighted."),
    "denoised": ("Denoised texts", "Held-out texts with removed spans, and below each the text the model generates."),
}


def run_page(run: RunFolder, samples: list[str]) -> str:
    """The page of a pretraining run; `samples` are texts it generated."""
    results = run.results()
    return render(
        __package__,
        "run.html",
        name=run.path.name,
        results=results,
        data=read_if_present(run.data),
        settings=settings_of(run),
        loss=loss_charts(run.read_metrics(), Gallery()),
        outputs=sample_sections(results.get("samples") or []),
        samples=samples,
    )


def sample_sections(samples: Rows) -> list[dict[str, Any]]:
    """The samples of results.json by kind, with the generated text highlighted."""
    sections = []
    for kind, (title, description) in SAMPLE_SECTIONS.items():
        rows = []
        for sample in (sample for sample in samples if sample.get("kind") == kind):
            given, output, true = sample["given"], sample["output"], sample["true"]
            if kind == "continued":
                text, marks = given + output, [(len(given), len(given + output), "said")]
                given, true = "", given + true
            else:
                text, marks = output, [(*span, "said") for span in filled_spans(given, output)]
            rows.append({"given": given, "output": make_passage(text, marks=marks, preview=len(text)), "true": true})
        if rows:
            sections.append({"kind": kind, "title": title, "description": description, "rows": rows})
    return sections


def filled_spans(given: str, output: str) -> list[tuple[int, int]]:
    """The spans of the output that replace the masks; empty if the rest was changed too."""
    match = re.fullmatch("(.*?)".join(map(re.escape, given.split(MASK))), output, re.DOTALL)
    return [match.span(number) for number in range(1, len(match.groups()) + 1)] if match else []


def finetune_page(run: RunFolder) -> str:
    """The page of a fine-tuned run: scores, accuracy by epoch, and errors if they were analysed."""
    results = run.results()
    settings = settings_of(run)
    style = arm_styles([{"name": run.path.name, "kind": kind_of_transfer(settings.get("transfer", {}))}])[run.path.name]
    gallery, rows = Gallery(), run.read_metrics()
    details, nouns = results.get("details") or {}, nouns_of(results.get("task"))
    max_text = error_section.max_text_length(len(details.get("mistakes") or []))
    classes = list(map(str, results.get("classes") or details.get("classes") or []))
    arm = error_section.describe(details, classes, style, gallery, max_text, nouns) if details else None
    measured = scores_by_split(results)
    others = {name for part in measured for name in part["others"]}
    return render(
        __package__,
        "finetune.html",
        name=run.path.name,
        results=results,
        measured=measured,
        definitions={name: DEFINITIONS[name] for name in DEFINITIONS if name in others},
        below=majority_warning(results.get("metrics") or {}),
        data=flatten(read_if_present(run.data)),
        settings=settings,
        nouns=nouns,
        accuracy=curve_charts([*rows, *(results.get("epochs") or [])], style, gallery, nouns),
        loss=loss_charts(rows, gallery),
        arm={"style": style, **arm} if arm else None,
    )


def read_if_present(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The contents of a run's file; empty if the run has no such file."""
    try:
        return read()
    except UserError:
        return {}


def settings_of(run: RunFolder) -> dict[str, dict[str, Any]]:
    return {section: values for section, values in read_if_present(run.config).items() if isinstance(values, dict)}


def loss_charts(rows: Rows, gallery: Gallery) -> dict[str, Any] | None:
    train = [(row["step"], row["loss"]) for row in rows if is_finite(row.get("loss"))]
    valid = [(row["step"], row["valid_loss"]) for row in rows if is_finite(row.get("valid_loss"))]
    if not train and not valid:
        return None
    step, value = (valid or train)[-1]
    alt_text = f"Training and validation loss by step; {value:.3f} at step {step:,}"
    return gallery.embed_both(("loss", "loss-narrow"), lambda wide: charts.loss(train, valid, wide=wide), alt_text)


def curve_charts(rows: Rows, style: ArmStyle, gallery: Gallery, nouns: Nouns) -> dict[str, Any] | None:
    """The training metric by epoch; of several rows for one epoch the last one counts."""
    key, train, valid = nouns.training_key, f"train_{nouns.training_key}", f"valid_{nouns.training_key}"
    by_epoch: dict[float, dict[str, Any]] = {}
    for row in rows:
        epoch = row.get("epoch", row.get("step"))
        values = {name: row[name] for name in (train, valid) if is_finite(row.get(name))}
        if values and epoch is not None:
            by_epoch.setdefault(epoch, {"epoch": epoch}).update(values)
    epochs = [by_epoch[epoch] for epoch in sorted(by_epoch)]
    if not epochs:
        return None
    alt_text = f"Training and validation {nouns.training_metric} by epoch"
    if valid in epochs[-1]:
        alt_text += f"; validation ends at {score(epochs[-1][valid], key)}"

    def draw(wide: bool) -> Any:
        return charts.training([(style, [epochs])], nouns.training_metric, key=key, size=WIDE if wide else NARROW)

    return gallery.embed_both(("accuracy-wide", "accuracy-narrow"), draw, alt_text)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"test": {"accuracy": 0.9}}` -> `{"test accuracy": 0.9}`, at any depth."""
    rows: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix} {key}".strip().replace("_", " ")
        if isinstance(value, dict) and len(value) <= 40:
            rows |= flatten(value, name)
        else:
            rows[name] = value
    return rows


def scores_by_split(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The metrics on test and validation rows: those with a display name, the primary one first, and all others."""
    splits = {"test": results.get("test"), "validation": results.get("valid")}
    available = {name: values for name, values in splits.items() if isinstance(values, dict)}
    available = available or {"": results.get("metrics") or {}}
    described = []
    for name, metrics in available.items():
        intervals = metrics.get("intervals") or {}
        order = sorted({**METRICS, **intervals}, key=lambda key: key != results.get("headline"))
        scores = [
            {"key": key, "name": metric_name(key), "value": metrics[key], "low": low, "high": high}
            for key in order
            if is_finite(metrics.get(key))
            for low, high in [intervals.get(key) or (None, None)]
        ]
        others = {key: value for key, value in flatten(metrics).items() if not key.startswith("intervals")}
        others = {key: value for key, value in others.items() if key.replace(" ", "_") not in order}
        if scores or others:
            described.append({"side": name, "shares": scores, "others": others})
    return described
