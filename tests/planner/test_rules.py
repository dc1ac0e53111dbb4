"""The planner's rules: what scales with what, and that every size can be built."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.planner import rules
from headstock.planner.rules import TextStatistics
from headstock.train.resolve import with_direction
from headstock.train.settings import make_config

SHORT = TextStatistics(bytes=10_000_000, documents=90_000, tokens=2.5e6, p90_length=60, median_length=25)
LONG = TextStatistics(bytes=10_000_000, documents=2_000, tokens=2.5e6, p90_length=4000, median_length=900)


@pytest.mark.parametrize("objective", rules.planned_objectives())
def test_every_size_of_every_objective_can_be_built(objective):
    shapes = []
    for size in rules.model_sizes(objective, LONG):
        model = size.sections["model"] | {"vocabulary": size.sections["tokenizer"]["vocabulary"]}
        run_config = make_config(with_direction(size.sections | {"model": model}))
        assert run_config.objective == objective
        shapes.append((run_config.model.depth, run_config.model.width))
    assert shapes == sorted(shapes) and len(set(shapes)) == len(shapes)


def test_each_decision_has_a_reason():
    assert set(rules.REASONS) >= {"objective", "size", "passes", "vocabulary", "context", "batch", "lr", "dropout"}


def test_the_vocabulary_follows_the_width_and_the_text():
    assert [rules.vocabulary_size(width, 10**9) for width in (128, 256, 512)] == [4000, 8000, 16_000]
    assert rules.vocabulary_size(512, 3_000_000) == 3000
    assert rules.vocabulary_size(512, 1000) == 500  # the byte alphabet and the special tokens must fit
    assert rules.vocabulary_size(4096, 10**12) == 32_000


def test_the_context_follows_document_lengths():
    assert rules.context_length(SHORT, 512) == 128
    assert rules.context_length(LONG, 512) == 512
    assert rules.context_length(LONG, 128) == 256


def test_repeated_text_is_not_planned_causal():
    assert rules.max_epochs(rules.REPEATED_TEXT_OBJECTIVE) > rules.max_epochs("causal")
    assert rules.dropout("causal", 4) > 0 == rules.dropout("causal", 1) == rules.dropout("masked", 16)


@given(st.floats(1e3, 1e11), st.sampled_from([128, 256, 512]))
def test_the_batch_size_gives_about_the_target_number_of_steps(tokens, length):
    rows = rules.batch_size(tokens, length)
    assert rows & (rows - 1) == 0 and 8 <= rows <= 1024
    if 8 * 2 < tokens / rules.TARGET_STEPS / length < 512:
        assert 0.6 * rules.TARGET_STEPS < tokens / rows / length < 1.6 * rules.TARGET_STEPS


def test_the_learning_rate_falls_with_the_width():
    rates = [rules.learning_rate(width) for _, width in rules.SIZES]
    assert rates == sorted(rates, reverse=True)
    assert rules.learning_rate(128) == 4e-3 and rules.learning_rate(512) == 2e-3
