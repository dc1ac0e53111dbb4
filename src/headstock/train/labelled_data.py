"""The labelled rows of a run: reading, splitting, and nested subsets by seed."""

import hashlib
import json
import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from headstock.data.formats import PLAIN, detect_format
from headstock.data.records import LABEL, LABELS, Records, parse_columns
from headstock.data.saved_inputs import source_name
from headstock.errors import UserError
from headstock.rng import generator
from headstock.tasks.labelled import LabelledTask
from headstock.train.settings import LabelledSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LabelledSplits:
    train: Records
    valid: Records
    test: Records | None
    warnings: tuple[str, ...] = ()  # probable problems with the rows

    def fingerprint(self) -> str:
        """Changes with any text or label."""
        digest = hashlib.sha256()
        for records in (self.train, self.valid, self.test):
            columns = {} if records is None else records.columns
            for column in sorted(columns, reverse=True):  # texts, then labels
                for value in columns[column]:
                    text = value if isinstance(value, str) else json.dumps(value)
                    digest.update(text.encode() + b"\0")
            digest.update(b"\1")
        return digest.hexdigest()

    def describe(self, task: type[LabelledTask] = LabelledTask) -> dict[str, Any]:
        """The file, rows and labels of each split."""
        splits = {"train": self.train, "valid": self.valid, "test": self.test}
        return {
            name: {"file": records.source, "rows": len(records), **task.describe_labels(records)}
            for name, records in splits.items()
            if records is not None
        }


def read_splits(settings: LabelledSettings, task: type[LabelledTask], config: Any, *, seed: int) -> LabelledSplits:
    """Read the files of a run; without a validation file, some training rows are held out."""
    train, valid, warnings = read_labelled(settings, task, config)
    test = read_rows(settings.test, settings, task, config, warnings, strict=False) if settings.test else None
    if test is not None and not test.has_labels:
        logger.info(f"{test.source} has no labels: it is predicted, not evaluated")
    for line in warnings:
        logger.info(f"warning: {line}")
    if valid is not None:
        return LabelledSplits(train, valid, test, tuple(warnings))
    remaining, held = hold_out_rows(train, settings, task, config, seed=seed)
    source, rows = source_name(train.source), f"{len(held):,} of {len(train):,} rows"
    logger.info(f"no --valid file: {rows} of {source} are held out for validation")
    return LabelledSplits(remaining, held, test, tuple(warnings))


def read_labelled(
    settings: LabelledSettings, task: type[LabelledTask], config: Any
) -> tuple[Records, Records | None, list[str]]:
    """The training rows, the validation rows if there is a file of them, and warnings."""
    if not settings.train:
        raise UserError("no labelled texts to train on: name a file with --train")
    warnings: list[str] = []
    train = require_labels(read_rows(settings.train, settings, task, config, warnings), task.target, "to train on")
    warnings += task.check_training_labels(config, train)  # of the whole file, before rows are held out
    valid = None
    if settings.valid:
        rows = read_rows(settings.valid, settings, task, config, warnings)
        valid = require_labels(rows, task.target, "to validate on")
    return train, valid, warnings


def read_rows(
    path: str,
    settings: LabelledSettings,
    task: type[LabelledTask],
    config: Any,
    warnings: list[str],
    *,
    strict: bool = True,
) -> Records:
    """The rows of a file; blank ones that are skipped add to the warnings."""
    columns = parse_columns(",".join(settings.columns)) if settings.columns else None
    rows = task.read_file(path, config=config, columns=columns, strict=strict, skip_blank=settings.skip_blank)
    if rows.skipped:
        plural = "row" if rows.skipped == 1 else "rows"
        warnings.append(f"{rows.source}: {rows.skipped:,} blank {plural} skipped")
    return rows


