"""How sure a number of held-out text is."""

import math

import numpy as np
import pytest

from headstock.tasks.causal import Causal
from headstock.tasks.hybrid import Hybrid
from headstock.train.evaluate import spread


def test_intervals_hold_what_other_held_out_text_would_give():
    """The loss of batches drawn from one distribution: the interval holds its true mean about 95 times of 100."""
    task, rng = Plain(), np.random.default_rng(3)
    held = 0
    for _ in range(200):
        pieces = [({"token": float(loss) * 50}, {"token": 50}, 5) for loss in rng.normal(3.0, 0.5, 40)]
        low, high = spread(task, pieces, size=0)["loss"]
        held += low <= 3.0 <= high
    assert 0.88 < held / 200 < 0.99
    assert spread(task, pieces[:7], size=0) == {}, "seven batches are too few"
    alike = spread(task, [({"token": 100.0}, {"token": 50}, 5)] * 20, size=1000)
    assert alike["loss"] == (2.0, 2.0) and alike["bits_per_byte"][0] == alike["bits_per_byte"][1]


def test_a_hybrids_bits_per_byte_are_as_sure_as_its_perplexity():
    """Half of the batches are masked and half causal: neither kind may stand in for the other in a resample."""
    rng = np.random.default_rng(4)
    masked, causal = rng.normal(2.5, 0.2, 20), rng.normal(5.5, 0.4, 20)
    pieces = [({"masked": 15 * loss, "causal": 0.0, "hits": 5.0}, {"masked": 15, "causal": 0}, 2) for loss in masked]
    pieces += [({"masked": 0.0, "causal": 100 * loss, "hits": 0.0}, {"masked": 0, "causal": 100}, 2) for loss in causal]
    found = spread(Mixed(), pieces, size=20 * 300)
    mean = causal.mean()
    of_loss = [math.log(edge) / mean for edge in found["perplexity"]]
    of_bits = [edge / (mean / math.log(2) / 3) for edge in found["bits_per_byte"]]
    assert of_bits == pytest.approx(of_loss, abs=1e-3)
    assert 0.94 < of_bits[0] < 1 < of_bits[1] < 1.06  # two standard errors: 2 * 0.4 / 20 ** 0.5 of 5.5


class Plain:
    score, bits_head = Causal.score, Causal.bits_head


class Mixed:
    score, bits_head = Hybrid.score, Hybrid.bits_head

    def weight(self, head):
        return 0.5
