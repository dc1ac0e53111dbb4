"""How sure a number of held-out text is."""

import math
import random
import shutil

import numpy as np
import pytest

import headstock
from headstock.data.token_shards import UnknownTokens
from headstock.report.pages import write_report
from headstock.tasks.causal import CausalLM
from headstock.tasks.hybrid import HybridLM
from headstock.train.evaluate import bootstrap_intervals, score_with_unknown
from headstock.train.run_folder import RunFolder
from tests.conftest import TINY


def test_intervals_hold_what_other_held_out_text_would_give():
    """The loss of batches drawn from one distribution: the interval holds its true mean about 95 times of 100."""
    task, rng = Plain(), np.random.default_rng(3)
    held = 0
    for _ in range(100):
        pieces = [({"token": float(loss) * 50}, {"token": 50}, 5) for loss in rng.normal(3.0, 0.5, 40)]
        low, high = bootstrap_intervals(task, pieces, size=0)["loss"]
        held += low <= 3.0 <= high
    assert 0.88 < held / 100 < 1
    assert bootstrap_intervals(task, pieces[:7], size=0) == {}, "seven batches are too few"
    alike = bootstrap_intervals(task, [({"token": 100.0}, {"token": 50}, 5)] * 20, size=1000)
    assert alike["loss"] == (2.0, 2.0) and alike["bits_per_byte"][0] == alike["bits_per_byte"][1]


def test_a_hybrids_bits_per_byte_are_as_sure_as_its_perplexity():
    """Half of the batches are masked and half causal: neither kind may stand in for the other in a resample."""
    rng = np.random.default_rng(4)
    masked, causal = rng.normal(2.5, 0.2, 20), rng.normal(5.5, 0.4, 20)
    pieces = [({"masked": 15 * loss, "causal": 0.0, "correct": 5.0}, {"masked": 15, "causal": 0}, 2) for loss in masked]
    none = {"masked": 0.0, "correct": 0.0}
    pieces += [({**none, "causal": 100 * loss}, {"masked": 0, "causal": 100}, 2) for loss in causal]
    found = bootstrap_intervals(Mixed(), pieces, size=20 * 300)
    mean = causal.mean()
    of_loss = [math.log(edge) / mean for edge in found["perplexity"]]
    of_bits = [edge / (mean / math.log(2) / 3) for edge in found["bits_per_byte"]]
    assert of_bits == pytest.approx(of_loss, abs=1e-3)
    assert 0.94 < of_bits[0] < 1 < of_bits[1] < 1.06  # two standard errors: 2 * 0.4 / 20 ** 0.5 of 5.5


def test_unknown_tokens_are_charged_or_bits_per_byte_are_withheld():
    sums, counts = {"token": 100 * math.log(2)}, {"token": 50, "unknown": 5}
    of_all = UnknownTokens(tokens=10, bytes=70)  # twice as many in the whole text: 8 * (7 + 1) bits each
    found = score_with_unknown(Plain(), sums, counts, size=200, unknown=of_all)
    assert found["bits_per_byte"] == pytest.approx((100 + 5 * 64) / 200)
    assert found["loss"] == pytest.approx(2 * math.log(2)), "only bits per byte compare between vocabularies"
    assert "bits_per_byte" not in score_with_unknown(Plain(), sums, counts, size=200, unknown=None)
    none = score_with_unknown(Plain(), sums, {"token": 50, "unknown": 0}, size=200, unknown=None)
    assert none["bits_per_byte"] == pytest.approx(0.5)
    pieces = [(sums, {"token": 50, "unknown": count}, 5) for count in range(10)]
    low, high = bootstrap_intervals(Plain(), pieces, size=2000, unknown=of_all)["bits_per_byte"]
    assert 0.5 + 2 * 64 / 200 < low < 0.5 + 4.5 * 64 / 200 < high, "batches with more unknown tokens cost more"


WORDS = ["".join(random.Random(i).choices("abcdefghijklmnop", k=3 + i % 6)) for i in range(400)]


@pytest.fixture(scope="module")
def two_tokenizers(tmp_path_factory):
    """Runs of one step on the same text: 60 words, nearly all of it unknown, and byte-level BPE."""
    folder = tmp_path_factory.mktemp("unknown")
    pick = random.Random(1)
    lines = [" ".join(pick.choices(WORDS, k=12)) for _ in range(300)]
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    made = {}
    for kind, entries in (("word", 60), ("bpe", 300)):
        settings = TINY | {"steps": 1, "tokenizer.kind": kind, "vocabulary": entries}
        made[kind] = headstock.pretrain(folder / "text.txt", out=folder / kind, settings=settings)
    return folder, made


def test_a_vocabulary_that_knows_little_does_not_look_better(two_tokenizers):
    folder, made = two_tokenizers
    assert made["word"]["unknown"]["tokens"] > 100 and made["bpe"]["unknown"] == {"tokens": 0, "bytes": 0}
    assert made["word"]["perplexity"] < made["bpe"]["perplexity"]
    assert made["word"]["bits_per_byte"] > made["bpe"]["bits_per_byte"]
    low, high = made["word"]["intervals"].get("bits_per_byte", (0, 99))
    assert low <= made["word"]["bits_per_byte"] <= high
    again = headstock.load(folder / "word").evaluate()
    assert again["bits_per_byte"] == pytest.approx(made["word"]["bits_per_byte"], rel=1e-4)
    assert again["unknown_tokens"] == made["word"]["unknown"]["tokens"]
    logged = [
        row["valid_bits_per_byte"] for row in RunFolder(folder / "word").read_metrics() if "valid_bits_per_byte" in row
    ]
    assert logged[-1] == pytest.approx(made["word"]["bits_per_byte"], rel=0.05)
    assert "unknown tokens" in RunFolder(folder / "word").model_card.read_text(encoding="utf-8")
    assert "unknown tokens" not in RunFolder(folder / "bpe").model_card.read_text(encoding="utf-8")


def test_a_run_of_before_withholds_bits_per_byte_where_tokens_can_be_unknown(two_tokenizers, tmp_path):
    folder, made = two_tokenizers
    for kind in ("word", "bpe"):
        shutil.copytree(folder / kind, tmp_path / kind)
        run = RunFolder(tmp_path / kind)
        run.write_results({name: value for name, value in run.results().items() if name != "unknown"})
    assert RunFolder(tmp_path / "bpe").results()["bits_per_byte"] == made["bpe"]["bits_per_byte"]
    old = RunFolder(tmp_path / "word").results()
    assert old["bits_per_byte"] is None and "bits_per_byte" not in old["metrics"] | old["intervals"]
    assert "unknown tokens" in old["bits_per_byte_withheld"]
    assert old["perplexity"] == made["word"]["perplexity"]
    page = write_report(tmp_path / "word").read_text(encoding="utf-8")
    assert "withheld" in page and "<dt>bits per byte</dt>" not in page


class Plain:
    score, bits_per_byte_head = CausalLM.score, CausalLM.bits_per_byte_head


class Mixed:
    score, bits_per_byte_head = HybridLM.score, HybridLM.bits_per_byte_head

    def weight(self, head):
        return 0.5
