"""The mirror of a run is whole at any time, never stops the run, and a run restored from it ends with the same bits."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from headstock.data import remote
from headstock.errors import UserError
from headstock.io import checksum_mismatch, layout_files, sha256
from headstock.logs import messages_to
from headstock.train import mirror
from headstock.train.finetune import finetune
from headstock.train.pretrain import pretrain
from headstock.train.run_folder import LAYOUT, RunFolder, open_run
from tests.commands import REVIEWS, set_options, write_rows
from tests.train.processes import BackgroundProcess


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "RETRY_SECONDS", (0.01,))
    yield
    mirror._mirrors.clear()


@pytest.fixture
def settings(tiny) -> dict:
    return tiny | {"steps": 8, "validate_every": 2, "keep": 2}


def local_files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in layout_files(folder, LAYOUT)}


def files_at(url: str) -> dict[str, bytes]:
    files = mirror.list_run(remote.open_url(url))
    return {name: file.fs.cat_file(file.path) for name, file in files.items()}


def weights(folder: Path) -> str:
    return sha256(folder / "model.safetensors")


# Writing


def test_the_mirror_of_a_finished_run_equals_its_folder(bucket, corpus, tmp_path, settings, call):
    url, out = f"{bucket.url}/runs/mine", tmp_path / "run"
    options = set_options(settings | {"mirror": url, "tensorboard": True})
    printed, log = call("pretrain", corpus, "--out", out, "--json", *options)
    expected = local_files(out)
    assert files_at(url) == expected
    assert {"report.html", "README.md", "results.json", "checkpoints/step-8/manifest.json"} < expected.keys()
    assert not any(name.startswith("checkpoints/step-2/") for name in expected), "pruned here and there"
    summary = json.loads(printed.splitlines()[-1])["mirror"]
    assert summary["complete"] and summary["url"] == url and summary["failures"] == 0
    assert summary["bytes"] < 3 * sum(map(len, expected.values())), "each file of a checkpoint is sent once"
    assert f"mirrored to {url}" in log
    assert open_run(url).weights().keys() == RunFolder(out).weights().keys()


def test_mirrors_on_sftp_and_on_disk_hold_ensembles(sftp, corpus, tmp_path, settings):
    source = tmp_path / "source"
    pretrain(corpus, out=source, settings=settings | {"steps": 2, "mirror": (tmp_path / "copy").as_uri()})
    assert files_at((tmp_path / "copy").as_uri()) == local_files(source)
    rows, out, url = write_rows(tmp_path / "rows.csv", REVIEWS), tmp_path / "two", sftp.url("mirrors/two")
    short = {"least_steps": 0, "epochs": 1, "ensemble": 2, "tensorboard": False, "adapt_steps": 2, "batch": 8}
    finetune(source, train=rows, out=out, settings=short | {"mirror": url})
    assert files_at(url) == local_files(out)
    assert any(name.startswith("members/1/checkpoints/") for name in local_files(out))
    assert "correct-horse" not in (out / "config.json").read_text() and "***" in (out / "config.json").read_text()
    assert not (sftp.folder / "mirrors" / "two" / "checkpoints" / "step-1").exists()


def half_checkpoints(url: str) -> list[str]:
    """Files of checkpoints at a URL that do not match the manifest beside them."""
    files, wrong = files_at(url), []
    for name in files:
        folder, _, file = name.rpartition("/")
        if file == "manifest.json" and mirror.in_checkpoint(name):
            for entry, recorded in json.loads(files[name]).items():
                data = files.get(f"{folder}/{entry}", b"")
                if len(data) != recorded["bytes"]:
                    wrong.append(f"{folder}/{entry}")
    return wrong


def test_a_reader_never_sees_a_part_of_a_checkpoint(corpus, tmp_path, settings, monkeypatch):
    url, seen = (tmp_path / "copy").as_uri(), []
    (tmp_path / "copy").mkdir()

    def watched(method):
        def call(self, *arguments):
            method(self, *arguments)
            if threading.current_thread() is self.thread:
                seen.extend(half_checkpoints(url))

        return call

    monkeypatch.setattr(mirror.Mirror, "put", watched(mirror.Mirror.put))
    monkeypatch.setattr(mirror.Mirror, "delete", watched(mirror.Mirror.delete))
    pretrain(corpus, out=tmp_path / "run", settings=settings | {"mirror": url, "keep": 1})
    assert seen == []

    # the control: a mirror that sends the manifests first
    def manifest_first(self, folder, local):
        self.send(f"{folder}/manifest.json", local[f"{folder}/manifest.json"])

    monkeypatch.setattr(mirror.Mirror, "adopt", manifest_first)
    pretrain(corpus, out=tmp_path / "run", settings=settings | {"mirror": url, "keep": 1}, overwrite=True)
    assert seen


def test_training_does_not_wait_and_one_transfer_runs_at_a_time(corpus, tmp_path, settings, monkeypatch):
    running, most, transfers, saves = 0, 0, [], []
    real, saved = mirror.Mirror.transfer, mirror.checkpoint_saved
    release = threading.Event()

    def slow(self):
        nonlocal running, most
        running += 1
        most = max(most, running)
        if transfers:
            release.wait(60)  # the second transfer lasts until all checkpoints are written
        transfers.append(len(saves))
        real(self)
        running -= 1

    def count(run):
        saves.append(time.monotonic())
        saved(run)
        if len(saves) == 4:
            release.set()

    monkeypatch.setattr(mirror.Mirror, "transfer", slow)
    monkeypatch.setattr("headstock.train.checkpoint.checkpoint_saved", count)
    url = (tmp_path / "copy").as_uri()
    pretrain(corpus, out=tmp_path / "run", settings=settings | {"mirror": url})
    assert len(saves) == 4 and most == 1
    assert len(transfers) <= 4, "a transfer that is not finished is followed by one, not by one for each checkpoint"
    assert files_at(url) == local_files(tmp_path / "run")


def test_failures_are_warned_about_and_made_up_for(corpus, tmp_path, settings, monkeypatch):
    real, failing = mirror.Mirror.put, iter([True] * 2)

    def unreliable(self, *arguments):
        if next(failing, False):
            raise ConnectionError("connection lost")
        real(self, *arguments)

    url, lines = (tmp_path / "copy").as_uri(), []
    monkeypatch.setattr(mirror, "check_writable", lambda mirror: None)
    monkeypatch.setattr(mirror.Mirror, "put", unreliable)
    with messages_to(lines.append):
        pretrain(corpus, out=tmp_path / "run", settings=settings | {"mirror": url})
    assert any(line.startswith("mirror: ") and "cannot be reached" in line for line in lines)
    assert files_at(url) == local_files(tmp_path / "run")
    # a mirror that cannot be written to at all: the run ends as without it, and says so
    failing, lines = iter([True] * 1000), []
    with messages_to(lines.append):
        pretrain(corpus, out=tmp_path / "other", settings=settings | {"mirror": f"{url}-other"})
    assert any("the mirror is incomplete" in line for line in lines)
    assert weights(tmp_path / "other") == weights(tmp_path / "run")


def test_a_wrong_mirror_is_refused_before_training(bucket, web, corpus, tmp_path, settings):
    def refusal(url, **options) -> str:
        with pytest.raises(UserError) as error:
            pretrain(corpus, out=tmp_path / "run", settings=settings | {"mirror": url}, **options)
        return str(error.value)

    assert "URL that can be written to" in refusal(web.url("run"))
    assert "URL that can be written to" in refusal("copy")
    assert "no such bucket" in refusal("s3://no-such-bucket/run")
    assert not (tmp_path / "run").exists()
    url = bucket.put("run/config.json", b"{}").removesuffix("/config.json")
    bucket.put("run/checkpoints/step-900/manifest.json", b"{}")
    bucket.put("run/mine.txt", b"kept")
    assert "holds a run already" in refusal(url)
    pretrain(corpus, out=tmp_path / "run", settings=settings | {"mirror": url}, overwrite=True)
    assert files_at(url) == local_files(tmp_path / "run")
    assert bucket.get("run/mine.txt") == b"kept"


# Restoring


def pretrain_slowly(corpus: Path, out: Path, settings: dict) -> None:
    pretrain(corpus, out=out, settings=settings, callbacks=[lambda event: time.sleep(0.05)])


def test_a_killed_run_continues_on_another_machine_with_the_same_bits(bucket, corpus, tmp_path, settings, monkeypatch):
    settings |= {"steps": 24, "validate_every": 4}
    whole = tmp_path / "whole"
    pretrain(corpus, out=whole, settings=settings)
    url, out = f"{bucket.url}/mine", tmp_path / "run"
    process = BackgroundProcess(tmp_path / "log", pretrain_slowly, corpus, out, settings | {"mirror": url})
    try:
        process.wait_until(lambda: any(name.endswith("/manifest.json") and "/step-" in name for name in bucket.names()))
    finally:
        process.kill()
    steps = {name.split("/")[2] for name in bucket.names() if name.endswith("/manifest.json") and "step-" in name}
    assert steps and not (out / "results.json").exists()
    bucket.put("mine/checkpoints/step-99/model.safetensors", b"half a checkpoint: no manifest")
    shutil.rmtree(out)
    monkeypatch.setenv("HEADSTOCK_CACHE", str(tmp_path / "other-machine"))
    lines: list[str] = []
    with messages_to(lines.append):
        pretrain(corpus, out=out, settings=settings | {"mirror": url}, resume=True)
    assert any(line.startswith("restoring") for line in lines) and any("resuming from" in line for line in lines)
    assert weights(out) == weights(whole)
    rows = [
        [{k: row[k] for k in row if "second" not in k} for row in RunFolder(f).read_metrics()] for f in (out, whole)
    ]
    assert rows[0] == rows[1]
    assert files_at(url) == local_files(out), "the half checkpoint is gone, too"


def test_a_mirror_that_is_ahead_replaces_the_folder_and_a_damaged_one_does_not(corpus, tmp_path, settings):
    copy, out = tmp_path / "copy", tmp_path / "run"
    settings |= {"mirror": copy.as_uri(), "keep": 9}
    pretrain(corpus, out=out, settings=settings)
    expected = weights(out)
    for name in ("step-8", "step-6"):
        shutil.rmtree(out / "checkpoints" / name)  # as if this machine had been left behind
    for name in ("results.json", "model.safetensors"):
        (out / name).unlink()
    lines: list[str] = []
    with messages_to(lines.append):
        pretrain(corpus, out=out, settings=settings, resume=True)
    assert any("restoring" in line for line in lines) and weights(out) == expected
    # of a damaged checkpoint at the mirror nothing is used
    data = bytearray((copy / "checkpoints/step-8/model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "checkpoints/step-8/model.safetensors").write_bytes(data)
    (copy / "results.json").unlink()
    shutil.rmtree(out)
    lines.clear()
    with messages_to(lines.append):
        pretrain(corpus, out=out, settings=settings, resume=True)
    assert any("step-8 is damaged" in line for line in lines)
    assert any("resuming from" in line and "step-6" in line for line in lines)
    assert weights(out) == expected
    assert checksum_mismatch(out / "model.safetensors", RunFolder(out).manifest()["model.safetensors"]) is None
    other = tmp_path / "other.txt"
    other.write_text(corpus.read_text() + "\n\nanother story")
    pretrain(other, out=tmp_path / "second", settings=settings | {"mirror": None})
    with pytest.raises(UserError, match="on other data"):
        pretrain(other, out=tmp_path / "second", settings=settings, resume=True)
