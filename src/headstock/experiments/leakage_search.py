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
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

import numpy as np

from headstock import rng as randomness
from headstock.data.corpus import Document

logger = logging.getLogger(__name__)

GRAM, LONG_GRAM = 5, 13  # words per n-gram
FEWEST_EXACT, FEWEST_NEAR = GRAM, 12  # words that must occur in the document
ONE_IN = 5  # 13-grams in the document: sufficient
IN_ORDER = 0.7  # of the words, together with as many 5-grams: sufficient
PATTERN = 50  # a 5-gram of more texts belongs to a template
STRETCH = 1.5  # maximum length of the span relative to the text
BATCH = 1 << 18  # characters
PAIRS = 1_000_000  # (document, text) pairs counted at a time
EXCERPT = 200  # characters
PROGRESS = 100_000_000  # characters between progress messages

ACCENTS = re.compile("[\u0300-\u036f\u00ad\u200b-\u200d\u2060\ufe00-\ufe0f\ufeff]+")  # and invisible characters
# Unicode blocks with other combining marks, such as the vowel signs of Indic scripts
OTHER_MARKS = re.compile(
    "[\u0483-\u0489\u0591-\u1dff\u20d0-\u20ff\u2cef-\ufe2f\U00010000-\U0001efff\U000e0000-\U000effff]"
)
SPACELESS = re.compile(  # Thai, Lao, Burmese, Khmer, kana and ideographs
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]"
)
END = "\x1e"  # separates the documents of a batch
WORD = re.compile(rf"[^\W_]+|{END}")
Hit = tuple[int, int]  # the position of a 5-gram in a batch, and its number
NO_WORD, END_NUMBER = 0, -1  # ids of words in no test text, and of the end of a document


@dataclass(frozen=True)
class LeakedText:
    row: int  # index of the test text
    kind: Literal["exact", "near"]
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
    rows: dict[tuple[str, ...], list[int]] = {}
    for row, text in enumerate(texts):
        if len(key := tuple(words(text))) >= FEWEST_EXACT:
            rows.setdefault(key, []).append(row)
    index = _index(list(rows))
    best: dict[int, LeakedText] = {}
    documents = characters = 0
    tail = np.zeros(0, np.int32)
    for parts in _batches(corpus):
        batch = _to_ids(index, parts, tail)
        _update_matches(index, batch, best)
        tail = tail[:0] if parts[-1].last else batch.numbers[batch.starts[-1] :][-index.reach :]
        documents += sum(part.last for part in parts)
        before, characters = characters, characters + sum(len(part.text) for part in parts)
        if characters // PROGRESS > before // PROGRESS:
            hits = f"{len(best):,} of {len(rows):,} texts found"
            logger.info("searched %s documents: %s", f"{documents:,}", hits)
    same = list(rows.values())
    leaked = [LeakedText(row, hit.kind, hit.share, hit.where, hit.text) for i, hit in best.items() for row in same[i]]
    return SearchResult(documents, sum(map(len, same)), sorted(leaked, key=lambda hit: hit.row))


def overlapping_rows(texts: Sequence[str], others: Sequence[str]) -> list[int]:
    """The indices of `texts` with the same words as one of `others`; texts without words must be equal."""

    def key(text: str) -> tuple[str, ...]:
        return tuple(words(text)) or ("", text.strip())

    other_keys = {key(text) for text in others}
    return [row for row, text in enumerate(texts) if key(text) in other_keys]


# Normalization


def words(text: str) -> list[str]:
    """The normalized words of a text."""
    return WORD.findall(_folded(text.replace(END, " ")))


def _folded(text: str) -> str:
    if not text.isascii():
        text = ACCENTS.sub("", unicodedata.normalize("NFKD", text))
        if OTHER_MARKS.search(text):
            text = text.translate(MARKS)
        if SPACELESS.search(text):
            text = SPACELESS.sub(r" \g<0> ", text)
    return text.casefold()


