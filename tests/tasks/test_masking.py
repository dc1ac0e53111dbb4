"""Which tokens are hidden: how many, how, what goes together, and that nothing else in the batch matters."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.errors import ConfigError
from headstock.model.batch import IGNORE_INDEX
from headstock.tasks.masking import MaskingConfig, Spans, TokenMasker, run_starts

TEXT = ["Anne-Marie likes « le café », doesn't she? Naturally: unbelievably so.\nBen goes home, too."] * 3
KINDS = {"bpe": 320, "unigram": 300, "wordpiece": 90, "word": 60, "char": 60}


@pytest.fixture(scope="module")
def tokenizers():
    return {
        kind: train_tokenizer(TEXT, TokenizerSettings(kind=kind, vocabulary=size, min_frequency=1))
        for kind, size in KINDS.items()
    }


def rows(tokenizer, count=400, length=60, *, seed=0):
    """Rows of random entries: an opening mark, then two documents of uneven length, then padding."""
    draw = np.random.default_rng(seed)
    words = np.setdiff1d(np.arange(tokenizer.vocabulary), sorted(tokenizer.all_special_ids))
    shown = draw.choice(words, (count, length))
    second, end = draw.integers(2, 20, (count, 1)), draw.integers(40, length + 1, (count, 1))
    place = np.arange(length)
    documents = np.where(place >= end, -1, np.where(place >= second, 2, 1))
    opening = (place == 0) | (place == second)
    shown = np.where(opening, tokenizer.cls, np.where(place >= end, tokenizer.pad, shown))
    return shown, ~opening & (place < end), documents


def hide(hiding, parts, *, key=(1, 0), fraction=None, chosen=None):
    shown, allowed, documents = parts
    chosen = np.arange(len(shown)) if chosen is None else np.asarray(chosen)
    fraction = hiding.config.fraction if fraction is None else fraction
    return hiding.mask_tokens(
        shown[chosen], allowed[chosen], documents[chosen], key=key, rows=chosen.tolist(), fraction=fraction
    )


def near(got, of, share, *, spread=1.0):
    return abs(got - of * share) < 4 * spread * math.sqrt(of * share * (1 - share))


# Shares


@pytest.mark.parametrize("unit", ["token", "word", "span"])
@pytest.mark.parametrize("fraction", [0.15, 0.4])
def test_just_the_wanted_share_is_hidden_and_shown_as_wanted(tokenizers, unit, fraction):
    tokenizer = tokenizers["bpe"]
    hiding = TokenMasker(MaskingConfig(fraction=fraction, masked=0.7, random=0.2, unit=unit), tokenizer)
    parts = rows(tokenizer, 3000)
    shown, allowed, _ = parts
    tokens, labels = hide(hiding, parts)
    hidden = labels != IGNORE_INDEX
    assert not (hidden & ~allowed).any()
    assert np.array_equal(labels[hidden], shown[hidden])
    assert np.array_equal(tokens[~hidden], shown[~hidden])
    spread = 1.0 if unit == "token" else 2.0  # tokens that are hidden together vary more than single ones
    assert near(hidden.sum(), allowed.sum(), fraction, spread=spread)
    seen, were = tokens[hidden], shown[hidden]
    by_chance = 0.2 / len(hiding.ordinary_tokens)  # a random token may be the hidden one itself
    assert near((seen == tokenizer.mask).sum(), hidden.sum(), 0.7)
    assert near(((seen != were) & (seen != tokenizer.mask)).sum(), hidden.sum(), 0.2 - by_chance)
    assert near((seen == were).sum(), hidden.sum(), 0.1 + by_chance)
    assert not np.isin(seen[seen != tokenizer.mask], sorted(tokenizer.all_special_ids)).any()


def test_no_place_of_a_document_is_hidden_more_often_than_another(tokenizers):
    """A span cannot begin before its document, and still the first tokens are hidden as often as those after them."""
    tokenizer = tokenizers["char"]
    hiding = TokenMasker(MaskingConfig(unit="span", span_mean=4.0), tokenizer)
    shown = np.full((60_000, 9), hiding.ordinary_tokens[0])
    allowed, documents = np.ones(shown.shape, dtype=bool), np.zeros(shown.shape, dtype=int)
    allowed[:, 0] = False
    _, labels = hiding.mask_tokens(shown, allowed, documents, key=(3,), rows=range(len(shown)), fraction=0.15)
    for place, share in enumerate((labels != IGNORE_INDEX).mean(0)[1:], 1):
        assert near(share * len(shown), len(shown), 0.15), place


# Units


def words_of(tokenizer, text):
    """A text's ids, and for each whether it begins a word."""
    ids = np.array(tokenizer.encode(text))[None]
    hiding = TokenMasker(MaskingConfig(unit="word"), tokenizer)
    everywhere = np.ones(ids.shape, dtype=bool)
    return ids, hiding.is_word_start(ids, everywhere, np.zeros_like(ids))[0]


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word"])
def test_a_word_is_what_stands_between_spaces_and_marks(tokenizers, kind):
    tokenizer = tokenizers[kind]
    bytes_only = train_tokenizer(["abab ab"], TokenizerSettings(vocabulary=264))
    for cutter in (tokenizer, bytes_only) if kind == "bpe" else (tokenizer,):
        ids, begins = words_of(cutter, "Ben likes « le café », unbelievably.\nBen goes")
        starts = [*np.flatnonzero(begins), ids.shape[1]]
        words = [cutter.decode(ids[0, a:b]).strip(" ") for a, b in pairwise(starts)]
        letters = [word for word in words if word[:1].isalnum()]
        assert letters == ["Ben", "likes", "le", "café", "unbelievably", "Ben", "goes"]


