"""What all verbs share: their common options, how they speak, and how they fail."""

import inspect
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand

from headstock.cli.output import check_outputs
from headstock.cli.terminal import discard, takes_unicode, wrapped, write_error, write_out, writing
from headstock.errors import HeadstockError
from headstock.logs import messages_to
from headstock.ranks import rank_and_size

COMMON = "Common options"
PATHS = ("corpus", "file", "run", "runs", "start", "valid")  # parameters that name files, though typed as text
TRAINS = ("pretrain", "finetune", "compare", "sweep", "demo")  # of torchrun's processes the first alone speaks here


@dataclass(frozen=True)
class Common:
    """The options every verb takes, and where its words go: results to stdout, progress to stderr."""

    json: bool = False
    quiet: bool = False
    seed: int | None = None
    device: str = "auto"
    debug: bool = False
    leads: bool = True  # False in all but the first of the processes that torchrun started, which say nothing

    def say(self, line: str) -> None:
        """Progress, for a person who waits."""
        if not self.quiet and self.leads:
            write_error(wrapped(line, sys.stderr))

    def show(self, result: Any = "") -> None:
        """A result as it is, for a person; with --json the JSON object says it instead."""
        if not self.json and self.leads:
            if isinstance(result, str):
                write_out(result)
            else:
                from rich.console import Console

                with writing():
                    Console(highlight=False).print(result)

    def tell(self, result: Any = "") -> None:
        """The same of a result in prose, which is wrapped at the width of a terminal."""
        self.show(wrapped(result, sys.stdout) if isinstance(result, str) else result)


def leads(verb: str) -> bool:
    """Whether this process speaks: of those that torchrun started for a training verb, only the first."""
    return verb not in TRAINS or rank_and_size()[0] == 0


class VerbCommand(TyperCommand):
    """A command that refuses an empty path, which would otherwise mean the current folder."""

    paths: frozenset[str] = frozenset()  # the parameters that name files or folders

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        for parameter in self.params:
            values = given.get(parameter.name)
            if parameter.name in self.paths and "" in (values if isinstance(values, list | tuple) else [values]):
                raise typer.BadParameter("the path is empty", ctx=ctx, param=parameter)  # type: ignore[arg-type]
        return super().parse_args(ctx, args)


def names_paths(parameter: inspect.Parameter) -> bool:
    """Whether a parameter of a verb names files or folders."""
    return parameter.name in PATHS or "Path" in str(get_args(parameter.annotation)[:1])


OPTIONS = {
    "json": (bool, typer.Option("--json", help="One JSON object as the last line of stdout.", rich_help_panel=COMMON)),
    "quiet": (bool, typer.Option("--quiet", "-q", help="No progress on stderr.", rich_help_panel=COMMON)),
    "seed": (int | None, typer.Option("--seed", min=0, help="Seed of everything random.", rich_help_panel=COMMON)),
    "device": (str, typer.Option("--device", help="auto, cpu, cuda or mps.", rich_help_panel=COMMON)),
    "debug": (bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=COMMON)),
}


OVERWRITE = Annotated[bool, typer.Option("--overwrite", help="Replace the output file if it exists.")]
Writes = Callable[[dict[str, Any]], Iterable[Path | None]]


def verb(
    app: typer.Typer, name: str | None = None, *, writes: Writes | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a verb. Its first parameter is Common; the dict it returns is what --json prints.

    `writes` gives the files that a call with these arguments writes under names the user chose: the verb then takes
    --overwrite, and they are checked before any work is done.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        called = name or function.__name__

        def command(**given: Any) -> None:
            common = Common(**{option: given.pop(option) for option in OPTIONS}, leads=leads(called))
            overwrite = given.pop("overwrite") if writes else False

            def work() -> Any:
                if writes:
                    outputs = [path for path in writes(given) if path is not None]
                    inputs = [value for value in given.values() if all(value is not path for path in outputs)]
                    check_outputs(outputs, inputs, overwrite=overwrite)
                return function(common, **given)

            raise SystemExit(attempt(work, common))

        own = list(inspect.signature(function).parameters.values())[1:]
        shared = [
            inspect.Parameter(
                option,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(Common, option),
                annotation=Annotated[kind, setting],
            )
            for option, (kind, setting) in OPTIONS.items()
        ]
        keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        if writes:
            kind = inspect.Parameter.KEYWORD_ONLY
            keyword.append(inspect.Parameter("overwrite", kind, default=False, annotation=OVERWRITE))
        command.__signature__ = inspect.Signature([*keyword, *shared])  # type: ignore[attr-defined]
        command.__doc__ = function.__doc__
        paths = frozenset(parameter.name for parameter in own if names_paths(parameter))
        app.command(called, cls=type("VerbCommand", (VerbCommand,), {"paths": paths}))(command)
        return function

    return register


def attempt(work: Callable[[], Any], common: Common) -> int:
    """Do the work; the exit code says how it went: 0 done, 1 failed while working, 2 the user's input was wrong."""
    try:
        with messages_to(common.say):
            result = work()
        if common.json and common.leads:
            write_out(as_json(result if result is not None else {}))
    except HeadstockError as wrong:
        return fail(str(wrong), wrong.exit_code, replace(common, leads=common.leads or wrong.from_any_rank))
    except KeyboardInterrupt:
        return fail("interrupted", 130, common)
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):  # the reader left; nobody is to be told
            discard(stream)
        return 0
    except OSError as wrong:
        where = f"{wrong.filename}: " if wrong.filename else ""
        return fail(f"{where}{wrong.strerror or wrong}", 1, common)
    except Exception as wrong:
        return fail(f"internal error (please report): {type(wrong).__name__}: {wrong} (--debug shows where)", 1, common)
    return 0


def as_json(value: Any) -> str:
    """One line of JSON, escaped where standard output cannot write every character."""
    return json.dumps(finite(value), ensure_ascii=not takes_unicode())


def finite(value: Any) -> Any:
    """The same with None for each number that is not finite: JSON has no word for those, and strict readers stop."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fail(message: str, code: int, common: Common) -> int:
    if common.debug:
        traceback.print_exc()
    if common.leads:
        write_error(f"headstock: {message}")
        if common.json:
            try:
                write_out(as_json({"error": message}))
            except (HeadstockError, BrokenPipeError):  # it may be standard output itself that cannot be written to
                discard(sys.stdout)
    return code
