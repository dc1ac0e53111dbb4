"""Rows in Python (lists, data frames, datasets) as .jsonl files in the cache, which runs read like any other file.

A list is one of texts, of tuples such as `(text, label)`, or of dicts. Data frames of pandas and polars and
`datasets.Dataset` are recognized by their attributes, so none of these libraries is needed. A file is named by the
hash of its rows: the same rows are saved once, and a run can be resumed and evaluated while the cache has them.
"""

import datetime
import decimal
import glob
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from headstock.data import catalog, urls
from headstock.data.formats import COMPRESSIONS, FORMATS, is_valid_unicode, split_compression
from headstock.data.records import Unusable, preview
from headstock.data.saved_inputs import MEMORY, save_input
from headstock.errors import UserError, did_you_mean
from headstock.io import cache_folder

MAX_PATH = 1024  # characters; a longer str is a text
NO_VALUE = "has no value (None or NaN)"
SKIP_HINT = "; skip_blank=True leaves out such rows"
MISSING = ("NAType", "NaTType")  # the types of pandas' missing values


class Frame(Protocol):
    """A pandas or polars DataFrame."""

    @property
    def columns(self) -> Any: ...
    @property
    def shape(self) -> Any: ...
    def __getitem__(self, column: Any, /) -> Any: ...


class Dataset(Protocol):
    """A `datasets.Dataset`."""

    @property
    def features(self) -> Any: ...
    @property
    def column_names(self) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...


# What functions accept as labelled rows, and as text to pretrain on; a str is always a path.
LabelledData: TypeAlias = (
    str | Path | Frame | Dataset | Iterable[str | Path] | Iterable[tuple[Any, ...]] | Iterable[Mapping[str, Any]]
)
CorpusData: TypeAlias = str | Path | Frame | Dataset | Iterable[str | Path] | Iterable[Mapping[str, Any]]


def labelled_files(
    data: LabelledData,
    *,
    name: str = "data",
    inputs: Sequence[str] = ("text",),
    target: str = "label",
    columns: Mapping[str, str] | None = None,
    labelled: bool = False,
    skip_blank: bool | None = None,
) -> list[str]:
    """Paths to labelled rows: those that `data` names, or of a file with its rows.

    `name` is how messages call the data, `inputs` and `target` are the task's columns, and `columns` their names in the
    data, such as {"text": "review"}. Without `labelled` the target may be missing, in all rows or in none. With
    `skip_blank`, rows with a blank value are left to the reader, which skips them; None where the caller has no such
    keyword, which messages then do not propose.
    """
    if (paths := as_paths(data, name)) is not None:
        return paths
    own = {column: (columns or {}).get(column, column) for column in (*inputs, target)}
    check = None
    if not skip_blank:
        names, hint = [own[column] for column in inputs], "" if skip_blank is None else SKIP_HINT
        check = RowCheck(name, names, own[target], labelled, hint)
    return [str(save_rows(data, name=name, names=list(own.values()), check=check))]


def labelled_file(
    data: LabelledData,
    *,
    name: str = "data",
    inputs: Sequence[str] = ("text",),
    target: str = "label",
    columns: Mapping[str, str] | None = None,
    labelled: bool = False,
    skip_blank: bool | None = None,
) -> str:
    """The path to labelled rows in one file; see `labelled_files`."""
    files = labelled_files(
        data, name=name, inputs=inputs, target=target, columns=columns, labelled=labelled, skip_blank=skip_blank
    )
    if len(files) != 1:
        raise UserError(f"{name}: {len(files)} paths, expected one file")
    return files[0]


def corpus_paths(data: CorpusData, *, name: str = "corpus", column: str = "text") -> list[str]:
    """Paths to text: those that `data` names, or of a file with its texts in the column `column`."""
    if (paths := as_paths(data, name)) is not None:
        return paths
    return [str(save_rows(data, name=name, names=[column], check=RowCheck(name, [column], None, False)))]


# Paths or texts


def as_paths(data: Any, name: str) -> list[str] | None:
    """The paths, globs and URLs that `data` consists of; None if it is rows.

    A str is a path. A list of str is one of paths if all of them are: files that exist, globs, URLs, or names with the
    suffix of a data file. A list in which only some are is refused.
    """
    if isinstance(data, str | Path):
        return [str(data)]
    if not isinstance(data, list | tuple) or not data or not all(isinstance(item, str | Path) for item in data):
        return None
    is_path = [isinstance(item, Path) or is_like_path(item) for item in data]
    if all(is_path):
        return [str(item) for item in data]
    if any(is_path):
        path, text = data[is_path.index(True)], data[is_path.index(False)]
        raise UserError(
            f"{name}: {preview(str(path))} is a path, but {preview(str(text))} is none; for files pass Path objects, "
            'for texts dicts such as {"text": "..."}'
        )
    return None


