"""What follows the training of a run: the error analysis, report.html, and the last copy to a mirror."""

from pathlib import Path
from typing import Any

from headstock.experiments.trial_evaluation import add_error_analysis
from headstock.io import rank_and_size
from headstock.report.pages import write_report
from headstock.train.mirror import finish_mirror
from headstock.train.run_folder import RunFolder

WRITE_REPORTS = True  # unless a function is told otherwise


def finish_run(out: str | Path, results: dict[str, Any], *, report: bool | None, device: str) -> dict[str, Any]:
    """Write the report of a run; returns its results.json, for a labelled task with the errors."""
    run = RunFolder(Path(out))
    if rank_and_size()[0] > 0:
        return results
    if WRITE_REPORTS if report is None else report:
        if results.get("kind") == "finetune":
            add_error_analysis(run, device=device)
        write_report(run.path)
    # a run that was copied here after training records its old path
    return run.results() | {"run": str(out)} | finish_mirror(run)


def finish_experiment(out: str | Path, *, report: bool | None) -> dict[str, Any]:
    """Write the report of a comparison or a sweep; returns its results.json."""
    if WRITE_REPORTS if report is None else report:
        write_report(Path(out))
    return RunFolder(Path(out)).results()
