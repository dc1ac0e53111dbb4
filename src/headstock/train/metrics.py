"""Metrics of predictions with 95% intervals over the rows, and metrics as text."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from headstock.intervals import SufficientStatistics, item_interval, macro_f1_item_interval, weighted_interval
from headstock.tasks.labelled import LabelledTask
from headstock.tasks.text_metrics import SECONDARY, format_metric, format_range, metric_name

# metrics of language models; others are printed under their own names
LANGUAGE_MODEL_LABELS = {"loss": "valid loss", "perplexity": "valid ppl", "bits_per_byte": "bits per byte"}
LANGUAGE_MODEL_LABELS |= {"causal_perplexity": "causal ppl", "masked_perplexity": "masked ppl"}
LANGUAGE_MODEL_LABELS |= {"forward_perplexity": "forward ppl", "backward_perplexity": "backward ppl"}
LANGUAGE_MODEL_LABELS |= {"next_accuracy": "next accuracy", "detection_loss": "detection loss"}
LANGUAGE_MODEL_LABELS |= {"generator_perplexity": "generator ppl", "generator_accuracy": "generator accuracy"}


def metrics_with_intervals(task: LabelledTask, data: Any, outputs: Sequence[np.ndarray]) -> dict[str, Any]:
    """The task's metrics, each with its 95% interval over the rows where there is one."""
    metrics: dict[str, Any] = {}
    intervals: dict[str, list[float | None]] = {}
    for name, metric in task.row_metrics(data, outputs).items():
        if isinstance(metric, SufficientStatistics):
            interval = item_interval(metric)
        else:
            correct, count = metric
            interval = item_interval(correct, None if (count == 1).all() else count)
        metrics[name], intervals[name] = interval.mean, [interval.low, interval.high]
    if (classes := task.true_and_predicted(data, outputs)) is not None:
        f1 = macro_f1_item_interval(*classes)
        metrics["macro_f1"], intervals["macro_f1"] = f1.mean, [f1.low, f1.high]
    for name, weighted in task.weighted_metrics(data, outputs).items():
        if (estimate := weighted_interval(weighted)) is not None:
            metrics[name], intervals[name] = estimate.mean, [estimate.low, estimate.high]
    metrics |= task.extra_metrics(data, outputs)
    if "accuracy" in metrics and (truth := task.true_class_ids(data)) is not None and len(truth):
        number, metrics["majority"] = majority_class(truth.tolist())
        metrics["majority_class"] = task.config.classes[number]
    return {**metrics, "rows": len(outputs), "intervals": intervals}


def majority_class(classes: Iterable[Any]) -> tuple[Any, float]:
    """The most frequent class, and the accuracy of always predicting it."""
    counts = Counter(classes)
    name, count = counts.most_common(1)[0]
    return name, count / counts.total()


def majority_warning(metrics: Mapping[str, Any]) -> str | None:
    """A sentence if a model is not clearly better than always predicting the most frequent class, or the mean."""
    majority = metrics.get("majority")
    if "r2" in metrics:
        low, _ = (metrics.get("intervals") or {}).get("r2") or (None, None)
        if metrics["r2"] <= 0 or (low is not None and low <= 0):
            return f"With R² {format_metric('r2', metrics['r2'])} the model is not clearly better than the mean label."
    if majority is None or "accuracy" not in metrics:
        return None
    accuracy, (low, _) = metrics["accuracy"], (metrics.get("intervals") or {}).get("accuracy") or (None, None)
    always = f"always predicting {metrics['majority_class']!r} ({100 * majority:.1f}%)"
    if accuracy < majority:
        return f"With an accuracy of {100 * accuracy:.1f}% the model is below {always}."
    if accuracy == majority or (low is not None and low <= majority):
        return f"With an accuracy of {100 * accuracy:.1f}% the model is not clearly above {always}."
    return None


def score_names(metrics: Mapping[str, Any]) -> list[str]:
    """The scores of a labelled task for one line: those with an interval, and macro F1, but not the secondary ones."""
    names = dict.fromkeys([*metrics["intervals"], "macro_f1"])
    return [name for name in names if name in metrics and name not in SECONDARY]


def format_labelled_metrics(metrics: Mapping[str, Any]) -> str:
    """`accuracy 81.2% (79.8 to 82.5), macro F1 ...`."""
    parts = []
    for name in score_names(metrics):
        interval = format_range(name, *metrics["intervals"].get(name, (None, None)), scale=metrics[name])
        parts.append(
            f"{metric_name(name)} {format_metric(name, metrics[name])}" + (f" ({interval})" if interval else "")
        )
    if "majority" in metrics:
        parts.append(f"majority class {100 * metrics['majority']:.1f}%")
    if "loss" in metrics:
        parts.append(f"loss {metrics['loss']:.4f}")
    return ", ".join([*parts, f"{metrics['rows']:,} rows"])


def labelled_metric_lines(name: str, metrics: Mapping[str, Any]) -> list[str]:
    """The metrics of a file as finetune and evaluate print them, with a warning if they do not beat the majority."""
    line, warning = f"{name}: {format_labelled_metrics(metrics)} (intervals: 95%)", majority_warning(metrics)
    return [line, f"{name}: {warning}"] if warning else [line]


def format_metrics(metrics: dict[str, float], intervals: Mapping[str, Sequence[float]] | None = None) -> str:
    """`valid loss 3.210 | valid ppl 24.779 | bits per byte 1.502`, each number once.

    With intervals: `valid loss 3.210 (3.151 to 3.272) | ...`.
    """
    around = {name: f" ({low:.3f} to {high:.3f})" for name, (low, high) in (intervals or {}).items()}
    redundant = {"next_loss"}
    if {"causal_perplexity", "forward_perplexity"} & metrics.keys():
        redundant.add("perplexity")
    return " | ".join(
        f"{LANGUAGE_MODEL_LABELS.get(name, name)} {value:.3f}{around.get(name, '')}"
        for name, value in metrics.items()
        if name not in redundant
    )
