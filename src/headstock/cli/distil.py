"""`headstock distil`: one model that learns what several classifiers predict on unlabelled text."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, command
from headstock.cli.options import Columns, Overwrite, RunOut
from headstock.cli.training import FinetuneSettings
from headstock.errors import UserError


@command("Train")
def distil(
    common: Common,
    out: RunOut,
    settings: FinetuneSettings,
    columns: Columns,
    run: Annotated[str, typer.Argument(help="Pretrained run that becomes the student.")],
    teacher: Annotated[list[str] | None, "Classifier to learn from, repeatable; or one ensemble."] = None,
    text: Annotated[list[str] | None, "Unlabelled text: files, folders, globs or URLs; repeatable."] = None,
    train: Annotated[Path | None, "Labelled training rows."] = None,
    valid: Annotated[Path | None, "Labelled validation rows; else some training rows are held out."] = None,
    test: Annotated[Path | None, "Test rows, evaluated or predicted at the end."] = None,
    rows: Annotated[int | None, "Unlabelled texts to use, the most like the labelled; 10 per labelled row."] = None,
    tfidf: Annotated[bool, "TF-IDF, fitted on the training rows, is a teacher too."] = True,
    equal_weights: Annotated[bool, "Weigh the teachers equally instead of fitting weights on validation rows."] = False,
    resume: Annotated[bool, "Continue an interrupted run."] = False,
    overwrite: Overwrite = False,
) -> dict[str, Any]:
    """Distil several classifiers into one model, on unlabelled text.

    Different models make different errors; together they are better than each. The student learns their combined
    probabilities on texts like the labelled ones, and is as fast as any single model.

    Example: headstock distil runs/mine --teacher runs/a --teacher runs/b --text reviews.txt --train train.csv
    --valid valid.csv --out runs/student
    """
    from headstock.errors import shell_quote
    from headstock.experiments import distil as distillation
    from headstock.experiments.trial_evaluation import add_error_analysis
    from headstock.report.pages import write_report
    from headstock.train.callbacks import terminal_progress
    from headstock.train.metrics import labelled_metric_lines
    from headstock.train.run_folder import RunFolder

    for name, value in (("teacher", teacher), ("text", text), ("train", train)):
        if not value:
            raise UserError(f"--{name}: is missing; see headstock distil --help")
    values = settings.to_dict() | ({"train.seed": common.seed} if common.seed is not None else {})
    with terminal_progress(quiet=common.quiet) as callbacks:
        results = distillation.distil(
            run,
            teachers=teacher or [],
            text=text or [],
            train=train or "",
            valid=valid,
            test=test,
            out=out,
            tfidf=tfidf,
            equal_weights=equal_weights,
            rows=rows,
            columns=columns.names(),
            settings=values,
            resume=resume,
            overwrite=overwrite,
            device=common.device,
            callbacks=callbacks,
        )
    add_error_analysis(RunFolder(out), device=common.device)
    write_report(out)
    facts = results["distillation"]
    for row in facts["teachers"]:
        common.show(f"teacher {row['name']}: weight {row['weight']:.2f}, valid accuracy {row['valid_accuracy']:.1%}")
    common.show(f"teachers together: valid accuracy {facts['ensemble_valid_accuracy']:.1%}")
    for split in ("valid", "test"):
        if split in results:
            for line in labelled_metric_lines(split, results[split]):
                common.show_prose(f"student {line}")
    common.show(f"report: {RunFolder(out).report}")
    common.show(f"try: headstock predict {shell_quote(out)} --file new.txt")
    return results
