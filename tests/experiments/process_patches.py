"""Patches for the process of a command; imports nothing that is slow."""

import os
import signal

from headstock.experiments import sweep_trials, trial_evaluation
from headstock.report import pages


def skip_report() -> None:
    """Patch this process: it writes no report, whose charts take longer than small trials."""
    pages.write_report = lambda folder: folder / "report.html"


def stop_comparison(*, kill: bool) -> None:
    """Patch this process: it is killed before the fourth result is renamed, or interrupted in the fifth trial."""
    written, replace, fit = [], os.replace, trial_evaluation.fit

    def replace_or_die(temporary, path):
        if "/cells/" in str(path):
            written.append(path)
            if kill and len(written) == 4:
                os.kill(os.getpid(), signal.SIGKILL)
        replace(temporary, path)

    def fit_and_stop(*args, callbacks, **options):
        def stop(event):
            if len(written) == 4 and event.kind == "step":
                os.kill(os.getpid(), signal.SIGINT)

        return fit(*args, callbacks=[*callbacks, stop], **options)

    os.replace, trial_evaluation.fit = replace_or_die, fit_and_stop


def stop_sweep(*, kill: bool, trial: int = 4, step: int = 4) -> None:
    """Patch this process: it is killed or interrupted after this step of the fourth trial, or of another one."""
    runs, pretrain = [], sweep_trials.pretrain

    def pretrain_and_stop(*args, callbacks, **options):
        runs.append(options["out"])

        def stop(event):
            if len(runs) == trial and event.kind == "step" and event.state.step == step:
                os.kill(os.getpid(), signal.SIGKILL if kill else signal.SIGINT)

        return pretrain(*args, callbacks=[*callbacks, stop], **options)

    sweep_trials.pretrain = pretrain_and_stop
