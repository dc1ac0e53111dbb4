"""A loaded run scores and generates."""

import pytest
import torch

import headstock
from tests.conftest import TINY


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp("pipeline") / "run"
    headstock.pretrain(corpus, out=path, settings=TINY | {"steps": 60, "validate_every": 30, "lr": 0.01})
    return path


def test_a_score_does_not_depend_on_the_other_texts(run):
    model = headstock.load(run)
    texts = ["Anne likes Paris.", "Zo\u00eb", " ".join(["Ben finds the sea."] * 9), ""]
    scores = model.score(texts)
    assert scores[3].log_likelihood == 0.0
    for text, score in zip(texts, scores, strict=True):
        assert model.score(text)[0].log_likelihood == pytest.approx(score.log_likelihood, abs=1e-4)


def test_an_empty_prompt_begins_a_text(run):
    assert headstock.load(run).generate("", max_tokens=4, temperature=0)[0].text.startswith("Story")


def test_loading_a_run_leaves_the_random_state_unchanged(run):
    before = torch.get_rng_state()
    headstock.load(run)
    assert torch.equal(torch.get_rng_state(), before)
