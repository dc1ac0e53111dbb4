"""`headstock lr-find`: a learning-rate range test."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Unpack

from headstock.cli.command import Common, command
from headstock.cli.options import DOCUMENTS_HELP, TASK_HELP, Columns, Corpus, ModelOptions, Setting, SettingOptions


@dataclass(frozen=True)
class LRFindSettings(SettingOptions):
    documents: Annotated[str | None, Setting("data.documents", DOCUMENTS_HELP)] = None


class LRFindOptions(ModelOptions):
    run: Annotated[str | None, "Fine-tune this run instead of pretraining."]
    train: Annotated[Path | None, "With --run: labelled texts."]


@command("Train", "lr-find", writes=lambda options: [options["out"]])
def lr_find(
    common: Common,
    settings: LRFindSettings,
    columns: Columns,
    corpus: Corpus = None,
    task: Annotated[str, f"With --run: {TASK_HELP}"] = "classify",
    min_lr: Annotated[float, "Learning rate of the first step."] = 1e-6,
    max_lr: Annotated[float, "Learning rate of the last step, unless the loss diverges before."] = 1.0,
    steps: Annotated[int, "Steps of the test."] = 100,
    out: Annotated[Path | None, "Draw the curve: .html or .svg."] = None,
    **options: Unpack[LRFindOptions],
) -> dict[str, Any]:
    """Suggest a learning rate for pretraining or fine-tuning.

    Raises the learning rate exponentially for some steps and records the loss (learning-rate range test). Stops when
    the loss diverges. No run is written, and the weights of a given run stay as they are.

    Example: headstock lr-find corpus.txt --preset gpt-nano
    Example: headstock lr-find --run reviews-en --train train.csv --out lr.html
    """
    from headstock.report.lr_finder_page import MEANINGS, terminal_lr_chart, write_lr_chart
    from headstock.report.render import check_output_path
    from headstock.train import lr_finder
    from headstock.train.callbacks import status_line
    from headstock.train.resolve import labelled_task

    check_output_path(out)
    values = settings.to_dict() | ({"train.seed": common.seed} if common.seed is not None else {})
    names = None
    if options["run"] is not None:
        names = columns.names(main=labelled_task(task).input_column)
    elif (column := columns.text()) is not None:
        values |= {"data.column": column}
    with status_line(quiet=common.quiet) as callbacks:
        result = lr_finder.lr_find(
            corpus or (),
            task=task,
            columns=names,
            settings=values,
            min_lr=min_lr,
            max_lr=max_lr,
            steps=steps,
            device=common.device,
            callbacks=callbacks,
            **options,
        )
    common.show(terminal_lr_chart(result))
    end = "the loss diverged" if result.diverged else "the end of the range"
    common.show(f"{len(result.lrs)} steps, up to {result.lrs[-1]:.1e} ({end})")
    for name, lr in result.suggestions.items():
        common.show(f"{name:10s} {lr:<8g}  {MEANINGS[name]}")
    if result.note:
        common.show_prose(f"note: {result.note}")
    if result.suggestion is not None:
        verb = "finetune" if options["run"] is not None else "pretrain"
        common.show(f"try: headstock {verb} ... --set lr={result.suggestion:g}")
    if out is not None:
        subject = options["run"] or ", ".join(Path(path).name for path in corpus or ()) or "pretraining"
        write_lr_chart(out, result, subject)
        common.show(f"curve: {out}")
    return result.to_dict() | ({"out": str(out)} if out is not None else {})