def is_like_path(text: str) -> bool:
    """Whether a str in a list is a path, glob or URL rather than a text."""
    if not text or len(text) > MAX_PATH or "\n" in text or "\0" in text:
        return False
    if text == "-" or (not has_space(text) and (urls.is_url(text) or catalog.is_name(text))):
        return True
    if not has_space(text) and has_data_suffix(text):
        return True
    try:
        return Path(text).expanduser().exists() or (glob.has_magic(text) and next(glob.iglob(text), None) is not None)
    except (OSError, RuntimeError):  # a name that is too long, or the home of an unknown user
        return False


def is_file_name(text: str) -> bool:
    """Whether a text is the name of an existing file, or one word with the suffix of a data file."""
    if not text or "\n" in text or "\0" in text:
        return False
    try:
        return (not has_space(text) and has_data_suffix(text)) or Path(text).is_file()
    except OSError:  # a name that is too long
        return False


def has_space(text: str) -> bool:
    return any(map(str.isspace, text))


def has_data_suffix(text: str) -> bool:
    return Path(split_compression(text)[0]).suffix.lower() in (*FORMATS, *COMPRESSIONS)


# Rows


@dataclass
class RowCheck:
    """Refuses rows without a text, and rows without a label where others have one."""

    name: str
    inputs: Sequence[str]
    target: str | None
    labelled: bool  # rows must have a label
    hint: str = ""  # how to go on with rows that have blank values
    columns: list[str] = field(default_factory=list)
    unlabelled: int | None = None  # the first row without a label
    has_labels: bool = False

    def add(self, index: int, row: dict[str, Any]) -> None:
        """Check a row; a missing label is removed from it."""
        self.columns = self.columns or list(row)
        for column in self.inputs:
            if column not in row:
                raise no_column(f"{self.name}[{index}]", column, list(row))
            if (value := row[column]) is None or (isinstance(value, str) and not value.strip()):
                problem = NO_VALUE if value is None else "is blank"
                raise UserError(f"{self.name}[{index}]: column {column!r} {problem}, expected a text{self.hint}")
        if self.target is not None and row.get(self.target) is None:
            row.pop(self.target, None)
            self.unlabelled = index if self.unlabelled is None else self.unlabelled
        else:
            self.has_labels = True

    def finish(self) -> None:
        if self.target is None or self.unlabelled is None or not (self.labelled or self.has_labels):
            return
        if self.has_labels or self.target in self.columns:
            in_others = " as in other rows" if self.has_labels else ""
            place = f"{self.name}[{self.unlabelled}]: column {self.target!r}"
            raise UserError(f"{place} {NO_VALUE}, expected a label{in_others}{self.hint}")
        raise no_column(self.name, self.target, self.columns)


def save_rows(data: Any, *, name: str, names: Sequence[str], check: RowCheck | None = None) -> Path:
    """Save rows as .jsonl; `names` are the columns of a tuple, and of a row that is a text the first."""

    def lines() -> Iterator[bytes]:
        index = -1
        for index, row in enumerate(iter_rows(data, name, names)):
            row = plain_row(row, f"{name}[{index}]", names)
            if check is not None:
                check.add(index, row)
            yield json.dumps(row, ensure_ascii=False).encode() + b"\n"
        if index < 0:
            raise UserError(f"{name}: no rows, expected at least one")
        if check is not None:
            check.finish()

    return save_input(lines(), cache_folder() / MEMORY, lambda _: ".jsonl")


