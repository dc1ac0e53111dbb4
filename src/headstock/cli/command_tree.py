"""The commands with their options and arguments as plain data, from which completions and the man page are made."""

import inspect
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import headstock
from headstock.cli.command import SECTIONS, Common, app

PACKAGE = Path(headstock.__file__).parent
METAVARS = {bool: "", int: "N", float: "X", Path: "PATH"}  # a flag has none


@dataclass(frozen=True)
class OptionInfo:
    """An option or argument of a command."""

    names: tuple[str, ...]  # `--quiet`, `-q`; empty for an argument
    name: str  # of the parameter
    metavar: str  # of its value; empty for a flag
    help: str
    is_common: bool = False  # True if every command has it
    required: bool = False
    repeatable: bool = False
    values: tuple[str, ...] = ()  # that are known; a path or another value may be possible, too


@dataclass(frozen=True)
class CommandInfo:
    """A verb, a group of verbs, or one verb of a group."""

    words: tuple[str, ...]  # `("data", "get")`; empty for the program itself
    help: str
    options: tuple[OptionInfo, ...]
    arguments: tuple[OptionInfo, ...]
    commands: tuple["CommandInfo", ...] = field(default=())

    @property
    def name(self) -> str:
        return self.words[-1]

    @property
    def summary(self) -> str:
        """The first sentence of the help, without its period."""
        return " ".join(self.help.split("\n\n")[0].split()).rstrip(".")

    @property
    def takes_files(self) -> bool:
        """Whether an argument may be a path: a run may be one of the bundled ones or a folder."""
        return any(not argument.values or argument.name in ("run", "runs") for argument in self.arguments)

    def walk(self) -> Iterator["CommandInfo"]:
        """This command and all below it."""
        yield self
        for command in self.commands:
            yield from command.walk()


def command_tree() -> CommandInfo:
    """The whole command line, its verbs in the order of the help."""
    from typer.main import get_command

    from headstock.cli.app import find_verbs

    find_verbs()
    return _describe(get_command(app), ())


def _describe(command: Any, words: tuple[str, ...]) -> CommandInfo:
    inner = getattr(command, "commands", {})
    order = [verb for verbs in SECTIONS.values() for verb in verbs] if not words else list(inner)
    common = {field.name for field in fields(Common)}
    types = getattr(command, "value_types", {})
    infos = [
        _describe_parameter(parameter, words, types.get(parameter.name, bool), parameter.name in common)
        for parameter in command.params
    ]
    helped = OptionInfo(("--help", "-h"), "help", "", "Show the help and exit.", is_common=True)
    return CommandInfo(
        words,
        inspect.cleandoc(command.help or ""),
        (*(info for info in infos if info.names), helped),
        tuple(info for info in infos if not info.names),
        tuple(_describe(inner[name], (*words, name)) for name in order),
    )


def _describe_parameter(parameter: Any, words: tuple[str, ...], value_type: Any, is_common: bool) -> OptionInfo:
    is_option = parameter.param_type_name == "option"
    return OptionInfo(
        names=(*parameter.opts, *parameter.secondary_opts) if is_option else (),
        name=parameter.name,
        metavar=parameter.metavar or _metavar(parameter, value_type),
        help=" ".join((parameter.help or "").split()),
        is_common=bool(words) and is_common,
        required=parameter.required,
        repeatable=parameter.nargs == -1 or bool(getattr(parameter, "multiple", False)),
        values=_choices(value_type) or known_values(words, parameter.name),
    )


def _metavar(parameter: Any, value_type: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    return next((name for kind, name in METAVARS.items() if kind in (value_type, *get_args(value_type))), "TEXT")


def _choices(value_type: Any) -> tuple[str, ...]:
    """The values of a Literal, which may be optional."""
    literal = next((kind for kind in (value_type, *get_args(value_type)) if get_origin(kind) is Literal), None)
    return tuple(map(str, get_args(literal)))


def known_values(words: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Names that a parameter of a command takes: presets, datasets, bundled runs, devices, shells."""
    if (words, name) == (("completion",), "shell"):
        return ("bash", "zsh", "fish")
    if name == "device":
        return ("auto", "cpu", "cuda", "mps")
    if name == "preset":
        return tuple(sorted(file.stem for file in (PACKAGE / "model" / "presets").glob("*.toml")))
    if name in ("run", "runs"):
        return tuple(sorted(folder.name for folder in (PACKAGE / "stocks").iterdir() if folder.is_dir()))
    if (words, name) == (("data", "get"), "name"):
        return tuple(tomllib.loads((PACKAGE / "data" / "catalog.toml").read_text(encoding="utf-8")))
    return ()
