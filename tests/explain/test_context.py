"""The loss by position and by context length: identities that hold for any weights, and the context command."""

import numpy as np
import pytest

from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_store
from headstock.errors import UserError
from headstock.explain.context import (
    ContextFacts,
    LossTable,
    RunContext,
    default_context,
    explain_context,
    position_bins,
)
from headstock.explain.context_document import context_document
from headstock.explain.render_document import terminal
from tests.explain.pipelines import make_pipeline

ORDER = 3


@pytest.fixture(scope="module")
def store(corpus, tokenizer):
    return build_store(read_corpus(corpus, documents="block"), tokenizer)


def context_losses(pipeline, store, **options) -> np.ndarray:
    """(K,) the mean loss for each context length."""
    table = explain_context([pipeline], [store], by="context", **{"targets": 60} | options).runs[0].by_context
    assert table is not None
    return table.losses.sum(0) / table.counts.sum(0)


@pytest.mark.parametrize("bos", [False, True])
def test_an_ngram_model_ignores_what_is_beyond_its_order(tokenizer, store, bos):
    ngram = make_pipeline(tokenizer, family="ngram", order=ORDER)
    options = {"max_context": 16, "bos": bos}
    losses = context_losses(ngram, store, **options)  # 1, 2, 4, 8, 16
    assert losses[2:] == pytest.approx(losses[2], abs=1e-6)
    assert abs(losses[1] - losses[2]) > 1e-3
    facts = explain_context([ngram], [store], by="context", targets=60, **options)
    assert facts.runs[0].effective_context(facts.contexts) <= 4
    for family in ("transformer", "recurrent"):  # others use it
        other = context_losses(make_pipeline(tokenizer, family=family), store, **options)
        assert np.ptp(other[2:]) > 1e-3, family


def test_a_context_that_reaches_the_start_of_the_document_gives_the_score_of_the_text(tokenizer, corpus, tmp_path):
    pipeline = make_pipeline(tokenizer)
    text = "Anne sees Paris.\nBen likes the sea."
    (tmp_path / "text.txt").write_text(text)
    store = build_store(read_corpus(tmp_path / "text.txt", documents="file"), tokenizer)
    tokens = [*tokenizer.encode(text), store.eos]
    expected = -pipeline.token_log_probabilities([tokens])[0][-1]
    losses = context_losses(pipeline, store, max_context=len(tokens))  # only the end has as many tokens before it
    assert losses[-1] == pytest.approx(expected, abs=1e-5)
    assert losses[0] != pytest.approx(expected, abs=1e-3)


def test_bins_partition_the_loss_that_evaluate_reports(tokenizer, store, corpus):
    pipeline = make_pipeline(tokenizer)
    facts = explain_context([pipeline], [store], by="position")
    table = facts.runs[0].by_position
    assert facts.bins[:3] == [(0, 1), (2, 3), (4, 7)] and facts.bins[-1][1] == pipeline.length - 1
    assert table.counts.sum() == store.tokens
    assert facts.runs[0].loss == pytest.approx(pipeline.evaluate(corpus, documents="block")["loss"], abs=1e-5)
    assert [last for _, last in position_bins(24)] == [1, 3, 7, 15, 23]
    # a state carried over from the row before would not be context of this length
    cells = make_pipeline(tokenizer, family="recurrent")
    fresh = explain_context([cells], [store], by="position").runs[0].loss
    assert fresh != pytest.approx(cells.evaluate(corpus, documents="block")["loss"], abs=1e-4)


def test_intervals_cover_the_mean_and_pair_the_runs(tokenizer, store):
    pipeline, other = make_pipeline(tokenizer), make_pipeline(tokenizer, family="recurrent")
    facts = explain_context([pipeline, pipeline, other], [store] * 3, targets=60)
    for run in facts.to_dict()["runs"]:
        for row in run["positions"] + run["contexts"]:
            assert row["low"] < row["loss"] < row["high"]
    (_, same, same_context), (_, _, different) = facts.differences()
    assert all((value.mean, value.low, value.high) == (0, 0, 0) for value in [*same, *same_context])
    assert all(value.low <= value.mean <= value.high and value.low < value.high for value in different)
    unpaired = [run.by_context.losses_by_bin()[-1] for run in (facts.runs[0], facts.runs[2])]
    paired = different[-1].high - different[-1].low
    assert paired < sum(value.high - value.low for value in unpaired)
    assert default_context(np.array([10] * 100), 64) == 8


def test_rare_and_empty_bins():
    """Two of 200 rows fill the second bin, which many resamples lack; none fills the third."""
    counts = np.ones((200, 3))
    counts[2:, 1], counts[:, 2] = 0, 0
    losses = counts * 3.0
    losses[1, 1] = 3.5
    table = LossTable(losses, counts)
    full, rare, empty = table.losses_by_bin()
    assert (full.mean, full.low, full.high) == (3, 3, 3)
    assert (rare.mean, rare.low, rare.high) == (3.25, 3, 3.5)
    assert np.isnan([empty.mean, empty.low, empty.high]).all()
    first, second = table.gains()
    assert (first.mean, first.low, first.high) == (-0.25, -0.5, 0) and np.isnan(second.mean)
    runs = [RunContext(name, table, None, 3.0) for name in "ab"]
    facts = ContextFacts("", 8, [(0, 1), (2, 3), (4, 7)], [], 0, runs, paired=True)
    result = facts.to_dict()
    assert [row["last"] for row in result["runs"][0]["positions"]] == [1, 3]
    assert [row["last"] for row in result["differences"][0]["positions"]] == [1, 3]
    assert "nan" not in "\n".join(map(str, terminal(context_document(facts))))


def test_documents_show_every_run(tokenizer, store):
    pipelines = [make_pipeline(tokenizer), make_pipeline(tokenizer, family="recurrent")]
    facts = explain_context(pipelines, [store] * 2, targets=20, max_tokens=500)
    document = context_document(facts)
    assert [section.title for section in document.sections] == ["", "By position", "By context length"]
    assert any("(2) - " in name for block in document.blocks("terminal") for name in getattr(block, "columns", ()))
    facts = explain_context(pipelines[:1], [store], targets=20, by="context")
    text = "\n".join(map(str, terminal(context_document(facts))))
    assert "Loss by context length" in text and "Loss by position" not in text


def test_bad_input_is_refused(tokenizer, store):
    pipeline = make_pipeline(tokenizer)
    with pytest.raises(UserError, match="left-to-right"):
        explain_context([make_pipeline(tokenizer, "masked")], [store])
    with pytest.raises(UserError, match="--max-context 25: must be from 1 to 24"):
        explain_context([pipeline], [store], max_context=25)
    with pytest.raises(UserError, match="--length 0"):
        explain_context([pipeline], [store], row_length=0)
