"""The learning-rate finder: its ramp, where it stops, and suggestions that train better than rates far from them."""

import json
import math

import numpy as np
import pytest

import headstock
from headstock.errors import UserError
from headstock.experiments.sweep_trials import sha256
from headstock.train.lr_finder import analyse, longest_decrease, lr_find, smooth
from headstock.train.run_folder import BUNDLED_RUNS
from tests.commands import REVIEWS, set_options, write_rows
from tests.conftest import TINY

SETTINGS = TINY | {"depth": 1}


def descend(curvature: float, steps: int = 100):
    """Noisy gradient descent on a quadratic, the rate rising until the loss explodes; stable below 2 / curvature."""
    random = np.random.default_rng(0)
    lrs, losses, weight = [], [], 1.0
    for lr in np.geomspace(1e-6, 1e3, steps):
        losses.append(0.5 * curvature * weight**2)
        lrs.append(float(lr))
        if losses[-1] > 4 * losses[0]:
            break
        weight -= lr * curvature * (weight + 0.1 * random.normal())
    return lrs, losses


@pytest.mark.parametrize("curvature", [0.1, 1.0, 100.0])
def test_suggestions_follow_the_curvature_of_a_quadratic(curvature):
    """Rates above 2 / curvature diverge; rates below a thousandth of it do not get anywhere in a hundred steps."""
    result = analyse(*descend(curvature), diverged=True)
    assert result.suggestions.keys() == {"valley", "steepest", "minimum"}
    assert all(2e-3 < lr * curvature < 2 for lr in result.suggestions.values())
    noise = analyse(result.lrs, np.random.default_rng(0).normal(5, 0.01, len(result.lrs)).tolist(), diverged=False)
    assert not noise.suggestions and "does not fall" in noise.note  # control: nothing is learned


def test_smoothing_does_not_move_the_minimum():
    x = np.arange(100)
    losses = (x - 60.0) ** 2 + np.random.default_rng(0).normal(scale=100, size=100)
    assert abs(int(smooth(losses).argmin()) - 60) <= 3
    assert longest_decrease(np.array([5.0, 4, 6, 3, 2, 7, 1])) == (0, 6)
    running = losses.copy()  # control: a running mean moves it
    for i in range(1, 100):
        running[i] = 0.95 * running[i - 1] + 0.05 * losses[i]
    assert int(running.argmin()) > 65


@pytest.fixture(scope="module")
def found(corpus):
    return lr_find(corpus, settings=SETTINGS, steps=60, max_lr=100.0, device="cpu")


def test_the_rate_rises_exponentially_until_the_loss_diverges(found):
    ratios = np.diff(np.log(found.lrs))
    assert np.allclose(ratios, math.log(100.0 / 1e-6) / 60)
    assert found.diverged and len(found.lrs) < 60 and found.lrs[-1] < 100
    assert len(found.losses) == len(found.smoothed) == len(found.lrs)
    assert found.losses[0] == pytest.approx(math.log(300), rel=0.1)


def test_the_suggestion_trains_better_than_rates_far_from_it(found, corpus, tmp_path):
    losses = {}
    for factor in (1, 1e-2, 1e3):
        options = SETTINGS | {"steps": 25, "lr": found.suggestion * factor}
        try:
            losses[factor] = headstock.pretrain(corpus, out=tmp_path / str(factor), settings=options)["valid_loss"]
        except headstock.WorkError:  # diverged
            losses[factor] = math.inf
    assert losses[1] < losses[1e-2] - 0.2 and losses[1] < losses[1e3] - 0.2


def test_fine_tuning_leaves_the_run_as_it_is(tmp_path, call):
    weights = BUNDLED_RUNS / "reviews-en" / "model.safetensors"
    before = sha256(weights)
    train = write_rows(tmp_path / "train.csv", REVIEWS)
    words = [
        "lr-find",
        "--run",
        "reviews-en",
        "--train",
        train,
        "--steps",
        20,
        "--set",
        "length=16",
        "--set",
        "batch=4",
    ]
    result = json.loads(call(*words, "--out", tmp_path / "lr.html", "--json")[0])
    assert result["lrs"][0] < 1e-5 and "suggestion" in result and sha256(weights) == before
    assert "<svg" in (tmp_path / "lr.html").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lr.html", "train.csv"]


def test_the_command_draws_the_curve(corpus, tmp_path, call):
    words = ["lr-find", corpus, *set_options(SETTINGS), "--steps", 20, "--out", tmp_path / "lr.svg"]
    out, _ = call(*words)
    assert "learning rate" in out and "\u2800" in out and "steepest" in out
    assert (tmp_path / "lr.svg").read_text(encoding="utf-8").startswith("<svg")
    for wrong, message in (
        (["--steps", 5], "20 or more"),
        (["--min-lr", 1, "--max-lr", 0.1], "must be above 0 and rise"),
        (["--train", "x.csv"], "--run"),
        (["--out", tmp_path / "lr.png"], ".html"),
        (["--run", "reviews-en"], "applies to pretraining"),
    ):
        assert message in call("lr-find", corpus, *wrong, code=2)[1]


def test_too_high_a_start_is_reported(corpus):
    with pytest.raises(UserError, match="smaller learning rate"):
        lr_find(corpus, settings=SETTINGS | {"clip": 0.0}, min_lr=1e4, max_lr=1e8, steps=20, device="cpu")
