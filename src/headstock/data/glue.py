"""GLUE tasks by name, read from a user's copy of the official folders and TSV files.

The data is not distributed here: some of it may not be. The labels of GLUE's test files are not public, so that its
development files are the ones to measure on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headstock.errors import UserError, did_you_mean


@dataclass(frozen=True)
class GlueTask:
    """The layout of a task's files and the metrics by which GLUE scores it."""

    name: str
    folder: str  # as in the official archive; case and hyphens do not matter
    text: str | int  # the column, by name or, in files without a header, by position
    text_b: str | None
    label: str | int
    metrics: tuple[str, ...] = ("accuracy",)
    task: str = "pair"  # that learns it
    dev: tuple[str, ...] = ("dev.tsv",)
    positive: str = "1"  # the class of which F1 is computed

    @property
    def has_header(self) -> bool:
        return isinstance(self.text, str)


GLUE_TASKS = (
    GlueTask("cola", "CoLA", 3, None, 1, ("mcc",), task="classify"),
    GlueTask("sst-2", "SST-2", "sentence", None, "label", task="classify"),
    GlueTask("mrpc", "MRPC", "#1 String", "#2 String", "Quality", ("f1", "accuracy")),
    GlueTask("sts-b", "STS-B", "sentence1", "sentence2", "score", ("pearson", "spearman"), task="regress"),
    GlueTask("qqp", "QQP", "question1", "question2", "is_duplicate", ("f1", "accuracy")),
    GlueTask("mnli", "MNLI", "sentence1", "sentence2", "gold_label", dev=("dev_matched.tsv", "dev_mismatched.tsv")),
    GlueTask("qnli", "QNLI", "question", "sentence", "label"),
    GlueTask("rte", "RTE", "sentence1", "sentence2", "label"),
    GlueTask("wnli", "WNLI", "sentence1", "sentence2", "label"),
)


def glue_tasks(names: Sequence[str] | None = None) -> list[GlueTask]:
    """The tasks of these names, by default all; spelling follows the names or the folders."""
    by_key = {key_of(task.name): task for task in GLUE_TASKS}
    for name in names or ():
        if key_of(name) not in by_key:
            known = [task.name for task in GLUE_TASKS]
            hint = did_you_mean(name.lower(), known)
            raise UserError(f"--tasks {name}: no such GLUE task{hint} (have: {', '.join(known)})")
    return [by_key[key_of(name)] for name in names] if names else list(GLUE_TASKS)


def key_of(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())


def find_tasks(folder: Path, tasks: Sequence[GlueTask]) -> tuple[dict[str, Path], dict[str, str]]:
    """The folder of each task with all its files, and for each other task what is missing."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder (expected one with folders such as CoLA and RTE)")
    folders = {key_of(entry.name): entry for entry in sorted(folder.iterdir()) if entry.is_dir()}
    complete, missing = {}, {}
    for task in tasks:
        if (path := folders.get(key_of(task.folder))) is None:
            missing[task.name] = f"no folder {task.folder}"
        elif absent := [name for name in ("train.tsv", *task.dev) if not (path / name).is_file()]:
            missing[task.name] = f"{path.name} has no {' and no '.join(absent)}"
        else:
            complete[task.name] = path
    return complete, missing


def read_rows(path: Path, task: GlueTask) -> list[dict[str, str]]:
    """The rows of a file with the columns text, text_b (of pairs) and label.

    Rows without a label or text are left out: MNLI has some without agreement, and QQP some that are cut off.
    """
    columns = {"text": task.text, "text_b": task.text_b, "label": task.label}
    rows = []
    lines = tsv_lines(path)
    header = next(lines, (0, []))[1] if task.has_header else []
    positions = {}
    for name, column in columns.items():
        if isinstance(column, str):
            if column not in header:
                raise UserError(f"{path}: no column {column!r} (columns: {', '.join(map(repr, header))})")
            positions[name] = header.index(column)
        elif column is not None:
            positions[name] = column
    for _, cells in lines:
        row = {name: cells[index].strip() if index < len(cells) else "" for name, index in positions.items()}
        if all(row.values()) and row["label"] != "-":
            rows.append(row)
    if not rows:
        raise UserError(f"{path}: no rows with a label (expected GLUE's {task.folder} format, tab-separated)")
    return rows


def tsv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The cells of each line; quotation marks are text."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, 1):
                yield number, line.rstrip("\r\n").split("\t")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason})") from None
