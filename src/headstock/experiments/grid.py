"""What a sweep is asked to do, and its points: all of a grid of settings, or some of them drawn at random."""

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from headstock import config
from headstock.errors import ConfigError, UserError
from headstock.rng import generator
from headstock.train.settings import override_flat

Point = dict[str, Any]  # the settings of the grid, each with one of its values

DIGITS = 3  # of numbers drawn from a range: more would only be hard to read
TRIES = 200  # draws for each point that is wanted; a grid of few whole numbers may give the same one again
NAME = 80  # characters; a longer name of a file is cut


@dataclass(frozen=True)
class SweepSettings:
    corpus: tuple[str, ...] = ()  # text to pretrain on,
    run: str | None = None  # or a run to fine-tune
    task: str = "classify"  # or pair, tag, answer
    train: str | None = None
    valid: tuple[str, ...] = ()  # held-out text, or the one file of labelled rows to rank by
    columns: tuple[str, ...] = ()
    tokenizer: str | None = None
    seeds: int = 3
    seed: int = 0  # the first of them; points are drawn by it too
    sample: int | None = None  # so many points of the grid, drawn at random
    by: Literal["auto", "loss", "bits_per_byte"] = "auto"  # what pretraining is ranked by; loss where that can be
    keep: bool = False  # all runs, not only the best

    def __post_init__(self) -> None:
        problems = [
            (name, f"must be 1 or more, not {value}")
            for name, value in (("seeds", self.seeds), ("sample", self.sample))
            if value is not None and value < 1
        ]
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class Range:
    """All numbers between two, to draw from: on a log scale where both are above 0. Whole ones stay whole."""

    low: float
    high: float

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def size(self) -> float:
        return self.high - self.low + 1 if self.whole else math.inf

    def at(self, share: float) -> float:
        """The number at a share of the way, 0 to 1."""
        if self.low <= 0:
            found = self.low + share * (self.high - self.low)
        else:
            found = self.low * (self.high / self.low) ** share
        return min(max(round(found), self.low), self.high) if self.whole else float(f"{found:.{DIGITS}g}")


Values = list[Any] | Range


@dataclass(frozen=True)
class SweepPlan:
    """The sections of a recipe, and the options above them."""

    sweep: SweepSettings
    grid: dict[str, Values]
    settings: dict[str, Any]  # of every point
    preset: str | None = None
    objective: str | None = None
    file: Path | None = None  # of settings, where what was named is no recipe

    @property
    def kind(self) -> str:
        return "finetune" if self.sweep.run else "pretrain"


SECTIONS = ("sweep", "grid", "pretrain", "finetune")


def make_plan(
    file: str | Path | None, given: Mapping[str, Any], grid: Mapping[str, Any], settings: Mapping[str, Any]
) -> SweepPlan:
    """One checked whole of a file and options; the options win. The file is a recipe, or the settings of a run."""
    given = dict(given)
    preset, objective = given.pop("preset", None), given.pop("objective", None)
    written = config.read_settings(Path(file)) if file else {}
    recipe = any(name in written for name in SECTIONS)
    tables: dict[str, Any] = {name: written.get(name, {}) for name in SECTIONS} if recipe else {}
    problems = [
        (name, f"unknown section (have: {', '.join(SECTIONS)})") for name in written if recipe and name not in SECTIONS
    ]
    problems += [(name, "must be a table") for name, table in tables.items() if not isinstance(table, dict)]
    if problems:
        raise ConfigError(problems)
    if not isinstance(tables.get("sweep", {}).get("grid", {}), dict):
        raise ConfigError([("sweep.grid", "must be a table")])
    asked = dict(tables.get("sweep", {}))
    own_grid = {**asked.pop("grid", {}), **tables.get("grid", {})}
    asked |= given
    for name in ("corpus", "valid"):
        if isinstance(asked.get(name), str):
            asked[name] = [asked[name]]
    chosen = config.from_dict(SweepSettings, asked, at="sweep")
    if chosen.corpus and chosen.run:
        raise UserError(f"--run {chosen.run}: does not go with text; a sweep either pretrains or fine-tunes")
    if not (chosen.corpus or chosen.run or file):
        raise UserError("nothing to train: name text to pretrain on, or a run to fine-tune with --run")
    base = flatten_tables(tables.get("finetune" if chosen.run else "pretrain", {}))
    preset, objective = preset or base.pop("preset", None), objective or base.pop("objective", None)
    values = read_grid({**own_grid, **grid}, sampled=chosen.sample is not None)
    return SweepPlan(
        chosen, values, override_flat(base, settings), preset, objective, Path(file) if file and not recipe else None
    )


def flatten_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """`{"model": {"depth": 2}}` -> `{"model.depth": 2}`."""
    settings: dict[str, Any] = {}
    for name, value in tables.items():
        settings |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return settings


