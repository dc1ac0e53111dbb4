"""The `@command` decorator: turns a function into a verb of the command line.

A verb is a function in any module of this package. Its signature declares its options:

    @command("Train")
    def finetune(common: Common, out: RunOut, columns: Columns, **options: Unpack[FinetuneOptions]) -> dict[str, Any]:

- an annotated parameter is one option: `rows: Annotated[int | None, "Read at most this many rows."] = None` is --rows
  with this help; `typer.Option` or `typer.Argument` in place of the help says more;
- a dataclass parameter, such as `Common` or `Columns`, stands for one option per annotated field;
- `**options: Unpack[SomeTypedDict]` stands for one option per key, for options that are only passed on.

The decorator adds the common options, prints the returned dict with --json, and turns errors into exit codes.
"""

import inspect
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from headstock.cli.terminal import PrintableCells, discard, takes_unicode, wrapped, write_error, write_out, writing
from headstock.data.urls import is_url
from headstock.errors import HeadstockError, LostProcessError, UserError
from headstock.io import finite
from headstock.logs import log_level, messages_to
from headstock.option_names import in_command
from headstock.signals import signal_of, sigterm_raises

# verbs per section of `headstock --help`, in its order; the decorator adds those that are not named here
SECTIONS: dict[str, list[str]] = {
    "Start": ["demo", "stocks", "data", "presets", "plan"],
    "Train": ["tokenizer", "pretrain", "finetune", "distil", "lr-find"],
    "Compare and measure": ["compare", "sweep", "ensemble", "report", "evaluate", "glue", "quality", "bench"],
    "Use a run": [
        *("predict", "calibrate", "suggest", "answer", "translate", "generate", "fill", "score"),
        *("embed", "search", "serve"),
    ],
    "Look inside": ["explain"],
    "Exchange": ["export", "import"],
    "Maintain": ["doctor", "cache", "completion"],
}
DISTRIBUTED: set[str] = set()  # verbs that run under torchrun, where only rank 0 prints
PATH_PARAMETERS = ("corpus", "file", "run", "runs", "start", "valid")  # paths, globs or URLs, typed as text


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

    json: Annotated[bool, "Print one JSON object as the last line of stdout."] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress or messages.")] = False
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Random seed.")] = None
    device: Annotated[str, "auto, cpu, cuda or mps."] = "auto"
    debug: Annotated[bool, "Show the traceback of an error."] = False
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
                Console(highlight=False).print(PrintableCells(result))

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
    value_types: Mapping[str, Any] = {}  # the types of the parameters by name

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        parsed, _, _ = self.make_parser(ctx).parse_args(list(args))
        for parameter in self.params:
            values = parsed.get(parameter.name)
            if parameter.name in self.paths and "" in (values if isinstance(values, list | tuple) else [values]):
                raise typer.BadParameter("the path is empty", ctx=ctx, param=parameter)  # type: ignore[arg-type]
            if parameter.name == "out" and isinstance(values, str) and is_url(values):
                hint = "results are written to local folders (a run can be copied to a URL with --set mirror=URL)"
                raise typer.BadParameter(hint, ctx=ctx, param=parameter)  # type: ignore[arg-type]
        return super().parse_args(ctx, args)


def is_path(parameter: Parameter) -> bool:
    return parameter.name in PATH_PARAMETERS or "Path" in str(get_args(parameter.annotation)[:1])


Overwrite = Annotated[bool, "Replace the output file if it exists."]
Writes = Callable[[dict[str, Any]], Iterable[Path | None]]


def command_group(name: str, section: str, help: str) -> typer.Typer:
    """A verb with subcommands of its own, such as `headstock data list`."""
    group = typer.Typer(help=help, no_args_is_help=True)
    app.add_typer(group, name=name)
    add_to_section(section, name)
    return group


def add_to_section(section: str, verb: str) -> None:
    verbs = SECTIONS.setdefault(section, [])
    if verb not in verbs:
        verbs.append(verb)


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
            options.append(make_option("overwrite", Overwrite, False))
        options += expand(declared[0], panel="Common options")

        def run(**values: Any) -> None:
            common = replace(bind(declared[:1], values)["common"], prints=is_printing(verb))
            overwrite = values.pop("overwrite") if writes else False

            def work() -> Any:
                if writes:
                    outputs = [path for path in writes(values) if path is not None]
                    inputs = [value for value in values.values() if all(value is not path for path in outputs)]
                    check_outputs([(option_of(path, values), path) for path in outputs], inputs, overwrite=overwrite)
                return function(common, **bind(declared[1:], values))

            raise SystemExit(attempt(work, common))

        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__doc__ = function.__doc__
        paths = frozenset(option.name for option in options if is_path(option))
        target = app if isinstance(parent, str) else parent
        types = {option.name: get_args(option.annotation)[0] for option in options}
        cls = type("VerbCommand", (VerbCommand,), {"paths": paths, "value_types": types})
        target.command(verb, cls=cls)(run)
        if isinstance(parent, str):
            add_to_section(parent, verb)
        if distributed:
            DISTRIBUTED.add(verb)
        return function

    return register


