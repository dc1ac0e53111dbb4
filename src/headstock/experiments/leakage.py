"""Checks whether evaluation texts occur in the pretraining text of the compared runs, and caches the outcome."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from headstock.data.catalog import download_of
from headstock.data.corpus import read_corpus
from headstock.data.records import Records
from headstock.errors import HeadstockError, UserError
from headstock.experiments.arms.base import ARM_KINDS
from headstock.experiments.compare_settings import Arm
from headstock.experiments.grid import read_json
from headstock.experiments.leakage_search import find_leaked_texts
from headstock.io import fingerprint, write_json
from headstock.report.format import format_bytes
from headstock.train.run_folder import RunFolder, open_run, source_run

logger = logging.getLogger(__name__)

MAX_EXAMPLES = 10  # leaked texts that the report quotes


@dataclass(frozen=True)
class RunLeakage:
    """The evaluation texts in the pretraining text of one run."""

    run: str
    checked: bool
    why: str | None = None  # why it was not checked
    corpus: Sequence[str] = ()
    documents: int = 0  # in the corpus
    tested: int = 0  # texts long enough to search for
    exact: int = 0
    near: int = 0
    examples: Sequence[dict[str, Any]] = ()
    excluded: bool = False  # True if rows were left out of the evaluation


@dataclass(frozen=True)
class LeakageReport:
    runs: list[RunLeakage] = field(default_factory=list)  # one entry per pretrained run
    excluded: frozenset[int] = frozenset()  # evaluation rows to leave out


def check_leakage(arms: Sequence[Arm], records: Records, policy: str, folder: Path) -> LeakageReport:
    """Search the corpus of every pretrained run. `policy` is to exclude or keep leaked rows, or to skip the search."""
    runs = {str(arm.run): arm.run for arm in arms if arm.run is not None and ARM_KINDS.get(arm.kind).uses_weights}
    if policy == "skip":
        return LeakageReport([RunLeakage(name, checked=False, why="the search was skipped") for name in runs])
    entries, excluded = [], set[int]()
    for name, run in runs.items():
        entry, rows = search_run(run, records, folder)
        entries.append(replace(entry, excluded=policy == "exclude" and bool(rows)))
        if policy == "exclude":
            excluded.update(rows)
        if rows:
            action = "excluded" if policy == "exclude" else "kept"
            counts = f"{len(rows)} of {len(records)} evaluation texts"
            logger.info("%s occur in the pretraining text of %s: %s", counts, name, action)
    return LeakageReport(entries, frozenset(excluded))


def search_run(run: RunFolder, records: Records, folder: Path) -> tuple[RunLeakage, set[int]]:
    """The evaluation texts that occur in what a run was pretrained on, and their rows.

    Cached, as a large corpus takes time.
    """
    settings = corpus_settings(run)
    if settings is None:
        return RunLeakage(
            str(run), checked=False, why="its text, or that of a run it started from, is not recorded"
        ), set()
    texts = [*records.display_texts, *records.columns.get("target", [])]  # target texts may occur in the corpus too
    path = folder / "leakage" / f"{run.path.name}-{fingerprint(str(run.path.resolve()))[:8]}.json"
    try:
        announce_downloads(run, [path for data in settings for path in data["corpus"]])
        corpora = [read_corpus(data["corpus"], documents=data["documents"], column=data["column"]) for data in settings]
        key, cached = fingerprint([[corpus.fingerprint() for corpus in corpora], texts]), read_json(path)
        if cached.get("key") != key:
            logger.info("searching the pretraining text of %s for %d texts", run, len(records))
            names = [name for corpus in corpora for name in corpus.names()]
            cached = {"key": key, "names": names, **asdict(find_leaked_texts(texts, chain.from_iterable(corpora)))}
            write_json(path, cached)
    except HeadstockError as error:
        logger.info("%s: cannot search its pretraining text: %s", run, error)
        return RunLeakage(str(run), checked=False, why=f"its pretraining text cannot be read ({error})"), set()
    matches = sorted(cached["found"], key=lambda match: -match["share"])
    rows, kinds = [match["row"] % len(records) for match in matches], [match["kind"] for match in matches]
    examples = [
        {"place": records.location(row), "text": texts[match["row"]], "found": match["where"], "share": match["share"]}
        for row, match in zip(rows[:MAX_EXAMPLES], matches, strict=False)
    ]
    counts = {"documents": cached["documents"], "tested": cached["tested"]}
    counts |= {kind: kinds.count(kind) for kind in ("exact", "near")}
    return RunLeakage(str(run), checked=True, corpus=cached["names"], **counts, examples=examples), set(rows)


def announce_downloads(run: RunFolder, corpus: Sequence[str]) -> None:
    """Say which text is fetched for the search alone: training does not need it."""
    for path in corpus:
        if entry := download_of(path):
            logger.info(
                "to search the pretraining text of %s for the evaluation texts, %s (%s) is downloaded to the cache; "
                "--leakage skip does without",
                *(run, entry.name, format_bytes(entry.size)),
            )


def corpus_settings(run: RunFolder) -> list[dict[str, Any]] | None:
    """The data settings of every pretraining that a run has behind it, the last first; None if one is not known."""
    settings, source = [], source_run(run)
    while source is not None:
        settings.append(source.config()["data"])
        if (start := source.data().get("start")) is None:
            return settings
        source = open_source(start)
    return None


def open_source(name: str) -> RunFolder | None:
    try:
        return source_run(open_run(name, download=False))
    except UserError:
        return None
