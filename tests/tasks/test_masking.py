"""Random masking: shares, words and spans, the schedule, and independence of the batch."""

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
    """Random rows: [CLS], then two documents of different lengths, then padding."""
    rng = np.random.default_rng(seed)
    ordinary_tokens = np.setdiff1d(np.arange(tokenizer.vocabulary), sorted(tokenizer.all_special_ids))
    tokens = rng.choice(ordinary_tokens, (count, length))
    second, end = rng.integers(2, 20, (count, 1)), rng.integers(40, length + 1, (count, 1))
    columns = np.arange(length)
    documents = np.where(columns >= end, -1, np.where(columns >= second, 2, 1))
    is_bos = (columns == 0) | (columns == second)
    tokens = np.where(is_bos, tokenizer.cls, np.where(columns >= end, tokenizer.pad, tokens))
    return tokens, ~is_bos & (columns < end), documents


def mask(masker, inputs, *, key=(1, 0), fraction=None, rows=None):
    tokens, maskable, documents = inputs
    rows = np.arange(len(tokens)) if rows is None else np.asarray(rows)
    fraction = masker.config.fraction if fraction is None else fraction
    return masker.mask_tokens(
        tokens[rows], maskable[rows], documents[rows], key=key, rows=rows.tolist(), fraction=fraction
    )


def is_near(count, total, share, *, spread=1.0):
    return abs(count - total * share) < 4 * spread * math.sqrt(total * share * (1 - share))


# Shares


@pytest.mark.parametrize("unit", ["token", "word", "span"])
@pytest.mark.parametrize("fraction", [0.15, 0.4])
def test_fraction_and_replacement_shares(tokenizers, unit, fraction):
    tokenizer = tokenizers["bpe"]
    masker = TokenMasker(MaskingConfig(fraction=fraction, masked=0.7, random=0.2, unit=unit), tokenizer)
    inputs = rows(tokenizer, 3000)
    originals, maskable, _ = inputs
    tokens, labels = mask(masker, inputs)
    is_masked = labels != IGNORE_INDEX
    assert not (is_masked & ~maskable).any()
    assert np.array_equal(labels[is_masked], originals[is_masked])
    assert np.array_equal(tokens[~is_masked], originals[~is_masked])
    spread = 1.0 if unit == "token" else 2.0  # tokens masked together have a larger variance
    assert is_near(is_masked.sum(), maskable.sum(), fraction, spread=spread)
    replacements, masked_originals = tokens[is_masked], originals[is_masked]
    by_chance = 0.2 / len(masker.ordinary_tokens)  # a random token may equal the original
    assert is_near((replacements == tokenizer.mask).sum(), is_masked.sum(), 0.7)
    assert is_near(
        ((replacements != masked_originals) & (replacements != tokenizer.mask)).sum(), is_masked.sum(), 0.2 - by_chance
    )
    assert is_near((replacements == masked_originals).sum(), is_masked.sum(), 0.1 + by_chance)
    assert not np.isin(replacements[replacements != tokenizer.mask], sorted(tokenizer.all_special_ids)).any()


def test_all_positions_are_masked_equally_often(tokenizers):
    """Also the first ones, though no span starts before its document."""
    tokenizer = tokenizers["char"]
    masker = TokenMasker(MaskingConfig(unit="span", span_mean=4.0), tokenizer)
    tokens = np.full((60_000, 9), masker.ordinary_tokens[0])
    maskable, documents = np.ones(tokens.shape, dtype=bool), np.zeros(tokens.shape, dtype=int)
    maskable[:, 0] = False
    _, labels = masker.mask_tokens(tokens, maskable, documents, key=(3,), rows=range(len(tokens)), fraction=0.15)
    for position, share in enumerate((labels != IGNORE_INDEX).mean(0)[1:], 1):
        assert is_near(share * len(tokens), len(tokens), 0.15), position


# Units


def words_of(tokenizer, text):
    """A text's ids, and for each whether it begins a word."""
    ids = np.array(tokenizer.encode(text))[None]
    masker = TokenMasker(MaskingConfig(unit="word"), tokenizer)
    maskable = np.ones(ids.shape, dtype=bool)
    return ids, masker.is_word_start(ids, maskable, np.zeros_like(ids))[0]


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word"])
def test_words_are_separated_by_spaces_and_punctuation(tokenizers, kind):
    tokenizer = tokenizers[kind]
    bytes_only = train_tokenizer(["abab ab"], TokenizerSettings(vocabulary=264))
    for tokenizer_ in (tokenizer, bytes_only) if kind == "bpe" else (tokenizer,):
        ids, is_start = words_of(tokenizer_, "Ben likes « le café », unbelievably.\nBen goes")
        starts = [*np.flatnonzero(is_start), ids.shape[1]]
        words = [tokenizer_.decode(ids[0, a:b]).strip(" ") for a, b in pairwise(starts)]
        letters = [word for word in words if word[:1].isalnum()]
        assert letters == ["Ben", "likes", "le", "café", "unbelievably", "Ben", "goes"]


