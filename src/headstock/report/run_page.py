"""The reports of single runs: a language model with its curve and samples, a fine-tuned one with its scores."""

import re
from collections.abc import Callable
from typing import Any

from headstock.data.mask_gaps import MASK
from headstock.errors import UserError
from headstock.report import charts
from headstock.report import error_section as details
from headstock.report.highlighted_text import make_passage
from headstock.report.render import is_finite, percent, render
from headstock.report.theme import NARROW, WIDE, Gallery, styles
from headstock.tasks.labelled import nouns_of
from headstock.tasks.wording import METRICS, metric_name
from headstock.train.metrics import majority_warning
from headstock.train.run_folder import RunFolder

Rows = list[dict[str, Any]]

SAMPLES = {  # by kind: the heading of its section and what its texts are
    "continued": (
        "How it goes on",
        "The first words of held-out texts, and marked what the model writes after them, drawn at random.",
    ),
    "filled": (
        "What it fills in",
        "Held-out texts with some words masked, and below each the likeliest words, marked.",
    ),
    "denoised": (
        "What it repairs",
        "Held-out texts with spans taken out, and below each the whole text as the model writes it.",
    ),
}


def write_run_report(run: RunFolder, samples: list[str]) -> None:
    """Make report.html of a pretraining run; `samples` are texts it generated."""
    results = run.results()
    page = render(
        __package__,
        "run.html",
        name=run.path.name,
        results=results,
        data=if_there(run.data),
        settings=settings_of(run),
        loss=loss_charts(run.read_metrics(), Gallery()),
        outputs=shown_samples(results.get("samples") or []),
        samples=samples,
    )
    run.write_report(page)


def shown_samples(samples: Rows) -> list[dict[str, Any]]:
    """The samples that pretraining kept, kind by kind, with what the model wrote marked."""
    shown = []
    for kind, (title, says) in SAMPLES.items():
        rows = []
        for row in (row for row in samples if row.get("kind") == kind):
            given, output, true = row["given"], row["output"], row["true"]
            if kind == "continued":
                whole, marks = given + output, [(len(given), len(given + output), "said")]
                given, true = "", given + true
            else:
                whole, marks = output, [(*span, "said") for span in fills_of(given, output)]
            rows.append({"given": given, "output": make_passage(whole, marks=marks, first=len(whole)), "true": true})
        if rows:
            shown.append({"kind": kind, "title": title, "says": says, "rows": rows})
    return shown


def fills_of(given: str, output: str) -> list[tuple[int, int]]:
    """Where in a text stands what was put in the place of each mask; nothing where the rest was changed too."""
    found = re.fullmatch("(.*?)".join(map(re.escape, given.split(MASK))), output, re.DOTALL)
    return [found.span(number) for number in range(1, len(found.groups()) + 1)] if found else []


def write_finetune_report(run: RunFolder) -> None:
    """Make report.html of a fine-tuned run: its numbers, accuracy by epoch, and its mistakes where it wrote them."""
    results = run.results()
    settings = settings_of(run)
    transfer = settings.get("transfer", {})
    kind = "frozen" if transfer.get("freeze") else transfer.get("init") or "pretrained"
    style = styles([{"name": run.path.name, "kind": kind}])[run.path.name]
    gallery, rows = Gallery(), run.read_metrics()
    found, nouns = results.get("details") or {}, nouns_of(results.get("task"))
    room = details.room_for(len(found.get("mistakes") or []))
    classes = list(map(str, results.get("classes") or found.get("classes") or []))
    page = render(
        __package__,
        "finetune.html",
        name=run.path.name,
        results=results,
        measured=measured(results),
        below=majority_warning(results.get("metrics") or {}),
        data=flat(if_there(run.data)),
        settings=settings,
        nouns=nouns,
        accuracy=accuracy_charts([*rows, *(results.get("epochs") or [])], style, gallery, nouns.learned),
        loss=loss_charts(rows, gallery),
        arm={"style": style, **details.describe(found, classes, style, gallery, room, nouns)} if found else None,
    )
    run.write_report(page)


def if_there(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a file of the run holds; not every kind of run has each of them, and a page can do without."""
    try:
        return read()
    except UserError:
        return {}


def settings_of(run: RunFolder) -> dict[str, dict[str, Any]]:
    """The sections of the run's settings."""
    return {section: values for section, values in if_there(run.config).items() if isinstance(values, dict)}


def loss_charts(rows: Rows, gallery: Gallery) -> dict[str, Any] | None:
    train = [(row["step"], row["loss"]) for row in rows if is_finite(row.get("loss"))]
    valid = [(row["step"], row["valid_loss"]) for row in rows if is_finite(row.get("valid_loss"))]
    if not train and not valid:
        return None
    last = (valid or train)[-1]
    label = f"Training and validation loss by step; at step {last[0]:,} it is {last[1]:.3f}"
    return {
        "wide": gallery.embed("loss", charts.loss(train, valid, wide=True), label),
        "narrow": gallery.embed("loss-narrow", charts.loss(train, valid, wide=False), label),
    }


def accuracy_charts(rows: Rows, style: Any, gallery: Gallery, learned: str) -> dict[str, Any] | None:
    """Accuracy by epoch, as far as the metrics tell; several rows may speak of one epoch, the last one counts."""
    by_epoch: dict[float, dict[str, Any]] = {}
    for row in rows:
        epoch = row.get("epoch", row.get("step"))
        known = {key: row[key] for key in ("train_accuracy", "valid_accuracy") if is_finite(row.get(key))}
        if known and epoch is not None:
            by_epoch.setdefault(epoch, {"epoch": epoch}).update(known)
    epochs = [by_epoch[epoch] for epoch in sorted(by_epoch)]
    if not epochs:
        return None
    label = f"{learned[0].upper()}{learned[1:]} in training and validation by epoch"
    if "valid_accuracy" in epochs[-1]:
        label += f"; at the end validation is at {percent(epochs[-1]['valid_accuracy'])}"
    limits = charts.accuracy_limits([epochs])
    both = {}
    for width, size in (("wide", WIDE), ("narrow", NARROW)):
        figure = charts.training_alone(style, [epochs], limits, learned=learned, size=size)
        both[width] = gallery.embed(f"accuracy-{width}", figure, label)
    return both


def flat(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    """`{"test": {"accuracy": 0.9}}` -> `{"test accuracy": 0.9}`: any depth as one table."""
    rows: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{above} {key}".strip().replace("_", " ")
        if isinstance(value, dict) and len(value) <= 40:
            rows |= flat(value, name)
        else:
            rows[name] = value
    return rows


def measured(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Each metric of the test and validation rows: the one that counts first, then others that are shares."""
    sides = {"test": results.get("test"), "validation": results.get("valid")}
    known = {side: values for side, values in sides.items() if isinstance(values, dict)}
    known = known or {"": results.get("metrics") or {}}
    described = []
    for side, metrics in known.items():
        intervals = metrics.get("intervals") or {}
        order = sorted({**METRICS, **intervals}, key=lambda key: key != results.get("headline"))
        shares = [
            {"name": metric_name(key), "value": metrics[key], "low": low, "high": high}
            for key in order
            if is_finite(metrics.get(key))
            for low, high in [intervals.get(key) or (None, None)]
        ]
        others = {key: value for key, value in flat(metrics).items() if not key.startswith("intervals")}
        others = {key: value for key, value in others.items() if key.replace(" ", "_") not in order}
        if shares or others:
            described.append({"side": side, "shares": shares, "others": others})
    return described
