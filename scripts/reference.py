"""Writes the pages of docs/reference/ that follow from the code: commands, settings, presets and the Python API.

    python scripts/reference.py [--check]

`--check` writes nothing and fails if a page is not current.
"""

import argparse
import ast
import dataclasses
import inspect
import io
import itertools
import re
import sys
import textwrap
import tokenize
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any

import headstock

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- written by scripts/reference.py (make reference): do not edit -->\n"
COMMON_PANEL = "Common options"
REQUIRED = "required"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    outdated = {path: text for path, text in pages().items() if not path.exists() or path.read_text("utf-8") != text}
    if check and outdated:
        sys.exit("not current (run `make reference`): " + ", ".join(map(str, outdated)))
    for path, text in outdated.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)


def pages() -> dict[Path, str]:
    """The generated pages by their paths."""
    texts = {
        **{f"cli/{name}.md": text for name, text in command_pages().items()},
        "settings.md": settings_page(),
        "presets.md": presets_page(),
        "recipes.md": recipes_page(),
        "python.md": python_page(),
    }
    return {REFERENCE / name: NOTE + "\n" + text.rstrip() + "\n" for name, text in texts.items()}


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


# Commands


def command_pages() -> dict[str, str]:
    """One page per section of `headstock --help`, and an overview."""
    import typer

    from headstock.cli.app import app, find_verbs
    from headstock.cli.command import SECTIONS

    find_verbs()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    names = {section: section.lower().replace(" ", "-") for section in SECTIONS}
    result = {"index": overview(SECTIONS, names, commands)}
    for section, verbs in SECTIONS.items():
        body = "\n".join(
            verb_section(path, command) for verb in verbs for path, command in leaves(verb, commands[verb])
        )
        result[names[section]] = f"# {section}\n\n[All commands and common options](index.md)\n\n{body}"
    return result


def leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """A verb, or the subcommands of a group, with their full names."""
    if not hasattr(command, "commands"):
        yield path, command
    else:
        for name, child in command.commands.items():
            yield from leaves(f"{path} {name}", child)


def overview(sections: dict[str, list[str]], names: dict[str, str], commands: dict[str, Any]) -> str:
    parts = ["# Command line\n"]
    for section, verbs in sections.items():
        rows = [
            [f"[`headstock {path}`]({names[section]}.md#{anchor(path)})", summary(command)]
            for verb in verbs
            for path, command in leaves(verb, commands[verb])
        ]
        parts.append(f"## {section}\n\n{table(['command', 'purpose'], rows)}")
    verb = commands["pretrain"]
    common = [option_row(option) for option in verb.params if is_common(option)]
    parts.append(f"## {COMMON_PANEL}\n\nEvery command takes these and `--help`.\n\n{table(OPTION_HEADER, common)}")
    parts.append(
        "Progress and messages go to stderr, results to stdout.\n\n## Exit codes\n\n"
        + table(["code", "meaning"], [[str(code), meaning] for code, meaning in EXIT_CODES.items()])
    )
    return "\n".join(parts)


EXIT_CODES = {
    0: "success",
    1: "failure while running",
    2: "invalid input: one line that names the file or option and what was expected",
    130: "stopped by Ctrl-C",
    143: "stopped by SIGTERM",
}
OPTION_HEADER = ["option", "default", "meaning"]


def anchor(path: str) -> str:
    return f"headstock-{path}".replace(" ", "-")


def summary(command: Any) -> str:
    return inspect.cleandoc(command.help or "").partition("\n\n")[0].replace("\n", " ")


def is_common(parameter: Any) -> bool:
    return getattr(parameter, "rich_help_panel", None) == COMMON_PANEL


def verb_section(path: str, command: Any) -> str:
    """Heading, help, usage, examples and options of one command."""
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not is_common(p) and p.name != "help"]
    prose, examples = split_help(command.help or "")
    required = [f"{option.opts[0]} {option.name.upper()}" for option in options if option.required]
    usage = " ".join(["headstock", path, *map(argument_usage, arguments), *required, "[OPTIONS]"])
    parts = [f"## headstock {path}\n", prose, "", *(f"    $ {example}" for example in examples), ""]
    parts += ["```text", usage, "```", ""] if arguments or required else []
    if arguments:
        rows = [[f"`{argument_usage(item)}`", sentence(item.help)] for item in arguments]
        parts.append(table(["argument", "meaning"], rows))
    if options:
        parts.append(table(OPTION_HEADER, [option_row(option) for option in options]))
    return "\n".join(parts)


