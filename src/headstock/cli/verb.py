"""What all verbs share: their common options, how they speak, and how they fail."""

import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from headstock.errors import HeadstockError

COMMON = "Common options"


@dataclass(frozen=True)
class Common:
    """The options every verb takes, and where its words go: results to stdout, progress to stderr."""

    json: bool = False
    quiet: bool = False
    seed: int | None = None
    device: str = "auto"
    debug: bool = False

    def say(self, line: str) -> None:
        """Progress, for a person who waits."""
        if not self.quiet and leads():
            print(line, file=sys.stderr, flush=True)

    def show(self, result: Any = "") -> None:
        """A result, for a person; with --json the JSON object says it instead."""
        if not self.json and leads():
            if isinstance(result, str):
                print(result, flush=True)
            else:
                from rich.console import Console

                Console(highlight=False).print(result)


def leads() -> bool:
    """Under torchrun, only the first process speaks."""
    return os.environ.get("RANK", "0") == "0"


OPTIONS = {
    "json": (bool, typer.Option("--json", help="One JSON object as the last line of stdout.", rich_help_panel=COMMON)),
    "quiet": (bool, typer.Option("--quiet", "-q", help="No progress on stderr.", rich_help_panel=COMMON)),
    "seed": (int | None, typer.Option("--seed", min=0, help="Seed of everything random.", rich_help_panel=COMMON)),
    "device": (str, typer.Option("--device", help="auto, cpu, cuda or mps.", rich_help_panel=COMMON)),
    "debug": (bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=COMMON)),
}


def verb(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a verb. Its first parameter is Common; the dict it returns is what --json prints."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def command(**given: Any) -> None:
            common = Common(**{option: given.pop(option) for option in OPTIONS})
            raise SystemExit(attempt(lambda: function(common, **given), common))

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
        command.__signature__ = inspect.Signature([*keyword, *shared])  # type: ignore[attr-defined]
        command.__doc__ = function.__doc__
        app.command(name or function.__name__)(command)
        return function

    return register


def attempt(work: Callable[[], Any], common: Common) -> int:
    """Do the work; the exit code says how it went: 0 done, 1 failed while working, 2 the user's input was wrong."""
    try:
        result = work()
        if common.json and leads():
            print(json.dumps(finite(result if result is not None else {}), ensure_ascii=False), flush=True)
    except HeadstockError as wrong:
        return fail(str(wrong), wrong.exit_code, common)
    except KeyboardInterrupt:
        return fail("interrupted", 130, common)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; nobody is to be told
        return 0
    except OSError as wrong:
        where = f"{wrong.filename}: " if wrong.filename else ""
        return fail(f"{where}{wrong.strerror or wrong}", 1, common)
    except Exception as wrong:
        return fail(f"a fault of ours: {type(wrong).__name__}: {wrong} (--debug shows where)", 1, common)
    return 0


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
    if leads():
        print(f"headstock: {message}", file=sys.stderr, flush=True)
        if common.json:
            print(json.dumps({"error": message}, ensure_ascii=False), flush=True)
    return code
