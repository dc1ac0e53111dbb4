"""Runs are used from URLs as from disk, and what changed or was damaged is fetched again."""

import json
import shutil

import pytest

import headstock
from headstock.errors import HeadstockError, UserError, WorkError
from headstock.experiments.compare_settings import make_arms
from headstock.io import cache_folder
from headstock.train.finetune import finetune
from headstock.train.pretrain import pretrain
from headstock.train.run_folder import open_run
from tests.commands import REVIEWS, write_rows
from tests.conftest import TINY


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):
    out = tmp_path_factory.mktemp("runs") / "stories"
    pretrain(corpus, out=out, settings=TINY | {"keep": 5})
    return out


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTOCK_CACHE", str(tmp_path / "cache"))


def test_a_run_at_a_url_is_used_like_a_local_one(run, bucket, web, sftp, tmp_path):
    shutil.copytree(run, web.folder / "stories", dirs_exist_ok=True)
    shutil.copytree(run, sftp.folder / "stories", dirs_exist_ok=True)
    expected = headstock.load(run).generate("Story", max_tokens=8, temperature=0)
    for url in (bucket.put_folder("runs/stories", run), web.url("stories"), sftp.url("stories")):
        assert headstock.load(url).generate("Story", max_tokens=8, temperature=0) == expected
    checkpoint = open_run(f"{bucket.url}/runs/stories/checkpoints/step-6")
    assert (checkpoint.step, str(checkpoint)) == (6, f"{bucket.url}/runs/stories/checkpoints/step-6")
    assert checkpoint.weights().keys() == open_run(run / "checkpoints" / "step-6").weights().keys()
    assert open_run(f"{bucket.url}/runs/stories/").title == "stories"


def test_finetuning_and_comparing_start_from_a_url(run, bucket, tmp_path):
    url = bucket.put_folder("stories", run)
    rows = bucket.put("rows.csv", write_rows(tmp_path / "rows.csv", REVIEWS))
    out = tmp_path / "fine"
    short = {"least_steps": 0, "epochs": 1, "tensorboard": False}
    finetune(url, train=rows, out=out, settings=short)
    config = json.loads((out / "config.json").read_text())
    assert (config["transfer"]["run"], config["data"]["train"]) == (url, rows)
    assert url in (out / "README.md").read_text()
    finetune(url, train=rows, out=out, settings=short, resume=True)
    assert [str(arm.run) for arm in make_arms([url], ["pretrained", "frozen"])] == [url, url]
    ensemble = tmp_path / "two"
    finetune(url, train=rows, out=ensemble, settings=short | {"ensemble": 2})
    place = bucket.put_folder("two", ensemble)
    text = REVIEWS[0][0]
    assert headstock.load(place).predict([text]) == headstock.load(ensemble).predict([text])


def test_changed_and_damaged_files_are_fetched_again(run, bucket):
    url = bucket.put_folder("stories", run)
    opened = open_run(url)
    weights, size = opened.weights_file, opened.weights_file.stat().st_size
    changed = weights.stat().st_mtime_ns
    assert open_run(url).weights_file.stat().st_mtime_ns == changed, "nothing changed, so nothing is downloaded"
    data = bytearray(weights.read_bytes())
    data[size // 2] ^= 1
    weights.write_bytes(data)  # as long as before, so only the manifest tells
    assert open_run(url).weights()
    bucket.put("stories/results.json", json.dumps({"new": 1}).encode())
    assert open_run(url).read("results.json") == {"new": 1}
    bucket.delete("stories/results.json")
    assert not open_run(url).is_finished()
    bucket.put("stories/model.safetensors", bytes(data))  # damaged there: never used
    with pytest.raises(WorkError, match="damaged or being written"):
        open_run(url)


def test_without_the_manifest_a_damaged_run_would_be_used(run, bucket):
    """The control: the flipped bit is noticed by the manifest alone."""
    data = bytearray((run / "model.safetensors").read_bytes())
    data[-3] ^= 1
    url = bucket.put_folder("stories", run)
    bucket.put("stories/model.safetensors", bytes(data))
    with pytest.raises(HeadstockError):
        open_run(url)
    bucket.delete("stories/manifest.json")
    assert open_run(url).weights()


def test_errors_name_the_url(run, bucket, tmp_path):
    for url in (f"{bucket.url}/none", f"{bucket.url}/none/checkpoints/step-1"):
        with pytest.raises(UserError, match=r"none.*: no such"):
            open_run(url)
    url = bucket.put_folder("stories", run)
    with pytest.raises(UserError, match="has not been downloaded"):
        open_run(url, download=False)
    open_run(url)
    assert open_run(url, download=False).exists()
    with pytest.raises(UserError, match="no such checkpoint"):
        open_run(f"{url}/checkpoints/step-7")


def test_names_in_a_manifest_do_not_lead_out_of_the_run(run, bucket, tmp_path):
    url = bucket.put_folder("stories", run)
    step = f"{url}/checkpoints/step-6"
    manifest = json.loads((run / "checkpoints" / "step-6" / "manifest.json").read_text())
    bucket.put("evil.txt", b"evil")
    entry = {"bytes": 4, "sha256": "0" * 64}
    names = ("../../../evil.txt", "/evil.txt", str(tmp_path / "evil.txt"), "..\\evil.txt", ".")
    bucket.put("stories/checkpoints/step-6/manifest.json", json.dumps(manifest | dict.fromkeys(names, entry)).encode())
    with pytest.raises(UserError):
        open_run(step).weights()
    assert not list(tmp_path.rglob("evil.txt"))
    assert all(p.resolve().is_relative_to((tmp_path / "cache").resolve()) for p in cache_folder().rglob("*"))
