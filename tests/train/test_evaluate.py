"""Confidence intervals of held-out metrics, and bits per byte with unknown tokens."""

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


def test_intervals_have_their_nominal_coverage():
    """The interval of the loss of normally distributed batches contains the true mean about 95 times in 100."""
    task, rng = Plain(), np.random.default_rng(3)
    covered = 0
    for _ in range(100):
        batch_sums = [({"token": float(loss) * 50}, {"token": 50}, 5) for loss in rng.normal(3.0, 0.5, 40)]
        low, high = bootstrap_intervals(task, batch_sums, size=0)["loss"]
        covered += low <= 3.0 <= high
    assert 0.88 < covered / 100 < 1
    assert bootstrap_intervals(task, batch_sums[:7], size=0) == {}, "seven batches are too few"
    constant = bootstrap_intervals(task, [({"token": 100.0}, {"token": 50}, 5)] * 20, size=1000)
    assert constant["loss"] == (2.0, 2.0) and constant["bits_per_byte"][0] == constant["bits_per_byte"][1]


def test_the_bits_per_byte_of_a_hybrid_have_the_relative_interval_of_its_perplexity():
    """Masked and causal batches are resampled separately."""
    rng = np.random.default_rng(4)
    masked, causal = rng.normal(2.5, 0.2, 20), rng.normal(5.5, 0.4, 20)
    batch_sums = [
        ({"masked": 15 * loss, "causal": 0.0, "correct": 5.0}, {"masked": 15, "causal": 0}, 2) for loss in masked
    ]
    none = {"masked": 0.0, "correct": 0.0}
    batch_sums += [({**none, "causal": 100 * loss}, {"masked": 0, "causal": 100}, 2) for loss in causal]
    intervals = bootstrap_intervals(Mixed(), batch_sums, size=20 * 300)
    mean = causal.mean()
    of_loss = [math.log(edge) / mean for edge in intervals["perplexity"]]
    of_bits = [edge / (mean / math.log(2) / 3) for edge in intervals["bits_per_byte"]]
    assert of_bits == pytest.approx(of_loss, abs=1e-3)
    assert 0.94 < of_bits[0] < 1 < of_bits[1] < 1.06  # two standard errors: 2 * 0.4 / 20 ** 0.5 of 5.5


def test_unknown_tokens_are_charged_or_bits_per_byte_are_withheld():
    sums, counts = {"token": 100 * math.log(2)}, {"token": 50, "unknown": 5}
    unknown = UnknownTokens(tokens=10, bytes=70)  # 8 * (7 + 1) bits each
    metrics = score_with_unknown(Plain(), sums, counts, size=200, unknown=unknown)
    assert metrics["bits_per_byte"] == pytest.approx((100 + 5 * 64) / 200)
    assert metrics["loss"] == pytest.approx(2 * math.log(2)), "only bits per byte compare between vocabularies"
    assert "bits_per_byte" not in score_with_unknown(Plain(), sums, counts, size=200, unknown=None)
    none = score_with_unknown(Plain(), sums, {"token": 50, "unknown": 0}, size=200, unknown=None)
    assert none["bits_per_byte"] == pytest.approx(0.5)
    batch_sums = [(sums, {"token": 50, "unknown": count}, 5) for count in range(10)]
    low, high = bootstrap_intervals(Plain(), batch_sums, size=2000, unknown=unknown)["bits_per_byte"]
    assert 0.5 + 2 * 64 / 200 < low < 0.5 + 4.5 * 64 / 200 < high, "batches with more unknown tokens cost more"


WORDS = ["".join(random.Random(i).choices("abcdefghijklmnop", k=3 + i % 6)) for i in range(400)]


@pytest.fixture(scope="module")
def two_tokenizers(tmp_path_factory):
    """Runs of one step on the same text: with 60 words, so that most are unknown, and with byte-level BPE."""
    folder = tmp_path_factory.mktemp("unknown")
    pick = random.Random(1)
    lines = [" ".join(pick.choices(WORDS, k=12)) for _ in range(300)]
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    results = {}
    for kind, entries in (("word", 60), ("bpe", 300)):
        settings = TINY | {"steps": 1, "tokenizer.kind": kind, "vocabulary": entries}
        results[kind] = headstock.pretrain(folder / "text.txt", out=folder / kind, settings=settings)
    return folder, results


def test_a_small_vocabulary_has_no_advantage_in_bits_per_byte(two_tokenizers):
    folder, results = two_tokenizers
    assert results["word"]["unknown"]["tokens"] > 100 and results["bpe"]["unknown"] == {"tokens": 0, "bytes": 0}
    assert results["word"]["perplexity"] < results["bpe"]["perplexity"]
    assert results["word"]["bits_per_byte"] > results["bpe"]["bits_per_byte"]
    low, high = results["word"]["intervals"].get("bits_per_byte", (0, 99))
    assert low <= results["word"]["bits_per_byte"] <= high
    evaluated = headstock.load(folder / "word").evaluate()
    assert evaluated["bits_per_byte"] == pytest.approx(results["word"]["bits_per_byte"], rel=1e-4)
    assert evaluated["unknown_tokens"] == results["word"]["unknown"]["tokens"]
    logged = [
        row["valid_bits_per_byte"] for row in RunFolder(folder / "word").read_metrics() if "valid_bits_per_byte" in row
    ]
    assert logged[-1] == pytest.approx(results["word"]["bits_per_byte"], rel=0.05)
    assert "unknown tokens" in RunFolder(folder / "word").model_card.read_text(encoding="utf-8")
    assert "unknown tokens" not in RunFolder(folder / "bpe").model_card.read_text(encoding="utf-8")


def test_old_results_withhold_bits_per_byte_where_tokens_can_be_unknown(two_tokenizers, tmp_path):
    folder, results = two_tokenizers
    for kind in ("word", "bpe"):
        shutil.copytree(folder / kind, tmp_path / kind)
        run = RunFolder(tmp_path / kind)
        run.write_results({name: value for name, value in run.results().items() if name != "unknown"})
    assert RunFolder(tmp_path / "bpe").results()["bits_per_byte"] == results["bpe"]["bits_per_byte"]
    old = RunFolder(tmp_path / "word").results()
    assert old["bits_per_byte"] is None and "bits_per_byte" not in old["metrics"] | old["intervals"]
    assert "unknown tokens" in old["bits_per_byte_withheld"]
    assert old["perplexity"] == results["word"]["perplexity"]
    page = write_report(tmp_path / "word").read_text(encoding="utf-8")
    assert "withheld" in page and "<dt>bits per byte</dt>" not in page


class Plain:
    score, bits_per_byte_head = CausalLM.score, CausalLM.bits_per_byte_head


class Mixed:
    score, bits_per_byte_head = HybridLM.score, HybridLM.bits_per_byte_head

    def weight(self, head):
        return 0.5
