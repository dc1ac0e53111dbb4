"""Adds an error analysis to the results of a fine-tuned run."""

from typing import Any

from headstock.inference.attribution import token_attributions
from headstock.inference.pipeline import load
from headstock.model.model import Model
from headstock.tasks.labelled import Attribution, LabelledTask
from headstock.train.loop import sequence_length
from headstock.train.run_folder import RunFolder


def attribution_for(model: Model, task: LabelledTask, data: Any, *, length: int) -> Attribution:
    """Attributes the score of a class to the tokens of a row."""
    return lambda row, target: token_attributions(model, task, data, row, target=target, length=length)


def add_error_analysis(run: RunFolder, *, device: str = "auto") -> None:
    """Add the errors on the run's test rows, or else its validation rows, to its results."""
    loaded = load(run.path, device=device)
    task, rows = loaded.labelled_task(), loaded.held_out()
    data = task.prepare(rows)
    attribute = attribution_for(loaded.model, task, data, length=sequence_length(loaded.model, loaded.config.train))
    if analysis := task.error_analysis(rows, data, loaded.outputs(data), attribute=attribute):
        run.write_results(run.results() | {"details": analysis})