def argument_usage(argument: Any) -> str:
    name = (argument.metavar or argument.name).upper().strip("[]").removesuffix("...")
    name += "..." if argument.nargs == -1 else ""
    return name if argument.required else f"[{name}]"


def split_help(text: str) -> tuple[str, list[str]]:
    """The prose of a help text, and the commands of its examples."""
    prose, examples = [], []
    for line in inspect.cleandoc(text).splitlines():
        if line.startswith("Example: "):
            examples.append(line.removeprefix("Example: "))
        else:
            prose.append(line)
    return "\n".join(prose).strip(), examples


def sentence(text: str | None) -> str:
    return (text or "").replace("[MASK]", "`[MASK]`").replace("``", "`").strip()


def option_row(option: Any) -> list[str]:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    return [names, option_default(option), sentence(option.help)]


def option_default(option: Any) -> str:
    if option.required:
        return REQUIRED
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    if option.default is None or option.default in ((), [], ""):
        return ""
    return f"`{option.default}`"


# Settings


def settings_page() -> str:
    """Every setting of a run, a comparison and a sweep, from the dataclasses that hold them."""
    from headstock.experiments.compare_settings import CompareSettings
    from headstock.experiments.sweep_settings import SweepSettings
    from headstock.model.backbone import BACKBONES
    from headstock.tasks.base import TASKS
    from headstock.tasks.packing import TextTask
    from headstock.train import settings
    from headstock.train.resolve import DEFAULTS_BY_INIT, FINETUNE_DEFAULTS

    objectives = {name: TASKS.get(name) for name in TASKS.names()}
    text_tasks = {name: task for name, task in objectives.items() if issubclass(task, TextTask)}
    labelled = {name: task for name, task in objectives.items() if name not in text_tasks}
    parts = [INTRODUCTION]
    parts += [section("`[data]` of pretraining", settings.DataSettings)]
    parts += [section("`[data]` of a labelled task", settings.LabelledSettings)]
    parts += [section("`[tokenizer]`", settings.TokenizerSettings)]
    parts += ["## `[model]`\n\n`family` selects the backbone; a preset sets it.\n"]
    parts += family_sections({name: BACKBONES.get(name).Config for name in BACKBONES.names()})
    parts += ["## `[task]` of pretraining\n\n`--objective NAME`, or `name`.\n"]
    parts += [section(f"`{name}`", task.Config, level=3) for name, task in text_tasks.items()]
    parts += ["## `[task]` of fine-tuning\n\n`--task NAME`, or `name`.\n"]
    parts += [section(f"task `{name}`", task.Config, level=3) for name, task in labelled.items()]
    parts += [section("`[train]`", settings.TrainSettings)]
    parts += ["### Defaults of fine-tuning\n", defaults_table(FINETUNE_DEFAULTS, DEFAULTS_BY_INIT)]
    parts += [section("`[transfer]`", settings.TransferSettings)]
    parts += [section("`[compare]` of a recipe", CompareSettings), section("`[sweep]` of a recipe", SweepSettings)]
    return "\n".join(parts)


INTRODUCTION = """# Settings

A setting comes from the preset, then from `--config` (a TOML file, or the `config.json` of another run, which repeats
it), then from options; later ones win. `--set depth=6` finds its section, `--set model.depth=6` names it. All invalid
settings are reported at once, each with the nearest valid name. In TOML:

```toml
preset = "modern-mini"

[data]
corpus = ["reviews/*.txt.xz"]

[model]
depth = 8

[train]
minutes = 30
```
"""


def family_sections(configs: dict[str, type]) -> Iterator[str]:
    """The settings of each family; a family that adds none to those of another refers to it."""
    for name, config in configs.items():
        same = [
            other
            for other, base in configs.items()
            if base is not config
            and issubclass(config, base)
            and list(described_fields(base)) == list(described_fields(config))
        ]
        if same:
            yield f"### family `{name}`\n\nThe settings of [`{same[0]}`](#family-{same[0]}), for each direction.\n"
        else:
            yield section(f"family `{name}`", config, level=3)


def section(title: str, config: type, *, level: int = 2) -> str:
    rows = [[f"`{name}`", kind, default, meaning] for name, kind, default, meaning in described_fields(config)]
    body = table(["setting", "values", "default", "meaning"], rows) if rows else "No settings.\n"
    return f"{'#' * level} {title}\n\n{body}"


