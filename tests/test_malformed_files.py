"""Malformed settings, run folders and Hugging Face folders end in a user's error that names the file."""

import json
import shutil

import pytest

import headstock
from headstock.errors import UserError
from headstock.interop import import_run
from headstock.train.run_folder import BUNDLED_RUNS

DEEP = 100_000  # levels of nesting, far beyond what a decoder's recursion allows


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep.toml", "model = " + "[" * DEEP + "]" * DEEP),
        ("deep.json", '{"model": ' + "[" * DEEP + "]" * DEEP + "}"),
        ("flat.toml", "model = 3\n"),
        ("listed.json", '{"train": [1, 2]}'),
        ("huge.toml", "[model]\ndepth = 99999999999999999999999\n"),
    ],
)
def test_malformed_recipes_are_refused(tmp_path, corpus, name, text):
    recipe = tmp_path / name
    recipe.write_text(text)
    with pytest.raises(UserError, match=rf"{name}|model.depth"):
        headstock.pretrain(corpus, out=tmp_path / "run", config_file=recipe)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("broken", [{"model": 3}, {"task": None}, {"train": "fast"}])
def test_malformed_run_configs_are_refused(tmp_path, broken):
    run = tmp_path / "stock"
    shutil.copytree(BUNDLED_RUNS / "reviews-en", run)
    (run / "manifest.json").unlink()
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | broken))
    with pytest.raises(UserError, match="stock"):
        headstock.load(run)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "[" * DEEP])
def test_malformed_weight_indexes_are_refused(tmp_path, text):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json"):
        import_run(folder, out=tmp_path / "run")
