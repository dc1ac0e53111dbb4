"""Several runs side by side: what each is, what it learned of its text, what it is worth downstream, how fast it is.

A perplexity is of tokens, so two of them compare only with the same tokenizer, and never between a model that sees what
follows and one that does not; bits per byte compare wherever they are defined.
"""

from collections.abc import Sequence
from typing import Any

from headstock.experiments.arms import Arm
from headstock.train.run_folder import RunFolder, source_run

ALIKE = 0.1  # runs whose parameters or tokens differ by more than this share are not alike
TOLD = ("perplexity", "masked_perplexity", "forward_perplexity", "backward_perplexity", "bits_per_byte", "accuracy")


def describe_runs(arms: Sequence[Arm], summary: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a pretrained run, in the order they were named; nothing where there is only one."""
    runs = list({arm.run.path: arm.run for arm in arms if arm.run is not None and arm.run.exists()}.values())
    if len(runs) < 2:
        return []
    return [describe_run(run, arms, summary) for run in runs]


def describe_run(run: RunFolder, arms: Sequence[Arm], summary: Sequence[dict[str, Any]]) -> dict[str, Any]:
    grown = pretrained_origin(run)
    settings, results = (grown.config(), grown.results()) if grown else (run.config(), {})
    metrics = results.get("metrics", {})
    named = {arm.name for arm in arms if arm.run == run}
    most = max(row["labels"] for row in summary)
    scores = {
        arm.kind: {key: row[key] for key in ("score", "low", "high", "tokens_per_second")}
        for arm in arms
        for row in summary
        if arm.name in named and (row["arm"], row["labels"]) == (arm.name, most)
    }
    return {
        "run": str(run),
        "family": settings["model"]["family"],
        "objective": settings["task"]["name"] if grown else None,
        "parameters": results.get("parameters", {}).get("total"),
        "tokens": results.get("tokens"),
        "tokens_per_second": results.get("tokens_per_second"),
        "tokenizer": run.data()["tokenizer"],
        **{name: metrics.get(name) for name in TOLD},
        "bits_per_byte_withheld": results.get("bits_per_byte_withheld"),
        "labels": most,
        "scores": scores,
    }


def pretrained_origin(run: RunFolder) -> RunFolder | None:
    """The language model behind a run: itself, or what it was fine-tuned from if that is still there."""
    found = source_run(run)
    return found if found is not None and found.is_finished() else None


def comparability_notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What must be known before the rows are compared."""
    said = []
    if len({row["tokenizer"] for row in rows}) > 1:
        said.append("The runs have different tokenizers, so their perplexities do not compare; bits per byte do.")
    said += [
        f"The bits per byte of {row['run']} are withheld: {why}."
        for row in rows
        if (why := row.get("bits_per_byte_withheld"))
    ]
    for name, unit in (("parameters", "parameters"), ("tokens", "tokens of pretraining")):
        known = [row[name] for row in rows if row[name]]
        if known and max(known) > (1 + ALIKE) * min(known):
            said.append(f"The runs differ in {unit}: from {min(known):,} to {max(known):,}.")
    return said
