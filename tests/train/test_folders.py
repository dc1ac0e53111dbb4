"""A run's folder: one process at a time works in it, none destroys what it comes from, and what is lost is remade."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

import headstock
from headstock import files
from headstock.errors import UserError
from headstock.study.families import pretrained
from headstock.study.leaks import corpus_settings
from headstock.train.finetune import finetune
from headstock.train.run import Run, alone_in
from tests.conftest import TINY

SETTINGS = TINY | {"depth": 1, "steps": 4}
QUICK = {"least_steps": 0, "epochs": 2}
BUSY = "another process is at work in this folder"


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
        assert "would be lost" in err
    assert content(stock) == before


def test_a_run_that_names_itself_comes_from_nowhere(stock):
    settings = json.loads((stock / "config.json").read_text())
    assert corpus_settings(Run(stock)) == settings["data"]
    assert pretrained(Run(stock)) == Run(stock)
    (stock / "config.json").write_text(json.dumps(settings | {"transfer": {"run": str(stock)}}))
    assert corpus_settings(Run(stock)) is None
    assert pretrained(Run(stock)) is None


# One process at a time

HOLDER = """
import sys
from pathlib import Path
from headstock.files import at_work
with at_work(Path(sys.argv[1])) as mine:
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

    headstock.pretrain(corpus, out=tmp_path / "run", settings=SETTINGS, say=start_another)
    assert refused
    assert [row["step"] for row in Run(tmp_path / "run").read_metrics() if "valid_loss" in row] == [1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_of_the_processes_of_torchrun_the_first_alone_claims(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with alone_in(Run(tmp_path / "run")):
        monkeypatch.setenv("RANK", "1")
        with alone_in(Run(tmp_path / "run")):
            assert len(list(tmp_path.iterdir())) == 1


def test_a_claim_to_a_file_that_went_is_none(tmp_path, monkeypatch):
    lock = files._lock

    def late(handle):  # whoever held it leaves between our opening the file and our claim to it
        (tmp_path / "claim").unlink()
        return lock(handle)

    monkeypatch.setattr(files, "_lock", late)
    with files.claimed(tmp_path / "claim") as mine:
        assert not mine


@pytest.mark.parametrize("number", ["ENOLCK", "EIO"])
def test_where_nothing_can_be_locked_work_goes_on(tmp_path, monkeypatch, number):
    def flock(handle, how):
        raise OSError(getattr(files.errno, number), number)

    monkeypatch.setattr(files.fcntl, "flock", flock)
    if number == "EIO":
        with pytest.raises(OSError, match="EIO"), files.claimed(tmp_path / "claim"):
            pass
    else:
        with files.claimed(tmp_path / "claim") as mine:
            assert mine


def test_a_refused_run_leaves_no_folder_behind(tmp_path):
    with pytest.raises(UserError, match="no text to train on"):
        headstock.pretrain(out=tmp_path / "new" / "runs" / "run")
    assert os.listdir(tmp_path) == []


# What a finished run lacks


@pytest.mark.parametrize("lost", ["README.md", "model.safetensors"])
def test_what_a_finished_run_lost_is_made_again(stock, corpus, lost):
    before = (stock / lost).read_bytes()
    (stock / lost).unlink()
    steps = []
    headstock.pretrain(corpus, out=stock, resume=True, watch=[steps.append])
    assert steps == []
    assert (stock / lost).read_bytes() == before


@pytest.mark.parametrize("lost", ["README.md", "members/1/model.safetensors"])
def test_what_a_finished_ensemble_lost_is_made_again(stock, labelled, tmp_path, lost):
    given = {"train": labelled, "out": tmp_path / "run", "settings": QUICK | {"ensemble": 2, "adapt_steps": 2}}
    finetune(stock, **given)
    before = (tmp_path / "run" / lost).read_bytes()
    (tmp_path / "run" / lost).unlink()
    steps = []
    finetune(stock, **given, resume=True, watch=[steps.append])
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
