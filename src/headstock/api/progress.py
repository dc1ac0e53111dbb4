"""Shows the progress of the API's functions: a bar in a notebook or a terminal, and the messages that are logged."""

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from html import escape
from typing import Any

from headstock.errors import printable
from headstock.io import rank_and_size
from headstock.logs import LOGGER, messages_to
from headstock.option_names import python_spelling
from headstock.tasks.base import perplexity
from headstock.train.callbacks import Callback, Event, status_line, terminal_progress
from headstock.train.metrics import format_metrics

REFRESH_SECONDS = 0.2  # between updates of a bar in a notebook
MAX_LINES = 200  # of messages in a notebook
KERNEL = "ZMQInteractiveShell"  # the class of IPython's shell in a notebook


@contextmanager
def show_progress(progress: bool | None, *, many_runs: bool = False) -> Iterator[list[Callback]]:
    """Callbacks that show training. With None it is shown in a notebook and in a terminal, and nowhere else.

    Messages are shown beside it, unless the program itself has set up `logging`.
    """
    notebook = in_notebook()
    shown = progress if progress is not None else notebook or sys.stderr.isatty()
    if not shown or rank_and_size()[0] > 0:
        yield []
    elif notebook:
        display = NotebookProgress(validations=not many_runs)
        with nullcontext() if LOGGER.hasHandlers() else messages_to(display.add_line):
            yield [display.on_event]
        display.show()
    else:
        with (
            nullcontext() if LOGGER.hasHandlers() else messages_to(print_message),
            status_line(quiet=False) if many_runs else terminal_progress(quiet=False) as callbacks,
        ):
            yield callbacks


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook; IPython is not imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return any(kind.__name__ == KERNEL for kind in type(shell).__mro__)


def print_message(line: str) -> None:
    print(printable(python_spelling(line)), file=sys.stderr, flush=True)


class NotebookProgress:
    """A progress bar with the messages below it, as one output of a cell that is updated in place.

    With `validations` it has a line for each validation; those of many runs would hide the results of the runs.
    """

    def __init__(self, *, validations: bool = True) -> None:
        self.validations = validations
        self.lines: deque[str] = deque(maxlen=MAX_LINES)
        self.bar, self.rates, self.shown_at = "", list[str](), 0.0
        self.handle: Any = None

    def add_line(self, line: str) -> None:
        self.lines.append(python_spelling(line))
        self.show()

    def on_event(self, event: Event) -> None:
        state, total = event.state, event.expected_steps
        if event.kind == "log":
            ppl = [f"perplexity {perplexity(state.loss):,.2f}"] if event.has_perplexity else []
            self.rates = [f"loss {state.loss:.3f}", *ppl, f"{event.tokens_per_second:,.0f} tokens/s"]
        parts = [f"epoch {event.epoch}", f"{state.step:,}/{total:,} steps", *self.rates, f"{event.time_left} left"]
        value, text = min(1.0, state.step / max(1, total)), escape(" · ".join(parts))
        self.bar = f'<progress value="{value:.4f}" style="width:14em"></progress> {text}'
        if event.kind == "valid" and self.validations:
            self.lines.append(f"step {state.step:,}: {format_metrics(state.valid)}")
        if event.kind == "valid" or time.monotonic() - self.shown_at > REFRESH_SECONDS:
            self.show()

    def show(self) -> None:
        from IPython.display import HTML, display

        lines = escape("\n".join(self.lines))
        messages = f'<pre style="margin:.3em 0;max-height:16em;overflow:auto">{lines}</pre>' if lines else ""
        content = HTML(f'<div class="headstock-progress">{self.bar}{messages}</div>')
        self.shown_at = time.monotonic()
        if self.handle is None:
            self.handle = display(content, display_id=True)
        else:
            self.handle.update(content)
