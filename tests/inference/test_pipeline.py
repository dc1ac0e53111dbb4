"""A run opened for use."""

import pytest
import torch

import headstock
from headstock.data.corpus import read_corpus
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.inference.pipeline import TextStreamer


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word", "char"])
def test_what_is_added_to_a_prompt_keeps_its_space(corpus, kind):
    settings = TokenizerSettings(kind=kind, vocabulary=300, min_frequency=1)
    tokenizer = train_tokenizer((document.text for document in read_corpus(corpus)), settings)
    prompt, whole = tokenizer.encode("Anne likes"), tokenizer.encode("Anne likes Paris. Ben")
    assert whole[: len(prompt)] == prompt
    told: list[str] = []
    writer = TextStreamer(tokenizer, prompt, ["Ben"], told.append)
    for count in range(1, len(whole) - len(prompt)):
        writer.update(whole[len(prompt) : len(prompt) + count])
    assert writer.update(whole[len(prompt) :])
    assert writer.finish(whole[len(prompt) :]) == "".join(told) == " Paris. "


def test_scores_do_not_depend_on_the_company(corpus, tmp_path, tiny):
    headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny)
    model = headstock.load(tmp_path / "run")
    texts = ["Anne likes Paris.", "Zo\u00eb", " ".join(["Ben finds the sea."] * 9), ""]
    together = model.score(texts)
    assert together[3].log_likelihood == 0.0
    for text, score in zip(texts, together, strict=True):
        assert model.score(text)[0].log_likelihood == pytest.approx(score.log_likelihood, abs=1e-4)


def test_generating_from_nothing_begins_a_text(corpus, tmp_path, tiny):
    headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"steps": 60, "lr": 0.01})
    made = headstock.load(tmp_path / "run").generate("", max_tokens=4, temperature=0)[0].text
    assert made.startswith("Story")


def test_opening_a_run_leaves_the_callers_draws_alone(corpus, tmp_path, tiny):
    headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"steps": 1})
    before = torch.get_rng_state()
    headstock.load(tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)