def test_every_character_is_a_word_of_its_own(tokenizers):
    assert words_of(tokenizers["char"], "Ben goes")[1].all()
    assert tokenizers["bpe"].word_starts.shape == (tokenizers["bpe"].vocabulary,)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_the_pieces_of_a_word_are_hidden_together_or_not_at_all(tokenizers, kind):
    tokenizer = tokenizers[kind]
    hiding = TokenMasker(MaskingConfig(unit="word", fraction=0.4), tokenizer)
    shown, allowed, documents = parts = rows(tokenizer)
    hidden = hide(hiding, parts)[1] != IGNORE_INDEX
    begins = hiding.is_word_start(shown, allowed, documents)
    inside = allowed & ~begins
    assert inside.sum() > 1000
    assert np.array_equal(hidden[inside], np.roll(hidden, 1, 1)[inside])  # as the piece before
    first = allowed & begins
    assert near(hidden[first].sum(), first.sum(), 0.4)
    after = begins & np.roll(allowed, 1, 1) & allowed
    together = hidden[after] == np.roll(hidden, 1, 1)[after]
    assert near(together.sum(), len(together), 0.4**2 + 0.6**2)  # words do not know of each other


def test_spans_have_the_wanted_mean_and_end_with_their_document(tokenizers):
    tokenizer = tokenizers["bpe"]
    for mean, most in ((3.0, 10), (1.0, 4), (5.0, 5), (2.5, 40)):
        spans = Spans.of(0.15, mean, most)
        lengths = spans.lengths(np.random.default_rng(0).random(200_000))
        assert lengths.mean() == pytest.approx(mean, abs=0.03)
        assert lengths.min() >= 1
        assert lengths.max() <= most
        assert 1 - np.prod(1 - spans.rate * spans.tails) == pytest.approx(0.15, abs=1e-12)
    hiding = TokenMasker(MaskingConfig(unit="span", fraction=0.02, span_mean=4.0, span_most=6), tokenizer)
    _, allowed, documents = parts = rows(tokenizer, 6000)
    hidden = hide(hiding, parts)[1] != IGNORE_INDEX
    # a stretch of hidden tokens that touches neither end of its run is, at so small a share, nearly always one span
    fresh = run_starts(allowed, documents)
    stretches = []
    for row, ends in zip(hidden, fresh, strict=True):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]])))
        for begin, end in edges.reshape(-1, 2):
            if not ends[begin] and end < len(row) - 1 and not ends[end]:
                stretches.append(end - begin)
    assert np.mean(stretches) == pytest.approx(4.0, abs=0.25)
    longest = np.array([len(part) for row in hidden for part in "".join("x" if h else " " for h in row).split()])
    assert (longest > 6).mean() < 0.06  # only where two overlap


