"""Existing output files are replaced only with --overwrite, input files never."""

import json

import pytest

WRITERS = {
    "predict": (["runs/none", "a text"], "p.jsonl"),
    "embed": (["runs/none", "a text"], "v.npy"),
    "translate": (["runs/none", "a text"], "t.txt"),
    "plan": (["corpus.txt"], "mine.toml"),
    "bench": ([], "bench.json"),
    "tokenizer train": (["corpus.txt"], "tokenizer.json"),
    "explain params": (["--preset", "gpt-nano"], "p.html"),
    "explain model": (["--preset", "gpt-nano"], "m.svg"),
    "explain layer": (["reviews-en", "a text"], "l.html"),
    "explain mask": ([], "mask.svg"),
    "explain positions": ([], "positions.html"),
    "explain attention": (["reviews-en", "a text"], "a.html"),
    "explain gradients": (["reviews-en", "a text"], "g.html"),
    "explain residual": (["reviews-en", "a text"], "r.html"),
    "explain prediction": (["reviews-en", "a text"], "p.svg"),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("Anne sees Paris.\n" * 30)
    return tmp_path


@pytest.mark.parametrize("verb", WRITERS)
def test_an_existing_output_is_kept(call, here, verb):
    arguments, name = WRITERS[verb]
    (here / name).write_text("mine")
    _, err = call(*verb.split(), *arguments, "--out", name, code=2)
    assert name in err and "--overwrite" in err
    assert (here / name).read_text() == "mine"


@pytest.mark.parametrize("options", [["--words"], ["--pool", "none"]])
def test_the_file_beside_an_array_is_kept_too(call, here, options):
    (here / "v.tokens.jsonl").write_text("mine")
    _, err = call("embed", "runs/none", "a text", *options, "--out", "v.npy", code=2)
    assert "v.tokens.jsonl" in err and "--overwrite" in err


def test_overwrite_replaces_an_output(call, here):
    (here / "model.svg").write_text("mine")
    call("explain", "model", "--preset", "gpt-nano", "--out", "model.svg", "--overwrite")
    assert (here / "model.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("spelling", ["d.csv", "./d.csv", "sub/../d.csv", "link.csv"])
def test_an_input_is_never_replaced(call, here, spelling):
    (here / "sub").mkdir()
    (here / "d.csv").write_text("text\nAnne sees Paris.\n")
    (here / "link.csv").symlink_to("d.csv")
    for verb in ("predict", "embed", "translate"):
        _, err = call(verb, "runs/none", "--file", "d.csv", "--out", spelling, "--overwrite", code=2)
        assert "input" in err and "d.csv" in err
    assert (here / "d.csv").read_text() == "text\nAnne sees Paris.\n"
    _, err = call("tokenizer", "train", "corpus.txt", "--out", "corpus.txt", "--overwrite", code=2)
    assert "input" in err
    assert (here / "corpus.txt").read_text().startswith("Anne")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "checkpoints/step-3/model.safetensors"])
def test_files_of_the_run_in_use_are_never_replaced(call, here, name):
    file = here / "run" / name
    file.parent.mkdir(parents=True)
    file.write_text("weights")
    (here / "run" / "config.json").write_text(json.dumps({}))
    before = file.read_text()
    _, err = call("predict", "run", "a text", "--out", file, "--overwrite", code=2)
    assert "input" in err and "run" in err
    assert file.read_text() == before


def test_a_folder_is_no_output_file(call, here):
    (here / "folder").mkdir()
    _, err = call("predict", "runs/none", "a text", "--out", "folder", "--overwrite", code=2)
    assert "folder" in err
