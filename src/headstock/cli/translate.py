"""`headstock translate`: sentences in another language, and which words of them came from where."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, verb
from headstock.cli.options import Column, Columns, Int8, RunPath, named_columns

AT_ONCE = 512  # texts that are sorted by length together


def translate(
    common: Common,
    run: RunPath,
    text: Annotated[list[str] | None, typer.Argument(help="One or more sentences.")] = None,
    file: Annotated[str | None, typer.Option("--file", help="Sentences, one a line, or a table; - is stdin.")] = None,
    beams: Annotated[int | None, typer.Option("--beams", help="Rows side by side in the search; 1 is greedy.")] = None,
    length_penalty: Annotated[
        float | None, typer.Option("--length-penalty", help="Above 1 favours long translations, below 1 short ones.")
    ] = None,
    no_repeat: Annotated[int | None, typer.Option("--no-repeat", help="No so many tokens come twice in a row.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Tokens in a translation at the most.")] = None,
    alignment: Annotated[
        Path | None, typer.Option("--alignment", help="Draw what each word looked at here: .svg or .html.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the translations here, one a line.")] = None,
    columns: Columns = None,
    column: Column = None,
    int8: Int8 = False,
) -> dict[str, Any]:
    """Translate sentences with a run that was fine-tuned for it.

    Example: headstock translate runs/en-fr "I like tea." --beams 4
    """
    from headstock.cli.loading import load
    from headstock.data.records import is_table
    from headstock.errors import UserError
    from headstock.io import whole_file

    if text and file:
        raise UserError("give texts or --file, not both")
    if not text and file is None and sys.stdin.isatty():
        raise UserError("no text: give one, name a --file, or pipe text in")
    if alignment is not None and (file is not None or len(text or ()) != 1):
        raise UserError("--alignment draws one translation: give one text")
    options = {"beams": beams, "length_penalty": length_penalty, "no_repeat": no_repeat, "max_tokens": max_tokens}
    loaded = load(run, device=common.device, int8=int8)
    task = loaded.translation_task(**options)
    named = named_columns(columns, column, main=task.input_column)
    if file is not None and is_table(file):  # of other files, the run's own columns are how pairs of them end
        named = loaded.resolve_columns(file, named)
    made, count = [], 0
    with ExitStack() as stack:
        lines = stack.enter_context(stack.enter_context(whole_file(out)).open("w", encoding="utf-8")) if out else None
        for part in parts_of(text or sentences(file or "-", named)):
            for line in loaded.translation_notes(part):
                common.say(line)
            for one in loaded.translate(part, **options):
                count += 1
                if lines is not None:
                    lines.write(" ".join(one.splitlines()) + "\n")
                else:
                    common.show(one)
                if common.json:
                    made.append(one)
    if out is not None:
        common.show(f"{out}: {count:,} translations")
    if alignment is not None and text:
        from headstock.report.alignment import draw_alignment

        draw_alignment(alignment, loaded.align(text[0], **options))
        common.show(f"alignment: {alignment}")
    return {"texts": made, "beams": task.config.beams}


def parts_of(texts: Iterable[str]) -> Iterator[list[str]]:
    """A few hundred at a time, so that what comes through a pipe is translated as it comes."""
    waiting = iter(texts)
    while part := list(islice(waiting, AT_ONCE)):
        yield part


def sentences(file: str, columns: dict[str, str] | None) -> Iterator[str]:
    """The sentences of a file: lines of plain text, blank ones too, or what the run calls the source of a table.

    A file that ends as no format does, such as test.en, is one side of a pair of files: its lines are the sentences.
    """
    from headstock.data.formats import PLAIN, Source, source_of, text_lines
    from headstock.data.parallel import read_parallel
    from headstock.data.records import stream_texts
    from headstock.errors import UserError

    known = source_of(Path(file))
    if file != "-" and known is None and not columns:
        if not Path(file).is_file():
            raise UserError(f"{file}: no such file")
        yield from (text for _, text in text_lines(Source(Path(file), file, PLAIN, "")))
    elif file != "-" and (columns or (known is not None and known.format != PLAIN)):
        yield from read_parallel(file, columns=columns, insist=False).plain
    else:
        yield from (text for _, text in stream_texts(file))


def add_to(app: typer.Typer) -> None:
    verb(app, writes=lambda given: [given["out"], given["alignment"]])(translate)