def iter_rows(data: Any, name: str, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Each row by the data's own column names."""
    if is_frame(data):
        yield from frame_rows(data, name)
    elif is_dataset(data):
        yield from dataset_rows(data)
    elif isinstance(data, Mapping):  # a DatasetDict is one, too
        keys = ", ".join(map(repr, list(data)[:4]))
        raise UserError(f"{name}: a {type(data).__name__} with {keys}, expected rows; pass one of its values")
    elif isinstance(data, bytes | bytearray) or not isinstance(data, Iterable):
        hint = "; call collect() first" if hasattr(data, "collect") else ""
        raise UserError(f"{name}: a {type(data).__name__}, expected a path, a list of rows or a data frame{hint}")
    else:
        for index, row in enumerate(data):
            yield list_row(row, f"{name}[{index}]", names)


def list_row(row: Any, place: str, names: Sequence[str]) -> dict[str, Any]:
    """A row of a list: a dict, a tuple of the columns, or a text alone."""
    if isinstance(row, str):
        return {names[0]: str(row)}
    if isinstance(row, Mapping):
        return {str(column): value for column, value in row.items()}
    if isinstance(row, tuple) and len(row) in (len(names), len(names) - 1):  # the last column is the label
        return dict(zip(names, row, strict=False))
    forms = f"{'a text, ' if len(names) <= 2 else ''}a tuple ({', '.join(names)})"
    found = f"a tuple of {len(row)}" if isinstance(row, tuple) else preview(row)
    if row is None:
        raise UserError(f"{place}: column {names[0]!r} {NO_VALUE}, expected a text")
    raise UserError(f"{place}: is {found}, expected {forms} or a dict with these columns")


def is_table(data: Any) -> bool:
    """Whether the data is a data frame or a dataset, which have columns."""
    return is_frame(data) or is_dataset(data)


def column_names(data: Any) -> list[str]:
    """The columns of a data frame, of a dataset, or of the first dict of a list; none for other rows."""
    if is_frame(data):
        return [str(column) for column in data.columns]
    if is_dataset(data):
        return list(data.column_names)
    first = data[0] if isinstance(data, list | tuple) and data else None
    return [str(column) for column in first] if isinstance(first, Mapping) else []


def is_dataset(data: Any) -> bool:
    return hasattr(data, "features") and hasattr(data, "column_names")


def is_frame(data: Any) -> bool:
    return len(getattr(data, "shape", ())) == 2 and hasattr(data, "columns")


def frame_rows(frame: Any, name: str) -> Iterator[dict[str, Any]]:
    columns = [str(column) for column in frame.columns]
    if repeated := [column for column in columns if columns.count(column) > 1]:
        raise UserError(f"{name}: more than one column is called {repeated[0]!r}")
    values = [frame[column].to_list() for column in frame.columns]
    return (dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True))


def dataset_rows(dataset: Any) -> Iterator[dict[str, Any]]:
    """The rows of a `datasets.Dataset`, with names in place of the numbers of a ClassLabel."""
    if hasattr(dataset, "with_format"):  # plain values, not tensors
        dataset = dataset.with_format(None)
    names = {column: class_names(feature) for column, feature in dict(dataset.features or {}).items()}
    for row in dataset:
        yield {column: named_classes(value, names.get(column)) for column, value in row.items()}


def class_names(feature: Any) -> list[str] | None:
    """The names of a ClassLabel, or of one in a list or sequence."""
    if isinstance(feature, list) and len(feature) == 1:
        feature = feature[0]
    feature = getattr(feature, "feature", feature)
    names = getattr(feature, "names", None)
    return list(names) if names else None


def named_classes(value: Any, names: list[str] | None) -> Any:
    if names is None or value is None:
        return value
    if isinstance(value, list):
        return [named_classes(item, names) for item in value]
    return names[value] if value >= 0 else None  # -1: no label, as in test splits


def plain_row(row: Mapping[str, Any], place: str, names: Sequence[str]) -> dict[str, Any]:
    """A row as JSON has it. Values that have no JSON form (images) are refused in `names`, dropped elsewhere."""
    plain = {}
    for column, value in row.items():
        try:
            plain[column] = plain_value(value)
        except Unusable as error:
            if column in names:
                raise UserError(f"{place}: column {column!r} {error}") from None
    return plain


def plain_value(value: Any) -> Any:
    """A value as JSON has it; NaN and the missing values of pandas become None."""
    if isinstance(value, str):
        if not is_valid_unicode(value):
            raise Unusable("contains half of a surrogate pair, which is not a character")
        return str(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if value == value else None
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch
        return plain_value(value.tolist())
    if type(value).__name__ in MISSING:
        return None
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal | Path):
        return str(value)
    raise Unusable(f"is a {type(value).__name__}, expected text, a number or a list")


def no_column(place: str, column: str, columns: list[str]) -> UserError:
    names = ", ".join(map(repr, columns)) or "none"
    hint = "; name the right one with columns={...}" if columns else ""
    return UserError(f"{place}: no column {column!r}{did_you_mean(column, columns)} (columns: {names}){hint}")
