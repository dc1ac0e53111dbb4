"""`headstock translate`, and fine-tuning without a pretrained run."""

import io
import json
import sys

import pytest

from tests.tasks.parallel import QUICK, sentences, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    for name, count in (("train", 80), ("valid", 10)):
        write(folder / f"{name}.tsv", sentences(count, name))
    return folder


@pytest.fixture(scope="module")
def run(folder):
    from headstock.train.finetune import finetune

    settings, files = QUICK | {"epochs": 2.0}, {name: folder / f"{name}.tsv" for name in ("train", "valid")}
    finetune(preset="seq2seq-nano", task="translate", out=folder / "run", settings=settings, **files)
    return folder / "run"


def test_finetune_without_a_run_makes_one_from_a_preset(call, folder, tmp_path):
    settings = [word for name, value in (QUICK | {"epochs": 1}).items() for word in ("--set", f"{name}={value}")]
    arguments = ["finetune", "--preset", "seq2seq-nano", "--task", "translate", "--train", folder / "train.tsv"]
    out, _ = call(*arguments, "--out", tmp_path / "run", *settings, "-q")
    assert "BLEU" in out and f"headstock translate {tmp_path / 'run'}" in out
    assert (tmp_path / "run" / "report.html").read_text().count("reference <b>")
    _, err = call("finetune", "--task", "translate", "--train", folder / "train.tsv", "--out", tmp_path / "x", code=2)
    assert "--preset" in err


def test_texts_files_and_a_pipe_give_the_same_translations(call, run, tmp_path, monkeypatch):
    texts = [row[0] for row in sentences(5, "said")]
    out, _ = call("translate", run, *texts, "--beams", 2, "--json", "-q")
    output = json.loads(out.splitlines()[-1])
    assert len(output["texts"]) == 5 and output["beams"] == 2
    (tmp_path / "texts.txt").write_text("\n".join([*texts[:2], "", *texts[2:]]) + "\n")
    call("translate", run, "--file", tmp_path / "texts.txt", "--beams", 2, "--out", tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text().splitlines() == [*output["texts"][:2], "", *output["texts"][2:]]
    (tmp_path / "texts.en").write_text("\n".join(texts) + "\n")  # one side of a pair of files
    out, _ = call("translate", run, "--file", tmp_path / "texts.en", "--beams", 2)
    assert out.splitlines() == output["texts"]
    _, err = call("translate", run, "--file", tmp_path / "nothing.en", code=2)
    assert "nothing.en: no such file" in err
    table = write(tmp_path / "rows.tsv", [(text, "?") for text in texts])
    out, _ = call("translate", run, "--file", table, "--beams", 2)
    assert out.splitlines() == output["texts"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(texts).encode())))
    out, _ = call("translate", run, "--beams", 2)
    assert out.splitlines() == output["texts"]


def test_an_alignment_is_drawn_as_a_page_or_a_picture(call, run, tmp_path):
    for name, beginning in (("map.svg", "<svg"), ("map.html", "<!doctype html>")):
        out, _ = call("translate", run, "anne sees a dog .", "--alignment", tmp_path / name)
        assert (tmp_path / name).read_text().startswith(beginning) and name in out
    _, err = call("translate", run, "anne", "--alignment", tmp_path / "map.svg", code=2)
    assert f"--alignment {tmp_path / 'map.svg'}: already exists" in err
    for arguments in (["a", "b"], ["a"]):
        _, err = call("translate", run, *arguments, "--alignment", tmp_path / "map.png", code=2)
    assert "must end in .svg or .html" in err


def test_mistakes_are_named(call, run, corpus, tiny, tmp_path):
    import headstock

    headstock.pretrain(corpus, out=tmp_path / "gpt", settings=tiny | {"steps": 1})
    _, err = call("translate", tmp_path / "gpt", "anne", code=2)
    assert "headstock finetune --task translate" in err
    _, err = call("translate", run, "anne", "--beams", 0, code=2)
    assert "beams: must be 1 or more, not 0" in err
    _, err = call("translate", run, "anne", "--file", "x.txt", code=2)
    assert "give texts or --file, not both" in err
    out, err = call("translate", run, "anne sees a dog . " * 12)
    assert "1 sentence is longer than a row of 32 tokens" in err and out.strip()
