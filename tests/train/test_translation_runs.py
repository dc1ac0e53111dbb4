"""Translation runs: trained from scratch and from a denoising run, resumed, evaluated and aligned."""

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


def train_translator(out, files, settings=LONG, **options):
    options = {"train": files["train"], "valid": files["valid"], "preset": "seq2seq-nano"} | options
    return finetune(options.pop("run", None), task="translate", out=out, settings=settings, **options)


@pytest.fixture(scope="module")
def translator(files, tmp_path_factory):
    """A trained translator and its results."""
    out = tmp_path_factory.mktemp("runs") / "run"
    return out, train_translator(out, files, test=files["test"])


@pytest.fixture(scope="module")
def denoiser(files, tmp_path_factory):
    """An encoder-decoder pretrained on both languages, but on no translations."""
    folder = tmp_path_factory.mktemp("denoiser")
    files, out = [folder / "corpus.en", folder / "corpus.eo"], folder / "run"
    for side, file in enumerate(files):
        file.write_text("\n".join(row[side] for row in sentences(300, "raw")))
    settings = SMALL | {"vocabulary": 300, "steps": 30, "lr": 1e-2, "tensorboard": False, "documents": "line"}
    return out, headstock.pretrain(files, out=out, preset="seq2seq-nano", settings=settings)


# From scratch


def test_a_translator_learns_and_its_metrics_are_those_of_sacrebleu(translator, files):
    out, results = translator
    pairs = sentences(40, "test")
    translations = [row["text"] for row in map(json.loads, RunFolder(out).predictions.read_text().splitlines())]
    assert np.mean([text == target for text, (_, target) in zip(translations, pairs, strict=True)]) > 0.8
    targets = [row[1] for row in pairs]
    test = results["test"]
    assert test["bleu"] == pytest.approx(sacrebleu.corpus_bleu(translations, [targets]).score / 100)
    assert test["chrf"] == pytest.approx(sacrebleu.corpus_chrf(translations, [targets]).score / 100)
    assert test["signature"]["bleu"].startswith("nrefs:1|case:mixed|eff:no|tok:13a")
    assert test["intervals"]["bleu"][0] <= test["bleu"] <= test["intervals"]["bleu"][1]
    assert results["headline"] == "bleu" and results["from"] == "seq2seq-nano"
    losses = [row["valid_loss"] for row in results["epochs"]]
    assert losses[-1] < 0.5 * losses[0]
    assert "A translator" in (out / "README.md").read_text() and "BLEU" in (out / "README.md").read_text()


