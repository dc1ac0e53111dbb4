"""Reads settings into frozen dataclasses, strictly, reporting every problem at once."""

import dataclasses
import json
import math
import tomllib
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar

from headstock.errors import ConfigError, UserError, did_you_mean

Settings = TypeVar("Settings")
Problems = list[tuple[str, str]]
SECTIONS = ("model", "task", "data", "tokenizer", "train", "transfer")  # of a run's settings


def from_dict(cls: type[Settings], data: dict[str, Any], *, at: str = "") -> Settings:
    """Make dataclass `cls` from `data`; one ConfigError names every bad path."""
    problems: Problems = []
    value = collect_problems(cls, data, at, problems)
    if problems:
        raise ConfigError(problems)
    return value


def collect_problems(cls: type[Settings], data: dict[str, Any], at: str, problems: Problems) -> Any:
    """Like `build`, but adds to `problems`, so that several sections are judged together."""
    if not isinstance(data, dict):
        problems.append((at, f"must be a table of settings, not {data!r}"))
        return None
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    before, values = len(problems), {}
    for key, raw in data.items():
        path = f"{at}.{key}" if at else key
        if key in fields:
            values[key] = _value(hints[key], raw, path, problems)
        else:
            problems.append((path, "unknown setting" + did_you_mean(key, fields)))
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in data:
            problems.append((f"{at}.{name}" if at else name, "missing"))
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except ConfigError as wrong:
        problems += [(f"{at}.{where}" if at else where, what) for where, what in wrong.problems]
    except ValueError as wrong:
        problems.append((at or cls.__name__, str(wrong)))
    return None


def _value(hint: Any, raw: Any, path: str, problems: Problems) -> Any:
    if dataclasses.is_dataclass(hint):
        return collect_problems(typing.cast(type, hint), raw, path, problems)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if raw not in arguments:
            words = [word for word in arguments if isinstance(word, str)]
            near = did_you_mean(raw, words) if isinstance(raw, str) else ""
            problems.append((path, f"must be one of {', '.join(map(repr, arguments))}, not {raw!r}{near}"))
        return raw
    if origin is tuple:
        if not isinstance(raw, (list, tuple)):
            problems.append((path, f"must be a list, not {raw!r}"))
            return raw
        return tuple(_value(arguments[0], item, f"{path}[{i}]", problems) for i, item in enumerate(raw))
    kinds = arguments if isinstance(hint, UnionType) or origin is typing.Union else (hint,)
    if type(raw) is int and not -(2**63) <= raw < 2**63:  # more than torch, numpy or a file of ours can hold
        problems.append((path, "must be a number of at most 18 digits"))
        return raw
    if float in kinds and type(raw) is int:
        return float(raw)
    if hint is not Any and type(raw) not in kinds:
        wanted = " or ".join("nothing" if kind is NoneType else kind.__name__ for kind in kinds)
        problems.append((path, f"must be {wanted}, not {raw!r}"))
    elif isinstance(raw, float) and not math.isfinite(raw):
        problems.append((path, f"must be a finite number, not {raw}"))
    return raw


def to_dict(settings: Any) -> Any:
    """A dataclass (or a tree of them) as JSON-ready dicts and lists, defaults written out."""
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        return {field.name: to_dict(getattr(settings, field.name)) for field in dataclasses.fields(settings)}
    if isinstance(settings, (list, tuple)):
        return [to_dict(item) for item in settings]
    if isinstance(settings, dict):
        return {key: to_dict(item) for key, item in settings.items()}
    return settings


def read_settings(path: Path, *, tables: Sequence[str] = ()) -> dict[str, Any]:
    """The settings in a TOML file people write or a JSON file the program wrote; some of them must be tables."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such settings file") from None
    except (OSError, UnicodeDecodeError) as wrong:
        raise UserError(f"{path}: cannot be read as settings ({wrong})") from None
    try:
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as wrong:  # both decoders' errors are ValueErrors that name line and column
        raise UserError(f"{path}: {wrong}") from None
    except RecursionError:
        raise UserError(f"{path}: wanted settings, got values nested too deeply to be any") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: wanted a table of settings, got {type(data).__name__}")
    for name in tables:
        if not isinstance(data.get(name, {}), dict):
            raise UserError(f"{path}: {name}: must be a table of settings, not {data[name]!r}")
    return data


@contextmanager
def malformed_as_user_error(path: Path | str, what: str) -> Iterator[None]:
    """Reports what a malformed file leads to, such as a missing key or a value of another type, as a user's error."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as wrong:
        reason = f"{wrong.args[0]!r} is missing" if isinstance(wrong, KeyError) else f"{type(wrong).__name__}: {wrong}"
        raise UserError(f"{path}: does not describe {what} ({reason})") from wrong


def parse_setting(text: str) -> tuple[str, Any]:
    """`lr=3e-4` -> ("lr", 0.0003): the value as TOML reads it, a bare word as itself."""
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {text}: wanted key=value, such as --set depth=4")
    raw = raw.strip()
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    except RecursionError:
        raise UserError(f"--set {key}: the value is nested too deeply to be a setting") from None
    return key.strip(), value


def merge(*layers: dict[str, Any]) -> dict[str, Any]:
    """One tree of settings from several; later layers win, tables are merged key by key."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, dict) and isinstance(merged.get(key), dict):
                merged[key] = merge(merged[key], value)
            else:
                merged[key] = value
    return merged
