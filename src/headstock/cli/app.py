"""The `headstock` program: finds the verbs and runs the one on the command line."""

import os
import pkgutil
import sys
from importlib import import_module
from typing import Any

import typer

from headstock import cli
from headstock.cli.command import Common, app, fail, is_printing
from headstock.cli.terminal import discard, set_up, write_out, writing
from headstock.errors import HeadstockError, did_you_mean
from headstock.signals import exit_process

# newer versions of typer contain their own copy of click; the base of its parameter error tells which is in use
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


@app.callback(invoke_without_command=True)
def show_version(version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    if version:
        from headstock import __version__

        write_out(f"headstock {__version__}")
        raise typer.Exit


def find_verbs() -> None:
    """Import every module of `headstock.cli`, so that its verbs register themselves."""
    for module in pkgutil.iter_modules(cli.__path__):
        import_module(f"headstock.cli.{module.name}")


def main() -> None:
    # OpenMP threads spin while they wait, which slows every program on a shared machine; a short spin costs nothing
    # measurable. The variable is read when torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        set_up()
        find_verbs()
        if sys.argv[1:] in ([], ["--help"], ["-h"]):
            app.rich_markup_mode = None  # importing rich would double the time that the help takes
        with writing():  # for the help; verbs handle their own output
            code = run()
    except SystemExit as left:  # of a verb
        code = left.code
    except KeyboardInterrupt:
        code = fail("interrupted", 130, Common())
    except HeadstockError as error:
        code = fail(str(error), error.exit_code, Common())
    except BrokenPipeError:
        discard(sys.stdout)
        code = 0
    exit_process(code)


def run() -> Any:
    """Run the command line; returns the exit code."""
    try:
        return app(standalone_mode=False)
    except UsageError as error:
        return report_usage_error(error)
    except typer.Abort:
        return 130
    except typer.Exit as error:
        return error.exit_code


def report_usage_error(error: Any) -> int:
    """Print what is wrong with the command line in one line, or the help if the command line is empty."""
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        write_out(message)
        return 2
    verb = error.ctx.command_path.rpartition("headstock")[2].strip() if error.ctx else ""
    option = getattr(error, "option_name", None)
    if option and error.ctx and not getattr(error, "possibilities", None):
        message += did_you_mean(option, [name for parameter in error.ctx.command.params for name in parameter.opts])
    message = " ".join(message.split()).removesuffix(".")
    message = f"{verb}: {message} (see headstock {verb} --help)" if verb else f"{message} (see headstock --help)"
    return fail(message, 2, Common(json="--json" in sys.argv, prints=is_printing(verb)))
