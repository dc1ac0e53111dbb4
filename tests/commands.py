"""Runs real commands in processes that start with torch imported, which takes longer than most commands."""

import functools
import json
import os
import pkgutil
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer.main

from headstock import api, cli, experiments, interop, maintenance, planner, tasks
from headstock.model import backbones
from tests.forks import CONTEXT, start_forked

REVIEWS = [("Anne sees Paris.", "town"), ("Ben likes the sea.", "sea"), ("Zoë finds Paris.", "town")] * 8
SHORT_FINETUNING = ["--set", "least_steps=0", "--epochs", 2, "--lr", 0.01, "--quiet"]
# what commands import; packages that are not installed are left out
COMMANDS = (
    "headstock.train.pretrain headstock.experiments.compare headstock.report.pages headstock.inference.pipeline "
    "headstock.serve.app tests.preloaded torch._dynamo torch.distributed.fsdp torch.distributed.checkpoint.hf_storage "
    "matplotlib.figure matplotlib.backends.backend_svg jinja2 filelock platformdirs typer._adapters fastapi "
    "uvicorn.server rich.console rich.table scipy.optimize scipy.stats"
)
# what the modules of tests and notebooks import, too
WORKERS = (
    "headstock.sklearn headstock.huggingface torch._dynamo.testing torch.utils.flop_counter "
    "sklearn.utils.estimator_checks transformers.models.bart.modeling_bart transformers.models.bert.modeling_bert "
    "openai datasets schemathesis sacrebleu gguf nbformat ipykernel.kernelapp ipywidgets"
)
PACKAGES = (api, backbones, cli, experiments, interop, maintenance, planner, tasks)


def preload(modules: str) -> None:
    """Import modules, beside those of the package, in the server of forks when it starts."""
    own = [module.name for p in PACKAGES for module in pkgutil.iter_modules(p.__path__, f"{p.__name__}.")]
    CONTEXT.set_forkserver_preload(own + modules.split())


preload(COMMANDS)
build_command_line = functools.cache(lambda program, *state: GET_COMMAND(program))
GET_COMMAND = typer.main.get_command


def command(
    *arguments, stdin: bytes = b"", timeout: float = 120, patch: Callable[[], None] | None = None
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `headstock ARGUMENTS` in the current folder and environment.

    `patch`, a function of a module, is called in the process before the command.
    """
    with tempfile.TemporaryDirectory() as name:
        streams = [Path(name) / stream for stream in ("stdin", "stdout", "stderr")]
        streams[0].write_bytes(stdin)
        task = (list(map(str, arguments)), [str(path) for path in streams], dict(os.environ), os.getcwd(), patch)
        process = start_forked(_run, *task)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"headstock {' '.join(task[0])}: not done after {timeout} s")
        return process.exitcode, streams[1].read_text(encoding="utf-8"), streams[2].read_text(encoding="utf-8")


def save_time() -> None:
    """In this process, leave out what tests do not need.

    Files are not flushed to the disk, since no test cuts the power. Charts saved as PNG have few pixels, and labels
    of charts may overlap, since their layout takes most of the time of a report; tests of reports compute it. The API
    writes reports only where a test asks for them: a report takes as long as a small run. Pretrained models generate
    short samples, which take a quarter of the time of a tiny run. The parsers of all verbs are built once, and not
    for each command.
    """
    from headstock.api import reports
    from headstock.report import theme
    from headstock.tasks import samples

    os.fsync = lambda file: None
    theme.PNG_DPI = 50
    theme.LAYOUT = None
    reports.WRITE_REPORTS = False
    samples.NEW_TOKENS = 8
    typer.main.get_command = command_line


def command_line(program: typer.Typer) -> Any:
    """The parsers of a program, built again only after verbs were added or the format of the help has changed."""
    groups = [program, *(group.typer_instance for group in program.registered_groups)]
    verbs = sum(len(group.registered_commands) for group in groups)
    return build_command_line(program, program.rich_markup_mode, verbs)


def _run(
    arguments: list[str],
    streams: list[str],
    environment: dict[str, str],
    folder: str,
    patch: Callable[[], None] | None,
) -> None:
    """Run `python -m headstock` in this process."""
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["headstock", *arguments]
    save_time()
    if patch is not None:
        patch()
    runpy.run_module("headstock", run_name="__main__")


def run_verb(*arguments, stdin: str | bytes | None = None, code: int = 0) -> tuple[str, str]:
    """Run a command that must end with this exit code; returns stdout and stderr."""
    exit_code, out, err = command(*arguments, stdin=stdin.encode() if isinstance(stdin, str) else stdin or b"")
    assert exit_code == code, f"exit {exit_code}\n{out}\n{err}"
    return out, err


def verb_result(*arguments, **options):
    """The object that a command prints with --json."""
    return json.loads(run_verb(*arguments, "--json", **options)[0].splitlines()[-1])


def set_options(settings: dict) -> list[str]:
    return [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]


def write_rows(path: Path, rows, header: str = "text,label") -> Path:
    path.write_text("\n".join([header, *(",".join(row) for row in rows)]) + "\n", encoding="utf-8")
    return path