class _Marks(dict[int, int | None]):
    """A table for `str.translate` that removes combining marks."""

    def __missing__(self, code: int) -> int | None:
        self[code] = None if unicodedata.category(chr(code)).startswith("M") else code
        return self[code]


MARKS = _Marks()


# Batches of the corpus


@dataclass
class _Part:
    """A document, or a part of a very long one."""

    document: Document
    text: str
    last: bool  # True for the last part of a document


@dataclass
class _Batch:
    parts: list[_Part]
    numbers: np.ndarray  # word ids of all parts, NO_WORD between two parts
    starts: np.ndarray  # (parts,) offsets in numbers
    ends: np.ndarray  # (parts,)
    carried: int  # leading words repeated from the previous part of the same document


def _batches(corpus: Iterable[Document]) -> Iterator[list[_Part]]:
    parts: list[_Part] = []
    size = 0
    for document in corpus:
        for part in _parts(document):
            parts.append(part)
            size += len(part.text)
            if size >= BATCH or not part.last:  # the next part of a document starts a batch
                yield parts
                parts, size = [], 0
    if parts:
        yield parts


def _parts(document: Document) -> Iterator[_Part]:
    text, start, space = document.text, 0, re.compile(r"\s")
    while len(text) - start > BATCH and (cut := space.search(text, start + BATCH)):
        yield _Part(document, text[start : cut.end()], False)
        start = cut.end()
    yield _Part(document, text[start:], True)


def _to_ids(index: "_Index", parts: list[_Part], tail: np.ndarray) -> _Batch:
    joined = f" {END} ".join(part.text.replace(END, " ") for part in parts)
    batch_words = WORD.findall(_folded(joined))
    ids = map(index.vocabulary.get, batch_words, repeat(NO_WORD))
    numbers = np.fromiter(ids, np.int32, len(batch_words))
    numbers = np.concatenate([tail, numbers])
    ends = np.append(np.flatnonzero(numbers == END_NUMBER), len(numbers))
    numbers[ends[:-1]] = NO_WORD
    return _Batch(parts, numbers, np.append(0, ends[:-1] + 1), ends, len(tail))


def _excerpt(text: str, word: int) -> str:
    """The text from its `word`-th word on; words are recounted because normalization shifts offsets."""
    for piece in re.finditer(r"(?s).{1,1000}\S*", text):
        inside = len(words(piece[0]))
        if word < inside:
            for token in re.finditer(r"\S+", piece[0]):
                word -= len(words(token[0]))
                if word < 0:
                    start = piece.start() + token.start()
                    return text[start : start + EXCERPT]
        word -= inside
    return text[:EXCERPT]  # the span lies in the repeated words, followed only by punctuation


# The index of the test texts


@dataclass
class _Index:
    """The texts as word ids, and an inverted index of their G distinct 5-grams."""

    vocabulary: dict[str, int]
    codes: np.ndarray  # (words,) random hash codes
    texts: list[np.ndarray]
    runs: list[np.ndarray]  # the 5-grams of each text in order
    grams: np.ndarray  # (G,) sorted hashes
    bits: int  # leading bits of a hash used by the filter
    maybe: np.ndarray  # (2 ** bits,) True if some 5-gram has this prefix; filters out most of the corpus
    first: np.ndarray  # (G + 1,) offsets of the owners of each 5-gram
    owners: np.ndarray  # texts that contain the 5-gram
    times: np.ndarray  # how often the owner contains it
    needed: np.ndarray  # (texts,) shared 5-grams that make a document a candidate
    reach: int  # words to repeat between parts of a document


