"""`headstock calibrate`: fits the probabilities and decision thresholds of a classifier."""

from pathlib import Path
from typing import Annotated, Any

from headstock.cli.command import Common, command
from headstock.cli.input_files import load
from headstock.cli.options import Columns, RunPath, SkipBlank
from headstock.errors import shell_quote


@command("Use a run")
def calibrate(
    common: Common,
    run: RunPath,
    columns: Columns,
    data: Annotated[Path | None, "Labelled rows it was not trained on; default: the run's validation rows."] = None,
    thresholds: Annotated[
        str | None, "Also fit decision thresholds: f1, balanced_accuracy, precision=0.9 or recall=0.9."
    ] = None,
    positive: Annotated[str | None, "Class of the threshold; default: the rarer of two."] = None,
    skip_blank: SkipBlank = False,
) -> dict[str, Any]:
    """Fit the temperature of a classifier, and decision thresholds.

    The result is stored in the run; predict --calibrated and evaluate --calibrated use it. Temperature scaling never
    changes which class is most probable; thresholds do.

    Example: headstock calibrate runs/spam --data valid.csv --thresholds f1
    """
    from headstock import config
    from headstock.inference.calibrate import calibrate as fit
    from headstock.tasks.text_metrics import DEFINITIONS

    pipeline = load(run, device=common.device)
    names = columns.names(main=pipeline.classification_task().input_column)
    result = fit(pipeline, data, thresholds=thresholds, positive=positive, columns=names, skip_blank=skip_blank)
    fitted = result.calibration
    rows = f"{fitted.rows:,} rows of {fitted.file}"
    common.show(f"{run}: temperature {fitted.temperature:.3f}, fitted on {rows}")
    if fitted.selected_epoch:
        common.show("These are the run's validation rows, which also selected its epoch.")
    if fitted.thresholds:
        classes = pipeline.classification_task().config.classes
        shown = ", ".join(f"{name} {value:.3f}" for name, value in zip(classes, fitted.thresholds, strict=True))
        common.show(f"decision thresholds by {fitted.criterion}: {shown}")
    common.show(f"{'on these rows':14s} {'before':>8s} {'after':>8s}")
    for name in ("loss", "ece", "brier"):
        if name in result.before:
            meaning = f"  ({DEFINITIONS[name]})" if name in DEFINITIONS else ""
            common.show(f"{name:14s} {result.before[name]:8.4f} {result.after[name]:8.4f}{meaning}")
    common.show(f"next: headstock evaluate {shell_quote(run)} test.csv --calibrated")
    return {"calibration": config.to_dict(fitted), "before": result.before, "after": result.after}
