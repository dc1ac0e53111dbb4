"""`headstock evaluate`, `predict`, `answer` and `translate`: verbs that use a fine-tuned run."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack

import typer

from headstock.cli.command import Common, command
from headstock.cli.input_files import check_text_source, load, read_utf8
from headstock.cli.options import Calibrated, Columns, Documents, Int8, RunPath, SkipBlank, Slices
from headstock.cli.prompt_options import PromptOptions, with_prompt
from headstock.errors import UserError

logger = logging.getLogger(__name__)

SHOWN_COVERAGES = (50, 70, 80, 90, 100)  # percent
EXCERPT_CHARACTERS = 60  # shown on each side of an answer
SORTED_TEXTS = 512  # texts that are sorted by length and translated together


@command("Compare and measure", writes=lambda options: [options["out"]])
def evaluate(
    common: Common,
    run: RunPath,
    columns: Columns,
    file: Annotated[
        list[str] | None, typer.Argument(help="Text, labelled rows or minimal pairs; default: the run's held-out data.")
    ] = None,
    documents: Documents = "auto",
    skip_blank: SkipBlank = False,
    minimal_pairs: Annotated[bool, "The files are minimal pairs (BLiMP, Winograd)."] = False,
    rows: Annotated[int | None, "Minimal pairs: at most this many per file."] = None,
    pseudo: Annotated[bool, "Minimal pairs: score each token given all others."] = False,
    out: Annotated[Path | None, "Minimal pairs: write each pair and its scores to this .jsonl file."] = None,
    slices: Slices = None,
    calibrated: Calibrated = False,
    int8: Int8 = False,
    **prompting: Unpack[PromptOptions],
) -> dict[str, Any]:
    """Measure a run on text, labelled rows or minimal pairs.

    Reports perplexity on text, the task's metrics on labelled rows, and accuracy on minimal pairs.
    """
    from headstock.inference.output_files import open_prediction_file
    from headstock.tasks.labelled import is_labelled
    from headstock.train.metrics import labelled_metric_lines, score_names

    for option, present in (("--pseudo", pseudo), ("--rows", rows is not None), ("--out", out is not None)):
        if present and not minimal_pairs:
            raise UserError(f"{option} is only for --minimal-pairs")
    if out is not None and out.suffix != ".jsonl":
        raise UserError(f"--out {out}: must end in .jsonl")
    pipeline = with_prompt(load(run, device=common.device, int8=int8, calibrated=calibrated), prompting)
    if prompting["prompt"] and not file:
        raise UserError("--prompt needs a file of labelled rows to measure on")
    labelled = is_labelled(pipeline.task)
    data_kind = "minimal pairs" if minimal_pairs else "labelled rows" if labelled else "text"
    for option, value, kinds in (
        ("--columns", columns.columns, ("labelled rows", "text")),
        ("--column", columns.column, ("labelled rows", "text")),
        ("--skip-blank", skip_blank, ("labelled rows",)),
        ("--slice", slices, ("labelled rows",)),
        ("--documents", documents != "auto", ("text",)),
    ):
        if value and data_kind not in kinds:
            raise UserError(f"{option} is for {' and '.join(kinds)}; here {run} is measured on {data_kind}")
    if minimal_pairs:
        with ExitStack() as stack:
            write = stack.enter_context(open_prediction_file(out)) if out else None
            options: dict[str, Any] = {"rows": rows, "pseudo": pseudo or None, "progress": log_tenths()}
            metrics = pipeline.minimal_pairs(file or (), write=write, **options)
    elif is_labelled(pipeline.task):
        names = columns.names(main=pipeline.task.input_column)
        chosen: dict[str, Any] = {"skip_blank": skip_blank, "details": True, "slices": slices or ()}
        metrics = pipeline.evaluate_files(file or (), columns=names, **chosen)
        if skipped := metrics.get("skipped_rows"):
            log_skipped(metrics["file"], skipped)
        for line in labelled_metric_lines(metrics["file"], metrics):
            common.show(line)
        printed = {"loss", "rows", "file", "majority", "majority_class", "skipped_rows", "slice_metric", "loss_change"}
        printed |= {"calibration_fitted_here", *score_names(metrics)}
        for line in metric_lines({name: value for name, value in metrics.items() if name not in printed}):
            common.show(line)
        for line in [*calibration_lines(metrics), *slice_lines(metrics)]:
            common.show(line)
        return {"metrics": metrics}
    else:
        column = columns.text()
        names = {"text": column} if column else None
        metrics = pipeline.evaluate_files(file or (), documents=documents, columns=names)
    for line in metric_lines(metrics):
        common.show(line)
    return {"metrics": metrics}


def log_tenths() -> Callable[[float], None]:
    """A callback that logs progress each time another tenth is done."""
    logged = 0

    def log(fraction: float) -> None:
        nonlocal logged
        if int(10 * fraction) > logged:
            logged = int(10 * fraction)
            logger.info("%d%% scored", 10 * logged)

    return log


def log_skipped(file: str, count: int) -> None:
    logger.warning(f"warning: {file}: {count:,} blank {'row' if count == 1 else 'rows'} skipped")


def metric_lines(metrics: dict[str, Any]) -> Iterator[str]:
    """One line per metric, with its confidence interval if it has one."""
    from headstock.tasks.text_metrics import DEFINITIONS

    intervals = metrics.get("intervals", {})
    for name, value in metrics.items():
        if isinstance(value, dict | list):
            continue
        low, high = intervals.get(name, (None, None))
        interval = f"  (95%: {low:.4f} to {high:.4f})" if low is not None else ""
        text = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        meaning = f"  ({DEFINITIONS[name]})" if name in DEFINITIONS else ""
        yield f"{name.replace('_', ' '):16s} {text}{interval}{meaning}"
    for kind, groups in metrics.get("by", {}).items():
        yield f"by {kind}, worst first:"
        for name, group in groups.items():
            interval = f"(95%: {group['low']:.4f} to {group['high']:.4f})"
            yield f"  {group['accuracy']:.4f}  {interval}  {group['rows']:6,d}  {name}"


def calibration_lines(metrics: dict[str, Any]) -> Iterator[str]:
    """The accuracy of the most confident predictions, and the metrics before calibration."""
    if curve := metrics.get("risk_coverage", {}).get("curve"):
        points = [point for point in curve if round(100 * point["coverage"]) in SHOWN_COVERAGES] or curve[-1:]
        parts = ", ".join(f"{point['coverage']:.0%}: {point['accuracy']:.1%}" for point in reversed(points))
        yield f"accuracy of the most confident predictions, by coverage: {parts}"
    if "uncalibrated" in metrics:
        before = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics["uncalibrated"].items())
        yield f"before calibration: {before}"
    if "loss_change" in metrics:
        low, high = metrics.get("loss_change_interval", (None, None))
        interval = "" if low is None else f" (95%: {low:+.4f} to {high:+.4f})"
        yield f"calibration changes the loss by {metrics['loss_change']:+.4f}{interval}"
    if metrics.get("calibration_fitted_here"):
        yield "The calibration was fitted on these rows; evaluate others to see what it changes."


def slice_lines(metrics: dict[str, Any]) -> Iterator[str]:
    """The score of each group of rows with its interval."""
    from headstock.tasks.text_metrics import format_metric, format_range, metric_name

    for part in metrics.get("slices", []):
        metric = metrics["slice_metric"]
        yield f"{metric_name(metric)} by {part['slice']}:"
        width = max(len(group["value"]) for group in part["groups"])
        for group in part["groups"]:
            score, ends = format_metric(metric, group["score"]), format_range(metric, group["low"], group["high"])
            interval = f"  (95%: {ends})" if ends else ""
            yield f"  {group['value']:{width}s}  {group['rows']:6,d} rows  {score}{interval}"


@command("Use a run", writes=lambda options: [options["out"]])
def predict(
    common: Common,
    run: RunPath,
    columns: Columns,
    text: Annotated[list[str] | None, typer.Argument(help="Texts to classify or tag.")] = None,
    file: Annotated[str | None, "Rows as in the training data, or one text per line; - is stdin."] = None,
    out: Annotated[Path | None, "Write one prediction per row to this .jsonl, .csv or .tsv file."] = None,
    with_: Annotated[str | None, "Columns of the file to copy to each prediction, such as id,text."] = None,
    skip_blank: SkipBlank = False,
    calibrated: Calibrated = False,
    abstain_below: Annotated[float | None, "Leave the class empty where it is less probable than this."] = None,
    coverage: Annotated[float | None, "Abstain so that this share of rows is predicted, such as 0.9."] = None,
    int8: Int8 = False,
    **prompting: Unpack[PromptOptions],
) -> dict[str, Any]:
    """Predict classes, tags or values with a run.

    A fine-tuned run predicts with its head; a language model predicts classes from a prompt (--prompt). `--coverage`
    abstains below the confidence that this share of the run's calibration rows reaches.

    Example: headstock predict reviews-en --prompt "{text} It was [MASK]." --label-words neg=bad,pos=good "What a film!"
    Example: headstock predict runs/tagger --file test.conll --out predictions.jsonl
    Example: headstock predict runs/reviews --file reviews.csv --with id,text --out predictions.csv
    """
    from headstock.data.records import Records
    from headstock.inference.output_files import InputColumns, check_suffix, open_prediction_file

    check_text_source(text, file)
    check_suffix(out)
    copied = [name.strip() for name in (with_ or "").split(",") if name.strip()]
    if abstain_below is not None and coverage is not None:
        raise UserError("give --abstain-below or --coverage, not both")
    if abstain_below is not None and not 0 < abstain_below <= 1:
        raise UserError(f"--abstain-below {abstain_below}: must be above 0 and at most 1")
    pipeline = with_prompt(load(run, device=common.device, int8=int8, calibrated=calibrated), prompting)
    if coverage is not None:
        abstain_below = pipeline.confidence_at(coverage)
        logger.info(f"abstains below a confidence of {abstain_below:.3f} ({coverage:.0%} of the calibration rows)")
    task = pipeline.labelled_task()
    names = columns.names(main=task.input_column)
    source = file or "-"
    resolved = None if text else pipeline.resolve_columns(source, names)
    inputs = InputColumns(copied, None if text else source, resolved)
    skipped: list[int] | None = [] if skip_blank else None
    rows: Any
    if text:
        rows = inputs.track(enumerate(text, 1))
    else:
        records = pipeline.read_numbered_rows(source, columns=names, skipped=skipped)
        rows = inputs.track_records(records) if isinstance(records, Records) else inputs.track(records)
    predictions, count, abstained = [], 0, 0
    with ExitStack() as stack:
        write = stack.enter_context(open_prediction_file(out)) if out else None
        for prediction in pipeline.iter_predictions(rows, abstain_below=abstain_below):
            row = inputs.merge(prediction)
            count, abstained = count + 1, abstained + prediction.get("abstained", False)
            if write is not None:
                write(row)
            else:
                cells = [str(value) for value in list(row.values())[: len(copied)]]
                common.show("\t".join([*cells, task.as_text(prediction)]))
            if common.json:
                predictions.append(row)
    if blank := rows.skipped if isinstance(rows, Records) else len(skipped or ()):
        log_skipped(source, blank)
    if out is not None:
        common.show(f"{out}: {count:,} predictions")
    if abstain_below is not None:
        logger.info(f"abstained from {abstained:,} of {count:,} rows")
    return {"predictions": predictions} | ({"skipped_rows": blank} if skip_blank else {})


@command("Use a run")
def answer(
    common: Common,
    run: RunPath,
    question: Annotated[list[str], typer.Argument(help="One or more questions about the context.")],
    context: Annotated[str, "A text that contains the answers, or a file with it."],
    threshold: Annotated[float | None, "Margin by which `no answer` must win to be returned."] = None,
) -> dict[str, Any]:
    """Answer questions with spans of a text.

    Example: headstock answer runs/squad --context article.txt "Who founded the town?"
    """
    text = read_context(context)
    answers = load(run, device=common.device).answer(question, context=text, threshold=threshold)
    for row in answers:
        if row["start"] is None:
            common.show(f"(no answer in this text)\t{row['score']:.3f}")
        else:
            common.show(f"{row['answer']}\t{row['score']:.3f}\n    {excerpt(text, row['start'], row['end'])}")
    return {"answers": answers.to_dict()}


def read_context(context: str) -> str:
    """The text of a file of this name, if there is one; otherwise the context itself."""
    if not os.path.isfile(context):
        if not context.strip():
            raise UserError("--context is empty: give a text, or the name of a file with one")
        if len(context.split()) == 1 and Path(context).suffix[1:].isalpha():
            raise UserError(f"--context {context}: no such file (and too short to be the text itself)")
        return context
    text = read_utf8(Path(context))
    if not text.strip():
        raise UserError(f"--context {context}: no text in it")
    return text.rstrip()  # a file ends in a newline, which few training contexts do


def excerpt(text: str, start: int, end: int) -> str:
    """The answer in brackets between whole words of its surroundings, on one line."""
    before, after = text[max(0, start - EXCERPT_CHARACTERS) : start], text[end : end + EXCERPT_CHARACTERS]
    if start > EXCERPT_CHARACTERS and " " in before:
        before = "... " + before.partition(" ")[2]
    if end + EXCERPT_CHARACTERS < len(text) and " " in after:
        after = after.rpartition(" ")[0] + " ..."
    return " ".join(f"{before}[{text[start:end]}]{after}".split())


class BeamOptions(TypedDict):
    beams: Annotated[int | None, "Beam size; 1 is greedy."]
    length_penalty: Annotated[float | None, "Above 1 favours long translations, below 1 short ones."]
    no_repeat: Annotated[int | None, "No repeated n-grams of this size."]
    max_tokens: Annotated[int | None, "Maximum number of tokens in a translation."]


@command("Use a run", writes=lambda options: [options["out"], options["alignment"]])
def translate(
    common: Common,
    run: RunPath,
    columns: Columns,
    text: Annotated[list[str] | None, typer.Argument(help="One or more sentences.")] = None,
    file: Annotated[str | None, "Sentences from a file: one per line, or a table; - is stdin."] = None,
    alignment: Annotated[Path | None, "Draw the cross-attention of one translation: .svg or .html."] = None,
    out: Annotated[Path | None, "Write one translation per line to this file."] = None,
    int8: Int8 = False,
    **options: Unpack[BeamOptions],
) -> dict[str, Any]:
    """Translate sentences.

    Example: headstock translate runs/en-fr "I like tea." --beams 4
    """
    from headstock.data.labelled_texts import is_table
    from headstock.io import atomic_file

    check_text_source(text, file)
    if alignment is not None and (file is not None or len(text or ()) != 1):
        raise UserError("--alignment draws one translation: give one text")
    pipeline = load(run, device=common.device, int8=int8)
    task = pipeline.translation_task(**options)
    names = columns.names(main=task.input_column)
    if file is not None and is_table(file):  # in parallel text files, the run's columns are file suffixes
        names = pipeline.resolve_columns(file, names)
    translations, count = [], 0
    with ExitStack() as stack:
        lines = stack.enter_context(stack.enter_context(atomic_file(out)).open("w", encoding="utf-8")) if out else None
        for chunk in chunks(text or read_sentences(file or "-", names)):
            for line in pipeline.translation_notes(chunk):
                logger.info(line)
            for translation in pipeline.translate(chunk, **options):
                count += 1
                if lines is not None:
                    lines.write(" ".join(translation.splitlines()) + "\n")
                else:
                    common.show(translation)
                if common.json:
                    translations.append(translation)
    if out is not None:
        common.show(f"{out}: {count:,} translations")
    if alignment is not None and text:
        from headstock.report.heatmap import draw_alignment

        draw_alignment(alignment, pipeline.align(text[0], **options))
        common.show(f"alignment: {alignment}")
    return {"texts": translations, "beams": task.config.beams}


def chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    """A few hundred texts at a time, so that a stream is translated as it arrives."""
    remaining = iter(texts)
    while chunk := list(islice(remaining, SORTED_TEXTS)):
        yield chunk


def read_sentences(file: str, columns: dict[str, str] | None) -> Iterator[str]:
    """The sentences of a file: its lines, blank ones included, or the source column of a table.

    A file without a known suffix, such as test.en, is one side of a pair of parallel files.
    """
    from headstock.data.formats import FORMATS, PLAIN, detect_format, text_lines
    from headstock.data.labelled_texts import stream_texts
    from headstock.data.parallel import read_parallel

    source = detect_format(file)
    if file != "-" and source.format not in FORMATS and not columns:
        if not Path(file).is_file():
            raise UserError(f"{file}: no such file")
        yield from (text for _, text in text_lines(source))
    elif file != "-" and (columns or source.format != PLAIN):
        yield from read_parallel(file, columns=columns, strict=False).display_texts
    else:
        yield from (text for _, text in stream_texts(file))