def _index(texts: list[tuple[str, ...]]) -> _Index:
    vocabulary = {END: END_NUMBER}
    numbered = [np.array([vocabulary.setdefault(word, len(vocabulary)) for word in text], np.int32) for text in texts]
    codes = randomness.generator("leakage").integers(0, 1 << 64, len(vocabulary), np.uint64)
    hashes = [_hashes(text, codes) for text in numbered]
    grams, runs = np.unique(np.concatenate([np.zeros(0, np.uint64), *hashes]), return_inverse=True)
    pairs, times = _owned(runs, np.repeat(np.arange(len(texts)), [len(text) for text in hashes]), len(texts))
    counted = np.bincount(pairs % max(1, len(texts)), times, len(texts)).astype(int)
    bits = min(28, max(10, (16 * len(grams)).bit_length()))
    maybe = np.zeros(1 << bits, bool)
    maybe[grams >> np.uint64(64 - bits)] = True
    return _Index(
        vocabulary=vocabulary,
        codes=codes,
        texts=numbered,
        runs=np.split(runs, np.cumsum([len(text) for text in hashes])[:-1]),
        grams=grams,
        bits=bits,
        maybe=maybe,
        first=np.searchsorted(pairs, np.arange(len(grams) + 1) * len(texts)),
        owners=pairs % max(1, len(texts)),
        times=times,
        needed=np.array([_needed(len(text), count) for text, count in zip(texts, counted, strict=True)], np.int64),
        reach=2 * max((_width(len(text)) for text in texts), default=1),
    )


