"""The labelled rows of a fine-tuned run: read, split, and cut to so many labels, the same way every time."""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from headstock.errors import UserError
from headstock.randomness import generator
from headstock.text.records import Records, parse_columns, read_records
from headstock.train.settings import LabelledSettings

Say = Callable[[str], None]


@dataclass(frozen=True)
class Splits:
    train: Records
    valid: Records
    test: Records | None

    def fingerprint(self) -> str:
        """What changes when any text or label does."""
        digest = hashlib.sha256()
        for records in (self.train, self.valid, self.test):
            for column in ("text", "label"):
                for value in records.columns.get(column, []) if records else []:
                    digest.update(value.encode() + b"\0")
            digest.update(b"\1")
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        parts = {"train": self.train, "valid": self.valid, "test": self.test}
        return {name: about(records) for name, records in parts.items() if records is not None}


def about(records: Records) -> dict[str, Any]:
    classes = None if records.labels is None else dict(sorted(Counter(records.labels).items()))
    return {"file": records.source, "rows": len(records), "classes": classes}


def read_splits(settings: LabelledSettings, *, separator: str | None, seed: int, say: Say) -> Splits:
    """The files of a run; where no validation file is given, some training rows are held out."""
    if not settings.train:
        raise UserError("no labelled texts to train on: name a file with --train")
    columns = parse_columns(",".join(settings.columns)) if settings.columns else None

    def read(path: str, *, insist: bool = True) -> Records:
        return read_records(path, columns=columns, separator=separator, insist=insist)

    train = with_labels(read(settings.train), "to train on")
    test = read(settings.test, insist=False) if settings.test else None
    if test is not None and test.labels is None:
        say(f"{test.source} has no labels: it is predicted, not measured")
    if settings.valid:
        return Splits(train, with_labels(read(settings.valid), "to validate on"), test)
    order = spread(train.labels or [], seed=seed)
    held = max(1, round(settings.valid_fraction * len(order)))
    if held >= len(order):
        raise UserError(f"{train.source}: {len(order)} rows are too few to hold some out; name a --valid file")
    say(f"no --valid file: {held:,} of {len(order):,} rows of {train.source} are held out to validate")
    return Splits(train.select(sorted(order[held:])), train.select(sorted(order[:held])), test)


def with_labels(records: Records, why: str) -> Records:
    if records.labels is None:
        raise UserError(
            f"{records.source}: has no labels {why}; add a column 'label', or name it with --columns label=NAME"
        )
    return records


def spread(labels: Sequence[str], *, seed: int) -> list[int]:
    """All rows in a random order in which the classes come in their shares: any beginning of it is a fair sample."""
    drawn: dict[str, deque[int]] = {}
    for row in generator(seed, "subset").permutation(len(labels)).tolist():
        drawn.setdefault(labels[row], deque()).append(row)
    total, classes = len(labels), list(drawn.values())  # in the order in which they were drawn, which decides ties
    sizes = [len(rows) for rows in classes]
    # A class's n-th row may come once more than n - 1 rows are its share, and is due before more than n are. The one
    # due first comes first: that keeps every class within one row of its share, however many classes there are.
    coming = [(0, number) for number in range(len(classes))]
    ready: list[tuple[int, int]] = []
    order: list[int] = []
    while len(order) < total:
        while coming and coming[0][0] <= len(order):
            number = heappop(coming)[1]
            taken = sizes[number] - len(classes[number])
            heappush(ready, (-(-(taken + 1) * total // sizes[number]), number))
        number = heappop(ready)[1]
        order.append(classes[number].popleft())
        if classes[number]:
            taken = sizes[number] - len(classes[number])
            heappush(coming, (taken * total // sizes[number], number))
    return order


def subset(records: Records, count: int | None, *, seed: int) -> Records:
    """So many labelled rows, drawn by the seed alone: a larger subset holds the smaller ones of the same seed."""
    if count is None:
        return records
    if count > len(records):
        raise UserError(f"{records.source}: {count:,} labels were asked for, there are {len(records):,}")
    return records.select(sorted(spread(records.labels or [], seed=seed)[:count]))
