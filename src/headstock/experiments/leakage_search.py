"""Finds test texts that occur in the pretraining corpus, exactly or nearly.

Texts are compared as sequences of words, ignoring case, accents, other combining marks and punctuation, after Unicode
compatibility normalization (NFKD). In scripts written without spaces each character is a word.

- **exact**: a document contains all words of the text consecutively. Texts of fewer than 5 words are common phrases
  and never count.
- **near**: a span of a document, about as long as the text, contains a fifth of the text's 13-grams (a long quotation),
  or as many of its 5-grams and 70% of its words in order, at least 12 (an edited copy). Reviews of the same film that
  share phrases or a short quotation are not near, nor are texts generated from one template: 5-grams of more than 50
  test texts are ignored unless a text has no others.

The corpus is read once in batches. All words that occur in no test text are equivalent, so memory grows with the test
texts and not with the corpus.
"""

import logging
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Literal

import numpy as np

from headstock import rng as randomness
from headstock.data.corpus import Document

logger = logging.getLogger(__name__)

GRAM, LONG_GRAM = 5, 13  # words per n-gram
MIN_EXACT_WORDS, MIN_NEAR_WORDS = GRAM, 12  # words that must occur in the document
QUOTED_ONE_IN = 5  # 13-grams in the document: sufficient
IN_ORDER_SHARE = 0.7  # of the words, together with as many 5-grams: sufficient
TEMPLATE_TEXTS = 50  # a 5-gram of more texts belongs to a template
SPAN_FACTOR = 1.5  # maximum length of the span relative to the text
BATCH_CHARACTERS = 1 << 18
EXCERPT_CHARACTERS = 200
PROGRESS_CHARACTERS = 100_000_000  # between progress messages

ACCENTS = re.compile("[\u0300-\u036f\u00ad\u200b-\u200d\u2060\ufe00-\ufe0f\ufeff]+")  # and invisible characters
# Unicode blocks with other combining marks, such as the vowel signs of Indic scripts
OTHER_MARKS = re.compile(
    "[\u0483-\u0489\u0591-\u1dff\u20d0-\u20ff\u2cef-\ufe2f\U00010000-\U0001efff\U000e0000-\U000effff]"
)
SPACELESS = re.compile(  # Thai, Lao, Burmese, Khmer, kana and ideographs
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]"
)
SEPARATOR = "\x1e"  # between the documents of a batch
WORD = re.compile(rf"[^\W_]+|{SEPARATOR}")
UNKNOWN_ID, SEPARATOR_ID = 0, -1  # of words in no test text, and of the separator

Kind = Literal["exact", "near"]
GramMatch = tuple[int, int]  # the position of a 5-gram in a batch, and its number


@dataclass(frozen=True)
class LeakedText:
    row: int  # index of the test text
    kind: Kind
    share: float  # of the text's words that occur in order in one span of the document
    where: str  # the document, as file:line
    text: str  # the beginning of the span


@dataclass(frozen=True)
class SearchResult:
    documents: int  # in the corpus
    tested: int  # texts long enough to search for
    found: list[LeakedText]  # the best match of each text, by row


def find_leaked_texts(texts: Sequence[str], corpus: Iterable[Document]) -> SearchResult:
    """Find which of `texts` occur in the corpus; of several equal matches the first is reported."""
    rows: dict[tuple[str, ...], list[int]] = {}  # of each distinct text
    for row, text in enumerate(texts):
        if len(key := tuple(words(text))) >= MIN_EXACT_WORDS:
            rows.setdefault(key, []).append(row)
    index, best = _build_index(list(rows)), dict[int, LeakedText]()
    documents = characters = 0
    tail = np.zeros(0, np.int32)
    for parts in _batches(corpus):
        batch = _to_ids(index, parts, tail)
        _update_matches(index, batch, best)
        tail = tail[:0] if parts[-1].is_last else batch.ids[batch.starts[-1] :][-index.overlap :]
        documents += sum(part.is_last for part in parts)
        before, characters = characters, characters + sum(len(part.text) for part in parts)
        if characters // PROGRESS_CHARACTERS > before // PROGRESS_CHARACTERS:
            logger.info("searched %s documents: %d of %d texts found", f"{documents:,}", len(best), len(rows))
    equal_rows = list(rows.values())
    leaked = [replace(match, row=row) for text, match in best.items() for row in equal_rows[text]]
    return SearchResult(documents, sum(map(len, equal_rows)), sorted(leaked, key=lambda match: match.row))


