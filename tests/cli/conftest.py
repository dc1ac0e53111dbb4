"""Fixtures of the command line tests."""

import json

import pytest

from tests.commands import REVIEWS, SHORT_FINETUNING, set_options, verb_result, write_rows
from tests.conftest import TINY


@pytest.fixture
def result(call):
    """The object that a command prints with --json."""
    return lambda *arguments: json.loads(call(*arguments, "--json")[0].splitlines()[-1])


@pytest.fixture
def refused(call, tmp_path):
    """The message of a wrong command: so many lines of stderr, and the same in JSON; no file may be written."""

    def refused(*arguments, lines: int = 1) -> str:
        before = sorted(tmp_path.rglob("*"))
        out, err = call(*arguments, "--json", "--quiet", code=2)
        message = json.loads(out.splitlines()[-1])["error"]
        assert err == f"headstock: {message}\n" and len(err.splitlines()) == lines
        assert sorted(tmp_path.rglob("*")) == before
        return message

    return refused


@pytest.fixture(scope="session")
def pretrained(corpus, tmp_path_factory):
    """A small causal model: its folder and the results that `headstock pretrain --json` printed."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    settings = set_options(TINY | {"lr": 0.01, "steps": 40})
    return out, verb_result("pretrain", corpus, "--out", out, "--steps", 40, "--seed", 3, *settings)


@pytest.fixture(scope="session")
def classifier(pretrained, tmp_path_factory):
    """A classifier trained on renamed columns, with unlabelled test rows: its folder and results."""
    folder = tmp_path_factory.mktemp("reviews")
    train = write_rows(folder / "train.csv", REVIEWS, header="review,stars")
    test = write_rows(folder / "test.csv", [(text,) for text, _ in REVIEWS[:5]], header="review")
    files = ["--train", train, "--valid", train, "--test", test, "--columns", "text=review,label=stars"]
    options = ["--pool", "mean", "--seed", 2]
    return folder, verb_result("finetune", pretrained[0], "--out", folder / "run", *files, *SHORT_FINETUNING, *options)
