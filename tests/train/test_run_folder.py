"""A run's folder: one process at a time works in it, none destroys what it comes from, and what is lost is remade."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

import headstock
from headstock.errors import UserError
from headstock.experiments.comparison_summary import pretrained_origin
from headstock.experiments.leakage import corpus_settings
from headstock.logs import messages_to
from headstock.train.finetune import finetune
from headstock.train.run_folder import RunFolder
from headstock.train.session import locked_run
from tests.conftest import TINY

SETTINGS = TINY | {"depth": 1, "steps": 4}
QUICK = {"least_steps": 0, "epochs": 2}
BUSY = "another process is using this folder"


@pytest.fixture(scope="module")
def kept(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("kept") / "stock"
    headstock.pretrain(corpus, out=out, settings=SETTINGS)
    return out


@pytest.fixture
def stock(kept, tmp_path):
    return shutil.copytree(kept, tmp_path / "stock")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    path.write_text("text,label\n" + "Anne likes Paris.,a\nBen sees the sea.,b\n" * 8)
    return path


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# A run is not made in the place of the one it comes from


@pytest.mark.parametrize("name", ["stock", "link", "above"])
def test_a_run_does_not_replace_what_it_comes_from(stock, labelled, corpus, tmp_path, call, name):
    out, before = tmp_path / name, content(stock)
    if name == "link":
        out.symlink_to(stock)
    elif name == "above":  # what it comes from lies in it, as an adapted run and an ensemble's models do
        shutil.copytree(stock, out)
        stock = shutil.copytree(stock, out / "adapted")
    for words in (["finetune", stock, "--train", labelled], ["pretrain", corpus, "--start", stock]):
        err = call(*words, "--out", out, "--overwrite", code=2)[1]
        assert "would be overwritten" in err
    assert content(stock) == before


def test_a_run_that_names_itself_comes_from_nowhere(stock):
    settings = json.loads((stock / "config.json").read_text())
    assert corpus_settings(RunFolder(stock)) == settings["data"]
    assert pretrained_origin(RunFolder(stock)) == RunFolder(stock)
    (stock / "config.json").write_text(json.dumps(settings | {"transfer": {"run": str(stock)}}))
    assert corpus_settings(RunFolder(stock)) is None
    assert pretrained_origin(RunFolder(stock)) is None


# Only what we wrote is replaced


@pytest.mark.parametrize("name", ["notes.txt", "mine/thesis.txt", "checkpoints/old/x.bin", "tensorboard/plan.md"])
def test_a_run_with_something_of_the_users_in_it_is_left_alone(stock, corpus, labelled, call, name):
    (stock / name).parent.mkdir(exist_ok=True)
    (stock / name).write_text("years of work")
    before = content(stock)
    for words in (["pretrain", corpus], ["finetune", "--preset", "gpt-nano", "--train", labelled]):
        err = call(*words, "--out", stock, "--overwrite", code=2)[1]
        assert name.partition("/")[0] in err and str(stock) in err
    assert content(stock) == before


def test_a_config_json_of_another_program_does_not_make_a_run(stock, corpus, tmp_path, call):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    (theirs / "model.safetensors").write_bytes(b"weights")
    before = content(theirs)
    assert "config.json" in call("pretrain", corpus, "--out", theirs, "--overwrite", code=2)[1]
    assert "not replaced" in call("export", stock, "--to", "huggingface", theirs, "--overwrite", code=2)[1]
    assert "input" in call("import", theirs, "--out", theirs, "--overwrite", code=2)[1]
    assert content(theirs) == before


def test_an_export_is_replaced_but_nothing_beside_it(stock, tmp_path, call):
    there = tmp_path / "there"
    call("export", stock, "--to", "huggingface", there)
    call("export", stock, "--to", "huggingface", there, "--overwrite")
    (there / "notes.txt").write_text("years of work")
    before = content(there)
    assert "notes.txt" in call("export", stock, "--to", "huggingface", there, "--overwrite", code=2)[1]
    assert content(there) == before


@pytest.mark.parametrize("name", ["predictions.jsonl", "tokenizer.json", "config.json"])
def test_a_run_does_not_replace_its_own_input(stock, corpus, tmp_path, call, name):
    (stock / "predictions.jsonl").write_text('{"text": "Anne likes Paris.", "label": "a"}\n' * 40)
    link = tmp_path / f"link{(stock / name).suffix}"
    link.symlink_to(stock / name)
    before = content(stock)
    given = {
        "predictions.jsonl": [["pretrain"], ["finetune", "--preset", "gpt-nano", "--train"]],
        "tokenizer.json": [["pretrain", corpus, "--tokenizer"]],
        "config.json": [["pretrain", corpus, "--config"]],
    }[name]
    for words in given:
        for path in (stock / name, link):
            assert "input" in call(*words, path, "--out", stock, "--overwrite", code=2)[1]
    assert content(stock) == before


def test_a_run_that_is_removed_leaves_what_is_the_users(stock):
    (stock / "checkpoints" / "notes.txt").write_text("years of work")
    RunFolder(stock).remove()
    assert [path.name for path in stock.rglob("*")] == ["checkpoints", "notes.txt"]


def test_labelled_files_are_the_same_wherever_they_lie(stock, labelled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(labelled, "rows.csv")
    finetune(stock, train="rows.csv", out="run", settings=QUICK)
    os.rename("rows.csv", "moved.csv")
    steps = []
    finetune(stock, train="./moved.csv", out="run", settings=QUICK, resume=True, callbacks=[steps.append])
    assert steps == [] and headstock.load("run").evaluate()["file"].endswith("moved.csv")
    (tmp_path / "moved.csv").write_text("text,label\n" + "Anne likes Paris.,b\nBen sees the sea.,a\n" * 8)
    with pytest.raises(UserError, match="have changed"):
        finetune(stock, train="moved.csv", out="run", settings=QUICK, resume=True)


def test_a_run_that_a_link_leads_to_is_replaced_there(stock, corpus, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(stock)
    headstock.pretrain(corpus, out=link, settings=SETTINGS | {"steps": 2}, overwrite=True)
    assert link.is_symlink() and RunFolder(stock).results()["steps"] == 2


def test_a_mount_point_is_not_replaced(stock, corpus, monkeypatch):
    before = content(stock)
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(stock))
    with pytest.raises(UserError, match="mount point"):
        headstock.pretrain(corpus, out=stock, settings=SETTINGS, overwrite=True)
    assert content(stock) == before


def test_all_files_have_the_rights_of_any_new_file(corpus, tmp_path):
    before = os.umask(0o027)
    try:
        headstock.pretrain(corpus, out=tmp_path / "run", settings=SETTINGS)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert "optimizer.safetensors" in modes and set(modes.values()) == {0o640}


# One process at a time

HOLDER = """
import sys
from pathlib import Path
from headstock.io import lock_folder
with lock_folder(Path(sys.argv[1])) as mine:
    print(mine, flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_its_holders_until_that_dies(stock, corpus, labelled, tmp_path):
    before = sorted(tmp_path.iterdir())
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(stock)
    other = subprocess.Popen([sys.executable, "-c", HOLDER, link], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"True\n"
    for given in ({"resume": True}, {"overwrite": True}, {}):
        with pytest.raises(UserError, match=BUSY):
            headstock.pretrain(corpus, out=stock, **given)
        with pytest.raises(UserError, match=BUSY):
            finetune(preset="gpt-nano", train=labelled, out=stock, **given)
    other.kill()
    other.communicate()
    assert other.returncode == -signal.SIGKILL
    headstock.pretrain(corpus, out=stock, resume=True)
    assert sorted(tmp_path.iterdir()) == before  # nor is a claim left


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_that_start_at_once_one_works(corpus, tmp_path, overwrite):
    refused = []

    def start_another(line):
        with pytest.raises(UserError, match=BUSY) as wrong:
            headstock.pretrain(corpus, out=tmp_path / "run", settings=SETTINGS, overwrite=overwrite)
        refused.append(wrong)

    with messages_to(start_another):
        headstock.pretrain(corpus, out=tmp_path / "run", settings=SETTINGS)
    assert refused
    assert [row["step"] for row in RunFolder(tmp_path / "run").read_metrics() if "valid_loss" in row] == [1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_of_the_processes_of_torchrun_the_first_alone_claims(tmp_path, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with locked_run(RunFolder(tmp_path / "run")):
        monkeypatch.setenv("RANK", "1")
        with locked_run(RunFolder(tmp_path / "run")):
            assert len(list(tmp_path.iterdir())) == 1


def test_a_refused_run_leaves_no_folder_behind(tmp_path):
    with pytest.raises(UserError, match="no text to train on"):
        headstock.pretrain(out=tmp_path / "new" / "runs" / "run")
    assert os.listdir(tmp_path) == []


# What a finished run lacks


@pytest.mark.parametrize("lost", ["README.md", "model.safetensors", "one bit"])
def test_what_a_finished_run_lost_is_made_again(stock, corpus, lost):
    if damaged := lost == "one bit":
        lost = "model.safetensors"
    before = (stock / lost).read_bytes()
    (stock / lost).unlink()
    if damaged:
        (stock / lost).write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    steps = []
    headstock.pretrain(corpus, out=stock, resume=True, callbacks=[steps.append])
    assert steps == []
    assert (stock / lost).read_bytes() == before


@pytest.mark.parametrize("lost", ["README.md", "members/1/model.safetensors"])
def test_what_a_finished_ensemble_lost_is_made_again(stock, labelled, tmp_path, lost):
    given = {"train": labelled, "out": tmp_path / "run", "settings": QUICK | {"ensemble": 2, "adapt_steps": 2}}
    finetune(stock, **given)
    before = (tmp_path / "run" / lost).read_bytes()
    (tmp_path / "run" / lost).unlink()
    steps = []
    finetune(stock, **given, resume=True, callbacks=[steps.append])
    assert steps == []
    assert (tmp_path / "run" / lost).read_bytes() == before
    assert not list(tmp_path.rglob("*.claim"))


# Weights that do not fit


def test_weights_that_do_not_fit_are_refused_before_a_folder_is_made(stock, corpus, tmp_path):
    out = shutil.copytree(stock, tmp_path / "before")
    before = content(out)
    for name in ("new", "before"):
        with pytest.raises(UserError, match="does not fit this model"):
            headstock.pretrain(
                corpus, out=tmp_path / name, start=stock, settings={"depth": 2, "steps": 2}, overwrite=True
            )
    assert not (tmp_path / "new").exists()
    assert content(out) == before
