"""`headstock ensemble`: several classifiers combined with fitted weights."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, command
from headstock.cli.options import Columns, SkipBlank
from headstock.errors import UserError


@command("Compare and measure")
def ensemble(
    common: Common,
    out: Annotated[Path, "Folder for results, predictions and report."],
    columns: Columns,
    members: Annotated[list[str], typer.Argument(help="Fine-tuned classifiers, or sweeps with --folds.")],
    train: Annotated[Path | None, "Labelled training rows."] = None,
    valid: Annotated[Path | None, "Validation rows, on which the weights are fitted."] = None,
    test: Annotated[Path | None, "Test rows: measured and predicted."] = None,
    tfidf: Annotated[bool, "TF-IDF, fitted on the training rows, is a member too."] = False,
    skip_blank: SkipBlank = False,
) -> dict[str, Any]:
    """Combine classifiers, and TF-IDF, with fitted weights.

    The weights are fitted on the validation rows. Members that are cross-validated sweeps (headstock sweep --folds)
    have out-of-fold predictions of all rows for that. The report has the gain over the best member with its interval.

    Example: headstock ensemble runs/masked runs/causal --tfidf --train train.csv --valid valid.csv --out ensembles/mine
    """
    from headstock.experiments import ensemble as experiment
    from headstock.experiments.terminal_tables import ensemble_table
    from headstock.report.pages import write_report

    if train is None:
        raise UserError("--train: is missing; see headstock ensemble --help")
    results = experiment.ensemble(
        members,
        train=train,
        valid=valid,
        test=test,
        tfidf=tfidf,
        out=out,
        columns=columns.names(),
        skip_blank=skip_blank,
        seed=common.seed or 0,
        device=common.device,
    )
    page = write_report(out)
    common.show(ensemble_table(results))
    common.show_prose(results["verdict"])
    common.show(f"report: {page}")
    return results | {"report": str(page)}