# From words to points


def parse_grid(text: str) -> tuple[str, str]:
    """`lr=1e-3,3e-3` -> ("lr", "1e-3,3e-3")."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise UserError(f"--grid {text}: wanted key=value,value, such as --grid lr=1e-3,3e-3")
    return key.strip(), values.strip()


def read_grid(written: Mapping[str, Any], *, sampled: bool) -> dict[str, Values]:
    """The values of each setting, from text as `--grid` takes it or from lists; every problem is named at once."""
    if not written:
        raise UserError("nothing to vary: name a setting and its values, such as --grid lr=1e-3,3e-3")
    grid: dict[str, Values] = {}
    problems: config.Problems = []
    for key, raw in written.items():
        values = read_values(key, raw)
        if isinstance(values, Range):
            if not sampled:
                problems.append(
                    (f"grid.{key}", f"{raw} is a range to draw from: say how often with --sample, or list values")
                )
            elif not values.low < values.high:
                problems.append((f"grid.{key}", f"{raw} must go from a smaller number to a larger one"))
        elif not values:
            problems.append((f"grid.{key}", "has no values"))
        elif len({canonical(value) for value in values}) < len(values):
            problems.append((f"grid.{key}", f"names a value twice: {', '.join(map(format_value, values))}"))
        grid[key] = values
    if problems:
        raise ConfigError(problems)
    return grid


def read_values(key: str, raw: Any) -> Values:
    if not isinstance(raw, str):
        return list(raw) if isinstance(raw, list | tuple) else [raw]
    if bounds := re.fullmatch(r"\s*(\S+?)\s*\.\.\s*(\S+)\s*", raw):
        low, high = (config.parse_setting(f"{key}={bound}")[1] for bound in bounds.groups())
        if all(type(bound) in (int, float) for bound in (low, high)):
            return Range(low, high)
    try:
        return list(tomllib.loads(f"values = [{raw}]")["values"])
    except tomllib.TOMLDecodeError:  # bare words, such as pre,post
        return [config.parse_setting(f"{key}={part}")[1] for part in raw.split(",")]


def draw_points(grid: Mapping[str, Values], *, sample: int | None, seed: int) -> list[Point]:
    """Every point of the grid, or `sample` of them without repetition: a larger sample holds the smaller ones."""
    if sample is None:
        lists = [values for values in grid.values() if not isinstance(values, Range)]
        return [dict(zip(grid, chosen, strict=True)) for chosen in product(*lists)]
    size = math.prod(values.size if isinstance(values, Range) else len(values) for values in grid.values())
    if sample > size:
        raise UserError(f"--sample {sample}: the grid has only {size:,} points; leave it out to try them all")
    found: dict[str, Point] = {}
    for number in range(TRIES * sample * len(grid)):
        shares = generator(seed, "sweep", number).random(len(grid))
        point = {key: value_at(values, share) for (key, values), share in zip(grid.items(), shares, strict=True)}
        found.setdefault(canonical(point), point)
        if len(found) == sample:
            return list(found.values())
    raise UserError(f"--sample {sample}: so many different points could not be drawn from this grid; ask for fewer")


def value_at(values: Values, share: float) -> Any:
    return values.at(share) if isinstance(values, Range) else values[int(share * len(values))]


# How points are called


def canonical(value: Any) -> str:
    """Tells values apart, and 1 from true, but not 1 from 1.0."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = float(value)
    return json.dumps({key: canonical(item) for key, item in value.items()} if isinstance(value, dict) else value)


def format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def label(point: Mapping[str, Any]) -> str:
    """`depth=2 lr=0.001`, as people read it."""
    return " ".join(f"{key}={format_value(value)}" for key, value in point.items())


def file_name(point: Mapping[str, Any]) -> str:
    """`depth=2,lr=0.001`; with what tells it apart where that cannot be a name."""
    name = ",".join(f"{key}={format_value(value)}" for key, value in point.items())
    plain = re.sub(r"[^A-Za-z0-9=,._+-]+", "_", name)
    if plain == name and len(name) <= NAME:
        return name
    return f"{plain[: NAME - 9]}-{hashlib.sha256(canonical(dict(point)).encode()).hexdigest()[:8]}"


def values_of(points: Sequence[Point]) -> dict[str, list[Any]]:
    """The values each setting takes among the points, numbers in their order."""
    found: dict[str, dict[str, Any]] = {}
    for point in points:
        for key, value in point.items():
            found.setdefault(key, {}).setdefault(canonical(value), value)
    return {key: sorted_values(list(values.values())) for key, values in found.items()}


def sorted_values(values: list[Any]) -> list[Any]:
    return sorted(values) if all(is_number(value) for value in values) else values


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
