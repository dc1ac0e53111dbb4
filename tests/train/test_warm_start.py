"""Translators that start from a causal or masked run: both stacks from its weights, cross-attention new."""

import pytest
import torch

import headstock
from headstock.errors import UserError
from headstock.model.batch import Batch
from headstock.train.finetune import finetune
from headstock.train.models import build_model, build_task, load_source_weights
from headstock.train.resolve import resolve_finetune_config
from headstock.train.run_folder import RunFolder
from tests.conftest import TINY
from tests.tasks.parallel import sentences, write

QUICK = {"epochs": 1.0, "batch": 8, "lr": 1e-3, "tensorboard": False, "beams": 1}


@pytest.fixture(scope="module", params=["gpt-nano", "bert-nano", "modern-nano"])
def source(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("warm")
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(" ".join(row) for row in sentences(300, "raw")))
    settings = TINY | {"steps": 20, "documents": "line"}
    headstock.pretrain(corpus, out=folder / "run", preset=request.param, settings=settings, device="cpu")
    return folder / "run"


def test_both_stacks_compute_what_the_source_computes(source):
    run = RunFolder(source)
    tokenizer = run.tokenizer()
    config = resolve_finetune_config(run, "translate", None, {"data.train": "x"})
    task = build_task(config, tokenizer)
    model = build_model(config, task).eval()
    load_source_weights(model, task, run.weights(), source=str(source))
    pretrained = headstock.load(source).model.eval()
    tokens = torch.tensor([tokenizer.encode("mi amas vin")])
    expected = {causal: pretrained(Batch(tokens, causal=causal)).hidden for causal in (True, False)}
    torch.testing.assert_close(model.backbone.encode(Batch(tokens)), expected[False])
    for block in model.backbone.decoder.blocks:  # without its new cross-attention, the decoder is the source too
        block.cross.output.weight.data.zero_()
        if block.cross.output.bias is not None:
            block.cross.output.bias.data.zero_()
    decoded = model.backbone(Batch(tokens, source=Batch(tokens))).hidden
    if config.model.norm == "pre":  # a post-norm cross-attention also norms what passes it
        torch.testing.assert_close(decoded, expected[True])


def test_a_translator_is_trained_from_it(source, tmp_path):
    train = write(tmp_path / "train.tsv", sentences(60, "train"))
    results = finetune(source, task="translate", train=train, valid=train, out=tmp_path / "run", settings=QUICK)
    assert results["from"] == str(source)
    (translation,) = headstock.load(tmp_path / "run").translate(["mi amas vin"])
    assert isinstance(translation, str)


def test_other_sizes_are_refused(source, tmp_path):
    train = write(tmp_path / "train.tsv", sentences(10, "train"))
    with pytest.raises(UserError, match=r"model\.width=24"):
        finetune(source, task="translate", train=train, out=tmp_path / "run", settings=QUICK | {"width": 24})