def overlapping_rows(texts: Sequence[str], others: Sequence[str]) -> list[int]:
    """The indices of `texts` with the same words as one of `others`; texts without words must be equal."""

    def key(text: str) -> tuple[str, ...]:
        return tuple(words(text)) or ("", text.strip())

    other_keys = {key(text) for text in others}
    return [row for row, text in enumerate(texts) if key(text) in other_keys]


# Normalization


def words(text: str) -> list[str]:
    """The normalized words of a text."""
    return WORD.findall(_normalize(text.replace(SEPARATOR, " ")))


def _normalize(text: str) -> str:
    if not text.isascii():
        text = ACCENTS.sub("", unicodedata.normalize("NFKD", text))
        if OTHER_MARKS.search(text):
            text = text.translate(COMBINING_MARKS)
        if SPACELESS.search(text):
            text = SPACELESS.sub(r" \g<0> ", text)
    return text.casefold()


class _CombiningMarks(dict[int, int | None]):
    """A table for `str.translate` that removes combining marks."""

    def __missing__(self, code: int) -> int | None:
        self[code] = None if unicodedata.category(chr(code)).startswith("M") else code
        return self[code]


COMBINING_MARKS = _CombiningMarks()


# Batches of the corpus


@dataclass
class _Part:
    """A document, or a part of a very long one."""

    document: Document
    text: str
    is_last: bool  # of its document


@dataclass
class _Batch:
    parts: list[_Part]
    ids: np.ndarray  # word ids of all parts, UNKNOWN_ID between two parts
    starts: np.ndarray  # (parts,) offsets in ids
    ends: np.ndarray  # (parts,)
    repeated: int  # leading words, from the previous part of the same document


def _batches(corpus: Iterable[Document]) -> Iterator[list[_Part]]:
    parts: list[_Part] = []
    size = 0
    for document in corpus:
        for part in _parts(document):
            parts.append(part)
            size += len(part.text)
            if size >= BATCH_CHARACTERS or not part.is_last:  # the next part of a document starts a batch
                yield parts
                parts, size = [], 0
    if parts:
        yield parts


def _parts(document: Document) -> Iterator[_Part]:
    text, start, space = document.text, 0, re.compile(r"\s")
    while len(text) - start > BATCH_CHARACTERS and (cut := space.search(text, start + BATCH_CHARACTERS)):
        yield _Part(document, text[start : cut.end()], is_last=False)
        start = cut.end()
    yield _Part(document, text[start:], is_last=True)


def _to_ids(index: "_Index", parts: list[_Part], tail: np.ndarray) -> _Batch:
    joined = f" {SEPARATOR} ".join(part.text.replace(SEPARATOR, " ") for part in parts)
    batch_words = WORD.findall(_normalize(joined))
    ids = np.fromiter(map(index.vocabulary.get, batch_words, repeat(UNKNOWN_ID)), np.int32, len(batch_words))
    ids = np.concatenate([tail, ids])
    ends = np.append(np.flatnonzero(ids == SEPARATOR_ID), len(ids))
    ids[ends[:-1]] = UNKNOWN_ID
    return _Batch(parts, ids, np.append(0, ends[:-1] + 1), ends, len(tail))


def _excerpt(text: str, word: int) -> str:
    """The text from its `word`-th word on; words are recounted because normalization shifts offsets."""
    for chunk in re.finditer(r"(?s).{1,1000}\S*", text):
        count = len(words(chunk[0]))
        if word < count:
            for token in re.finditer(r"\S+", chunk[0]):
                word -= len(words(token[0]))
                if word < 0:
                    start = chunk.start() + token.start()
                    return text[start : start + EXCERPT_CHARACTERS]
        word -= count
    return text[:EXCERPT_CHARACTERS]  # the span lies in the repeated words, followed only by punctuation


# The index of the test texts


@dataclass
class _Index:
    """The texts as word ids, and an inverted index of their G distinct 5-grams."""

    vocabulary: dict[str, int]
    codes: np.ndarray  # (words,) random hash codes
    texts: list[np.ndarray]
    text_grams: list[np.ndarray]  # the 5-grams of each text in order
    grams: np.ndarray  # (G,) sorted hashes
    prefix_bits: int  # leading bits of a hash used by the filter
    prefixes: np.ndarray  # (2 ** prefix_bits,) True if some 5-gram has this prefix; filters out most of the corpus
    first: np.ndarray  # (G + 1,) offsets of each 5-gram in owners and times
    owners: np.ndarray  # texts that contain the 5-gram
    times: np.ndarray  # how often the owner contains it
    required: np.ndarray  # (texts,) shared 5-grams that make a document a candidate
    overlap: int  # words to repeat between parts of a document


