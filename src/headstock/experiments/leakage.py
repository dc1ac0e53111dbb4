"""Checks whether evaluation texts occur in the pretraining text of the compared runs, and caches the outcome."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headstock.data.corpus import read_corpus
from headstock.data.records import Records
from headstock.errors import HeadstockError
from headstock.experiments.arms import Arm
from headstock.experiments.grid import read_json
from headstock.experiments.leakage_search import find_leaked_texts
from headstock.io import fingerprint, write_json
from headstock.train.run_folder import RunFolder, source_run

logger = logging.getLogger(__name__)

MAX_EXAMPLES = 10  # leaked texts that the report quotes


@dataclass(frozen=True)
class LeakageReport:
    runs: list[dict[str, Any]] = field(default_factory=list)  # one entry per pretrained run
    excluded: frozenset[int] = frozenset()  # evaluation rows to leave out


def check_leakage(arms: Sequence[Arm], records: Records, policy: str, folder: Path) -> LeakageReport:
    """Search the corpus of every pretrained run. `policy` is to exclude or keep leaked rows, or to skip the search."""
    runs = {str(arm.run): arm.run for arm in arms if arm.run is not None and arm.kind != "scratch"}
    entries: list[dict[str, Any]] = []
    excluded: set[int] = set()
    for name, run in runs.items():
        if policy == "skip":
            entries.append(unchecked(run, "the search was skipped") | {"excluded": False})
            continue
        entry = search_run(run, records, folder)
        rows = entry.pop("rows", [])
        entries.append(entry | {"excluded": policy == "exclude" and bool(rows)})
        excluded |= set(rows) if policy == "exclude" else set()
        if rows:
            action = "excluded" if policy == "exclude" else "kept"
            logger.info(
                "%d of %d evaluation texts occur in the pretraining text of %s: %s",
                len(rows),
                len(records),
                name,
                action,
            )
    return LeakageReport(entries, frozenset(excluded))


def search_run(run: RunFolder, records: Records, folder: Path) -> dict[str, Any]:
    """The evaluation texts that occur in one run's corpus; cached in a file, as a large corpus takes time."""
    settings = corpus_settings(run)
    if settings is None:
        return unchecked(run, "the run does not record what it was pretrained on")
    try:
        corpus = read_corpus(settings["corpus"], documents=settings["documents"], column=settings["column"])
        texts = [*records.display_texts, *records.columns.get("target", [])]  # target texts may occur in the corpus too
        key = fingerprint([corpus.fingerprint(), texts])
        path = folder / "leakage" / f"{run.path.name}.json"
        cached = read_json(path)
        if cached.get("key") != key:
            logger.info("searching the pretraining text of %s for %d texts", run, len(records))
            cached = {"key": key, "names": list(corpus.names()), **asdict(find_leaked_texts(texts, corpus))}
            write_json(path, cached)
    except HeadstockError as error:
        logger.info("%s: cannot search its pretraining text: %s", run, error)
        return unchecked(run, f"its pretraining text cannot be read ({error})")
    hits = sorted(cached["found"], key=lambda hit: -hit["share"])
    kinds = [hit["kind"] for hit in hits]
    return {
        "run": str(run),
        "checked": True,
        "why": None,
        "corpus": cached["names"],
        "documents": cached["documents"],
        "tested": cached["tested"],
        "exact": kinds.count("exact"),
        "near": kinds.count("near"),
        "examples": [
            {
                "place": records.location(hit["row"] % len(records)),
                "text": texts[hit["row"]],
                "found": hit["where"],
                "share": hit["share"],
            }
            for hit in hits[:MAX_EXAMPLES]
        ],
        "rows": sorted({hit["row"] % len(records) for hit in hits}),
    }


def unchecked(run: RunFolder, reason: str) -> dict[str, Any]:
    empty = {"corpus": [], "documents": 0, "tested": 0, "exact": 0, "near": 0, "examples": []}
    return {"run": str(run), "checked": False, "why": reason, **empty}


def corpus_settings(run: RunFolder) -> dict[str, Any] | None:
    """The data settings of the pretraining run: the run itself, or the run it was fine-tuned from."""
    source = source_run(run)
    return None if source is None else source.config()["data"]
