"""Recipes: TOML files with the sections of a run, comparison or sweep."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from headstock.config import Problems


def to_toml(tree: Mapping[str, Mapping[str, Any]], heading: str = "") -> str:
    """Sections of plain values as TOML; None values are omitted."""
    parts = ["\n".join(f"# {line}".rstrip() for line in heading.splitlines())] if heading else []
    for section, values in tree.items():
        lines = [f"{key} = {toml_value(value)}" for key, value in values.items() if value is not None]
        if lines:
            parts.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(parts) + "\n"


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # TOML and JSON strings have the same syntax
    return repr(value)


def section_problems(recipe: Mapping[str, Any], sections: Sequence[str]) -> Problems:
    """Unknown sections, and known ones that are not tables."""
    unknown = [name for name in recipe if name not in sections]
    problems: Problems = [(name, f"unknown section (have: {', '.join(sections)})") for name in unknown]
    return problems + table_problems({name: recipe.get(name, {}) for name in sections})


def table_problems(tables: Mapping[str, Any]) -> Problems:
    return [(name, "must be a table") for name, table in tables.items() if not isinstance(table, dict)]


def fixed_setting_problems(settings: Mapping[str, Any], fixed: Mapping[str, str], prefix: str = "") -> Problems:
    """Settings that the experiment chooses itself; `fixed` gives the reason for each name."""
    reasons = ((key, fixed.get(key.rpartition(".")[2])) for key in settings)
    return [(f"{prefix}{key}", f"cannot be set: {reason}") for key, reason in reasons if reason]


def given_options(settings: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The `arguments` of a function that are fields of `settings` and not None, as a recipe would write them."""
    options = {field.name: arguments.get(field.name) for field in fields(settings)}
    if options["columns"] is not None:
        options["columns"] = [f"{name}={column}" for name, column in options["columns"].items()] or None
    return {name: plain_value(value) for name, value in options.items() if value is not None}


def plain_value(value: Any) -> Any:
    """Paths as text, tuples as lists."""
    if isinstance(value, Path):
        return str(value)
    return [plain_value(item) for item in value] if isinstance(value, list | tuple) else value
