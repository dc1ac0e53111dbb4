"""Describes the pretrained runs of a comparison side by side: what they are, how well they model text, their scores.

Perplexity is per token: it compares only runs with the same tokenizer, and never a bidirectional with a causal model.
Bits per byte compare wherever they are defined.
"""

from collections.abc import Sequence
from typing import Any

from headstock.experiments.arms import Arm
from headstock.train.run_folder import RunFolder, source_run

TOLERANCE = 0.1  # runs whose sizes differ by a larger fraction are reported as different
METRICS = ("perplexity", "masked_perplexity", "forward_perplexity", "backward_perplexity", "bits_per_byte", "accuracy")


def describe_runs(arms: Sequence[Arm], summary: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per pretrained run; empty if there is only one."""
    runs = list({arm.run.path: arm.run for arm in arms if arm.run is not None and arm.run.exists()}.values())
    return [describe_run(run, arms, summary) for run in runs] if len(runs) > 1 else []


def describe_run(run: RunFolder, arms: Sequence[Arm], summary: Sequence[dict[str, Any]]) -> dict[str, Any]:
    language_model = pretrained_origin(run)
    settings = language_model.config() if language_model else run.config()
    results = language_model.results() if language_model else {}
    metrics = results.get("metrics", {})
    most_labels = max(row["labels"] for row in summary)
    scores = {
        arm.kind: {key: row[key] for key in ("score", "low", "high", "tokens_per_second")}
        for arm in arms
        for row in summary
        if arm.run == run and (row["arm"], row["labels"]) == (arm.name, most_labels)
    }
    return {
        "run": str(run),
        "family": settings["model"]["family"],
        "objective": settings["task"]["name"] if language_model else None,
        "parameters": results.get("parameters", {}).get("total"),
        "tokens": results.get("tokens"),
        "tokens_per_second": results.get("tokens_per_second"),
        "tokenizer": run.data()["tokenizer"],
        **{name: metrics.get(name) for name in METRICS},
        "bits_per_byte_withheld": results.get("bits_per_byte_withheld"),
        "labels": most_labels,
        "scores": scores,
    }


def pretrained_origin(run: RunFolder) -> RunFolder | None:
    """The language model behind a run: the run itself, or the run it was fine-tuned from if that still exists."""
    source = source_run(run)
    return source if source is not None and source.is_finished() else None


def comparability_notes(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Differences between the runs that limit what their numbers mean."""
    notes = []
    if len({run["tokenizer"] for run in runs}) > 1:
        notes.append("The runs have different tokenizers: compare their bits per byte, not their perplexities.")
    notes += [
        f"The bits per byte of {run['run']} are withheld: {reason}."
        for run in runs
        if (reason := run.get("bits_per_byte_withheld"))
    ]
    for key, noun in (("parameters", "parameters"), ("tokens", "pretraining tokens")):
        counts = [run[key] for run in runs if run[key]]
        if counts and max(counts) > (1 + TOLERANCE) * min(counts):
            notes.append(f"The runs differ in {noun}: from {min(counts):,} to {max(counts):,}.")
    return notes
