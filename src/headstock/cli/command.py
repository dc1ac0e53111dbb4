"""The `@command` decorator: turns a function into a verb of the command line.

A verb is a function in any module of this package. Its signature declares its options:

    @command("Train")
    def finetune(common: Common, out: RunOut, columns: Columns, **options: Unpack[FinetuneOptions]) -> dict[str, Any]:

- an `Annotated[..., typer.Option(...)]` parameter is one option;
- a dataclass parameter, such as `Common` or `Columns`, stands for one option per annotated field;
- `**options: Unpack[SomeTypedDict]` stands for one option per key, for options that are only passed on.

The decorator adds the common options, prints the returned dict with --json, and turns errors into exit codes.
"""

import inspect
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from headstock.cli.files import check_outputs
from headstock.cli.terminal import discard, takes_unicode, wrapped, write_error, write_out, writing
from headstock.errors import HeadstockError
from headstock.logs import messages_to

# verbs per section of `headstock --help`, filled by the decorator
SECTIONS: dict[str, list[str]] = {
    "Start": [],
    "Train": [],
    "Compare and measure": [],
    "Use a run": [],
    "Look inside": [],
    "Exchange": [],
}
DISTRIBUTED: set[str] = set()  # verbs that run under torchrun, where only rank 0 prints
PATH_PARAMETERS = ("corpus", "file", "run", "runs", "start", "valid")  # paths, globs or URLs, typed as text
COMMON = "Common options"


class SectionedGroup(TyperGroup):
    """Lists the verbs by section in the help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for section, names in SECTIONS.items():
            with formatter.section(section):
                limit = formatter.width - 6 - width
                verbs = [(name.ljust(width), self.commands[name]) for name in names]
                formatter.write_dl([(name, verb.get_short_help_str(limit)) for name, verb in verbs])


app = typer.Typer(
    name="headstock",
    cls=SectionedGroup,
    help="Pretrain a language model on your own text, fine-tune it, and measure whether pretraining was worth it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 120},
)


@dataclass(frozen=True)
class Common:
    """The options that every verb takes. Results go to stdout, log messages to stderr."""

    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.", rich_help_panel=COMMON)
    ] = False
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no progress or messages.", rich_help_panel=COMMON)
    ] = False
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Random seed.", rich_help_panel=COMMON)] = None
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.", rich_help_panel=COMMON)] = "auto"
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=COMMON)] = (
        False
    )
    prints: bool = True  # False on all ranks but the first, which print nothing

    def log(self, message: str) -> None:
        """Write a log message to stderr."""
        if not self.quiet and self.prints:
            write_error(wrapped(message, sys.stderr))

    def show(self, result: Any = "") -> None:
        """Print a result unchanged: text or anything rich can render. With --json, the JSON object replaces it."""
        if self.json or not self.prints:
            return
        if isinstance(result, str):
            write_out(result)
        else:
            from rich.console import Console

            with writing():
                Console(highlight=False).print(result)

    def show_prose(self, result: Any) -> None:
        """Print a result; text is wrapped to the width of a terminal."""
        self.show(wrapped(result, sys.stdout) if isinstance(result, str) else result)


def is_printing(verb: str) -> bool:
    """Whether this process prints: under torchrun, only rank 0 of a distributed verb does."""
    from headstock.io import rank_and_size

    return verb not in DISTRIBUTED or rank_and_size()[0] == 0


class VerbCommand(TyperCommand):
    """A command that refuses an empty path, which would otherwise mean the current folder."""

    paths: frozenset[str] = frozenset()  # names of parameters that are files or folders

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        parsed, _, _ = self.make_parser(ctx).parse_args(list(args))
        for parameter in self.params:
            values = parsed.get(parameter.name)
            if parameter.name in self.paths and "" in (values if isinstance(values, list | tuple) else [values]):
                raise typer.BadParameter("the path is empty", ctx=ctx, param=parameter)  # type: ignore[arg-type]
        return super().parse_args(ctx, args)


def is_path(parameter: Parameter) -> bool:
    return parameter.name in PATH_PARAMETERS or "Path" in str(get_args(parameter.annotation)[:1])


Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output file if it exists.")]
Writes = Callable[[dict[str, Any]], Iterable[Path | None]]


def command_group(name: str, section: str, help: str) -> typer.Typer:
    """A verb with subcommands of its own, such as `headstock data list`."""
    group = typer.Typer(help=help, no_args_is_help=True)
    app.add_typer(group, name=name)
    SECTIONS.setdefault(section, []).append(name)
    return group


def command(
    parent: str | typer.Typer, name: str | None = None, *, writes: Writes | None = None, distributed: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a verb, in a section of the help or in a command group.

    `writes` returns the files that a call with these options writes under names the user chose: the verb then takes
    --overwrite, and the files are checked before any work starts. `distributed` verbs run under torchrun.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        verb = name or function.__name__.rstrip("_")
        declared = list(inspect.signature(function).parameters.values())
        options = [option for parameter in declared[1:] for option in expand(parameter)]
        if writes:
            options.append(Parameter("overwrite", Parameter.KEYWORD_ONLY, default=False, annotation=Overwrite))
        options += expand(declared[0])

        def run(**values: Any) -> None:
            common = replace(bind(declared[:1], values)["common"], prints=is_printing(verb))
            overwrite = values.pop("overwrite") if writes else False

            def work() -> Any:
                if writes:
                    outputs = [path for path in writes(values) if path is not None]
                    inputs = [value for value in values.values() if all(value is not path for path in outputs)]
                    check_outputs(outputs, inputs, overwrite=overwrite)
                return function(common, **bind(declared[1:], values))

            raise SystemExit(attempt(work, common))

        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__doc__ = function.__doc__
        paths = frozenset(option.name for option in options if is_path(option))
        target = app if isinstance(parent, str) else parent
        target.command(verb, cls=type("VerbCommand", (VerbCommand,), {"paths": paths}))(run)
        if isinstance(parent, str):
            SECTIONS.setdefault(parent, []).append(verb)
        if distributed:
            DISTRIBUTED.add(verb)
        return function

    return register


def expand(parameter: Parameter) -> list[Parameter]:
    """The options that a parameter of a verb stands for."""
    annotation = parameter.annotation
    if is_dataclass(annotation):
        hints = get_type_hints(annotation, include_extras=True)
        defaults = {field.name: field.default for field in fields(annotation)}
        hints = {name: hint for name, hint in hints.items() if name in defaults and get_origin(hint) is Annotated}
    elif parameter.kind is Parameter.VAR_KEYWORD:
        hints = get_type_hints(get_args(annotation)[0], include_extras=True)
        defaults = {name: False if get_args(hint)[0] is bool else None for name, hint in hints.items()}
    else:
        return [parameter.replace(kind=Parameter.KEYWORD_ONLY)]
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint) for name, hint in hints.items()
    ]


def bind(parameters: list[Parameter], values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a verb: the values of its options, which are removed, with option groups rebuilt."""
    arguments: dict[str, Any] = {}
    for parameter in parameters:
        group = {option.name: values.pop(option.name) for option in expand(parameter)}
        if is_dataclass(parameter.annotation):
            group = {parameter.name: cast(type, parameter.annotation)(**group)}
        arguments |= group
    return arguments


