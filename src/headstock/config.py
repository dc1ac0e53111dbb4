"""Strict conversion between settings files and frozen dataclasses; all problems are reported at once."""

import dataclasses
import json
import math
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar

from headstock.errors import ConfigError, UserError, did_you_mean

Settings = TypeVar("Settings")
Problems = list[tuple[str, str]]
# settings files are small: larger ones would take many times their size in memory
MAX_BYTES = {".json": 32 << 20, ".toml": 1 << 20}
# a.a.a. ...: the TOML parser needs quadratic memory for it
DEEP_KEY = re.compile(r"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){64}")
QUOTED_CHARACTERS = 200  # of a value in an error message
SECTIONS = ("model", "task", "data", "tokenizer", "train", "transfer")  # of a run's config


def from_dict(cls: type[Settings], data: dict[str, Any], *, prefix: str = "") -> Settings:
    """Construct dataclass `cls` from `data`; one ConfigError lists every invalid path."""
    problems: Problems = []
    value = collect_problems(cls, data, prefix, problems)
    if problems:
        raise ConfigError(problems)
    return value


def collect_problems(cls: type[Settings], data: dict[str, Any], prefix: str, problems: Problems) -> Any:
    """Like `from_dict`, but appends to `problems`, so that several sections can be validated together."""
    if not isinstance(data, dict):
        problems.append((prefix, f"must be a table of settings, not {quote(data)}"))
        return None
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    before, values = len(problems), {}
    for key, raw in data.items():
        path = f"{prefix}.{key}" if prefix else key
        if key in fields:
            values[key] = _convert(hints[key], raw, path, problems)
        else:
            problems.append((path, "unknown setting" + did_you_mean(key, fields)))
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in data:
            problems.append((f"{prefix}.{name}" if prefix else name, "missing"))
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except ConfigError as error:
        problems += [(f"{prefix}.{path}" if prefix else path, problem) for path, problem in error.problems]
    except ValueError as error:
        problems.append((prefix or cls.__name__, str(error)))
    return None


def _convert(hint: Any, raw: Any, path: str, problems: Problems) -> Any:
    """`raw` as a value of type `hint`; a wrong type is added to `problems`."""
    if dataclasses.is_dataclass(hint):
        return collect_problems(typing.cast(type, hint), raw, path, problems)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if raw not in arguments:
            names = [name for name in arguments if isinstance(name, str)]
            suggestion = did_you_mean(raw, names) if isinstance(raw, str) else ""
            problems.append((path, f"must be one of {', '.join(map(repr, arguments))}, not {quote(raw)}{suggestion}"))
        return raw
    if origin is tuple:
        if not isinstance(raw, (list, tuple)):
            problems.append((path, f"must be a list, not {quote(raw)}"))
            return raw
        return tuple(_convert(arguments[0], item, f"{path}[{i}]", problems) for i, item in enumerate(raw))
    types = arguments if isinstance(hint, UnionType) or origin is typing.Union else (hint,)
    if type(raw) is int and not -(2**63) <= raw < 2**63:  # torch, numpy and our files use 64-bit integers
        problems.append((path, "must be a number of at most 18 digits"))
        return raw
    if type(raw) is int and float in types:
        return float(raw)
    if type(raw) is int and str in types and int not in types:  # a name that is a number, such as `layers=1`
        return str(raw)
    if hint is not Any and type(raw) not in types:
        expected = " or ".join("nothing" if kind is NoneType else kind.__name__ for kind in types)
        problems.append((path, f"must be {expected}, not {quote(raw)}"))
    elif isinstance(raw, float) and not math.isfinite(raw):
        problems.append((path, f"must be a finite number, not {raw}"))
    return raw


def quote(value: Any) -> str:
    """A value in an error message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= QUOTED_CHARACTERS else f"{text[:QUOTED_CHARACTERS]}..."


def added(default: Any) -> Any:
    """The default of a setting that did not exist in an earlier version.

    While it has this value it is not part of cache keys, so that the results of earlier versions stay valid.
    """
    return dataclasses.field(default=default, metadata={"added": True})


def to_dict(settings: Any, *, for_key: bool = False) -> Any:
    """A tree of dataclasses as JSON-ready dicts and lists, including default values; `for_key` see `added`."""
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        fields = {field: getattr(settings, field.name) for field in dataclasses.fields(settings)}
        return {
            field.name: to_dict(value, for_key=for_key)
            for field, value in fields.items()
            if not (for_key and field.metadata.get("added") and value == field.default)
        }
    if isinstance(settings, (list, tuple)):
        return [to_dict(item, for_key=for_key) for item in settings]
    if isinstance(settings, dict):
        return {key: to_dict(item, for_key=for_key) for key, item in settings.items()}
    return settings


def read_settings(path: Path, *, tables: Sequence[str] = ()) -> dict[str, Any]:
    """Read a TOML or JSON settings file; the keys in `tables` must be tables where present."""
    limit = MAX_BYTES.get(path.suffix, MAX_BYTES[".toml"])
    try:
        if (size := path.stat().st_size) > limit:
            raise UserError(f"{path}: has {size:,} bytes, expected settings of at most {limit:,}")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such settings file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read settings ({error})") from None
    if path.suffix != ".json" and DEEP_KEY.search(text):
        raise UserError(f"{path}: expected settings, found keys nested too deeply")
    try:
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:  # both decoders raise ValueErrors that name line and column
        raise UserError(f"{path}: {error}") from None
    except RecursionError:
        raise UserError(f"{path}: expected settings, found values nested too deeply") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a table of settings, found {type(data).__name__}")
    for name in tables:
        if not isinstance(data.get(name, {}), dict):
            raise UserError(f"{path}: {name}: must be a table of settings, not {quote(data[name])}")
    return data


@contextmanager
def malformed_as_user_error(path: Path | str, kind: str) -> Iterator[None]:
    """Report what a malformed file raises, such as KeyError or TypeError, as a UserError: not a valid `kind`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: does not describe {kind} ({reason})") from error


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse `lr=3e-4` to ("lr", 0.0003). The value is TOML; anything else is taken as a string."""
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {text}: expected key=value, such as --set depth=4")
    raw = raw.strip()
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    except RecursionError:
        raise UserError(f"--set {key}: the value is nested too deeply") from None
    return key.strip(), value


def merge(*layers: dict[str, Any]) -> dict[str, Any]:
    """Merge trees of settings; later layers win, tables are merged key by key."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, dict) and isinstance(merged.get(key), dict):
                merged[key] = merge(merged[key], value)
            else:
                merged[key] = value
    return merged


def flatten_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """`{"model": {"depth": 2}}` -> `{"model.depth": 2}`."""
    settings: dict[str, Any] = {}
    for name, value in tables.items():
        settings |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return settings