def _build_index(texts: list[tuple[str, ...]]) -> _Index:
    vocabulary, count = {SEPARATOR: SEPARATOR_ID}, max(1, len(texts))
    ids = [np.array([vocabulary.setdefault(word, len(vocabulary)) for word in text], np.int32) for text in texts]
    codes = randomness.generator("leakage").integers(0, 1 << 64, len(vocabulary), np.uint64)
    hashes = [_gram_hashes(text, codes) for text in ids]
    lengths = [len(text) for text in hashes]
    grams, gram_numbers = np.unique(np.concatenate([np.zeros(0, np.uint64), *hashes]), return_inverse=True)
    pairs, times = np.unique(gram_numbers * count + np.repeat(np.arange(len(texts)), lengths), return_counts=True)
    gram, text = np.divmod(pairs, count)
    is_specific = np.bincount(gram)[gram] <= TEMPLATE_TEXTS
    relevant = is_specific | ~np.isin(text, text[is_specific])  # a text with only template 5-grams uses them
    pairs, times, owners = pairs[relevant], times[relevant], text[relevant]
    relevant_counts = np.bincount(owners, times, len(texts)).astype(int)
    prefix_bits = min(28, max(10, (16 * len(grams)).bit_length()))
    prefixes = np.zeros(1 << prefix_bits, bool)
    prefixes[grams >> np.uint64(64 - prefix_bits)] = True
    return _Index(
        vocabulary=vocabulary,
        codes=codes,
        texts=ids,
        text_grams=np.split(gram_numbers, np.cumsum(lengths)[:-1]),
        grams=grams,
        prefix_bits=prefix_bits,
        prefixes=prefixes,
        first=np.searchsorted(pairs, np.arange(len(grams) + 1) * count),
        owners=owners,
        times=times,
        required=np.array(list(map(_required_grams, map(len, texts), relevant_counts)), np.int64),
        overlap=2 * max((_span_length(len(text)) for text in texts), default=1),
    )