def expand(parameter: Parameter, *, panel: str | None = None) -> list[Parameter]:
    """The options that a parameter of a verb stands for; `panel` is their heading in the help."""
    annotation = parameter.annotation
    if is_dataclass(annotation):
        hints = get_type_hints(annotation, include_extras=True)
        defaults = {field.name: field.default for field in fields(annotation)}
        hints = {name: hint for name, hint in hints.items() if name in defaults and get_origin(hint) is Annotated}
    elif parameter.kind is Parameter.VAR_KEYWORD:
        hints = get_type_hints(get_args(annotation)[0], include_extras=True)
        defaults = {name: False if get_args(hint)[0] is bool else None for name, hint in hints.items()}
    else:
        hints, defaults = {parameter.name: annotation}, {parameter.name: parameter.default}
    return [make_option(name, hint, defaults[name], panel) for name, hint in hints.items()]


def make_option(name: str, hint: Any, default: Any, panel: str | None = None) -> Parameter:
    """A parameter for typer, with an option named like it if only its help is annotated."""
    value_type, option = get_args(hint)
    if isinstance(option, str):
        flag = name.rstrip("_").replace("_", "-")
        option = typer.Option(f"--{flag}/--no-{flag}" if default is True else f"--{flag}", help=option)
    if panel is not None:
        option.rich_help_panel = panel
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[value_type, option])


def bind(parameters: list[Parameter], values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a verb: the values of its options, which are removed, with option groups rebuilt."""
    arguments: dict[str, Any] = {}
    for parameter in parameters:
        group = {option.name: values.pop(option.name) for option in expand(parameter)}
        if is_dataclass(parameter.annotation):
            group = {parameter.name: cast(type, parameter.annotation)(**group)}
        arguments |= group
    return arguments


def option_of(path: Path, values: dict[str, Any]) -> str:
    """The option that names an output; --out for files that are written beside another."""
    name = next((name for name, value in values.items() if value is path), "out")
    return f"--{name.replace('_', '-')}"


def check_outputs(outputs: Iterable[tuple[str, Path]], arguments: Iterable[Any], *, overwrite: bool) -> None:
    """Refuse outputs, each with its option, that exist, unless `overwrite`, or are inputs of the same command.

    Every argument that is the path of an existing file counts as an input, and so do the files of a run folder.
    """
    inputs = list(existing_paths(arguments))
    for option, path in outputs:
        if not os.path.lexists(path):
            continue
        if path.is_dir():
            raise UserError(f"{option} {path}: is a folder, expected a file")
        for source in inputs:
            if is_part_of(path, source):
                raise UserError(f"{option} {path}: is an input of this command ({source}), which is never replaced")
        if not overwrite:
            raise UserError(f"{option} {path}: already exists; replace it with --overwrite, or choose another file")


def existing_paths(values: Iterable[Any]) -> Iterable[Path]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from existing_paths(value)
        elif isinstance(value, str | Path) and value != "":
            try:
                if Path(value).exists():
                    yield Path(value)
            except (OSError, ValueError):  # not a file name: too long, or with a NUL
                continue


def is_part_of(path: Path, source: Path) -> bool:
    """Whether a file is the input itself or one of the files of a run folder."""
    from headstock.train.run_folder import RunFolder

    if not source.is_dir():
        return path.exists() and path.samefile(source)
    return RunFolder(source).exists() and RunFolder(source).owns(path)


def attempt(work: Callable[[], Any], common: Common) -> int:
    """Run a verb; returns its exit code: 0 done, 1 failed while working, 2 the user's input was wrong."""
    try:
        level = logging.INFO if common.prints and not common.quiet else logging.WARNING
        with in_command(), messages_to(common.log), log_level(level), sigterm_raises():
            result = work()
        if common.json and common.prints:
            write_out(to_json(result if result is not None else {}))
    except HeadstockError as error:
        code = fail(str(error), error.exit_code, replace(common, prints=common.prints or error.from_any_rank), error)
        if isinstance(error, LostProcessError):
            # PyTorch deadlocks at times when it frees a process group whose collectives have timed out
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code
    except KeyboardInterrupt as stop:
        return fail("interrupted", 128 + signal_of(stop), common)
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


def fail(message: str, code: int, common: Common, error: Exception | None = None) -> int:
    """Print an error as one line, and as JSON with --json; returns the exit code."""
    if common.debug:
        traceback.print_exc()
    if common.prints:
        write_error(f"headstock: {message}")
        if common.json:
            try:
                write_out(to_json({"error": message, **getattr(error, "result", {})}))
            except (HeadstockError, BrokenPipeError):  # standard output itself may be what failed
                discard(sys.stdout)
    return code
