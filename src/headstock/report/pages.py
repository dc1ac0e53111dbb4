"""Reports as single HTML pages that need nothing else: of a run, of a fine-tuned run, of a comparison, of a sweep."""

from pathlib import Path

from headstock.errors import UserError
from headstock.report.compare_page import write_compare_report
from headstock.report.run_page import write_finetune_report, write_run_report
from headstock.report.sweep_page import write_sweep_report
from headstock.train.run_folder import RunFolder

__all__ = ["write_compare_report", "write_finetune_report", "write_report", "write_run_report", "write_sweep_report"]


def write_report(folder: Path, samples: list[str] | None = None) -> Path:
    """Make the report that suits what the folder holds; `samples` are texts a language model generated."""
    run = RunFolder(folder)
    if not run.is_finished():
        if run.exists():
            raise UserError(f"{folder}: has no results.json yet; headstock pretrain ... --resume finishes a run")
        what = "has no results.json" if folder.exists() else "no such folder"
        raise UserError(
            f"{folder}: {what}; headstock pretrain, finetune, compare and sweep make folders with results.json"
        )
    kind = run.results().get("kind")
    if kind == "compare":
        return write_compare_report(folder)
    if kind == "sweep":
        return write_sweep_report(folder)
    if kind == "finetune":
        write_finetune_report(run)
    elif kind in (None, "pretrain"):
        write_run_report(run, samples or [])
    else:
        raise UserError(f"{folder}: there is no report of kind {kind!r}, only of pretrain, finetune, compare and sweep")
    return run.report
