"""All verbs under one name."""

import os
import sys
from typing import Any

import typer

from headstock.cli import (
    answer,
    bench,
    compare,
    data,
    demo,
    explain,
    export,
    finetune,
    importing,
    language,
    plan,
    pretrain,
    report,
    sweep,
    tokenizer,
    translate,
    use,
)
from headstock.cli.verb import Common, fail
from headstock.errors import did_you_mean

app = typer.Typer(
    name="headstock",
    help="Grow a language model from raw text, graft task heads onto it, and say with numbers whether that paid.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 120},
)


@app.callback(invoke_without_command=True)
def about(version: bool = typer.Option(False, "--version", help="Show the version and leave.")) -> None:
    if version:
        from headstock import __version__

        print(f"headstock {__version__}")
        raise typer.Exit


verbs = (demo, data, tokenizer, plan, pretrain, finetune, compare, sweep, language, use, answer, translate, report)
for part in (*verbs, explain, export, importing, bench):
    part.add_to(app)


# typer carries a click of its own in newer versions; its parameter error tells which one is in use
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def main() -> None:
    # torch's threads wait for each other by spinning; where another program wants the cores too, that makes each of
    # them many times slower, and a short spin costs nothing measurable. Read when torch is imported, so set before.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if sys.argv[1:] in (["--help"], ["-h"]):
        app.rich_markup_mode = None  # what draws the frames takes as long to import as all the rest
    try:
        sys.exit(app(standalone_mode=False))
    except UsageError as wrong:
        sys.exit(misspelled(wrong))
    except typer.Abort:
        sys.exit(130)
    except typer.Exit as leaving:
        sys.exit(leaving.exit_code)


def misspelled(wrong: Any) -> int:
    """A call that was spelled wrong, in one line; a call of nothing at all gets the help it needs."""
    message = wrong.format_message()
    if type(wrong).__name__ == "NoArgsIsHelpError":
        print(message)
        return 2
    where = wrong.ctx.command_path if wrong.ctx else "headstock"
    missed = getattr(wrong, "option_name", None)
    if missed and wrong.ctx and not getattr(wrong, "possibilities", None):
        message += did_you_mean(missed, [name for option in wrong.ctx.command.params for name in option.opts])
    message = " ".join(message.split()).removesuffix(".")
    named = where.removeprefix("headstock").strip()
    said = f"{named}: {message}" if named else message
    return fail(f"{said} (see {where} --help)", 2, Common(json="--json" in sys.argv))
