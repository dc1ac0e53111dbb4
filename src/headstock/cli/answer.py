"""`headstock answer`: questions about a text, answered in its own words."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, verb
from headstock.cli.options import RunPath

AROUND = 60  # characters shown on each side of an answer


def answer(
    common: Common,
    run: RunPath,
    question: Annotated[list[str], typer.Argument(help="One or more questions about the context.")],
    context: Annotated[str, typer.Option("--context", help="The file that holds the answers, or the text itself.")],
    threshold: Annotated[
        float | None, typer.Option("--threshold", help="By how much no answer must be likelier to be said.")
    ] = None,
) -> dict[str, Any]:
    """Answer questions about a text, in words that stand in it.

    Example: headstock answer runs/squad --context article.txt "Who founded the town?"
    """
    from headstock.cli.loading import load

    text = context_from(context)
    answers = load(run, device=common.device).answer(question, context=text, threshold=threshold)
    for row in answers:
        if row["start"] is None:
            common.show(f"(no answer in this text)\t{row['score']:.3f}")
        else:
            common.show(f"{row['answer']}\t{row['score']:.3f}\n    {excerpt(text, row['start'], row['end'])}")
    return {"answers": answers}


def context_from(given: str) -> str:
    """The text of a file where one has this name; else what was given is the text."""
    from headstock.errors import UserError

    if not os.path.isfile(given):
        if not given.strip():
            raise UserError("--context is empty: give a text, or the name of a file with one")
        if len(given.split()) == 1 and Path(given).suffix[1:].isalpha():
            raise UserError(f"--context {given}: no such file (and too short to be the text itself)")
        return given
    try:
        text = Path(given).read_text(encoding="utf-8")
    except UnicodeDecodeError as wrong:
        raise UserError(f"--context {given}: not UTF-8 at byte {wrong.start}") from None
    if not text.strip():
        raise UserError(f"--context {given}: no text in it")
    return text.rstrip()  # a file ends in a line end, which few contexts of training rows do


def excerpt(text: str, start: int, end: int) -> str:
    """The answer in brackets, amid whole words of what stands around it, on one line."""
    before, after = text[max(0, start - AROUND) : start], text[end : end + AROUND]
    if start > AROUND and " " in before:
        before = "... " + before.partition(" ")[2]
    if end + AROUND < len(text) and " " in after:
        after = after.rpartition(" ")[0] + " ..."
    return " ".join(f"{before}[{text[start:end]}]{after}".split())


def add_to(app: typer.Typer) -> None:
    verb(app)(answer)
