"""Looks for the measured texts in what the compared runs were pretrained on, and remembers what it found."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headstock.data.corpus import read_corpus
from headstock.data.records import Records
from headstock.errors import HeadstockError
from headstock.experiments.arms import Arm
from headstock.experiments.leakage import find_leaked_texts
from headstock.io import write_json
from headstock.train.run_folder import RunFolder, source_run

SHOWN = 10  # found texts that the report quotes


@dataclass(frozen=True)
class LeakageReport:
    """What was found, run by run, and which measured rows are left out for it."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    excluded: frozenset[int] = frozenset()


def check_leakage(
    arms: Sequence[Arm], measured: Records, wish: str, folder: Path, say: Callable[[str], None]
) -> LeakageReport:
    """Search every pretrained run's corpus. `wish` is to exclude what is found, to keep it, or to skip the search."""
    runs = {str(arm.run): arm.run for arm in arms if arm.run is not None and arm.kind != "scratch"}
    told: list[dict[str, Any]] = []
    excluded: set[int] = set()
    for name, run in runs.items():
        if wish == "skip":
            told.append(unchecked(run, "not asked for") | {"excluded": False})
            continue
        found = search_run(run, measured, folder, say)
        rows = found.pop("rows", [])
        told.append(found | {"excluded": wish == "exclude" and bool(rows)})
        excluded |= set(rows) if wish == "exclude" else set()
        if rows:
            fate = "left out" if wish == "exclude" else "kept"
            say(f"{len(rows):,} of {len(measured):,} measured texts are in what {name} was pretrained on: {fate}")
    return LeakageReport(told, frozenset(excluded))


def search_run(run: RunFolder, measured: Records, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """What of the measured texts is in one run's corpus; kept in a file, since a large corpus takes its time."""
    settings = corpus_settings(run)
    if settings is None:
        return unchecked(run, "the run does not say what it was pretrained on")
    try:
        corpus = read_corpus(settings["corpus"], documents=settings["documents"], column=settings["column"])
        texts = [
            *measured.display_texts,
            *measured.columns.get("target", []),
        ]  # what is to be written may have been read too
        key = hashlib.sha256(json.dumps([corpus.fingerprint(), texts]).encode()).hexdigest()
        path = folder / "leakage" / f"{run.path.name}.json"
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            kept = {}
        if not isinstance(kept, dict) or kept.get("key") != key:
            say(f"looking for {len(measured):,} texts in what {run} was pretrained on")
            found = asdict(find_leaked_texts(texts, corpus, say=say))
            kept = {"key": key, "names": list(corpus.names()), **found}
            write_json(path, kept)
    except HeadstockError as wrong:
        say(f"{run}: its pretraining text cannot be searched: {wrong}")
        return unchecked(run, f"its pretraining text cannot be read here ({wrong})")
    examples = [
        {
            "place": measured.location(hit["row"] % len(measured)),
            "text": texts[hit["row"]],
            "found": hit["where"],
            "share": hit["share"],
        }
        for hit in sorted(kept["found"], key=lambda hit: -hit["share"])[:SHOWN]
    ]
    kinds = [hit["kind"] for hit in kept["found"]]
    return {
        "run": str(run),
        "checked": True,
        "why": None,
        "corpus": kept["names"],
        "documents": kept["documents"],
        "tested": kept["tested"],
        "exact": kinds.count("exact"),
        "near": kinds.count("near"),
        "examples": examples,
        "rows": sorted({hit["row"] % len(measured) for hit in kept["found"]}),
    }


def unchecked(run: RunFolder, why: str) -> dict[str, Any]:
    nothing = {"corpus": [], "documents": 0, "tested": 0, "exact": 0, "near": 0, "examples": []}
    return {"run": str(run), "checked": False, "why": why, **nothing}


def corpus_settings(run: RunFolder) -> dict[str, Any] | None:
    """Where a run's pretraining text is; a fine-tuned run is asked for the run that it came from."""
    found = source_run(run)
    return None if found is None else found.config()["data"]
