"""Checks labels before training: numbers that are no classes, the wrong column, misspellings, contradictions."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

from headstock.data.records import Records
from headstock.errors import UserError

NUMERIC = re.compile(r"[+-]?(\d+([.,]\d*)?|[.,]\d+)([eE][+-]?\d+)?")
MOST_VALUES = 20  # more distinct integers than this, each in few rows, look like a target to predict by regression
MOST_FRACTIONS = 10  # the same of numbers with a fraction, which are seldom names of classes
ROWS_PER_VALUE = 10  # integers that each have so many rows may be class ids (banking77 has 0 to 76)
SHORTEST = 4  # characters; shorter labels that differ in one of them are often both meant
RARER = 5  # a misspelling is at least so many times rarer than what was meant
SHOWN = 3  # examples in one line


def check_class_labels(source: str, labels: Sequence[str]) -> None:
    """Refuse labels that look like a regression target, or like a column that holds no labels at all."""
    names, rows = set(labels), len(labels)
    count = f"{len(names):,} distinct values in {rows:,} rows"
    anyway = "take them for classes all the same with --set many_classes=true"
    if all(NUMERIC.fullmatch(name) for name in names):
        values = [float(name.replace(",", ".")) for name in names]
        if any(not value.is_integer() for value in values):
            refused = len(names) > MOST_FRACTIONS or (len(names) > MOST_FRACTIONS // 2 and len(names) > rows / 2)
        else:
            refused = len(names) > MOST_VALUES and len(names) > rows / ROWS_PER_VALUE
        if refused:
            low, high = min(values), max(values)
            raise UserError(
                f"{source}: the labels are numbers from {low:g} to {high:g}, {count}: that looks like a regression "
                f"target, and a classifier ignores their order; bin them into a few classes, or {anyway}"
            )
    elif len(names) > MOST_VALUES and len(names) > rows / 2:
        raise UserError(
            f"{source}: nearly every row has a label of its own, {count}: is that the right column? "
            f"name it with --columns label=NAME, or {anyway}"
        )


def label_warnings(records: Records, separator: str | None = None) -> list[str]:
    """What is probably wrong with the labels of training rows, one line each."""
    labels = records.labels
    if not labels:
        return []
    split = [label.split(separator) if separator else [label] for label in labels]
    first: dict[str, int] = {}
    for row, names in enumerate(split):
        for name in names:
            first.setdefault(name.strip(), row)
    counts = Counter(name.strip() for names in split for name in names if name.strip())
    found = []
    if once := [name for name, count in counts.items() if count == 1]:
        what = "a label occurs" if len(once) == 1 else f"{len(once):,} labels occur"
        found.append(f"{records.source}: {what} once: {some(f'{n!r} ({records.location(first[n])})' for n in once)}")
    if pairs := similar_names(counts):
        what = "are two labels" if len(pairs) == 1 else f"are {len(pairs):,} pairs of labels"
        shown = some(f"{a!r} ({counts[a]:,} rows) and {b!r} ({counts[b]:,})" for a, b in pairs)
        found.append(f"{records.source}: {what} the same, spelled differently? {shown}")
    if twice := contradictions(records):
        what = "a text has" if len(twice) == 1 else f"{len(twice):,} texts have"
        shown = some(f"{records.location(a)} {labels[a]!r}, {records.location(b)} {labels[b]!r}" for a, b in twice)
        found.append(f"{records.source}: {what} more than one label: {shown}")
    if len(counts) > MOST_VALUES and all(NUMERIC.fullmatch(name) for name in counts):
        found.append(f"{records.source}: {len(counts):,} labels are all numbers; they are classes here, without order")
    return found


def similar_names(counts: Counter[str]) -> list[tuple[str, str]]:
    """Labels that differ in case, spaces or punctuation only, or in one letter where one of them is far rarer.

    Of each pair the commoner one comes first.
    """
    words = [name for name in counts if not NUMERIC.fullmatch(name)]
    same, near = defaultdict(list), defaultdict(list)  # by what is left of them without case and marks, or a letter
    for name in words:
        same["".join(char for char in name.casefold() if char.isalnum()) or name].append(name)
        if len(name) >= SHORTEST:
            near[name].append(name)
            # digits are never left out: class1 and class2 are both meant
            for shorter in {name[:at] + name[at + 1 :] for at, char in enumerate(name) if not char.isdigit()}:
                near[shorter].append(name)
    pairs = [ordered(pair, counts) for names in same.values() for pair in combinations(names, 2)]
    slips = [ordered(pair, counts) for names in near.values() for pair in combinations(names, 2)]
    return list(dict.fromkeys([*pairs, *(pair for pair in slips if misspelled(*pair, counts))]))


def ordered(pair: tuple[str, str], counts: Counter[str]) -> tuple[str, str]:
    first, second = sorted(pair, key=lambda name: (-counts[name], name))
    return first, second


def misspelled(common: str, rare: str, counts: Counter[str]) -> bool:
    """Whether one label, which differs from the other in one character, is rare enough to be a slip of it."""
    return counts[rare] * RARER <= counts[common]


def contradictions(records: Records) -> list[tuple[int, int]]:
    """The first row of each text that has another label further down, and that other row."""
    first: dict[str, int] = {}
    found: dict[str, tuple[int, int]] = {}
    labels = records.labels or []
    for row, text in enumerate(records.display_texts):
        key = " ".join(text.split())
        before = first.setdefault(key, row)
        if labels[before] != labels[row]:
            found.setdefault(key, (before, row))
    return list(found.values())


def some(examples: Iterable[str]) -> str:
    every = list(examples)
    return "; ".join(every[:SHOWN]) + (f"; and {len(every) - SHOWN:,} more" if len(every) > SHOWN else "")
