"""Verbs that use a finished run on rows with labels or to be labelled: predict, evaluate."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, verb
from headstock.cli.options import Column, Columns, Int8, RunPath, SkipBlank, named_columns, text_column


def predict(
    common: Common,
    run: RunPath,
    text: Annotated[list[str] | None, typer.Argument(help="Texts to classify or to tag.")] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", help="Rows such as the run was trained on, or texts, one a line; - is stdin."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write one prediction a row here: .jsonl, .csv or .tsv.")
    ] = None,
    with_: Annotated[
        str | None, typer.Option("--with", help="Columns of the file to put beside each prediction, such as id,text.")
    ] = None,
    columns: Columns = None,
    column: Column = None,
    skip_blank: SkipBlank = False,
    int8: Int8 = False,
) -> dict[str, Any]:
    """What a fine-tuned run says of new rows: their class, the tags of their words, the answers to their questions.

    Example: headstock predict runs/tagger --file test.conll --out predictions.jsonl
    Example: headstock predict runs/reviews --file reviews.csv --with id,text --out predictions.csv
    """
    from headstock.cli.loading import load
    from headstock.data.records import Records
    from headstock.errors import UserError
    from headstock.inference.prediction_files import InputColumns, check_suffix, open_prediction_file

    if text and file:
        raise UserError("give texts or --file, not both")
    if not text and file is None and sys.stdin.isatty():
        raise UserError("no text: give one, name a --file, or pipe text in")
    check_suffix(out)
    carried_names = [name.strip() for name in with_.split(",") if name.strip()] if with_ else []
    loaded = load(run, device=common.device, int8=int8)
    named = named_columns(columns, column, main=loaded.labelled_task().input_column)
    where = file or "-"
    carried = InputColumns(
        carried_names, None if text else where, None if text else loaded.resolve_columns(where, named)
    )
    skipped: list[int] | None = [] if skip_blank else None
    rows: Any
    if text:
        rows = carried.track(enumerate(text, 1))
    else:
        found = loaded.read_numbered_rows(where, columns=named, skipped=skipped)
        rows = carried.track_records(found) if isinstance(found, Records) else carried.track(found)
    made, count = [], 0
    with ExitStack() as stack:
        write = stack.enter_context(open_prediction_file(out)) if out else None
        for prediction in loaded.iter_predictions(rows):
            row = carried.merge(prediction)
            count += 1
            if write is not None:
                write(row)
            else:
                before = [str(value) for value in list(row.values())[: len(carried_names)]]
                common.show("\t".join([*before, loaded.labelled_task().as_text(prediction)]))
            if common.json:
                made.append(row)
    left_out = rows.skipped if isinstance(rows, Records) else len(skipped or ())
    if left_out:
        common.say(f"warning: {where}: {left_out:,} blank {'row' if left_out == 1 else 'rows'} left out")
    if out is not None:
        common.show(f"{out}: {count:,} predictions")
    return {"predictions": made} | ({"skipped_rows": left_out} if skip_blank else {})


def evaluate(
    common: Common,
    run: RunPath,
    file: Annotated[
        list[str] | None, typer.Argument(help="Text, labelled rows or minimal pairs; else what the run held out.")
    ] = None,
    documents: Annotated[str, typer.Option("--documents", help="line, block, file, or auto to guess.")] = "auto",
    columns: Columns = None,
    column: Column = None,
    skip_blank: SkipBlank = False,
    minimal_pairs: Annotated[
        bool,
        typer.Option("--minimal-pairs", help="The files are pairs of sentences (BLiMP, Winograd): which is likelier?"),
    ] = False,
    rows: Annotated[int | None, typer.Option("--rows", help="Minimal pairs: at most so many of each file.")] = None,
    pseudo: Annotated[bool, typer.Option("--pseudo", help="Minimal pairs: score each token given all others.")] = False,
    int8: Int8 = False,
) -> dict[str, Any]:
    """How good a run is: perplexity on text, accuracy with its interval on labelled rows or minimal pairs."""
    from headstock.cli.loading import load
    from headstock.errors import UserError
    from headstock.tasks.labelled import LabelledTask
    from headstock.train.model_card import TOLD, measured_lines

    if not minimal_pairs and (rows is not None or pseudo):
        raise UserError(f"{'--pseudo' if pseudo else '--rows'} is for --minimal-pairs, which was not asked for")
    loaded = load(run, device=common.device, int8=int8)
    labelled = isinstance(loaded.task, LabelledTask)
    measured_on = "minimal pairs" if minimal_pairs else "labelled rows" if labelled else "text"
    of_rows, of_tables = ("labelled rows",), ("labelled rows", "text")
    for option, given, meant in (
        ("--columns", columns, of_tables),
        ("--column", column, of_tables),
        ("--skip-blank", skip_blank, of_rows),
        ("--documents", documents != "auto", ("text",)),
    ):
        if given and measured_on not in meant:
            raise UserError(f"{option} is for {' and '.join(meant)}; here {run} is measured on {measured_on}")
    if minimal_pairs:
        metrics = loaded.minimal_pairs(file or (), rows=rows, pseudo=pseudo or None, watch=tenths(common.say))
    elif isinstance(loaded.task, LabelledTask):
        named = named_columns(columns, column, main=loaded.task.input_column)
        metrics = loaded.evaluate(file or (), columns=named, skip_blank=skip_blank)
        if skipped := metrics.get("skipped_rows"):
            common.say(f"warning: {metrics['file']}: {skipped:,} blank {'row' if skipped == 1 else 'rows'} left out")
        for line in measured_lines(metrics["file"], metrics):
            common.show(line)
        said = (*TOLD, "loss", "rows", "file", "majority", "majority_class", "skipped_rows", "intervals")
        for line in told({name: value for name, value in metrics.items() if name not in said}):
            common.show(line)
        return {"metrics": metrics}
    else:
        name = text_column(columns, column)
        metrics = loaded.evaluate(file or (), documents=documents, columns={"text": name} if name else None)
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
