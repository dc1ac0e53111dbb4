"""Position encodings against their formulas, and the positions command."""

import json
import math

import numpy as np
import pytest
import torch

import headstock
from headstock.errors import UserError
from headstock.explain.positions import (
    explain_model_positions,
    explain_positions,
    nearest_pair,
    position_document,
    signed_colours,
)
from headstock.explain.render_document import page
from headstock.model.backbones.elmo import Elmo, ElmoConfig
from headstock.model.backbones.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from headstock.model.model import Model
from tests.conftest import TINY
from tests.model.small import small_model
from tests.report.browsing import view_page


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A model with learned positions, trained on rows of half its context."""
    out = tmp_path_factory.mktemp("runs") / "learned"
    headstock.pretrain(corpus, out=out, settings=TINY | {"positions": "learned", "length": 16, "steps": 6})
    return out


def frequencies(pairs: int) -> list[float]:
    return [10_000 ** (-i / pairs) for i in range(pairs)]


def test_sinusoids_match_the_formula_and_depend_on_distance_alone():
    facts = explain_positions("sinusoidal", 40, 12)
    for position in range(40):
        for i, frequency in enumerate(frequencies(6)):
            assert float(facts.table[position, 2 * i]) == pytest.approx(math.sin(position * frequency), abs=1e-6)
            assert float(facts.table[position, 2 * i + 1]) == pytest.approx(math.cos(position * frequency), abs=1e-6)
    expected = [np.mean([math.cos(distance * frequency) for frequency in frequencies(6)]) for distance in range(40)]
    assert facts.similarity == pytest.approx(expected, abs=1e-6)
    assert facts.by_distance_alone and facts.spread < 1e-6
    assert facts.wavelengths == pytest.approx((2 * math.pi, 2 * math.pi * 10_000 ** (5 / 6)))


@pytest.mark.parametrize("kind", ["sinusoidal", "rotary"])
def test_nearest_pair_matches_brute_force(kind):
    facts = explain_positions(kind, 60, 8)
    table = facts.table.numpy()
    distances = {(i, j): np.sqrt(((table[i] - table[j]) ** 2).sum()) for i in range(60) for j in range(i + 1, 60)}
    assert facts.gap == pytest.approx(min(distances.values()), rel=1e-12)
    assert distances[facts.nearest] == pytest.approx(facts.gap, rel=1e-9)
    assert facts.distinct


def test_equal_positions_are_reported():
    table = torch.randn(1300, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table[1201] = table[7]  # in different chunks of the search
    assert nearest_pair(table) == ((7, 1201), 0.0)
    model = small_model(positions="learned")
    with torch.no_grad():
        model.backbone.positions.weight[3] = model.backbone.positions.weight[9]
    (facts,) = explain_model_positions(model, "broken")
    assert not facts.distinct and facts.nearest == (3, 9)
    assert "are the same, so the model cannot tell them apart" in page(position_document([facts]))


def test_rotary_scores_match_complex_rotation():
    model = small_model(positions="rotary", width=32, heads=2)
    (facts,) = explain_model_positions(model, "rotary", length=12)
    speeds = torch.tensor(frequencies(8), dtype=torch.float64)
    expected = [float((distance * speeds).cos().mean()) for distance in range(12)]
    assert facts.scores == pytest.approx(expected, abs=1e-6) and facts.similarity == pytest.approx(expected, abs=1e-6)
    assert facts.table.shape == (12, 16) and facts.by_distance_alone
    by_formula = explain_positions("rotary", 12, 16)
    assert torch.allclose(by_formula.table, facts.table, atol=1e-6)
    assert by_formula.scores == pytest.approx(expected, abs=1e-9)
    # queries and keys of all ones at every two positions, rotated by complex numbers
    rotated = torch.exp(1j * torch.arange(12)[:, None] * speeds)
    scores = (rotated[:, None] * rotated[None].conj()).real.mean(-1) * (1 + 1) / 2
    assert all(abs(float(scores[i, j]) - facts.scores[abs(i - j)]) < 1e-6 for i in range(12) for j in range(12))


def test_learned_positions_note_untrained_ones(run):
    loaded = headstock.load(run)
    (facts,) = explain_model_positions(loaded.model, "run", trained_length=16)
    assert torch.equal(facts.table.float(), loaded.model.backbone.positions.weight.detach())
    assert facts.trained and "trained on rows of 16 tokens" in facts.notes[0]
    assert not facts.by_distance_alone
    unit = facts.table / facts.table.norm(dim=1, keepdim=True)
    cosines = unit @ unit.T
    for distance in (0, 1, 5, 31):
        values = [float(cosines[i, i + distance]) for i in range(32 - distance)]
        result = facts.similarity[distance], facts.low[distance], facts.high[distance]
        assert result == pytest.approx((np.mean(values), min(values), max(values)), abs=1e-9)
    (fresh,) = explain_model_positions(small_model(positions="learned"), "gpt-nano", trained=False)
    assert fresh.trained is False and "random vectors" in fresh.notes[0]


def test_encoder_decoder_has_two_learned_tables_or_one_formula():
    sizes = {"vocabulary": 20, "context": 8, "depth": 1, "width": 8, "heads": 2, "hidden": 8}
    learned = explain_model_positions(
        Model(EncoderDecoder(EncoderDecoderConfig(**sizes, positions="learned")), {}), "pair"
    )
    assert [facts.where for facts in learned] == ["encoder", "decoder"]
    assert not torch.equal(learned[0].table, learned[1].table)
    (facts,) = explain_model_positions(
        Model(EncoderDecoder(EncoderDecoderConfig(**sizes, positions="sinusoidal")), {}), "pair"
    )
    assert facts.where is None
    with pytest.raises(UserError, match="reads in order and has no position encodings"):
        explain_model_positions(Model(Elmo(ElmoConfig(vocabulary=20, width=8, hidden=8)), {}), "elmo")


def test_positions_command(call, run, tmp_path):
    out, _ = call("explain", "positions", run)
    assert "No two positions are the same" in out and "rows of 16 tokens" in out
    out, _ = call("explain", "positions", "--kind", "sinusoidal", "--length", 16, "--width", 6, "--json")
    result = json.loads(out)
    assert (result["length"], result["width"], result["distinct"]) == (16, 6, True) and len(result["similarity"]) == 16
    for words, line in [
        (["--kind", "learned"], "name a run, or a preset"),
        (["--kind", "rotary", "--width", 7], "must be even"),
        (["--length", 1], "at least 2 positions"),
        ([run, "--kind", "rotary"], "are learned"),
        ([run, "--length", 33], "they end at 32"),
        ([run, "--width", 8], "its own width"),
        (["--preset", "lstm-nano"], "no position encodings"),
        (["--preset", "gpt-nana"], "no preset called"),
    ]:
        _, err = call("explain", "positions", *words, code=2)
        assert line in err and err.count("\n") == 1, words


def test_colours_fade_towards_zero():
    colours = signed_colours(np.array([[-1.0, 0.0, 0.5]]))
    assert colours.shape == (1, 3, 4) and colours[0, :, 3].tolist() == [1.0, 0.0, 0.5]
    assert colours[0, 0, 2] > colours[0, 0, 0] and colours[0, 2, 0] > colours[0, 2, 2]  # blue below zero, orange above


def test_page_is_self_contained(browser, tmp_path):
    path = tmp_path / "positions.html"
    path.write_text(page(position_document([explain_positions("rotary", 20, 8)])), encoding="utf-8")
    for width, scheme in ((1280, "light"), (390, "dark")):
        view = view_page(browser, path, width=width, scheme=scheme)
        assert view.is_sound()
        assert {"heat" if width > 640 else "heat-narrow", "alike", "distance"} <= view.charts


def test_picture_carries_its_colours():
    svg = position_document([explain_positions("sinusoidal", 20, 8)]).picture()
    assert 'xmlns="http://www.w3.org/2000/svg"' in svg and "prefers-color-scheme: dark" in svg
    assert "var(--soft)" in svg and "--soft:" in svg
