"""`Explanation`, the result of the functions `headstock.explain_*`, and how these open runs and read texts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstock.errors import UserError, did_you_mean
from headstock.explain.document import ExplainDocument, Formula, Table
from headstock.explain.render_document import formula_text, page, terminal, write_document
from headstock.explain.subject import ExplainSubject, open_single_run, open_subject
from headstock.inference.pipeline import Pipeline
from headstock.report.render import check_output_path
from headstock.results import Result

Run = str | Path | Pipeline
Texts = str | Sequence[str]


@dataclass(frozen=True, repr=False)
class Explanation(Result):
    """Text, tables and figures: printed in a terminal, shown as a page in a notebook, saved with `save`."""

    document: ExplainDocument

    @property
    def title(self) -> str:
        return self.document.title

    def to_dict(self) -> dict[str, Any]:
        """What the command line prints with --json."""
        return self.document.json

    def save(self, path: str | Path) -> Path:
        """Write the page (.html), or its main picture (.svg)."""
        target = Path(path)
        check_output_path(target)
        write_document(self.document, target)
        return target

    def _rows(self) -> list[dict[str, Any]]:
        """The rows of the largest table, if there is one."""
        tables = [block for block in self.document.blocks("page") if isinstance(block, Table)]
        if not tables:
            return [self.to_dict()]
        table = max(tables, key=lambda table: len(table.rows))
        return [dict(zip(table.columns, map(plain_cell, row.cells), strict=True)) for row in table.styled_rows()]

    def _repr_html_(self) -> str:
        """The page in a frame, so that its style and its script stay apart from the notebook's."""
        from markupsafe import escape

        frame = 'style="width:100%;height:640px;border:1px solid #8884;border-radius:6px" sandbox="allow-scripts"'
        # in single quotes, the many double quotes of a page need no escape, which keeps notebooks small
        content = page(self.document).replace("&", "&amp;").replace("'", "&#39;")
        return f"<iframe {frame} title=\"{escape(self.title)}\" srcdoc='{content}'></iframe>"

    def __repr__(self) -> str:
        return f"<Explanation: {self.title}>"

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120, highlight=False)
        with console.capture() as capture:
            for part in terminal(self.document):
                console.print(part, markup=False) if isinstance(part, str) else console.print(part)
        return capture.get()


def plain_cell(value: Any) -> Any:
    return formula_text(value) if isinstance(value, Formula) else value


# Inputs


def list_of_texts(text: Texts | None) -> list[str]:
    """One text, or two for a task that reads pairs, or a question and its context."""
    return [] if text is None else [text] if isinstance(text, str) else list(text)


def subject_of(
    run: Run | None,
    preset: str | None,
    settings: Mapping[str, Any] | Sequence[str] | None,
    *,
    task: str | None = None,
    classes: int | None = None,
    device: str = "cpu",
    weights: bool = False,
) -> ExplainSubject:
    return open_subject(
        name_of(run), preset, assignments(settings), task=task, classes=classes, device=device, weights=weights
    )


def name_of(run: Run | None) -> str | None:
    return str(run.run) if isinstance(run, Pipeline) else None if run is None else str(run)


def assignments(settings: Mapping[str, Any] | Sequence[str] | None) -> list[str] | None:
    """Settings in the form of --set."""
    if not isinstance(settings, Mapping):
        return None if settings is None else list(settings)
    return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]


def pipeline_of(run: Run, device: str) -> Pipeline:
    return (
        run if isinstance(run, Pipeline) and len(run.models) == 1 else open_single_run(str(name_of(run)), device=device)
    )


def pipeline_in_double(run: Run, device: str) -> Pipeline:
    """A run on a device that has double precision, which MPS does not."""
    pipeline = pipeline_of(run, device)
    if pipeline.model.device.type == "mps":
        pipeline.model.to("cpu")
    return pipeline


def one_of(value: str | None, choices: Sequence[str], option: str) -> Any:
    if value is not None and value not in choices:
        raise UserError(f"{option} {value}: must be {', '.join(choices)}{did_you_mean(value, choices)}")
    return value


def check_text_or_file(texts: Sequence[str], file: str | Path | None) -> None:
    if bool(texts) == bool(file):
        raise UserError("give a text or --file, not both" if texts else "no text: give one, or name a --file")
