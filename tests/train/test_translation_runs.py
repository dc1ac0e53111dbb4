"""A translator from files to translations: made from nothing and from raw text, stopped, resumed and used."""

import json
import re
import shutil

import numpy as np
import pytest
import sacrebleu
import torch

import headstock
from headstock.errors import UserError
from headstock.model.attention_weights import record_attention
from headstock.report.heatmap import alignment_svg
from headstock.train.distributed import Interrupted
from headstock.train.finetune import finetune
from headstock.train.run_folder import RunFolder
from tests.tasks.parallel import QUICK, SMALL, sentences, write

LONG = QUICK | {"epochs": 16.0}
SHORT = QUICK | {"epochs": 1.0}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    return {
        name: write(folder / f"{name}.tsv", sentences(n, name))
        for name, n in (("train", 300), ("valid", 40), ("test", 40))
    }


def learn(out, files, settings=LONG, **more):
    given = {"train": files["train"], "valid": files["valid"], "preset": "seq2seq-nano"} | more
    return finetune(given.pop("run", None), task="translate", out=out, settings=settings, **given)


@pytest.fixture(scope="module")
def made(files, tmp_path_factory):
    """A translator that knows the language, and the results of making it."""
    out = tmp_path_factory.mktemp("runs") / "translator"
    return out, learn(out, files, test=files["test"])


@pytest.fixture(scope="module")
def stock(files, tmp_path_factory):
    """An encoder-decoder that has seen both languages, but no translation."""
    folder = tmp_path_factory.mktemp("stock")
    files, out = [folder / "corpus.en", folder / "corpus.eo"], folder / "run"
    for place, file in enumerate(files):
        file.write_text("\n".join(row[place] for row in sentences(300, "raw")))
    settings = SMALL | {"vocabulary": 300, "steps": 30, "lr": 1e-2, "tensorboard": False, "documents": "line"}
    return out, headstock.pretrain(files, out=out, preset="seq2seq-nano", settings=settings)


# Made


def test_a_translator_learns_a_language_and_its_numbers_are_sacrebleus(made, files):
    out, results = made
    pairs = sentences(40, "test")
    said = [row["text"] for row in map(json.loads, RunFolder(out).predictions.read_text().splitlines())]
    right = np.mean([text == wanted for text, (_, wanted) in zip(said, pairs, strict=True)])
    assert right > 0.8
    wanted = [row[1] for row in pairs]
    test = results["test"]
    assert test["bleu"] == pytest.approx(sacrebleu.corpus_bleu(said, [wanted]).score / 100)
    assert test["chrf"] == pytest.approx(sacrebleu.corpus_chrf(said, [wanted]).score / 100)
    assert test["signature"]["bleu"].startswith("nrefs:1|case:mixed|eff:no|tok:13a")
    assert test["intervals"]["bleu"][0] <= test["bleu"] <= test["intervals"]["bleu"][1]
    assert results["headline"] == "bleu" and results["from"] == "seq2seq-nano"
    losses = [row["valid_loss"] for row in results["epochs"]]
    assert losses[-1] < 0.5 * losses[0]
    assert "A translator" in (out / "README.md").read_text() and "BLEU" in (out / "README.md").read_text()


