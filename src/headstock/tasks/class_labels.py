"""Class labels: settings of classification heads, class ids and weights, and checks of labels before training.

N examples, C classes.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from headstock.data.records import Records
from headstock.errors import UserError, did_you_mean
from headstock.tasks.labelled import PooledHeadConfig

CLASS_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")  # a label such as -1, 10 or 4.5
NUMERIC = re.compile(r"[+-]?(\d+([.,]\d*)?|[.,]\d+)([eE][+-]?\d+)?")
MAX_INTEGERS = 20  # more distinct integers than this, each in few rows, look like a regression target
MAX_FRACTIONS = 10  # the same for numbers with a fraction, which are seldom names of classes
ROWS_PER_INTEGER = 10  # integers that each have so many rows may be class ids (banking77 has 0 to 76)
MIN_SPELLING = 4  # characters; shorter labels that differ in one of them are often both intended
MISSPELLING_RATIO = 5  # a misspelling is at least so many times rarer than the right spelling
MAX_EXAMPLES = 3  # in one warning
MAX_PROBLEMS = 5  # in one error message


@dataclass(frozen=True)
class ClassConfig(PooledHeadConfig):
    """Settings of a classification head."""

    classes: tuple[str, ...] = ()  # from the training labels unless given
    many_classes: bool = False  # accept labels that look like a regression target or the wrong column
    balance: bool = False  # weight classes by their inverse frequency
    class_weights: tuple[float, ...] = ()  # in the order of `classes`

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        if self.class_weights and len(self.class_weights) != len(self.classes):
            expected = f"one for each of the {len(self.classes)} classes" if self.classes else "with `classes` set too"
            problems.append(("class_weights", f"must be {expected}, not {len(self.class_weights)}"))
        if any(weight < 0 for weight in self.class_weights):
            problems.append(("class_weights", "must be 0 or more"))
        return problems


def split_label(label: str, separator: str | None) -> list[str]:
    if separator is None:
        return [label]
    return [name.strip() for name in label.split(separator) if name.strip()]


def class_names(records: Records, separator: str | None) -> list[str]:
    """The class names in all labels, one after the other."""
    return [name for label in records.labels or [] for name in split_label(label, separator)]


def label_numbers(records: Records, config: ClassConfig) -> np.ndarray:
    """(N,) class ids, or (N, C) of 0 and 1; unknown labels are refused with their locations."""
    class_ids = {name: i for i, name in enumerate(config.classes)}
    separator = getattr(config, "separator", None)
    rows = [split_label(label, separator) for label in records.labels or []]
    refuse_unknown(
        [
            (name, f"{records.location(i)}: label {name!r} is new")
            for i, names in enumerate(rows)
            for name in names
            if name not in class_ids
        ],
        config.classes,
    )
    if separator is None:
        return np.array([class_ids[names[0]] for names in rows])
    labels = np.zeros((len(rows), len(class_ids)), dtype=np.int64)
    for row, names in enumerate(rows):
        labels[row, [class_ids[name] for name in names]] = 1
    return labels


def refuse_unknown(unknown: Sequence[tuple[str, str]], classes: Sequence[str]) -> None:
    """Raise a UserError if there are labels that are no class; each comes with a description of the problem."""
    if unknown:
        expected = f"; training has {quote_names(classes)}"
        problems = [f"{problem}{expected}{did_you_mean(name, classes)}" for name, problem in unknown]
        raise UserError(join_some(problems, MAX_PROBLEMS))


def find_classes(records: Records, separator: str | None, *, many: bool = False) -> tuple[str, ...]:
    """The distinct classes, numbers in numerical and words in alphabetical order.

    Labels that do not look like classes are refused unless `many`.
    """
    names = set(class_names(records, separator))
    if len(names) < 2 and not (separator and names):
        problem = f"only one class, {next(iter(names))!r}" if names else "no labels"
        raise UserError(f"{records.source}: {problem}; there must be at least two")
    if not many:
        check_class_labels(records, separator)
    if all(CLASS_NUMBER.fullmatch(name) for name in names):
        return tuple(sorted(names, key=lambda name: (float(name), name)))
    return tuple(sorted(names))


def infer_class_settings(config: Any, records: Records) -> Any:
    """The classes and, if they are balanced, the class weights of training rows, unless they are given."""
    if not config.classes:
        separator = getattr(config, "separator", None)
        config = replace(config, classes=find_classes(records, separator, many=config.many_classes))
    if config.balance and not config.class_weights:
        weights = balanced_weights(label_numbers(records, config), len(config.classes))
        config = replace(config, class_weights=weights)
    return config


def balanced_weights(labels: np.ndarray, classes: int) -> tuple[float, ...]:
    """Inverse-frequency class weights; for multi-label classes, the weight of positives."""
    if labels.ndim == 2:
        positives = labels.sum(0)
        weights = (len(labels) - positives) / np.maximum(1, positives)
    else:
        weights = len(labels) / (classes * np.maximum(1, np.bincount(labels, minlength=classes)))
    return tuple(weights.tolist())


# Checks before training


def check_class_labels(records: Records, separator: str | None) -> None:
    """Refuse labels that look like a regression target, or like a column that holds no labels at all."""
    labels, source = class_names(records, separator), records.source
    names, rows = set(labels), len(labels)
    count = f"{len(names):,} distinct values in {rows:,} rows"
    override = "use them as classes with --set many_classes=true"
    if all(NUMERIC.fullmatch(name) for name in names):
        values = [float(name.replace(",", ".")) for name in names]
        if any(not value.is_integer() for value in values):
            refused = len(names) > MAX_FRACTIONS or (len(names) > MAX_FRACTIONS // 2 and len(names) > rows / 2)
        else:
            refused = len(names) > MAX_INTEGERS and len(names) > rows / ROWS_PER_INTEGER
        if refused:
            raise UserError(
                f"{source}: the labels are numbers from {min(values):g} to {max(values):g}, {count}; this looks like a "
                f"regression target, and a classifier ignores their order; use --task regress, or {override}"
            )
    elif len(names) > MAX_INTEGERS and len(names) > rows / 2:
        raise UserError(
            f"{source}: nearly every row has its own label, {count}; is this the right column? "
            f"Name it with --columns label=NAME, or {override}"
        )


def label_warnings(records: Records, separator: str | None = None) -> list[str]:
    """What is probably wrong with the labels of training rows, one line each."""
    labels = records.labels
    if not labels:
        return []
    first: dict[str, int] = {}  # the first row of each class
    counts: Counter[str] = Counter()
    for row, label in enumerate(labels):
        for name in filter(None, map(str.strip, label.split(separator) if separator else [label])):
            first.setdefault(name, row)
            counts[name] += 1
    warnings = []
    if once := [f"{name!r} ({records.location(first[name])})" for name, count in counts.items() if count == 1]:
        subject = "a label occurs" if len(once) == 1 else f"{len(once):,} labels occur"
        warnings.append(f"{subject} once: {join_some(once, MAX_EXAMPLES)}")
    if pairs := [f"{a!r} ({counts[a]:,} rows) and {b!r} ({counts[b]:,})" for a, b in similar_names(counts)]:
        subject = "are two labels" if len(pairs) == 1 else f"are {len(pairs):,} pairs of labels"
        warnings.append(f"{subject} the same, spelled differently? {join_some(pairs, MAX_EXAMPLES)}")
    if conflicts := [
        f"{records.location(a)} {labels[a]!r}, {records.location(b)} {labels[b]!r}" for a, b in contradictions(records)
    ]:
        subject = "a text has" if len(conflicts) == 1 else f"{len(conflicts):,} texts have"
        warnings.append(f"{subject} more than one label: {join_some(conflicts, MAX_EXAMPLES)}")
    if len(counts) > MAX_INTEGERS and all(NUMERIC.fullmatch(name) for name in counts):
        hint = "--task regress predicts a number"
        warnings.append(f"{len(counts):,} labels are all numbers; they are used as classes, without order ({hint})")
    return [f"{records.source}: {warning}" for warning in warnings]


def similar_names(counts: Counter[str]) -> list[tuple[str, str]]:
    """Labels that differ in case, spaces or punctuation only, or in one letter where one of them is far rarer.

    Of each pair the more frequent one comes first.
    """
    same, near = defaultdict(list), defaultdict(list)  # names by their letters and digits, or without one letter
    for name in counts:
        if NUMERIC.fullmatch(name):
            continue
        same["".join(char for char in name.casefold() if char.isalnum()) or name].append(name)
        if len(name) >= MIN_SPELLING:
            near[name].append(name)
            # digits are never left out: class1 and class2 are both intended
            for shorter in {name[:i] + name[i + 1 :] for i, char in enumerate(name) if not char.isdigit()}:
                near[shorter].append(name)

    def ordered_pairs(groups: dict[str, list[str]]) -> list[tuple[str, str]]:
        pairs = (pair for names in groups.values() for pair in combinations(names, 2))
        return [(a, b) if (-counts[a], a) < (-counts[b], b) else (b, a) for a, b in pairs]

    misspelled = [(a, b) for a, b in ordered_pairs(near) if counts[b] * MISSPELLING_RATIO <= counts[a]]
    return list(dict.fromkeys([*ordered_pairs(same), *misspelled]))


def contradictions(records: Records) -> list[tuple[int, int]]:
    """The first row of each text that has another label further down, and that other row."""
    first: dict[str, int] = {}
    pairs: dict[str, tuple[int, int]] = {}
    labels = records.labels or []
    for row, text in enumerate(records.display_texts):
        key = " ".join(text.split())
        earlier = first.setdefault(key, row)
        if labels[earlier] != labels[row]:
            pairs.setdefault(key, (earlier, row))
    return list(pairs.values())


def join_some(items: Sequence[str], limit: int, separator: str = "; ") -> str:
    """The first items, and how many more there are."""
    more = [f"and {len(items) - limit:,} more"] if len(items) > limit else []
    return separator.join([*items[:limit], *more])


def quote_names(names: Sequence[str]) -> str:
    return join_some([repr(name) for name in names], 8, ", ")