def test_a_span_never_goes_on_in_the_next_document(tokenizers):
    tokenizer = tokenizers["char"]
    hiding = TokenMasker(MaskingConfig(unit="span", span_mean=8.0, span_most=8), tokenizer)
    shown = np.full((20_000, 8), hiding.ordinary_tokens[0])
    allowed = np.ones(shown.shape, dtype=bool)
    documents = np.repeat([[0, 0, 0, 0, 1, 1, 1, 1]], len(shown), 0)
    before, after = (
        (hiding.mask_tokens(shown, allowed, which, key=(5,), rows=range(len(shown)), fraction=0.2)[1] != IGNORE_INDEX)[
            :, 3:5
        ]
        for which in (documents, np.zeros_like(documents))
    )
    assert np.corrcoef(after.T)[0, 1] > 0.7  # inside one document most spans go on
    assert abs(np.corrcoef(before.T)[0, 1]) < 0.04


# Schedule and purity


@pytest.mark.parametrize("unit", ["token", "word", "span"])
@given(low=st.floats(0.01, 0.9), more=st.floats(0.0, 0.09), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_what_is_hidden_at_a_small_share_is_hidden_at_a_larger_one(tokenizers, unit, low, more, seed):
    tokenizer = tokenizers["bpe"]
    hiding = TokenMasker(MaskingConfig(unit=unit), tokenizer)
    parts = rows(tokenizer, 30, seed=seed)
    few, many = (hide(hiding, parts, key=(seed,), fraction=share) for share in (low, low + more))
    hidden = few[1] != IGNORE_INDEX
    assert np.array_equal(few[1][hidden], many[1][hidden])
    assert np.array_equal(few[0][hidden], many[0][hidden])  # and shown as the same


def test_the_share_goes_in_a_line_from_its_start_to_its_end(tokenizers):
    hiding = TokenMasker(MaskingConfig(fraction=0.15, fraction_start=0.3), tokenizers["bpe"])
    assert [hiding.fraction(done) for done in (0.0, 0.5, 1.0)] == pytest.approx([0.3, 0.225, 0.15])
    assert TokenMasker(MaskingConfig(), tokenizers["bpe"]).fraction(0.2) == 0.15


@pytest.mark.parametrize("unit", ["token", "word", "span"])
def test_a_row_is_hidden_alike_in_any_batch_and_at_any_length(tokenizers, unit):
    tokenizer = tokenizers["bpe"]
    hiding = TokenMasker(MaskingConfig(unit=unit), tokenizer)
    parts = rows(tokenizer, 20)
    whole = hide(hiding, parts)
    some = hide(hiding, parts, chosen=[7, 3, 7])
    for got, wanted in zip(some, whole, strict=True):
        assert np.array_equal(got, wanted[[7, 3, 7]])
    shorter = hide(hiding, [part[:, :40] for part in parts])
    assert np.array_equal(shorter[1], whole[1][:, :40])
    other = hide(hiding, parts, key=(1, 1))
    assert not np.array_equal(other[1], whole[1])


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        MaskingConfig(fraction=0.0, fraction_start=1.0, masked=0.8, random=0.3, span_mean=0.5)
    assert [where for where, _ in caught.value.problems] == ["fraction", "fraction_start", "masked", "span_mean"]
    with pytest.raises(ConfigError, match="span_mean: must be from 1 to span_most 4, not 5"):
        MaskingConfig(span_mean=5, span_most=4)