def attempt(work: Callable[[], Any], common: Common) -> int:
    """Run a verb; returns its exit code: 0 done, 1 failed while working, 2 the user's input was wrong."""
    try:
        with messages_to(common.log):
            result = work()
        if common.json and common.prints:
            write_out(to_json(result if result is not None else {}))
    except HeadstockError as error:
        return fail(str(error), error.exit_code, replace(common, prints=common.prints or error.from_any_rank))
    except KeyboardInterrupt:
        return fail("interrupted", 130, common)
    except BrokenPipeError:  # the reader of our output has exited
        for stream in (sys.stdout, sys.stderr):
            discard(stream)
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return fail(f"{where}{error.strerror or error}", 1, common)
    except Exception as error:
        hint = "" if common.debug else " (--debug shows the traceback)"
        return fail(f"internal error (please report): {type(error).__name__}: {error}{hint}", 1, common)
    return 0


def to_json(value: Any) -> str:
    """One line of JSON, escaped where standard output cannot encode every character."""
    return json.dumps(finite(value), ensure_ascii=not takes_unicode())


def finite(value: Any) -> Any:
    """The value with None for NaN and infinity, which JSON does not have and strict parsers refuse."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fail(message: str, code: int, common: Common) -> int:
    """Print an error as one line, and as JSON with --json; returns the exit code."""
    if common.debug:
        traceback.print_exc()
    if common.prints:
        write_error(f"headstock: {message}")
        if common.json:
            try:
                write_out(to_json({"error": message}))
            except (HeadstockError, BrokenPipeError):  # standard output itself may be what failed
                discard(sys.stdout)
    return code
