"""Slices: groups of labelled rows by a column's value, a pattern in the text, negation, contrast or length.

N rows.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headstock.data import tables
from headstock.data.labelled_texts import is_table
from headstock.data.records import Records, find_file
from headstock.errors import UserError

LENGTH_BINS = 4  # of about equally many rows
MAX_VALUES = 20  # of a column; rarer ones are one group
MIN_ROWS = 10  # of either group of a built-in slice
NEGATION = (
    r"\bn['’]|\w+n['’]t\b|\b(ne|pas|jamais|rien|aucune?s?|sans|ni|guère|nullement"
    r"|not?|never|nothing|nobody|none|neither|nor|without|cannot)\b"
)
CONTRAST = (
    r"\b(mais|pourtant|cependant|toutefois|néanmoins|malgré|quoique|bien que"
    r"|but|however|although|though|yet|nevertheless|despite)\b"
)
BUILT_IN = {"contrast": CONTRAST, "negation": NEGATION}
FORMS = "a column, contains:WORD, regex:PATTERN, contrast, negation or length"


@dataclass(frozen=True)
class Slice:
    """Groups of rows that do not overlap."""

    name: str  # as it was asked for
    groups: dict[str, np.ndarray]  # by value, (N,) True for its rows


def make_slices(specs: Sequence[str], records: Records, texts: Sequence[str]) -> list[Slice]:
    return [make_slice(spec, records, texts) for spec in specs]


def make_slice(spec: str, records: Records, texts: Sequence[str]) -> Slice:
    """The groups of a specification such as `contains:mais`, `length` or a column of the rows' file."""
    kind, colon, pattern = spec.partition(":")
    if colon and kind in ("contains", "regex"):
        return pattern_slice(spec, compile_pattern(kind, pattern, spec), texts)
    if spec == "length":
        return length_slice(texts)
    if spec in BUILT_IN:
        return pattern_slice(spec, re.compile(BUILT_IN[spec], re.IGNORECASE), texts)
    return column_slice(spec, records)


def built_in_slices(texts: Sequence[str]) -> list[Slice]:
    """Texts with words of contrast (mais, but), with negation, and by length, where both groups have enough rows."""
    patterns = [pattern_slice(name, re.compile(text, re.IGNORECASE), texts) for name, text in BUILT_IN.items()]
    slices = [*patterns, length_slice(texts)]
    return [part for part in slices if len(part.groups) > 1 and min(map(np.sum, part.groups.values())) >= MIN_ROWS]


def compile_pattern(kind: str, pattern: str, spec: str) -> re.Pattern[str]:
    words = [re.escape(word.strip()) for word in pattern.split(",") if word.strip()]
    if not pattern or (kind == "contains" and not words):
        raise UserError(f"--slice {spec}: nothing follows the colon; expected {FORMS}")
    try:
        return re.compile(rf"(?<!\w)({'|'.join(words)})(?!\w)" if kind == "contains" else pattern, re.IGNORECASE)
    except re.error as error:
        raise UserError(f"--slice {spec}: not a regular expression ({error})") from None


def pattern_slice(name: str, pattern: re.Pattern[str], texts: Sequence[str]) -> Slice:
    matches = np.array([pattern.search(text) is not None for text in texts], dtype=bool)
    return Slice(name, {value: rows for value, rows in (("with", matches), ("without", ~matches)) if rows.any()})


def length_slice(texts: Sequence[str]) -> Slice:
    """About equally many rows in each group, from short to long."""
    words = np.array([len(text.split()) for text in texts])
    edges = np.unique(np.quantile(words, np.linspace(0, 1, LENGTH_BINS + 1)).astype(int))
    groups = {}
    for number, (low, high) in enumerate(pairwise(edges.tolist())):
        is_last = number == len(edges) - 2
        rows = (words >= low) & ((words <= high) if is_last else (words < high))
        last = high if is_last else high - 1
        groups[f"{low:,} words" if low == last else f"{low:,} to {last:,} words"] = rows
    return Slice("length", groups or {f"{edges[0]:,} words": np.ones(len(words), dtype=bool)})


def column_slice(name: str, records: Records) -> Slice:
    """The values of a column of the file that the rows come from."""
    values = column_of(name, records)
    counts = Counter(values)
    shown = [value for value, _ in counts.most_common(MAX_VALUES if len(counts) > MAX_VALUES + 1 else len(counts))]
    array = np.array(values, dtype=object)
    groups = {value or "(empty)": array == value for value in sorted(shown)}
    if len(shown) < len(counts):
        groups[f"({len(counts) - len(shown):,} other values)"] = ~np.isin(values, shown)
    return Slice(name, groups)


def column_of(name: str, records: Records) -> list[str]:
    """A column's value for each row, read again from the file by line."""
    if name in records.columns and all(isinstance(value, str) for value in records.columns[name]):
        return records.columns[name]
    if not is_table(records.source):
        raise UserError(f"--slice {name}: {records.source} is not a table with columns; expected {FORMS}")
    file = find_file(records.source)
    existing = tables.column_names(file) or []
    if name not in existing:
        raise tables.no_column(f"--slice {name}: {records.source}", name, [*existing, *BUILT_IN, "length"])
    cells = {line: row.get(name) for line, row in tables.table_rows(file, [name])}
    return ["" if cells[line] is None else str(cells[line]) for line in records.lines]
