"""Run folders: locked by one process at a time, never replacing their sources or other files, restored by a resume."""

import json
import os
import shutil

import pytest

import headstock
from headstock.errors import UserError
from headstock.experiments.comparison_summary import pretrained_origin
from headstock.experiments.leakage import corpus_settings
from headstock.train.finetune import finetune
from headstock.train.run_folder import RunFolder
from headstock.train.session import locked_run
from tests.conftest import TINY

SETTINGS = TINY | {"depth": 1, "steps": 4, "validate_every": 2}
QUICK = {"least_steps": 0, "epochs": 2}
BUSY = "another process is using this folder"


@pytest.fixture(scope="module")
def pretrained(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrained") / "source"
    headstock.pretrain(corpus, out=out, settings=SETTINGS)
    return out


@pytest.fixture
def source(pretrained, tmp_path):
    return shutil.copytree(pretrained, tmp_path / "source")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    path.write_text("text,label\n" + "Anne likes Paris.,a\nBen sees the sea.,b\n" * 8)
    return path


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Sources


@pytest.mark.parametrize("name", ["source", "link", "above"])
def test_a_run_does_not_replace_its_source(source, labelled, corpus, tmp_path, call, name):
    out, before = tmp_path / name, content(source)
    if name == "link":
        out.symlink_to(source)
    elif name == "above":  # a folder that contains the source, as an adapted run or an ensemble does
        shutil.copytree(source, out)
        source = shutil.copytree(source, out / "adapted")
    for command in (["finetune", source, "--train", labelled], ["pretrain", corpus, "--start", source]):
        err = call(*command, "--out", out, "--overwrite", code=2)[1]
        assert "would be overwritten" in err
    assert content(source) == before


def test_a_circular_source_is_ignored(source):
    settings = json.loads((source / "config.json").read_text())
    assert corpus_settings(RunFolder(source)) == [settings["data"]]
    assert pretrained_origin(RunFolder(source)) == RunFolder(source)
    (source / "config.json").write_text(json.dumps(settings | {"transfer": {"run": str(source)}}))
    assert corpus_settings(RunFolder(source)) is None
    assert pretrained_origin(RunFolder(source)) is None


def test_the_text_of_every_run_before_is_known(source, corpus, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(corpus.read_text())
    settings = {"steps": 1, "batch": 2, "length": 16}
    for name, start in (("second", source), ("third", tmp_path / "second")):
        headstock.pretrain(other, out=tmp_path / name, start=start, settings=settings, report=False)
    chain = corpus_settings(RunFolder(tmp_path / "third"))
    assert [data["corpus"] for data in chain] == [
        [str(other)],
        [str(other)],
        RunFolder(source).config()["data"]["corpus"],
    ]
    shutil.rmtree(tmp_path / "second")
    assert corpus_settings(RunFolder(tmp_path / "third")) is None


# Only files of a run are replaced


@pytest.mark.parametrize("name", ["notes.txt", "mine/thesis.txt", "checkpoints/old/x.bin", "tensorboard/plan.md"])
def test_folders_with_other_files_are_not_replaced(source, corpus, labelled, call, name):
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_text("user data")
    before = content(source)
    for command in (["pretrain", corpus], ["finetune", "--preset", "gpt-nano", "--train", labelled]):
        err = call(*command, "--out", source, "--overwrite", code=2)[1]
        assert name.partition("/")[0] in err and str(source) in err
    assert content(source) == before


def test_a_config_json_of_another_program_does_not_make_a_run(source, corpus, tmp_path, call):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    (foreign / "model.safetensors").write_bytes(b"weights")
    before = content(foreign)
    assert "config.json" in call("pretrain", corpus, "--out", foreign, "--overwrite", code=2)[1]
    assert "not replaced" in call("export", source, "--to", "huggingface", foreign, "--overwrite", code=2)[1]
    assert "input" in call("import", foreign, "--out", foreign, "--overwrite", code=2)[1]
    assert content(foreign) == before


def test_exports_are_replaced_unless_they_contain_other_files(source, tmp_path, call):
    there = tmp_path / "there"
    call("export", source, "--to", "huggingface", there)
    call("export", source, "--to", "huggingface", there, "--overwrite")
    (there / "notes.txt").write_text("user data")
    before = content(there)
    assert "notes.txt" in call("export", source, "--to", "huggingface", there, "--overwrite", code=2)[1]
    assert content(there) == before


@pytest.mark.parametrize("name", ["predictions.jsonl", "tokenizer.json", "config.json"])
def test_a_run_does_not_replace_its_own_input(source, corpus, tmp_path, call, name):
    (source / "predictions.jsonl").write_text('{"text": "Anne likes Paris.", "label": "a"}\n' * 40)
    link = tmp_path / f"link{(source / name).suffix}"
    link.symlink_to(source / name)
    before = content(source)
    commands = {
        "predictions.jsonl": [["pretrain"], ["finetune", "--preset", "gpt-nano", "--train"]],
        "tokenizer.json": [["pretrain", corpus, "--tokenizer"]],
        "config.json": [["pretrain", corpus, "--config"]],
    }[name]
    for command in commands:
        for path in (source / name, link):
            assert "input" in call(*command, path, "--out", source, "--overwrite", code=2)[1]
    assert content(source) == before


def test_removing_a_run_keeps_other_files(source):
    (source / "checkpoints" / "notes.txt").write_text("user data")
    RunFolder(source).remove()
    assert [path.name for path in source.rglob("*")] == ["checkpoints", "notes.txt"]


def test_labelled_files_may_be_moved_before_a_resume(source, labelled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(labelled, "rows.csv")
    finetune(source, train="rows.csv", out="run", settings=QUICK)
    os.rename("rows.csv", "moved.csv")
    events = []
    finetune(source, train="./moved.csv", out="run", settings=QUICK, resume=True, callbacks=[events.append])
    assert events == [] and headstock.load("run").evaluate()["file"].endswith("moved.csv")
    (tmp_path / "moved.csv").write_text("text,label\n" + "Anne likes Paris.,b\nBen sees the sea.,a\n" * 8)
    with pytest.raises(UserError, match="have changed"):
        finetune(source, train="moved.csv", out="run", settings=QUICK, resume=True)


def test_overwriting_follows_symbolic_links(source, corpus, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(source)
    headstock.pretrain(corpus, out=link, settings=SETTINGS | {"steps": 2}, overwrite=True)
    assert link.is_symlink() and RunFolder(source).results()["steps"] == 2


def test_a_mount_point_is_not_replaced(source, corpus, monkeypatch):
    before = content(source)
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(source))
    with pytest.raises(UserError, match="mount point"):
        headstock.pretrain(corpus, out=source, settings=SETTINGS, overwrite=True)
    assert content(source) == before


def test_files_have_default_permissions(corpus, tmp_path):
    before = os.umask(0o027)
    try:
        headstock.pretrain(corpus, out=tmp_path / "run", settings=SETTINGS)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert "optimizer.safetensors" in modes and set(modes.values()) == {0o640}


# Locks


def test_only_rank_0_locks_the_folder(tmp_path, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with locked_run(RunFolder(tmp_path / "run")):
        monkeypatch.setenv("RANK", "1")
        with locked_run(RunFolder(tmp_path / "run")):
            assert len(list(tmp_path.iterdir())) == 1


def test_a_rejected_run_creates_no_folder(tmp_path):
    with pytest.raises(UserError, match="no text to train on"):
        headstock.pretrain(out=tmp_path / "new" / "runs" / "run")
    assert os.listdir(tmp_path) == []


# Missing files of finished runs


@pytest.mark.parametrize("missing", ["README.md", "model.safetensors", "one bit"])
def test_resuming_restores_missing_files_of_a_finished_run(source, corpus, missing):
    if damaged := missing == "one bit":
        missing = "model.safetensors"
    before = (source / missing).read_bytes()
    (source / missing).unlink()
    if damaged:
        (source / missing).write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    events = []
    headstock.pretrain(corpus, out=source, resume=True, callbacks=[events.append])
    assert events == []
    assert (source / missing).read_bytes() == before


@pytest.mark.parametrize("missing", ["README.md", "members/1/model.safetensors"])
def test_resuming_restores_missing_files_of_a_finished_ensemble(source, labelled, tmp_path, missing):
    options = {"train": labelled, "out": tmp_path / "run", "settings": QUICK | {"ensemble": 2, "adapt_steps": 2}}
    finetune(source, **options)
    before = (tmp_path / "run" / missing).read_bytes()
    (tmp_path / "run" / missing).unlink()
    events = []
    finetune(source, **options, resume=True, callbacks=[events.append])
    assert events == []
    assert (tmp_path / "run" / missing).read_bytes() == before
    assert not list(tmp_path.rglob("*.claim"))


# Weights that do not fit


def test_weights_that_do_not_fit_are_rejected_before_the_folder_is_created(source, corpus, tmp_path):
    out = shutil.copytree(source, tmp_path / "before")
    before = content(out)
    for name in ("new", "before"):
        with pytest.raises(UserError, match="does not fit this model"):
            headstock.pretrain(
                corpus, out=tmp_path / name, start=source, settings={"depth": 2, "steps": 2}, overwrite=True
            )
    assert not (tmp_path / "new").exists()
    assert content(out) == before
