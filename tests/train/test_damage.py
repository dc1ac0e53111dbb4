"""Damaged runs are rejected: flipped bits, values that are not finite, impossible sizes."""

import json
import random
import shutil

import pytest
import torch

import headstock
from headstock.errors import HeadstockError, UserError
from headstock.train.finetune import finetune
from headstock.train.run_folder import BUNDLED_RUNS, RunFolder
from headstock.train.tensors import read_tensors, write_tensors
from tests.conftest import TINY

SETTINGS = TINY | {"depth": 1, "steps": 2}


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    path.write_text("text,label\n" + "Anne likes Paris.,a\nBen sees the sea.,b\n" * 8)
    return path


@pytest.fixture(scope="module")
def runs(corpus, labelled, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    headstock.pretrain(corpus, out=folder / "language", settings=SETTINGS)
    finetune(folder / "language", train=labelled, out=folder / "labels", settings={"steps": 2, "least_steps": 0})
    return folder


@pytest.fixture
def run(runs, tmp_path):
    return RunFolder(shutil.copytree(runs / "language", tmp_path / "run"))


def flip(file, bit):
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


# Bits


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_every_flipped_bit_is_rejected(run, name):
    file, pick = run.path / name, random.Random(0)
    for _ in range(100):
        bit = pick.randrange(8 * file.stat().st_size)
        flip(file, bit)
        with pytest.raises(UserError, match=name):
            headstock.load(run.path)
        flip(file, bit)
    assert headstock.load(run.path).score("Anne likes Paris.")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "data.json"])
def test_a_flipped_bit_in_a_bundled_run_is_rejected(tmp_path, name):
    bundled = shutil.copytree(BUNDLED_RUNS / "reviews-en", tmp_path / "bundled")
    headstock.load(bundled, device="cpu")
    size = (bundled / name).stat().st_size
    for bit in (77, 4 * size, 8 * size - 5):
        flip(bundled / name, bit)
        with pytest.raises(UserError, match=name):
            headstock.load(bundled, device="cpu")
        flip(bundled / name, bit)


def test_every_bundled_run_has_checksums():
    for bundled in BUNDLED_RUNS.glob("*/config.json"):
        names = RunFolder(bundled.parent).manifest().keys()
        assert names >= {"config.json", "data.json", "tokenizer.json", "model.safetensors"}


def test_damaged_weights_are_neither_exported_nor_fine_tuned(run, labelled, tmp_path):
    flip(run.weights_file, 8 * run.weights_file.stat().st_size - 5)
    for action in (
        lambda: headstock.export_run(run.path, tmp_path / "there"),
        lambda: finetune(run.path, train=labelled, out=tmp_path / "new"),
        lambda: headstock.pretrain("x.txt", start=run.path, out=tmp_path / "new"),
    ):
        with pytest.raises(UserError, match=r"model\.safetensors|x\.txt"):
            action()
    assert not (tmp_path / "there").exists() and not (tmp_path / "new").exists()


def test_a_damaged_manifest_is_rejected(run):
    (run.path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json"):
        headstock.load(run.path)
    (run.path / "manifest.json").write_text('{"model.safetensors": 3}')
    with pytest.raises(UserError, match=r"model\.safetensors"):
        headstock.load(run.path)
    (run.path / "manifest.json").unlink()  # as in runs of earlier versions
    assert headstock.load(run.path).score("Anne likes Paris.")


# Values that are not finite


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_weights_that_are_not_finite_are_rejected(run, value):
    tensors = run.weights()
    tensors["backbone.tokens.weight"][5, 3] = value
    run.save_weights(tensors)
    with pytest.raises(UserError, match=r"backbone\.tokens\.weight"):
        headstock.load(run.path)


def test_outputs_that_are_not_finite_are_errors(runs, tmp_path, call):
    for name in ("language", "labels"):
        run = RunFolder(shutil.copytree(runs / name, tmp_path / name))
        run.save_weights({key: torch.full_like(tensor, 3e38) for key, tensor in run.weights().items()})
        verbs = {"language": ["score", "generate", "embed"], "labels": ["predict", "embed"]}[name]
        for verb in verbs:
            out = call(verb, run.path, "Anne likes Paris.", "--json", "-q", code=1)[0]
            assert "finite" in json.loads(out.splitlines()[-1])["error"], verb


# Sizes


@pytest.mark.parametrize(
    "sizes",
    [
        {"width": 1 << 20, "heads": 1},
        {"vocabulary": 10**9},
        {"depth": 10**9},
        {"depth": 1500},
        {"hidden": 10**12},
        {"context": 10**13, "positions": "rotary"},
        {"context": 10**13},
        {"heads": 10**30, "width": 10**30},
    ],
)
def test_sizes_that_the_weights_do_not_have_allocate_no_memory(run, labelled, tmp_path, sizes):
    resource = pytest.importorskip("resource")
    settings = run.config()
    run.write("config.json", settings | {"model": settings["model"] | sizes})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError):
        headstock.load(run.path)
    with pytest.raises(UserError):
        finetune(run.path, train=labelled, out=tmp_path / "new")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes
    assert not (tmp_path / "new").exists()


def test_the_size_of_buffers_without_weights_is_bounded(corpus, tmp_path):
    headstock.pretrain(corpus, out=tmp_path / "run", settings=SETTINGS | {"positions": "rotary"})
    run = RunFolder(tmp_path / "run")
    settings = run.config()
    for context in (10**11, 10**25):
        run.write("config.json", settings | {"model": settings["model"] | {"context": context}})
        with pytest.raises(HeadstockError, match=r"context|sizes"):
            headstock.load(run.path)
    run.write("config.json", settings | {"model": settings["model"] | {"context": 4096}})
    assert headstock.load(run.path).score("Anne likes Paris.")


def test_tensor_files_round_trip(tmp_path):
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.float16)}
    write_tensors(tmp_path / "x.safetensors", tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_tensors(tmp_path / "x.safetensors").items())
