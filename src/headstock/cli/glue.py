"""`headstock glue`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, command
from headstock.cli.options import ExperimentOut, RunPath, SettingOptions


@command("Compare and measure", distributed=True)
def glue(
    common: Common,
    run: RunPath,
    folder: Annotated[Path, typer.Argument(help="Your copy of GLUE: a folder with CoLA, SST-2, RTE, ...")],
    out: ExperimentOut,
    settings: SettingOptions,
    tasks: Annotated[str | None, "Only these tasks, such as cola,rte."] = None,
    rows: Annotated[int | None, "Train on at most this many rows of each task."] = None,
) -> dict[str, Any]:
    """Fine-tune a run on GLUE tasks and average the scores.

    The tasks in the folder are measured on their development files; a tenth of the training rows selects the epoch.
    Missing tasks are named.

    Example: headstock glue reviews-en glue_data --tasks cola,rte,sts-b --out runs/glue
    """
    from headstock.experiments import glue as experiment
    from headstock.experiments.terminal_tables import glue_table
    from headstock.train.callbacks import status_line

    names = [name.strip() for name in tasks.split(",") if name.strip()] if tasks else None
    with status_line(quiet=common.quiet) as callbacks:
        results = experiment.glue(
            run,
            folder,
            out=out,
            tasks=names,
            rows=rows,
            seed=common.seed or 0,
            settings=settings.to_dict(),
            device=common.device,
            callbacks=callbacks,
        )
    common.show(glue_table(results))
    if results["missing"]:
        common.show_prose("missing: " + "; ".join(f"{name} ({why})" for name, why in results["missing"].items()))
    return results