def described_fields(config: type) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and comment of each field of a dataclass."""
    hints, comments = typing.get_type_hints(config), field_comments(config)
    for field in dataclasses.fields(config):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = REQUIRED if required else show_default(field.default)
        yield field.name, show_type(hints[field.name]), default, comments.get(field.name, "")


def field_comments(config: type) -> dict[str, str]:
    """The comments of a dataclass's fields and of those it inherits: behind a field, or in the lines above it."""
    comments: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        if dataclasses.is_dataclass(cls):
            comments |= own_comments(textwrap.dedent(inspect.getsource(cls)))
    return comments


def own_comments(source: str) -> dict[str, str]:
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    by_line = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    lines = source.splitlines()
    comments = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above, line = list[str](), node.lineno - 1
            while line in by_line and lines[line - 1].lstrip().startswith("#"):
                above.insert(0, by_line[line])
                line -= 1
            behind = [by_line[n] for n in range(node.lineno, (node.end_lineno or 0) + 1) if n in by_line]
            comments[node.target.id] = " ".join(above + behind)
    return comments


def show_type(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(f"`{show_value(value)}`" for value in arguments)
    if origin is tuple:
        return f"list of {show_type(arguments[0])}"
    if isinstance(hint, UnionType) or origin is typing.Union:
        return " or ".join(show_type(kind) for kind in arguments if kind is not type(None))
    return {str: "text", int: "integer", float: "number", bool: "`true`, `false`"}.get(hint, str(hint))


def show_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def show_default(value: Any) -> str:
    if value is None or value == () or value == "":
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{show_value(value)}`"


def defaults_table(common: dict[str, Any], by_init: dict[str, dict[str, Any]]) -> str:
    rows = [["all", describe(common)]] + [[name, describe(values)] for name, values in by_init.items()]
    return table(["fine-tuning", "defaults of `[train]` that differ"], rows)


def describe(values: dict[str, Any]) -> str:
    return ", ".join(f"`{name}={show_default(value).strip('`')}`" for name, value in values.items())


# Presets


def presets_page() -> str:
    from headstock.train.models import describe_preset
    from headstock.train.settings import preset_names

    rows = [describe_preset(name) for name in preset_names()]
    rows.sort(key=lambda row: (row["preset"].rpartition("-")[0] or row["preset"], row["parameters"]))
    cells = [[f"`{row['preset']}`", *(show_cell(value) for value in list(row.values())[1:])] for row in rows]
    return f"# Presets\n\n`headstock presets` prints this table.\n\n{table(list(rows[0]), cells)}"


def show_cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


# Recipes


RECIPES_INTRODUCTION = """# Recipes

Pages name files such as `recipes/quotes.toml`. They are in the repository and not in the wheel. With the wheel alone,
download a recipe from this table into a folder `recipes`, and run the command of the page beside that folder; most
recipes open with their command, too. Data of the [catalog](cli/start.md#headstock-data-list) is downloaded when it is
first read; other data that a recipe needs is named in its opening lines.
"""


def recipes_page() -> str:
    """Every recipe with its first sentence, as a download."""
    rows = []
    for file in sorted((REFERENCE.parents[1] / "recipes").glob("*.*")):
        meaning = opening_sentence(file) if file.suffix == ".toml" else f"The text of `{file.stem}.toml`."
        rows.append([f"[{file.name}](../../recipes/{file.name})", meaning])
    return RECIPES_INTRODUCTION + "\n" + table(["recipe", "what it is for"], rows)


def opening_sentence(recipe: Path) -> str:
    """The first sentence of the comment at the top; a question with its answer or addition."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("# "), lines)
    text = " ".join(line.removeprefix("# ") for line in comment)
    match = re.match(r".*?\.(?=\s|$)", text)
    return sentence(match[0] if match else text.rstrip(":"))


# Python


def python_page() -> str:
    """Signatures and docstrings of everything that `headstock` exports."""
    names = [name for name in headstock.__all__ if not name.startswith("_")]
    parts = [PYTHON_INTRODUCTION]
    parts += [object_section(f"headstock.{name}", getattr(headstock, name)) for name in names]
    return "\n".join([*parts, KEYWORDS_INTRODUCTION, *keyword_sections()])


def keyword_sections() -> Iterator[str]:
    """One table for each group of keywords, and for each function the groups that it takes."""
    from headstock.api import keywords

    groups = {
        name: value for name, value in vars(keywords).items() if typing.is_typeddict(value) and name != "TypedDict"
    }
    defaults, has_parts = setting_defaults(), {name: groups_of(value, groups) for name, value in groups.items()}
    for name, group in groups.items():
        own = keywords_of(group, has_parts[name], groups)
        others = ", ".join(f"[{part}](#{part.lower()})" for part in has_parts[name])
        parts = [f"### {name}\n", documentation(group) + (f" Also those of {others}." if others else "") + "\n"]
        rows = [[f"`{key}`", short(inspect.formatannotation(hint)), defaults.get(key, "")] for key, hint in own.items()]
        yield "\n".join([*parts, table(["keyword", "type", "default"], rows) if rows else ""])


def groups_of(group: Any, groups: dict[str, Any]) -> list[str]:
    """The largest other groups whose keywords a group has; TypedDict has no base classes at run time."""
    parts = {name: set(other.__annotations__) for name, other in groups.items() if other is not group}
    parts = {name: keys for name, keys in parts.items() if keys < set(group.__annotations__)}
    return [name for name, keys in parts.items() if not any(keys < others for others in parts.values())]


def keywords_of(group: Any, parts: list[str], groups: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a group that are not those of its parts."""
    inherited = {key for part in parts for key in groups[part].__annotations__}
    return {key: hint for key, hint in typing.get_type_hints(group).items() if key not in inherited}


def setting_defaults() -> dict[str, str]:
    """The default of each setting, where all sections that have it agree."""
    from headstock.model.backbone import BACKBONES
    from headstock.tasks.base import TASKS
    from headstock.train.settings import FROM_SCRATCH, PRETRAINING

    sections = {*PRETRAINING.values(), *FROM_SCRATCH.values()}
    sections |= {registry.get(name).Config for registry in (BACKBONES, TASKS) for name in registry.names()}
    values: dict[str, set[str]] = {}
    for config in sections:
        for field in dataclasses.fields(config):
            if field.default is not dataclasses.MISSING:
                values.setdefault(field.name, set()).add(python_value(field.default))
    return {name: found.pop() if len(found) == 1 else "*differs*" for name, found in values.items()}


def python_value(value: Any) -> str:
    """A default as Python writes it; empty where the value follows from others."""
    if value is None or value in ((), ""):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value!r}`".replace("'", '"')


PYTHON_INTRODUCTION = """# Python

Signatures and docstrings of the names that `import headstock` provides; [Python API](api.md) explains them.
`Unpack[PretrainKeywords]` stands for the settings, which are [listed below](#keywords). All names are imported on first
use.
"""

KEYWORDS_INTRODUCTION = """## Keywords

The settings that functions take as keywords, with their types and defaults; [Settings](settings.md) says what they
mean, and which defaults fine-tuning, a family or a task changes. All keywords are optional. Without a default, the
value follows from others; *differs*: it depends on the family or the task.
"""


def object_section(name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"## {name}\n\n{documentation(value)}\n"
    parts = [f"## {name}\n", signature_block(name, value), documentation(value), ""]
    if inspect.isclass(value):
        for method, function in public_methods(value):
            full = f"{value.__name__}.{method}"
            parts += [f"### {full}\n", signature_block(full, function), documentation(function), ""]
    return "\n".join(parts)


def public_methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties that a class or a base class of this package defines."""
    for name in sorted(dir(cls)):
        owner = next((base for base in cls.__mro__ if name in vars(base)), object)
        if not name.startswith("_") and owner.__module__.startswith("headstock"):
            value = inspect.getattr_static(cls, name)
            if callable(getattr(cls, name)) or isinstance(value, property):
                yield name, value.fget if isinstance(value, property) else getattr(cls, name)


def signature_block(name: str, value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    text = name + short(str(signature))
    if len(text) > 100:
        inside = ",\n".join(f"    {parameter}" for parameter in map(short_parameter, parameters_with_marks(signature)))
        ending = f" -> {short(inspect.formatannotation(signature.return_annotation))}" if has_return(signature) else ""
        text = f"{name}(\n{inside},\n){ending}"
    return f"```python\n{text}\n```\n"


def has_return(signature: inspect.Signature) -> bool:
    return signature.return_annotation is not inspect.Signature.empty


def parameters_with_marks(signature: inspect.Signature) -> Iterator[Any]:
    """The parameters, with `*` before the first keyword-only one."""
    marked = False
    for parameter in signature.parameters.values():
        marked = marked or parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not marked:
            marked = True
            yield "*"
        yield parameter


def short_parameter(parameter: Any) -> str:
    return short(str(parameter))


def short(text: str) -> str:
    """An annotation without the paths of modules; unpacked keywords by their name."""
    text = re.sub(r"\*<class '(?:\w+\.)*(\w+)'>", r"Unpack[\1]", text)
    return re.sub(r"(?<![\w.\"'])(?:\w+\.)+(?=[A-Za-z]\w*)", "", text).replace("'", '"')


def documentation(value: Any) -> str:
    return inspect.getdoc(value) or ""


if __name__ == "__main__":
    main()