def test_a_finished_run_translates_evaluates_and_moves(made, files, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(made[0], moved)
    loaded = headstock.load(moved)
    pairs = sentences(12, "new")
    texts = [row[0] for row in pairs]
    said = loaded.translate(texts)
    assert said == [loaded.translate(text)[0] for text in texts]  # a batch is what its rows are alone
    assert np.mean([text == wanted for text, (_, wanted) in zip(said, pairs, strict=True)]) > 0.7
    assert loaded.translate(["", texts[0], " "]) == ["", said[0], ""]
    assert loaded.translate(texts, beams=1) == loaded.translate(texts, beams=1, length_penalty=0.5)
    assert all(len(text.split()) <= 2 for text in loaded.translate(texts, max_tokens=2))
    assert [row["text"] for row in loaded.predict(texts)] == said
    metrics = loaded.evaluate(files["valid"])
    assert metrics["bleu"] == pytest.approx(made[1]["valid"]["bleu"])
    assert loaded.evaluate()["bleu"] == pytest.approx(made[1]["test"]["bleu"])


def test_each_side_may_have_a_tokenizer_of_its_own(files, tmp_path):
    out = tmp_path / "two"
    learn(out, files, SHORT | {"two_tokenizers": True, "vocabulary": 280})
    run = RunFolder(out)
    tokenizer = run.tokenizer()
    assert tokenizer.source_tokenizer is not None and tokenizer.source_tokenizer.fingerprint != tokenizer.fingerprint
    model = run.config()["model"]
    assert (model["vocabulary"], model["source_vocabulary"]) == (
        tokenizer.vocabulary,
        tokenizer.source_tokenizer.vocabulary,
    )
    assert len(headstock.load(out).translate(["anne sees a dog ."])) == 1
    run.source_tokenizer_file.unlink()
    with pytest.raises(UserError, match=r"source_tokenizer.json is missing"):
        headstock.load(out)


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(files, tmp_path):
    def stop(event):
        if event.kind == "valid" and event.state.step > 8:
            raise Interrupted("stopped", 2)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    learn(whole, files, SHORT)
    with pytest.raises(Interrupted):
        learn(parts, files, SHORT, callbacks=[stop])
    finetune(out=parts, task="translate", resume=True)  # the run itself knows what it is made from
    assert RunFolder(parts).results()["valid"] == RunFolder(whole).results()["valid"]
    one, other = RunFolder(whole).weights(), RunFolder(parts).weights()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_two_files_of_a_pair_serve_as_well_as_a_table(files, tmp_path):
    for name in ("train", "valid"):
        rows = sentences(60, name)
        for place, end in enumerate(("en", "eo")):
            (tmp_path / f"{name}.{end}").write_text("\n".join(row[place] for row in rows) + "\n")
    (tmp_path / "test.en").write_text("anne sees a dog .\nben likes the cat .\n")
    sides = {name: tmp_path / name for name in ("train", "valid", "test")}
    results = learn(tmp_path / "run", sides, SHORT, test=sides["test"], columns={"source": "en", "target": "eo"})
    assert "test" not in results  # it has no target, so it is translated, not measured
    assert len(RunFolder(tmp_path / "run").predictions.read_text().splitlines()) == 2


# From raw text


def test_denoising_reads_two_languages_and_tells_its_perplexity(stock):
    out, results = stock
    assert 1 < results["perplexity"] < 60
    assert results["metrics"]["loss"] == pytest.approx(np.log(results["perplexity"]))
    assert headstock.load(out).evaluate()["perplexity"] == pytest.approx(results["perplexity"])


def test_a_translator_begins_with_what_denoising_learned(stock, files, tmp_path):
    source, out, more = RunFolder(stock[0]), tmp_path / "fine", {"run": stock[0], "preset": None}
    still = {"batch_tokens": 400, "steps": 1, "lr": 1e-9, "weight_decay": 0.0}
    results = learn(out, files, still, **more)
    assert results["from"] == str(stock[0])
    before, after = source.weights(), RunFolder(out).weights()
    assert set(before) == set(after)
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
    fresh = learn(tmp_path / "scratch", files, still, init="scratch", **more)
    assert fresh["valid_loss"] > results["valid_loss"]


def test_objectives_tasks_and_families_that_do_not_fit_are_refused(stock, corpus, files, tmp_path):
    out = tmp_path / "no"
    for preset, objective, able in (("seq2seq-nano", "causal", "denoise"), ("gpt-nano", "denoise", "seq2seq")):
        with pytest.raises(UserError, match=f"cannot learn the objective '{objective}'.*{able}"):
            headstock.pretrain(corpus, out=out, preset=preset, objective=objective)
    with pytest.raises(UserError, match=r"cannot learn it \(families that can: seq2seq"):
        learn(out, files, {}, preset="gpt-nano")
    with pytest.raises(UserError, match="tasks for 'seq2seq': translate"):
        finetune(stock[0], task="classify", train=files["train"], out=out)
    with pytest.raises(UserError, match="no head that could be trained alone"):
        learn(out, files, SHORT, run=stock[0], preset=None, freeze=True)
    with pytest.raises(UserError, match="cannot be averaged"):
        learn(out, files, SHORT | {"ensemble": 2})
    with pytest.raises(UserError, match="--preset"):
        learn(out, files, SHORT, preset=None)
    with pytest.raises(UserError, match="--preset"):
        learn(out, files, SHORT, run=stock[0])
    with pytest.raises(UserError, match="--init"):
        learn(out, files, SHORT, init="pretrained")
    with pytest.raises(UserError, match="two_tokenizers"):
        learn(out, files, {"two_tokenizers": True}, run=stock[0], preset=None)
    with pytest.raises(UserError, match="headstock finetune --task translate"):
        headstock.load(stock[0]).translate("anne")
    with pytest.raises(UserError, match="encoder-decoder"):
        headstock.load(stock[0]).embed("anne")
    assert not out.exists()


# Where it looks


def test_an_alignment_is_what_the_last_layer_mixed_by(made):
    loaded = headstock.load(made[0])
    text = "anne sees a dog ."
    found = loaded.align(text)
    assert found.text == loaded.translate(text)[0]
    assert found.weights.shape == (len(found.target), len(found.source))
    assert found.weights.sum(1) == pytest.approx(np.ones(len(found.target)), abs=1e-5)
    assert found.source[-1] == found.target[-1] == "<eos>"
    assert "".join(found.target[:-1]).replace("␣", "") == found.text.replace(" ", "")


def test_looking_changes_nothing_and_its_weights_give_the_layers_own_output(made):
    loaded = headstock.load(made[0])
    task, model = loaded.translation_task(), loaded.model
    data = task.prepare(task.read_file(loaded.config.data.valid, config=task.config).select([0]))
    batch = task.examples(data, length=32).batch([0])
    block, memory, seen, across = model.backbone.decoder.blocks[-1], model.backbone.encode(batch.source), [], []
    with torch.no_grad():
        before = model(batch).hidden
        hook = block.around_cross.register_forward_pre_hook(lambda module, given: across.append(given))
        with record_attention(model, seen.append):
            during = model(batch).hidden
        hook.remove()
        assert torch.equal(before, during) and torch.equal(model(batch).hidden, before)
        (x, sublayer), cross = across[0], block.cross
        h = x if block.around_cross.post else block.around_cross.norm(x)
        keys, values = cross.project_key_value(memory)
        (queries,) = cross.split_heads(
            torch.nn.functional.linear(h, cross.inputs.weight[:32], cross.inputs.bias[:32]), 1
        )
        weights = (queries @ keys.transpose(-1, -2) / 16**0.5).softmax(-1)  # width 32, two heads
        again = cross.output((weights @ values).transpose(1, 2).flatten(2))
        assert torch.allclose(again, sublayer(h), atol=1e-5)
        assert torch.allclose(weights, seen[-1].weights, atol=1e-6)
    assert [(record.kind, record.layer) for record in seen] == [("encoder", 1), ("decoder", 1), ("cross", 1)]


def test_the_picture_has_a_square_for_every_pair_and_two_looks(made):
    found = headstock.load(made[0]).align("anne sees a dog .")
    picture = alignment_svg(found)
    shades = [float(shade) for shade in re.findall(r'fill-opacity="([0-9.]+)"', picture)]
    assert np.reshape(shades, found.weights.shape) == pytest.approx(found.weights, abs=6e-4)
    assert "prefers-color-scheme: dark" in picture and "&lt;eos&gt;" in picture
