"""All verbs under one name."""

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from headstock.cli import (
    answer,
    bench,
    compare,
    data,
    demo,
    explain,
    export,
    finetune,
    import_,
    language,
    plan,
    predict,
    presets,
    pretrain,
    report,
    sweep,
    tokenizer,
    translate,
)
from headstock.cli.command import Common, fail, leads
from headstock.cli.terminal import discard, set_up, write_out, writing
from headstock.errors import HeadstockError, did_you_mean

GROUPS = {  # of the verbs, as the help lists them
    "Start": ("demo", "data", "presets", "plan"),
    "Train": ("tokenizer", "pretrain", "finetune"),
    "Compare and measure": ("compare", "sweep", "evaluate", "report", "bench"),
    "Use a run": ("generate", "fill", "score", "predict", "answer", "translate", "embed"),
    "Look inside": ("explain",),
    "Exchange": ("export", "import"),
}


class GroupedVerbs(TyperGroup):
    """The verbs under headings in the help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [
                        (name.ljust(width), self.commands[name].get_short_help_str(formatter.width - 6 - width))
                        for name in names
                    ]
                )


app = typer.Typer(
    name="headstock",
    cls=GroupedVerbs,
    help="Grow a language model from raw text, graft task heads onto it, and say with numbers whether that paid.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 120},
)


@app.callback(invoke_without_command=True)
def about(version: bool = typer.Option(False, "--version", help="Show the version and leave.")) -> None:
    if version:
        from headstock import __version__

        write_out(f"headstock {__version__}")
        raise typer.Exit


verbs = (
    demo,
    data,
    presets,
    tokenizer,
    plan,
    pretrain,
    finetune,
    compare,
    sweep,
    language,
    predict,
    answer,
    translate,
    report,
)
for part in (*verbs, explain, export, import_, bench):
    part.add_to(app)


# typer carries a click of its own in newer versions; its parameter error tells which one is in use
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def main() -> None:
    # torch's threads wait for each other by spinning; where another program wants the cores too, that makes each of
    # them many times slower, and a short spin costs nothing measurable. Read when torch is imported, so set before.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    set_up()
    if sys.argv[1:] in ([], ["--help"], ["-h"]):
        app.rich_markup_mode = None  # what draws the frames takes as long to import as all the rest
    try:
        with writing():  # the help; verbs look after themselves
            code = called()
    except HeadstockError as wrong:
        code = fail(str(wrong), wrong.exit_code, Common())
    except BrokenPipeError:
        discard(sys.stdout)
        code = 0
    sys.exit(code)


def called() -> Any:
    """The exit code of what the command line asks for."""
    try:
        return app(standalone_mode=False)
    except UsageError as wrong:
        return misspelled(wrong)
    except typer.Abort:
        return 130
    except typer.Exit as leaving:
        return leaving.exit_code


def misspelled(wrong: Any) -> int:
    """A call that was spelled wrong, in one line; a call of nothing at all gets the help it needs."""
    message = wrong.format_message()
    if type(wrong).__name__ == "NoArgsIsHelpError":
        write_out(message)
        return 2
    named = wrong.ctx.command_path.rpartition("headstock")[2].strip() if wrong.ctx else ""
    missed = getattr(wrong, "option_name", None)
    if missed and wrong.ctx and not getattr(wrong, "possibilities", None):
        message += did_you_mean(missed, [name for option in wrong.ctx.command.params for name in option.opts])
    message = " ".join(message.split()).removesuffix(".")
    said, verb = (f"{named}: {message}", f"headstock {named}") if named else (message, "headstock")
    return fail(f"{said} (see {verb} --help)", 2, Common(json="--json" in sys.argv, leads=leads(named)))