def test_a_finished_run_translates_and_evaluates_after_being_moved(translator, files, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(translator[0], moved)
    loaded = headstock.load(moved)
    pairs = sentences(12, "new")
    texts = [row[0] for row in pairs]
    translations = loaded.translate(texts)
    assert translations == [loaded.translate(text)[0] for text in texts]  # independent of the batch
    assert np.mean([text == target for text, (_, target) in zip(translations, pairs, strict=True)]) > 0.7
    assert loaded.translate(["", texts[0], " "]) == ["", translations[0], ""]
    assert loaded.translate(texts, beams=1) == loaded.translate(texts, beams=1, length_penalty=0.5)
    assert all(len(text.split()) <= 2 for text in loaded.translate(texts, max_tokens=2))
    assert [row["text"] for row in loaded.predict(texts)] == translations
    metrics = loaded.evaluate(files["valid"])
    assert metrics["bleu"] == pytest.approx(translator[1]["valid"]["bleu"])
    assert loaded.evaluate()["bleu"] == pytest.approx(translator[1]["test"]["bleu"])


def test_each_side_can_have_its_own_tokenizer(files, tmp_path):
    out = tmp_path / "two"
    train_translator(out, files, SHORT | {"two_tokenizers": True, "vocabulary": 280})
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


def test_a_resumed_run_has_the_same_weights(files, tmp_path):
    def stop(event):
        if event.kind == "valid" and event.state.step > 8:
            raise Interrupted("stopped", 2)

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train_translator(whole, files, SHORT)
    with pytest.raises(Interrupted):
        train_translator(resumed, files, SHORT, callbacks=[stop])
    finetune(out=resumed, task="translate", resume=True)  # everything else is in the run's config.json
    assert RunFolder(resumed).results()["valid"] == RunFolder(whole).results()["valid"]
    expected, actual = RunFolder(whole).weights(), RunFolder(resumed).weights()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_parallel_text_in_two_files(files, tmp_path):
    for name in ("train", "valid"):
        rows = sentences(60, name)
        for side, suffix in enumerate(("en", "eo")):
            (tmp_path / f"{name}.{suffix}").write_text("\n".join(row[side] for row in rows) + "\n")
    (tmp_path / "test.en").write_text("anne sees a dog .\nben likes the cat .\n")
    splits = {name: tmp_path / name for name in ("train", "valid", "test")}
    results = train_translator(
        tmp_path / "run", splits, SHORT, test=splits["test"], columns={"source": "en", "target": "eo"}
    )
    assert "test" not in results  # without targets it is translated, not evaluated
    assert len(RunFolder(tmp_path / "run").predictions.read_text().splitlines()) == 2


# From a denoising run


def test_denoising_of_two_languages_has_a_perplexity(denoiser):
    out, results = denoiser
    assert 1 < results["perplexity"] < 60
    assert results["metrics"]["loss"] == pytest.approx(np.log(results["perplexity"]))
    assert headstock.load(out).evaluate()["perplexity"] == pytest.approx(results["perplexity"])


def test_a_translator_starts_from_the_denoising_weights(denoiser, files, tmp_path):
    source, out, options = RunFolder(denoiser[0]), tmp_path / "run", {"run": denoiser[0], "preset": None}
    settings = {"batch_tokens": 400, "steps": 1, "lr": 1e-9, "weight_decay": 0.0}
    results = train_translator(out, files, settings, **options)
    assert results["from"] == str(denoiser[0])
    before, after = source.weights(), RunFolder(out).weights()
    assert set(before) == set(after)
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
    scratch = train_translator(tmp_path / "scratch", files, settings, init="scratch", **options)
    assert scratch["valid_loss"] > results["valid_loss"]


def test_incompatible_objectives_tasks_and_families_are_rejected(denoiser, corpus, files, tmp_path):
    out = tmp_path / "no"
    for preset, objective, supported in (("seq2seq-nano", "causal", "denoise"), ("gpt-nano", "denoise", "seq2seq")):
        with pytest.raises(UserError, match=f"cannot learn the objective '{objective}'.*{supported}"):
            headstock.pretrain(corpus, out=out, preset=preset, objective=objective)
    with pytest.raises(UserError, match=r"cannot learn it \(families that can: rnn-seq2seq, seq2seq"):
        train_translator(out, files, {}, preset="gpt-nano")
    with pytest.raises(UserError, match="tasks for 'seq2seq': translate"):
        finetune(denoiser[0], task="classify", train=files["train"], out=out)
    with pytest.raises(UserError, match="no head that could be trained alone"):
        train_translator(out, files, SHORT, run=denoiser[0], preset=None, freeze=True)
    with pytest.raises(UserError, match="cannot be averaged"):
        train_translator(out, files, SHORT | {"ensemble": 2})
    with pytest.raises(UserError, match="--preset"):
        train_translator(out, files, SHORT, preset=None)
    with pytest.raises(UserError, match="--preset"):
        train_translator(out, files, SHORT, run=denoiser[0])
    with pytest.raises(UserError, match="--init"):
        train_translator(out, files, SHORT, init="pretrained")
    with pytest.raises(UserError, match="two_tokenizers"):
        train_translator(out, files, {"two_tokenizers": True}, run=denoiser[0], preset=None)
    with pytest.raises(UserError, match="headstock finetune --task translate"):
        headstock.load(denoiser[0]).translate("anne")
    with pytest.raises(UserError, match="encoder-decoder"):
        headstock.load(denoiser[0]).embed("anne")
    assert not out.exists()


# Alignment


def test_an_alignment_has_the_cross_attention_of_the_last_layer(translator):
    loaded = headstock.load(translator[0])
    text = "anne sees a dog ."
    alignment = loaded.align(text)
    assert alignment.text == loaded.translate(text)[0]
    assert alignment.weights.shape == (len(alignment.target), len(alignment.source))
    assert alignment.weights.sum(1) == pytest.approx(np.ones(len(alignment.target)), abs=1e-5)
    assert alignment.source[-1] == alignment.target[-1] == "<eos>"
    assert "".join(alignment.target[:-1]).replace("␣", "") == alignment.text.replace(" ", "")


def test_recorded_attention_reproduces_the_layer_output_without_changing_it(translator):
    loaded = headstock.load(translator[0])
    task, model = loaded.translation_task(), loaded.model
    data = task.prepare(task.read_file(loaded.config.data.valid, config=task.config).select([0]))
    batch = task.examples(data, length=32).batch([0])
    block, memory, records, inputs = model.backbone.decoder.blocks[-1], model.backbone.encode(batch.source), [], []
    with torch.no_grad():
        before = model(batch).hidden
        hook = block.around_cross.register_forward_pre_hook(lambda module, args: inputs.append(args))
        with record_attention(model, records.append):
            during = model(batch).hidden
        hook.remove()
        assert torch.equal(before, during) and torch.equal(model(batch).hidden, before)
        (x, sublayer), cross = inputs[0], block.cross
        h = x if block.around_cross.post else block.around_cross.norm(x)
        keys, values = cross.project_key_value(memory)
        (queries,) = cross.split_heads(
            torch.nn.functional.linear(h, cross.inputs.weight[:32], cross.inputs.bias[:32]), 1
        )
        weights = (queries @ keys.transpose(-1, -2) / 16**0.5).softmax(-1)  # width 32, two heads
        output = cross.output((weights @ values).transpose(1, 2).flatten(2))
        assert torch.allclose(output, sublayer(h), atol=1e-5)
        assert torch.allclose(weights, records[-1].weights, atol=1e-6)
    assert [(record.kind, record.layer) for record in records] == [("encoder", 1), ("decoder", 1), ("cross", 1)]


def test_the_alignment_chart_has_a_cell_for_every_pair_and_two_themes(translator):
    alignment = headstock.load(translator[0]).align("anne sees a dog .")
    svg = alignment_svg(alignment)
    opacities = [float(opacity) for opacity in re.findall(r'fill-opacity="([0-9.]+)"', svg)]
    assert np.reshape(opacities, alignment.weights.shape) == pytest.approx(alignment.weights, abs=6e-4)
    assert "prefers-color-scheme: dark" in svg and "&lt;eos&gt;" in svg