def _gram_hashes(ids: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """A hash of each 5-gram. Collisions only cost time: the words are compared later."""
    word_codes = codes[ids]
    hashes = np.zeros(max(0, len(ids) - GRAM + 1), np.uint64)
    for offset in range(GRAM):
        hashes *= np.uint64(0x9E3779B97F4A7C15)  # odd, so that the product is invertible
        hashes += word_codes[offset : offset + len(hashes)]
    return hashes


def _required_grams(count: int, relevant: int) -> int:
    """How many of the `relevant` 5-grams of a text of `count` words make a document a candidate."""
    grams = count - GRAM + 1
    required = grams if count < MIN_NEAR_WORDS else max(1, (count - LONG_GRAM + 1) / QUOTED_ONE_IN)
    return math.ceil(required * relevant / grams)


def _span_length(count: int) -> int:
    return math.ceil(SPAN_FACTOR * count)


# The search


@dataclass
class _Span:
    kind: Kind
    start: int  # in the ids of the batch
    share: float


def _update_matches(index: _Index, batch: _Batch, best: dict[int, LeakedText]) -> None:
    """Update the best match of each text with those in the batch."""
    positions, grams = _shared_grams(index, batch.ids)
    parts, offsets = np.unique(np.searchsorted(batch.ends, positions), return_index=True)
    groups = zip(parts.tolist(), np.split(positions, offsets[1:]), np.split(grams, offsets[1:]), strict=False)
    for part, part_positions, part_grams in groups:
        for text in _candidates(index, part_grams):
            span = _match(index, text, batch, part, part_positions, part_grams)
            previous = best.get(text)
            if span and (previous is None or (span.kind, -span.share) < (previous.kind, -previous.share)):
                document = batch.parts[part].document
                word = span.start - int(batch.starts[part]) - (batch.repeated if part == 0 else 0)
                excerpt = _excerpt(batch.parts[part].text, max(0, word))
                best[text] = LeakedText(text, span.kind, span.share, f"{document.source}:{document.line}", excerpt)
                if span.kind == "exact":
                    index.required[text] = len(index.texts[text]) + 1  # unreachable: stop searching for it


def _shared_grams(index: _Index, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The positions and numbers of the batch's 5-grams that occur in some text."""
    hashes = _gram_hashes(ids, index.codes)
    is_candidate = index.prefixes[hashes >> np.uint64(64 - index.prefix_bits)]
    is_word_of_texts = ids != UNKNOWN_ID
    for offset in range(GRAM):
        is_candidate &= is_word_of_texts[offset : offset + len(is_candidate)]
    positions = np.flatnonzero(is_candidate)
    if not len(positions):
        return positions, positions
    grams = np.searchsorted(index.grams, hashes[positions])
    is_equal = index.grams[np.minimum(grams, len(index.grams) - 1)] == hashes[positions]
    return positions[is_equal], grams[is_equal]


def _candidates(index: _Index, grams: np.ndarray) -> list[int]:
    """The texts that share enough 5-grams with a part."""
    slices = [slice(index.first[gram], index.first[gram + 1]) for gram in np.unique(grams).tolist()]
    owners, owner = np.unique(np.concatenate([index.owners[entries] for entries in slices]), return_inverse=True)
    shared = np.bincount(owner, np.concatenate([index.times[entries] for entries in slices]))
    return owners[shared >= index.required[owners]].tolist()


def _match(
    index: _Index, text: int, batch: _Batch, part: int, positions: np.ndarray, grams: np.ndarray
) -> _Span | None:
    """The span of a part that matches the text, if any; `positions` and `grams` are those of the part."""
    text_ids, text_grams = index.texts[text], index.text_grams[text]
    for start in positions[grams == text_grams[0]].tolist():
        if np.array_equal(batch.ids[start : start + len(text_ids)], text_ids):
            return _Span("exact", start, 1.0)
    if len(text_ids) < MIN_NEAR_WORDS:
        return None
    times = Counter(text_grams.tolist())
    matches = [pair for pair in zip(positions.tolist(), grams.tolist(), strict=True) if pair[1] in times]
    first, last = _densest_window(matches, times, _span_length(len(text_ids)))
    # extend the span by the words before the first and after the last shared 5-gram
    words_before = int(np.flatnonzero(text_grams == first[1])[0])
    words_after = len(text_grams) - 1 - int(np.flatnonzero(text_grams == last[1])[-1])
    start = max(first[0] - words_before, int(batch.starts[part]))
    end = min(last[0] + GRAM + words_after, int(batch.ends[part]))
    span = batch.ids[start:end].tolist()
    in_order = _longest_common_subsequence(text_ids.tolist(), span)
    is_near = in_order >= max(MIN_NEAR_WORDS, IN_ORDER_SHARE * len(text_ids)) or _is_quoted(text_ids.tolist(), span)
    return _Span("near", start, in_order / len(text_ids)) if is_near else None


def _densest_window(matches: list[GramMatch], times: Counter[int], width: int) -> tuple[GramMatch, GramMatch]:
    """The first and last match in the window of `width` words with the most 5-grams of the text."""
    inside: Counter[int] = Counter()
    shared = maximum = first = 0
    best = matches[0], matches[0]
    for position, gram in matches:
        shared += 0 if inside[gram] else times[gram]
        inside[gram] += 1
        while position + GRAM - matches[first][0] > width:
            removed = matches[first][1]
            inside[removed] -= 1
            shared -= 0 if inside[removed] else times[removed]
            first += 1
        if shared > maximum:
            maximum, best = shared, (matches[first], (position, gram))
    return best


def _longest_common_subsequence(text: list[int], span: list[int]) -> int:
    """Its length (bit-parallel; a bit is 1 while a word of the text is unmatched)."""
    masks: dict[int, int] = {}  # by word, a bit for each of its positions
    for position, word in enumerate(text):
        masks[word] = masks.get(word, 0) | 1 << position
    all_bits = unmatched = (1 << len(text)) - 1
    for word in span:
        matched = unmatched & masks.get(word, 0)
        unmatched = (unmatched + matched | unmatched - matched) & all_bits
    return len(text) - unmatched.bit_count()


def _is_quoted(text: list[int], span: list[int]) -> bool:
    """Whether the span contains a fifth of the text's 13-grams."""
    text_grams, span_grams = (
        list(zip(*(ids[offset:] for offset in range(LONG_GRAM)), strict=False)) for ids in (text, span)
    )
    shared = sum(map(set(span_grams).__contains__, text_grams))
    return bool(text_grams) and shared * QUOTED_ONE_IN >= len(text_grams)