def test_every_character_is_a_word(tokenizers):
    assert words_of(tokenizers["char"], "Ben goes")[1].all()
    assert tokenizers["bpe"].word_starts.shape == (tokenizers["bpe"].vocabulary,)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_word_pieces_are_masked_together(tokenizers, kind):
    tokenizer = tokenizers[kind]
    masker = TokenMasker(MaskingConfig(unit="word", fraction=0.4), tokenizer)
    tokens, maskable, documents = inputs = rows(tokenizer)
    is_masked = mask(masker, inputs)[1] != IGNORE_INDEX
    is_start = masker.is_word_start(tokens, maskable, documents)
    continues = maskable & ~is_start
    assert continues.sum() > 1000
    assert np.array_equal(is_masked[continues], np.roll(is_masked, 1, 1)[continues])  # like the previous piece
    first = maskable & is_start
    assert is_near(is_masked[first].sum(), first.sum(), 0.4)
    next_word = is_start & np.roll(maskable, 1, 1) & maskable
    agrees = is_masked[next_word] == np.roll(is_masked, 1, 1)[next_word]
    assert is_near(agrees.sum(), len(agrees), 0.4**2 + 0.6**2)  # words are independent


def test_span_lengths(tokenizers):
    tokenizer = tokenizers["bpe"]
    for mean, maximum in ((3.0, 10), (1.0, 4), (5.0, 5), (2.5, 40)):
        spans = Spans.of(0.15, mean, maximum)
        lengths = spans.lengths(np.random.default_rng(0).random(200_000))
        assert lengths.mean() == pytest.approx(mean, abs=0.03)
        assert lengths.min() >= 1
        assert lengths.max() <= maximum
        assert 1 - np.prod(1 - spans.rate * spans.tails) == pytest.approx(0.15, abs=1e-12)
    masker = TokenMasker(MaskingConfig(unit="span", fraction=0.02, span_mean=4.0, span_most=6), tokenizer)
    _, maskable, documents = inputs = rows(tokenizer, 6000)
    is_masked = mask(masker, inputs)[1] != IGNORE_INDEX
    # at such a small fraction, masked tokens inside a run are nearly always one span
    is_start = run_starts(maskable, documents)
    span_lengths = []
    for row, run_start in zip(is_masked, is_start, strict=True):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]])))
        for begin, end in edges.reshape(-1, 2):
            if not run_start[begin] and end < len(row) - 1 and not run_start[end]:
                span_lengths.append(end - begin)
    assert np.mean(span_lengths) == pytest.approx(4.0, abs=0.25)
    runs = np.array([len(run) for row in is_masked for run in "".join("x" if h else " " for h in row).split()])
    assert (runs > 6).mean() < 0.06  # only overlapping spans


def test_spans_end_with_their_document(tokenizers):
    tokenizer = tokenizers["char"]
    masker = TokenMasker(MaskingConfig(unit="span", span_mean=8.0, span_most=8), tokenizer)
    tokens = np.full((20_000, 8), masker.ordinary_tokens[0])
    maskable = np.ones(tokens.shape, dtype=bool)
    documents = np.repeat([[0, 0, 0, 0, 1, 1, 1, 1]], len(tokens), 0)
    separate, joined = (
        (masker.mask_tokens(tokens, maskable, ids, key=(5,), rows=range(len(tokens)), fraction=0.2)[1] != IGNORE_INDEX)[
            :, 3:5
        ]
        for ids in (documents, np.zeros_like(documents))
    )
    assert np.corrcoef(joined.T)[0, 1] > 0.7  # inside one document most spans continue
    assert abs(np.corrcoef(separate.T)[0, 1]) < 0.04


# Schedule and purity


@pytest.mark.parametrize("unit", ["token", "word", "span"])
@given(fraction=st.floats(0.01, 0.9), increase=st.floats(0.0, 0.09), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_masks_grow_with_the_fraction(tokenizers, unit, fraction, increase, seed):
    tokenizer = tokenizers["bpe"]
    masker = TokenMasker(MaskingConfig(unit=unit), tokenizer)
    inputs = rows(tokenizer, 30, seed=seed)
    small, large = (mask(masker, inputs, key=(seed,), fraction=share) for share in (fraction, fraction + increase))
    is_masked = small[1] != IGNORE_INDEX
    assert np.array_equal(small[1][is_masked], large[1][is_masked])
    assert np.array_equal(small[0][is_masked], large[0][is_masked])  # with the same replacement


def test_fraction_schedule_is_linear(tokenizers):
    masker = TokenMasker(MaskingConfig(fraction=0.15, fraction_start=0.3), tokenizers["bpe"])
    assert [masker.fraction(progress) for progress in (0.0, 0.5, 1.0)] == pytest.approx([0.3, 0.225, 0.15])
    assert TokenMasker(MaskingConfig(), tokenizers["bpe"]).fraction(0.2) == 0.15


@pytest.mark.parametrize("unit", ["token", "word", "span"])
def test_masks_do_not_depend_on_batch_or_length(tokenizers, unit):
    tokenizer = tokenizers["bpe"]
    masker = TokenMasker(MaskingConfig(unit=unit), tokenizer)
    inputs = rows(tokenizer, 20)
    expected = mask(masker, inputs)
    selected = mask(masker, inputs, rows=[7, 3, 7])
    for actual, reference in zip(selected, expected, strict=True):
        assert np.array_equal(actual, reference[[7, 3, 7]])
    shorter = mask(masker, [array[:, :40] for array in inputs])
    assert np.array_equal(shorter[1], expected[1][:, :40])
    other_epoch = mask(masker, inputs, key=(1, 1))
    assert not np.array_equal(other_epoch[1], expected[1])


def test_invalid_settings_are_reported_together():
    with pytest.raises(ConfigError) as error:
        MaskingConfig(fraction=0.0, fraction_start=1.0, masked=0.8, random=0.3, span_mean=0.5)
    assert [name for name, _ in error.value.problems] == ["fraction", "fraction_start", "masked", "span_mean"]
    with pytest.raises(ConfigError, match="span_mean: must be from 1 to span_most 4, not 5"):
        MaskingConfig(span_mean=5, span_most=4)
