"""How good a classifier's probabilities are, with the interval that the number of test rows allows."""

from typing import Any

import numpy as np

from headstock.tasks.classify import ClassifyConfig
from headstock.train.intervals import item_interval, macro_f1_item_interval


def metrics_of(config: ClassifyConfig, probabilities: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Accuracy, macro F1 and mean loss, each of the first two with its 95% interval over the rows."""
    if config.separator is not None:
        return metrics_of_several(probabilities, labels)
    predicted = probabilities.argmax(1)
    likely = probabilities[np.arange(len(labels)), labels]
    accuracy = item_interval(predicted == labels)
    f1 = macro_f1_item_interval(labels, predicted, len(config.classes))
    return {
        "accuracy": accuracy.mean,
        "macro_f1": f1.mean,
        "loss": float(-np.log(np.maximum(likely, 1e-12)).mean()),
        "rows": len(labels),
        "intervals": {"accuracy": [accuracy.low, accuracy.high], "macro_f1": [f1.low, f1.high]},
    }


def metrics_of_several(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """For yes-or-no classes: rows that are wholly right, and F1 over all answers and by class."""
    chosen, wanted = probabilities > 0.5, labels.astype(bool)
    exact = item_interval((chosen == wanted).all(1))
    found, either = (chosen & wanted).sum(0), chosen.sum(0) + wanted.sum(0)  # by class
    known = np.clip(probabilities, 1e-12, 1 - 1e-12)
    return {
        "accuracy": exact.mean,
        "micro_f1": float(2 * found.sum() / max(1, either.sum())),
        "macro_f1": float((2 * found / np.maximum(1, either))[either > 0].mean()) if (either > 0).any() else 0.0,
        "loss": float(-np.where(wanted, np.log(known), np.log(1 - known)).mean()),
        "rows": len(labels),
        "intervals": {"accuracy": [exact.low, exact.high]},
    }


def as_predictions(config: ClassifyConfig, probabilities: np.ndarray) -> list[dict[str, Any]]:
    """What `predict` says of each text."""
    classes = config.classes
    made = []
    for row in probabilities:
        told = {name: round(float(p), 6) for name, p in zip(classes, row, strict=True)}
        if config.separator is not None:
            names = [name for name, p in zip(classes, row, strict=True) if p > 0.5]
            made.append({"label": config.separator.join(names), "labels": names, "probabilities": told})
        else:
            made.append({"label": classes[int(row.argmax())], "probabilities": told})
    return made