def _owned(runs: np.ndarray, texts: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The relevant pairs (run * count + text), and how often the text contains the run."""
    pairs, times = np.unique(runs * count + texts, return_counts=True)
    run, text = np.divmod(pairs, max(1, count))
    own = np.bincount(run)[run] <= PATTERN
    keep = own | ~np.isin(text, text[own])  # a text with only template 5-grams keeps them
    return pairs[keep], times[keep]


def _hashes(numbers: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """A hash of each 5-gram. Collisions only cost time: the words are compared later."""
    coded = codes[numbers]
    hashes = np.zeros(max(0, len(numbers) - GRAM + 1), np.uint64)
    for k in range(GRAM):
        hashes *= np.uint64(0x9E3779B97F4A7C15)  # odd, so that the product is invertible
        hashes += coded[k : k + len(hashes)]
    return hashes


def _needed(count: int, runs: int) -> int:
    """How many of a text's `runs` relevant 5-grams make a document a candidate."""
    grams = count - GRAM + 1
    required = grams if count < FEWEST_NEAR else max(1, (count - LONG_GRAM + 1) / ONE_IN)
    return math.ceil(required * runs / grams)


def _width(count: int) -> int:
    return math.ceil(STRETCH * count)


# The search


@dataclass
class _Span:
    kind: Literal["exact", "near"]
    start: int  # in the numbers of the batch
    share: float


def _update_matches(index: _Index, batch: _Batch, best: dict[int, LeakedText]) -> None:
    """Update the best match of each text with those in the batch."""
    positions, grams = _find_hits(index, batch.numbers)
    parts = np.searchsorted(batch.ends, positions)
    for part, text in _candidates(index, parts, grams):
        mine = slice(*np.searchsorted(parts, [part, part + 1]))
        span = _match(index, text, batch, part, positions[mine], grams[mine])
        previous = best.get(text)
        if span and (previous is None or (span.kind, -span.share) < (previous.kind, -previous.share)):
            document = batch.parts[part].document
            word = span.start - int(batch.starts[part]) - (batch.carried if part == 0 else 0)
            excerpt = _excerpt(batch.parts[part].text, max(0, word))
            best[text] = LeakedText(text, span.kind, span.share, f"{document.source}:{document.line}", excerpt)
            if span.kind == "exact":
                index.needed[text] = len(index.texts[text]) + 1  # unreachable: stop searching for it


def _find_hits(index: _Index, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The positions and numbers of the batch's 5-grams that occur in some text."""
    hashes = _hashes(numbers, index.codes)
    hit = index.maybe[hashes >> np.uint64(64 - index.bits)]
    in_texts = numbers != NO_WORD
    for k in range(GRAM):
        hit &= in_texts[k : k + len(hit)]
    positions = np.flatnonzero(hit)
    if not len(positions):
        return positions, positions
    grams = np.searchsorted(index.grams, hashes[positions])
    there = index.grams[np.minimum(grams, len(index.grams) - 1)] == hashes[positions]
    return positions[there], grams[there]


def _candidates(index: _Index, parts: np.ndarray, grams: np.ndarray) -> Iterator[tuple[int, int]]:
    """Pairs of a part and a text that share enough 5-grams."""
    if not len(parts):
        return
    count = len(index.texts)
    once = np.unique(parts * len(index.grams) + grams)
    parts, grams = np.divmod(once, len(index.grams))
    owned = index.first[grams + 1] - index.first[grams]
    before = np.cumsum(owned) - owned
    portion = before[np.searchsorted(parts, parts)] // PAIRS  # bounds memory for phrases that all texts share
    for some in np.split(np.arange(len(once)), np.flatnonzero(np.diff(portion)) + 1):
        many = owned[some]
        at = np.repeat(index.first[grams[some]] - before[some] + before[some[0]], many) + np.arange(many.sum())
        pairs, pair = np.unique(np.repeat(parts[some], many) * count + index.owners[at], return_inverse=True)
        shared = np.bincount(pair, index.times[at])
        for pair_number in pairs[shared >= index.needed[pairs % count]].tolist():
            yield divmod(pair_number, count)


def _match(
    index: _Index, text: int, batch: _Batch, part: int, positions: np.ndarray, grams: np.ndarray
) -> _Span | None:
    """The span of a part that matches the text, if any; `positions` and `grams` are the part's hits."""
    text_words, own = index.texts[text], index.runs[text]
    for start in positions[grams == own[0]].tolist():
        if np.array_equal(batch.numbers[start : start + len(text_words)], text_words):
            return _Span("exact", start, 1.0)
    if len(text_words) < FEWEST_NEAR:
        return None
    times = Counter(own.tolist())
    hits = [(at, gram) for at, gram in zip(positions.tolist(), grams.tolist(), strict=True) if gram in times]
    first, last = _densest_window(hits, times, _width(len(text_words)))
    # extend the span by the words before the first and after the last shared 5-gram
    start = max(first[0] - int(np.flatnonzero(own == first[1])[0]), int(batch.starts[part]))
    end = min(last[0] + GRAM + len(own) - 1 - int(np.flatnonzero(own == last[1])[-1]), int(batch.ends[part]))
    span = batch.numbers[start:end].tolist()
    in_order = _in_order(text_words.tolist(), span)
    near = in_order >= max(FEWEST_NEAR, IN_ORDER * len(text_words)) or _quoted(text_words.tolist(), span)
    return _Span("near", start, in_order / len(text_words)) if near else None


def _densest_window(hits: list[Hit], times: Counter[int], width: int) -> tuple[Hit, Hit]:
    """The first and last hit of the window of `width` words with the most 5-grams of the text."""
    inside: Counter[int] = Counter()
    shared = most = low = 0
    best = hits[0], hits[0]
    for at, gram in hits:
        shared += 0 if inside[gram] else times[gram]
        inside[gram] += 1
        while at + GRAM - hits[low][0] > width:
            left = hits[low][1]
            inside[left] -= 1
            shared -= 0 if inside[left] else times[left]
            low += 1
        if shared > most:
            most, best = shared, (hits[low], (at, gram))
    return best


def _in_order(text_words: list[int], span: list[int]) -> int:
    """The length of the longest common subsequence (bit-parallel; a bit is 1 while a word is unmatched)."""
    masks: dict[int, int] = {}  # by word, a bit for each of its positions
    for i, word in enumerate(text_words):
        masks[word] = masks.get(word, 0) | 1 << i
    everywhere = free = (1 << len(text_words)) - 1
    for word in span:
        here = free & masks.get(word, 0)
        free = (free + here | free - here) & everywhere
    return len(text_words) - free.bit_count()


def _quoted(text_words: list[int], span: list[int]) -> bool:
    """Whether the span contains a fifth of the text's 13-grams."""
    there = set(zip(*(span[k:] for k in range(LONG_GRAM)), strict=False))
    own = list(zip(*(text_words[k:] for k in range(LONG_GRAM)), strict=False))
    return bool(own) and sum(run in there for run in own) * ONE_IN >= len(own)
