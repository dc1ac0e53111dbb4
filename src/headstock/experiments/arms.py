"""The arms of a comparison: ways to obtain a model, each with its own settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstock.errors import UserError, did_you_mean
from headstock.train.run_folder import RunFolder, open_run

KINDS = ("scratch", "pretrained", "frozen", "tfidf")


@dataclass(frozen=True)
class Arm:
    name: str
    kind: str
    run: RunFolder | None = None  # None for TF-IDF
    settings: dict[str, Any] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """Fine-tuning settings: those implied by the kind, and the arm's own."""
        init = "scratch" if self.kind == "scratch" else "pretrained"
        return {"transfer.init": init, "transfer.freeze": self.kind == "frozen"} | self.settings


def make_arms(
    runs: Sequence[str | Path], names: Sequence[str], tables: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Arm]:
    """The named arms, once per run except TF-IDF.

    `tables` defines custom arms, such as `{"fast": {"kind": "frozen", "lr": 1e-3}}`, and settings of standard ones.
    """
    tables = tables or {}
    check_names(names, tables)
    folders = [open_run(run) for run in runs]
    paths = [run.path.resolve() for run in folders]
    if twice := [run for run in folders if paths.count(run.path.resolve()) > 1]:
        raise UserError(f"{twice[0]}: given twice")
    if not folders and any(kind_of(name, tables) != "tfidf" for name in names):
        raise UserError("no run to compare: give one, such as reviews-en, or use --arms tfidf")
    titles = [run.path.name for run in folders]
    if len(set(titles)) < len(titles):
        titles = [str(run) for run in folders]
    arms = []
    for name in names:
        kind = kind_of(name, tables)
        settings = {key: value for key, value in tables.get(name, {}).items() if key != "kind"}
        if kind == "tfidf":
            arms.append(Arm(name, kind, settings=settings))
        else:
            arms += [
                Arm(name if len(folders) == 1 else f"{name} {title}", kind, run, settings)
                for run, title in zip(folders, titles, strict=True)
            ]
    return arms


def check_names(names: Sequence[str], tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse unknown and repeated arms, tables without a kind, and settings for TF-IDF."""
    available = [*KINDS, *(name for name in tables if name not in KINDS)]
    for name in names:
        if name not in available:
            hint = did_you_mean(name, available)
            raise UserError(f"--arms {name}: no such arm{hint} (have: {', '.join(available)})")
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise UserError(f"--arms: {', '.join(twice)} given twice")
    for name, table in tables.items():
        if kind_of(name, tables) == "tfidf" and (keys := [key for key in table if key != "kind"]):
            raise UserError(f"arms.{name}: TF-IDF has no settings, so {', '.join(keys)} cannot be set")


def kind_of(name: str, tables: Mapping[str, Mapping[str, Any]]) -> str:
    kind = tables.get(name, {}).get("kind", name)
    if kind not in KINDS:
        hint = did_you_mean(str(kind), KINDS)
        raise UserError(f"arms.{name}.kind: must be one of {', '.join(KINDS)}, not {kind!r}{hint}")
    return str(kind)