def hold_out_rows(
    train: Records, settings: LabelledSettings, task: type[LabelledTask], config: Any, *, seed: int
) -> tuple[Records, Records]:
    """The training rows without a stratified sample of them, and that sample."""
    separator = getattr(config, "separator", None)
    held = hold_out(train, settings.valid_fraction, seed=seed, separator=separator, strata=task.strata(train))
    if not 0 < len(held) < len(train):
        raise UserError(f"{train.source}: {len(train)} rows are too few to hold some out; name a --valid file")
    remaining = train.select(row for row in range(len(train)) if row not in held)
    return remaining, train.select(sorted(held))


def hold_out(
    records: Records, fraction: float, *, seed: int, separator: str | None = None, strata: Sequence[str] | None = None
) -> set[int]:
    """A stratified sample of rows. Questions on the same text stay together, because the others would reveal it."""
    count = max(1, round(fraction * len(records)))
    if "context" not in records.columns:
        return stratified_sample(strata or records.strata, count, seed=seed, separator=separator)
    of_context: dict[str, list[int]] = {}
    for row, context in enumerate(records.columns["context"]):
        of_context.setdefault(context, []).append(row)
    groups, held = list(of_context.values()), set[int]()
    for number in generator(seed, "subset").permutation(len(groups)).tolist():
        if len(held) >= count:
            break
        held |= set(groups[number])
    return held


def stratified_sample(labels: Sequence[str], count: int, *, seed: int, separator: str | None) -> set[int]:
    """A stratified sample that leaves at least one row of every class."""
    classes = [[label] if separator is None else label.split(separator) for label in labels]
    remaining, held = Counter(name for names in classes for name in names), set[int]()
    for row in stratified_order(labels, seed=seed):
        if len(held) < count and all(remaining[name] > 1 for name in classes[row]):
            remaining.subtract(classes[row])
            held.add(row)
    return held


def require_labels(records: Records, target: str, why: str) -> Records:
    if records.has_labels:
        return records
    source = records.source
    if target == LABEL and detect_format(source).format == PLAIN:
        labels_file = Path(source).with_suffix(LABELS).name
        expected = f"a table with the columns text and label, such as .csv, or {labels_file} beside it"
        raise UserError(f"{source}: plain text without labels {why} (expected {expected})")
    hint = f"add a column {target!r}, or name it with --columns {target}=NAME"
    raise UserError(f"{source}: has no {'labels' if target == LABEL else target} {why}; {hint}")


def stratified_order(labels: Sequence[str], *, seed: int) -> list[int]:
    """All rows in a random order of which every prefix is a stratified sample."""
    rows_by_class: dict[str, deque[int]] = {}
    for row in generator(seed, "subset").permutation(len(labels)).tolist():
        rows_by_class.setdefault(labels[row], deque()).append(row)
    total, classes = len(labels), list(rows_by_class.values())  # in order of first occurrence, which breaks ties
    sizes = [len(rows) for rows in classes]
    # Earliest deadline first: the n-th row of a class is released when the class's share exceeds n - 1 rows and due
    # before it exceeds n. This keeps every class within one row of its share.
    waiting = [(0, number) for number in range(len(classes))]  # time of release and class
    ready: list[tuple[int, int]] = []  # deadline and class
    order: list[int] = []
    while len(order) < total:
        while waiting and waiting[0][0] <= len(order):
            number = heappop(waiting)[1]
            used = sizes[number] - len(classes[number])
            heappush(ready, (-(-(used + 1) * total // sizes[number]), number))
        number = heappop(ready)[1]
        order.append(classes[number].popleft())
        if classes[number]:
            used = sizes[number] - len(classes[number])
            heappush(waiting, (used * total // sizes[number], number))
    return order


def subset(records: Records, count: int | None, *, seed: int, strata: Sequence[str] | None = None) -> Records:
    """`count` rows chosen by the seed; a larger subset contains the smaller ones of the same seed.

    `strata` are the groups of the rows, by default their labels.
    """
    if count is None:
        return records
    if count > len(records):
        raise UserError(f"{records.source}: {count:,} labels requested, but there are only {len(records):,}")
    return records.select(sorted(stratified_order(strata or records.strata, seed=seed)[:count]))
