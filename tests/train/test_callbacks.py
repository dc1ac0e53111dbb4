"""The progress bar on a terminal."""

import io
import sys

import pytest

from headstock.train.budget import Budget
from headstock.train.callbacks import Event, terminal_progress
from headstock.train.checkpoint import TrainState


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("has_perplexity", [True, False])
def test_the_bar_shows_a_perplexity_only_where_tokens_are_predicted(has_perplexity, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    state = TrainState(step=3, tokens=60, seconds=1.0, loss=1.5)
    with terminal_progress(quiet=False) as callbacks:
        for callback in callbacks:
            callback(Event("log", state, Budget(10, None), 10, tokens_per_second=60.0, has_perplexity=has_perplexity))
    output = sys.stderr.getvalue()
    assert "loss 1.500" in output and ("ppl 4.48" in output) == has_perplexity == ("ppl" in output)
