"""The arms of a comparison: ways to get a classifier, each with settings of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstock.errors import UserError, did_you_mean
from headstock.train.run_folder import RunFolder, open_run

KINDS = ("scratch", "pretrained", "frozen", "tfidf")


@dataclass(frozen=True)
class Arm:
    """One way: from which run (none for TF-IDF), how it begins, and what is set for it alone."""

    name: str
    kind: str
    run: RunFolder | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """Its settings as fine-tuning takes them."""
        begin = {"transfer.init": "scratch" if self.kind == "scratch" else "pretrained"}
        return begin | {"transfer.freeze": self.kind == "frozen"} | self.settings


def make_arms(
    runs: Sequence[str | Path], names: Sequence[str], tables: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Arm]:
    """The arms by name, once for each run where they need one; `tables` may define arms of other names and settings.

    A table is `{"kind": "frozen", "lr": 1e-3}`: everything but `kind` is a setting.
    """
    tables = tables or {}
    check_names(names, tables)
    found = [open_run(run) for run in runs]
    paths = [run.path.resolve() for run in found]
    if again := [run for run in found if paths.count(run.path.resolve()) > 1]:
        raise UserError(f"{again[0]}: named twice")
    if not found and any(kind_of(name, tables) != "tfidf" for name in names):
        raise UserError("no run to compare: name one, such as reviews-en, or ask for --arms tfidf alone")
    titles = [run.path.name for run in found]
    if len(set(titles)) < len(titles):
        titles = [str(run) for run in found]
    arms = []
    for name in names:
        kind = kind_of(name, tables)
        settings = {key: value for key, value in tables.get(name, {}).items() if key != "kind"}
        if kind == "tfidf":
            arms.append(Arm(name, kind, settings=settings))
        else:
            arms += [
                Arm(name if len(found) == 1 else f"{name} {title}", kind, run, settings)
                for run, title in zip(found, titles, strict=True)
            ]
    return arms


def check_names(names: Sequence[str], tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse arms that are not there, and tables that say nothing of how an arm begins or what TF-IDF cannot take."""
    known = [*KINDS, *(name for name in tables if name not in KINDS)]
    for name in names:
        if name not in known:
            raise UserError(f"--arms {name}: no such arm{did_you_mean(name, known)} (have: {', '.join(known)})")
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise UserError(f"--arms: {', '.join(twice)} named twice")
    for name, table in tables.items():
        if kind_of(name, tables) == "tfidf" and (own := [key for key in table if key != "kind"]):
            raise UserError(f"arms.{name}: TF-IDF has no settings, so {', '.join(own)} would change nothing")


def kind_of(name: str, tables: Mapping[str, Mapping[str, Any]]) -> str:
    kind = tables.get(name, {}).get("kind", name)
    if kind not in KINDS:
        raise UserError(
            f"arms.{name}.kind: must be one of {', '.join(KINDS)}, not {kind!r}{did_you_mean(str(kind), KINDS)}"
        )
    return str(kind)
