"""How sure a number of held-out text is."""

import numpy as np

from headstock.tasks.causal import Causal
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


class Plain:
    score = Causal.score
