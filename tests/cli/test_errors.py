"""User errors exit with code 2, print one line and leave no files behind."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headstock.cli.command import Common, attempt
from tests.commands import REVIEWS, set_options, write_rows

FIXTURES = Path(__file__).parents[1] / "compatibility" / "before_redesign"


def test_wrong_files(tmp_path, corpus, tiny, refused):
    def pretrain(path):
        return refused("pretrain", path, "--out", tmp_path / "run", *set_options(tiny))

    shutil.copy(corpus, tmp_path / "stories.txt")
    assert "storis.txt" in (line := pretrain(tmp_path / "storis.txt"))
    assert "stories.txt" in line  # the most similar
    (tmp_path / "empty.txt").write_bytes(b"")
    assert "empty" in pretrain(tmp_path / "empty.txt")
    (tmp_path / "picture.txt").write_bytes(b"\x89PNG\x00\x00\x01\x00" * 50)
    assert "binary" in pretrain(tmp_path / "picture.txt")
    (tmp_path / "latin.txt").write_bytes("bon\ncaf\xe9 noir\n".encode("latin-1"))
    line = pretrain(tmp_path / "latin.txt")
    assert "UTF-8" in line
    assert "latin.txt:2" in line
    assert "offset 7" in line
    (tmp_path / "small.txt").write_text("one line only")
    assert "too small" in pretrain(tmp_path / "small.txt")
    (tmp_path / "table.csv").write_text("review,stars\ngood film,5\nbad film,1\n")
    line = pretrain(tmp_path / "table.csv")
    assert "'text'" in line
    assert "review" in line


def test_all_wrong_settings_are_reported_together(tmp_path, corpus, refused):
    line = refused(
        "pretrain",
        corpus,
        "--out",
        tmp_path / "run",
        "--set",
        "dept=3",
        "--set",
        "leraning=1",
        "--set",
        "hedas=2",
        lines=4,
    )
    assert "did you mean 'depth'?" in line
    assert "did you mean 'heads'?" in line
    assert "3 invalid settings" in line
    line = refused("pretrain", corpus, "--out", tmp_path / "run", "--set", "width=30", "--set", "heads=4")
    assert "width: 30 must be a multiple of heads 4" in line
    assert "did you mean 'gpt-nano'" in refused("pretrain", corpus, "--out", tmp_path / "run", "--preset", "gpt-nan")
    assert "did you mean 'causal'" in refused("pretrain", corpus, "--out", tmp_path / "run", "--objective", "casual")


@pytest.mark.parametrize("text", ["a long text " * 100, "long and/or dull, " * 30, "é" * 200, "either/or/" * 1000])
def test_a_text_without_a_run_is_not_printed_whole(text, refused):
    line = refused("predict", text)
    assert "name the run before the text" in line and len(line) < 200


def test_an_existing_folder_is_never_replaced_if_it_is_no_run(tmp_path, corpus, tiny, refused):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    line = refused("pretrain", corpus, "--out", tmp_path / "mine", *set_options(tiny))
    assert str(tmp_path / "mine") in line and "--overwrite" in line
    for flag in ("--overwrite", "--resume"):
        line = refused("pretrain", corpus, "--out", tmp_path / "mine", flag, *set_options(tiny))
        assert str(tmp_path / "mine") in line
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_an_output_folder_that_is_a_file_is_refused(tmp_path, corpus, tiny, refused):
    (tmp_path / "mine").write_text("precious")
    for flag in ("--overwrite", "--resume", "--quiet"):
        assert "is a file" in refused("pretrain", corpus, "--out", tmp_path / "mine", flag, *set_options(tiny))


def test_a_run_with_a_foreign_tokenizer_is_refused(tmp_path, corpus, pretrained, refused, call):
    copy = tmp_path / "other"
    shutil.copytree(pretrained[0], copy)
    call("tokenizer", "train", corpus, "--out", copy / "tokenizer.json", "--vocab", 299, "--overwrite")
    line = refused("generate", copy, "Anne")
    assert str(copy / "tokenizer.json") in line and "manifest.json" in line
    (copy / "manifest.json").unlink()  # runs of earlier versions have none
    assert "does not belong to this run" in refused("generate", copy, "Anne")


def test_wrong_runs_options_and_verbs(tmp_path, pretrained, refused, call):
    shutil.copytree(pretrained[0], tmp_path / "tiny")
    assert "did you mean 'tiny'" in refused("generate", tmp_path / "tinny", "x")
    (tmp_path / "tiny" / "model.safetensors").unlink()
    assert "--resume" in refused("generate", tmp_path / "tiny", "x")
    assert "--max-tokens" in refused("generate", pretrained[0], "x", "--max-tokns", 3)
    assert "temperature" in refused("generate", pretrained[0], "x", "--temperature", -1)
    assert "did you mean 'imdb'" in refused("data", "get", "imbd")
    _, err = call("generat", code=2)
    assert "generate" in err


def test_resume_without_a_run_is_refused_first(tmp_path, corpus, tiny, pretrained, call):
    (tmp_path / "empty").mkdir()
    write_rows(tmp_path / "rows.csv", REVIEWS)
    for out in (tmp_path / "none", tmp_path / "empty"):
        for arguments in (["pretrain", corpus], ["finetune", pretrained[0], "--train", tmp_path / "rows.csv"]):
            assert "nothing to resume" in call(*arguments, "--out", out, "--resume", code=2)[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "rows.csv"]


@pytest.mark.parametrize("arguments", [["--steps", 20], ["--set", "epochs=2"], ["--set", "lr=-1"], ["--out", "there"]])
def test_wrong_settings_are_refused_before_planning(arguments, corpus, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    _, err = call("pretrain", corpus, "--out", "new", "--minutes", 1, *arguments, code=2)
    assert len(err.splitlines()) == 1


def test_a_folder_that_cannot_be_created_is_named(corpus, tiny, call, tmp_path):
    (tmp_path / "file").write_text("x")
    _, err = call("pretrain", corpus, "--out", tmp_path / "file" / "run", *set_options(tiny), code=2)
    assert str(tmp_path / "file" / "run") in err and "claim" not in err


def test_only_similar_paths_are_suggested(corpus, call, tmp_path):
    for name in ("notes.txt", "stories.txt"):
        (tmp_path / name).write_text("Anne sees Paris.")
    for name, suggestion in (("corpus.txt", None), ("tests.txt", None), ("storys.txt", "stories.txt")):
        _, err = call("pretrain", tmp_path / name, "--out", tmp_path / "run", code=2)
        assert ("did you mean" in err) == (suggestion is not None) and (suggestion or name) in err


def test_a_closed_pipe_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    arguments = [sys.executable, "-m", "headstock", "data", "list", "--json"]
    process = subprocess.run(arguments, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (process.returncode, process.stderr) == (0, "")


def test_json_has_null_for_nan_and_infinity(capsys):
    result = {"loss": math.nan, "steps": 3, "rows": [{"low": -math.inf}, (1.5, math.inf), "NaN", None, True]}
    assert attempt(lambda: result, Common(json=True)) == 0
    rows = [{"low": None}, [1.5, None], "NaN", None, True]
    assert json.loads(capsys.readouterr().out) == {"loss": None, "steps": 3, "rows": rows}


def test_completion_works():
    environment = os.environ | {
        "_HEADSTOCK_COMPLETE": "complete_bash",
        "COMP_WORDS": "headstock pre",
        "COMP_CWORD": "1",
    }
    code = "import sys; sys.argv[0] = 'headstock'; from headstock.cli import main; main()"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "pretrain" in process.stdout


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("compare", "summary", None),
        ("compare", "arms", 3),
        ("sweep", "points", "many"),
        ("classify", "valid", [1]),
        ("classify", "versions", "new"),
        ("rotary", "metrics", 3),
    ],
)
def test_malformed_results_are_a_user_error(kind, key, value, call, tmp_path):
    shutil.copytree(FIXTURES / kind, tmp_path / "run")
    file = tmp_path / "run" / "results.json"
    results = json.loads(file.read_text())
    if value is None:
        del results[key]
    else:
        results[key] = value
    file.write_text(json.dumps(results))
    _, err = call("report", tmp_path / "run", code=2)
    assert str(file.parent) in err and "results.json" in err and key in err and "internal error" not in err


def test_internal_errors_are_reported_as_such(capsys):
    def work():
        return {}["missing"]

    assert attempt(work, Common()) == 1
    err = capsys.readouterr().err
    assert err.startswith("headstock: internal error (please report): KeyError: 'missing'") and "Traceback" not in err
    assert attempt(work, Common(debug=True)) == 1
    assert "Traceback" in capsys.readouterr().err
