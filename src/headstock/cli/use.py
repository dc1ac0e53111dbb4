"""Verbs that use a finished run on rows with labels or to be labelled: predict, evaluate."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.options import Columns, Int8, RunPath
from headstock.cli.verb import Common, verb


def predict(
    common: Common,
    run: RunPath,
    text: Annotated[list[str] | None, typer.Argument(help="Texts to classify or to tag.")] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", help="Rows such as the run was trained on, or texts, one a line; - is stdin."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write JSON lines here, one a row.")] = None,
    columns: Columns = None,
    int8: Int8 = False,
) -> dict[str, Any]:
    """What a fine-tuned run says of new rows: their class, the tags of their words, the answers to their questions.

    Example: headstock predict runs/tagger --file test.conll --out predictions.jsonl
    """
    import json

    from headstock.errors import UserError
    from headstock.files import whole_file
    from headstock.text.records import parse_columns
    from headstock.train.loaded import load

    if text and file:
        raise UserError("give texts or --file, not both")
    if not text and file is None and sys.stdin.isatty():
        raise UserError("no text: give one, name a --file, or pipe text in")
    named = parse_columns(columns) if columns else None
    loaded = load(run, device=common.device, int8=int8)
    rows = text or loaded.rows_of(file or "-", columns=named)
    made, count = [], 0
    with ExitStack() as stack:
        lines = stack.enter_context(stack.enter_context(whole_file(out)).open("w", encoding="utf-8")) if out else None
        for row in loaded.predictions(rows):
            count += 1
            if lines is not None:
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")
            else:
                common.show(loaded.labelled().as_text(row))
            if common.json:
                made.append(row)
    if out is not None:
        common.show(f"{out}: {count:,} predictions")
    return {"predictions": made}


def evaluate(
    common: Common,
    run: RunPath,
    file: Annotated[
        list[str] | None, typer.Argument(help="Text, labelled rows or minimal pairs; else what the run held out.")
    ] = None,
    documents: Annotated[str, typer.Option("--documents", help="line, block, file, or auto to guess.")] = "auto",
    columns: Columns = None,
    minimal_pairs: Annotated[
        bool,
        typer.Option("--minimal-pairs", help="The files are pairs of sentences (BLiMP, Winograd): which is likelier?"),
    ] = False,
    rows: Annotated[int | None, typer.Option("--rows", help="Minimal pairs: at most so many of each file.")] = None,
    pseudo: Annotated[bool, typer.Option("--pseudo", help="Minimal pairs: score each token given all others.")] = False,
    int8: Int8 = False,
) -> dict[str, Any]:
    """How good a run is: perplexity on text, accuracy with its interval on labelled rows or minimal pairs."""
    from headstock.errors import UserError
    from headstock.tasks.labelled import LabelledTask
    from headstock.text.records import parse_columns
    from headstock.train.loaded import load

    if not minimal_pairs and (rows is not None or pseudo):
        raise UserError(f"{'--pseudo' if pseudo else '--rows'} is for --minimal-pairs, which was not asked for")
    loaded = load(run, device=common.device, int8=int8)
    rows_or_text = "labelled rows" if isinstance(loaded.task, LabelledTask) else "text"
    measured_on = "minimal pairs" if minimal_pairs else rows_or_text
    for option, given, meant in (("--columns", columns, "labelled rows"), ("--documents", documents != "auto", "text")):
        if given and measured_on != meant:
            raise UserError(f"{option} is for {meant}; here {run} is measured on {measured_on}")
    if minimal_pairs:
        metrics = loaded.minimal_pairs(file or (), rows=rows, pseudo=pseudo or None, watch=tenths(common.say))
    else:
        named = parse_columns(columns) if columns else None
        metrics = loaded.evaluate(file or (), documents=documents, columns=named)
    for line in told(metrics):
        common.show(line)
    return {"metrics": metrics}


def tenths(say: Callable[[str], None]) -> Callable[[float], None]:
    """Says how far long work has come, ten times at the most."""
    said = 0

    def watch(share: float) -> None:
        nonlocal said
        if int(10 * share) > said:
            said = int(10 * share)
            say(f"{10 * said}% scored")

    return watch


def told(metrics: dict[str, Any]) -> Iterator[str]:
    """Metrics as a person reads them, each with its interval where it has one."""
    intervals = metrics.get("intervals", {})
    for name, value in metrics.items():
        if isinstance(value, dict):
            continue
        low, high = intervals.get(name, (None, None))
        around = f"  (95%: {low:.4f} to {high:.4f})" if low is not None else ""
        shown = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        yield f"{name.replace('_', ' '):16s} {shown}{around}"
    for kind, groups in metrics.get("by", {}).items():
        yield f"by {kind}, the worst first:"
        for name, group in groups.items():
            around = f"(95%: {group['low']:.4f} to {group['high']:.4f})"
            yield f"  {group['accuracy']:.4f}  {around}  {group['rows']:6,d}  {name}"


def add_to(app: typer.Typer) -> None:
    verb(app, writes=lambda given: [given["out"]])(predict)
    verb(app)(evaluate)
