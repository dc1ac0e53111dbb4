"""The rules of a plan: what grows with what, and that every size can be built."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.planner import rules
from headstock.planner.rules import Text
from headstock.train.pretrain import with_direction
from headstock.train.settings import make_config

SHORT = Text(bytes=10_000_000, documents=90_000, tokens=2.5e6, nine_in_ten=60, middle=25)
LONG = Text(bytes=10_000_000, documents=2_000, tokens=2.5e6, nine_in_ten=4000, middle=900)


@pytest.mark.parametrize("objective", rules.MOST_PASSES)
def test_every_size_of_every_objective_is_a_run_that_can_be_built(objective):
    found = []
    for size in rules.sizes(objective, LONG):
        tree = size.tree | {"model": size.tree["model"] | {"vocabulary": size.tree["tokenizer"]["vocabulary"]}}
        chosen = make_config(with_direction(tree))
        assert chosen.objective == objective
        found.append((chosen.model.depth, chosen.model.width))
    assert found == sorted(found) and len(set(found)) == len(found)


def test_each_decision_has_its_reason():
    assert set(rules.REASONS) >= {"objective", "size", "passes", "vocabulary", "context", "batch", "lr", "dropout"}


def test_the_vocabulary_follows_the_width_and_the_text():
    assert [rules.vocabulary(width, 10**9) for width in (128, 256, 512)] == [4000, 8000, 16_000]
    assert rules.vocabulary(512, 3_000_000) == 3000
    assert rules.vocabulary(512, 1000) == 500  # a byte alphabet and its marks must fit
    assert rules.vocabulary(4096, 10**12) == 32_000


def test_rows_are_as_long_as_documents_ask_for():
    assert rules.context(SHORT, 512) == 128
    assert rules.context(LONG, 512) == 512
    assert rules.context(LONG, 128) == 256


def test_a_text_that_is_read_often_is_not_learned_left_to_right_alone():
    assert rules.MOST_PASSES[rules.READ_OFTEN] > rules.MOST_PASSES["causal"]
    assert rules.dropout_of("causal", 4) > 0 == rules.dropout_of("causal", 1) == rules.dropout_of("masked", 16)


@given(st.floats(1e3, 1e11), st.sampled_from([128, 256, 512]))
def test_steps_are_neither_few_nor_many(tokens, length):
    rows = rules.rows_of(tokens, length)
    assert rows & (rows - 1) == 0 and 8 <= rows <= 1024
    if 8 * 2 < tokens / rules.STEPS / length < 512:
        assert 0.6 * rules.STEPS < tokens / rows / length < 1.6 * rules.STEPS


def test_the_rate_falls_with_the_width_as_in_the_recipes():
    rates = [rules.lr_of(width) for _, width in rules.SIZES]
    assert rates == sorted(rates, reverse=True)
    assert rules.lr_of(128) == 4e-3 and rules.lr_of(512) == 2e-3
