"""Finds the test texts that stand in the pretraining corpus, word for word or nearly.

A text is compared by its words: without case, accents, other marks and punctuation, in the compatibility form of
Unicode, whatever lies between them. In scripts written without spaces each character counts as a word.

- **exact**: all words of the text stand in one document, in their order and with nothing between them. A text of
  fewer than 5 words is a common phrase and never counts.
- **near**: one stretch of one document, about as long as the text, holds either a fifth of the text's runs of 13
  words (a long quotation), or as many of its runs of 5 words and, in their order, seven tenths of its words and no
  fewer than 12 (a copy in which words were changed, cut or added). Reviews of the same film that share phrases or a
  short quotation are not near, nor are texts made after one pattern: a run that over 50 of the test texts have
  brings none of them into question that has other runs.

The corpus is read once, a batch at a time. Words that no test text has are all the same to the search, so what it
keeps in memory grows with the test texts and not with the corpus.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

import numpy as np

from headstock import rng as randomness
from headstock.data.corpus import Document

GRAM, LONG_GRAM = 5, 13  # words in a run
FEWEST_EXACT, FEWEST_NEAR = GRAM, 12  # words that must stand in the document
ONE_IN = 5  # runs of 13 that the document has: enough by itself
IN_ORDER = 0.7  # of the words, with as many runs of 5: enough together
PATTERN = 50  # texts that have a run of 5: with more, it is of a pattern
STRETCH = 1.5  # how much longer than the text the stretch may be that holds its runs of 5
BATCH = 1 << 18  # characters
PAIRS = 1_000_000  # runs shared by a document and a text: so many are counted at a time
EXCERPT = 200  # characters
PROGRESS = 100_000_000  # characters between two lines of progress

ACCENTS = re.compile("[\u0300-\u036f\u00ad\u200b-\u200d\u2060\ufe00-\ufe0f\ufeff]+")  # and what does not show
# the blocks of Unicode that have other marks, such as the vowel signs of Indic scripts
OTHER_MARKS = re.compile(
    "[\u0483-\u0489\u0591-\u1dff\u20d0-\u20ff\u2cef-\ufe2f\U00010000-\U0001efff\U000e0000-\U000effff]"
)
SPACELESS = re.compile(  # Thai, Lao, Burmese, Khmer, kana and ideographs
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]"
)
END = "\x1e"  # stands between two documents of a batch
WORD = re.compile(rf"[^\W_]+|{END}")
Hit = tuple[int, int]  # where in a batch a run of 5 begins, and which run it is
NO_WORD, END_NUMBER = 0, -1  # the numbers of a word that no test text has, and of the end of a document


@dataclass(frozen=True)
class LeakedText:
    row: int  # which of the test texts
    kind: Literal["exact", "near"]
    share: float  # of the text's words, those that stand in one stretch of the document in their order
    where: str  # the document, as file:line
    text: str  # how the stretch begins


@dataclass(frozen=True)
class SearchResult:
    documents: int  # in the corpus
    tested: int  # texts long enough to be looked for
    found: list[LeakedText]  # the best for each text, by row


def find_leaked_texts(
    texts: Sequence[str], corpus: Iterable[Document], *, say: Callable[[str], None] = lambda line: None
) -> SearchResult:
    """Which of `texts` stand in the corpus. Of documents that hold a text equally well, the first is named."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for row, text in enumerate(texts):
        if len(key := tuple(words(text))) >= FEWEST_EXACT:
            rows.setdefault(key, []).append(row)
    index = _index(list(rows))
    best: dict[int, LeakedText] = {}
    documents = seen = 0
    tail = np.zeros(0, np.int32)
    for parts in _batches(corpus):
        batch = _numbered(index, parts, tail)
        _note(index, batch, best)
        tail = tail[:0] if parts[-1].last else batch.numbers[batch.starts[-1] :][-index.reach :]
        documents += sum(part.last for part in parts)
        before, seen = seen, seen + sum(len(part.text) for part in parts)
        if seen // PROGRESS > before // PROGRESS:
            say(f"searched {documents:,} documents: {len(best):,} of {len(rows):,} texts found")
    same = list(rows.values())
    found = [LeakedText(row, hit.kind, hit.share, hit.where, hit.text) for i, hit in best.items() for row in same[i]]
    return SearchResult(documents, sum(map(len, same)), sorted(found, key=lambda hit: hit.row))


def overlapping_rows(texts: Sequence[str], others: Sequence[str]) -> list[int]:
    """The rows of `texts` that have the same words as one of `others`; where there are no words, the same text."""

    def key(text: str) -> tuple[str, ...]:
        return tuple(words(text)) or ("", text.strip())

    known = {key(text) for text in others}
    return [row for row, text in enumerate(texts) if key(text) in known]


# Words


def words(text: str) -> list[str]:
    """The words that two texts are compared by."""
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
    """What `str.translate` asks for each character: None for a mark, which removes it."""

    def __missing__(self, code: int) -> int | None:
        self[code] = None if unicodedata.category(chr(code)).startswith("M") else code
        return self[code]


MARKS = _Marks()


# The corpus, batch by batch


@dataclass
class _Part:
    """All of a document; of a very long one, as much as fits a batch."""

    document: Document
    text: str
    last: bool  # nothing of the document follows


@dataclass
class _Batch:
    parts: list[_Part]
    numbers: np.ndarray  # of the words of all parts, NO_WORD between two parts
    starts: np.ndarray  # (parts,) where each begins in numbers
    ends: np.ndarray  # (parts,)
    carried: int  # how many of the first words belong to the part before, of the same document


def _batches(corpus: Iterable[Document]) -> Iterator[list[_Part]]:
    parts: list[_Part] = []
    size = 0
    for document in corpus:
        for part in _parts(document):
            parts.append(part)
            size += len(part.text)
            if size >= BATCH or not part.last:  # so that what follows of a document is the first of its batch
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


def _numbered(index: "_Index", parts: list[_Part], tail: np.ndarray) -> _Batch:
    joined = f" {END} ".join(part.text.replace(END, " ") for part in parts)
    found = WORD.findall(_folded(joined))
    numbers = np.fromiter(map(index.vocabulary.get, found, repeat(NO_WORD)), np.int32, len(found))
    numbers = np.concatenate([tail, numbers])
    ends = np.append(np.flatnonzero(numbers == END_NUMBER), len(numbers))
    numbers[ends[:-1]] = NO_WORD
    return _Batch(parts, numbers, np.append(0, ends[:-1] + 1), ends, len(tail))


def _excerpt(text: str, word: int) -> str:
    """The text from its `word`-th word on; words are counted again, as folding moves the characters."""
    for piece in re.finditer(r"(?s).{1,1000}\S*", text):
        inside = len(words(piece[0]))
        if word < inside:
            for token in re.finditer(r"\S+", piece[0]):
                word -= len(words(token[0]))
                if word < 0:
                    start = piece.start() + token.start()
                    return text[start : start + EXCERPT]
        word -= inside
    return text[:EXCERPT]  # the stretch lies in words carried over, and nothing but punctuation follows


# What is looked for


@dataclass
class _Index:
    """The texts as numbers of words, and which of them have which run of 5 words (of which there are G)."""

    vocabulary: dict[str, int]
    codes: np.ndarray  # (words,) random, so that a sum of them tells runs apart
    texts: list[np.ndarray]
    runs: list[np.ndarray]  # the grams of each text, in its order
    grams: np.ndarray  # (G,) sorted hashes
    bits: int  # so many leading bits of a hash
    maybe: np.ndarray  # (2 ** bits,) True where some gram begins so: most of the corpus is left behind here
    first: np.ndarray  # (G + 1,) where the owners of a gram begin
    owners: np.ndarray  # texts that the gram can bring into question
    times: np.ndarray  # how often the owner has the gram
    needed: np.ndarray  # (texts,) how many of a text's grams make a document worth a closer look
    reach: int  # words that a stretch and what lies around it may have


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
    """The runs and texts (as run * count + text) that count, and how often the text has the run."""
    pairs, times = np.unique(runs * count + texts, return_counts=True)
    run, text = np.divmod(pairs, max(1, count))
    own = np.bincount(run)[run] <= PATTERN
    keep = own | ~np.isin(text, text[own])  # a text that has nothing of its own keeps all it has
    return pairs[keep], times[keep]


def _hashes(numbers: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """A number for each run of 5 words. A rare collision costs only time: the words themselves are compared later."""
    coded = codes[numbers]
    hashes = np.zeros(max(0, len(numbers) - GRAM + 1), np.uint64)
    for k in range(GRAM):
        hashes *= np.uint64(0x9E3779B97F4A7C15)  # odd, so that no bit is lost
        hashes += coded[k : k + len(hashes)]
    return hashes


def _needed(count: int, runs: int) -> int:
    """How many runs of 5 bring a text of `count` words into question, if only `runs` of all it has count."""
    grams = count - GRAM + 1
    wanted = grams if count < FEWEST_NEAR else max(1, (count - LONG_GRAM + 1) / ONE_IN)
    return math.ceil(wanted * runs / grams)


def _width(count: int) -> int:
    return math.ceil(STRETCH * count)


# The search


@dataclass
class _Stretch:
    kind: Literal["exact", "near"]
    start: int  # in the numbers of the batch
    share: float


def _note(index: _Index, batch: _Batch, best: dict[int, LeakedText]) -> None:
    """Keep what the batch has of each text, where it is better than what is known."""
    positions, grams = _hits(index, batch.numbers)
    parts = np.searchsorted(batch.ends, positions)
    for part, text in _candidates(index, parts, grams):
        mine = slice(*np.searchsorted(parts, [part, part + 1]))
        stretch = _compared(index, text, batch, part, positions[mine], grams[mine])
        known = best.get(text)
        if stretch and (known is None or (stretch.kind, -stretch.share) < (known.kind, -known.share)):
            document = batch.parts[part].document
            word = stretch.start - int(batch.starts[part]) - (batch.carried if part == 0 else 0)
            excerpt = _excerpt(batch.parts[part].text, max(0, word))
            best[text] = LeakedText(text, stretch.kind, stretch.share, f"{document.source}:{document.line}", excerpt)
            if stretch.kind == "exact":
                index.needed[text] = len(index.texts[text]) + 1  # more than there are: it is looked for no longer


def _hits(index: _Index, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where in the batch runs of 5 words begin that some text has, and which runs they are."""
    hashes = _hashes(numbers, index.codes)
    hit = index.maybe[hashes >> np.uint64(64 - index.bits)]
    known = numbers != NO_WORD
    for k in range(GRAM):
        hit &= known[k : k + len(hit)]
    positions = np.flatnonzero(hit)
    if not len(positions):
        return positions, positions
    grams = np.searchsorted(index.grams, hashes[positions])
    there = index.grams[np.minimum(grams, len(index.grams) - 1)] == hashes[positions]
    return positions[there], grams[there]


def _candidates(index: _Index, parts: np.ndarray, grams: np.ndarray) -> Iterator[tuple[int, int]]:
    """The parts and texts that share so many runs of 5 words that a closer look is due."""
    if not len(parts):
        return
    count = len(index.texts)
    once = np.unique(parts * len(index.grams) + grams)
    parts, grams = np.divmod(once, len(index.grams))
    owned = index.first[grams + 1] - index.first[grams]
    before = np.cumsum(owned) - owned
    portion = before[np.searchsorted(parts, parts)] // PAIRS  # a phrase that all texts share must not fill the memory
    for some in np.split(np.arange(len(once)), np.flatnonzero(np.diff(portion)) + 1):
        many = owned[some]
        at = np.repeat(index.first[grams[some]] - before[some] + before[some[0]], many) + np.arange(many.sum())
        pairs, pair = np.unique(np.repeat(parts[some], many) * count + index.owners[at], return_inverse=True)
        shared = np.bincount(pair, index.times[at])
        for chosen in pairs[shared >= index.needed[pairs % count]].tolist():
            yield divmod(chosen, count)


def _compared(
    index: _Index, text: int, batch: _Batch, part: int, positions: np.ndarray, grams: np.ndarray
) -> _Stretch | None:
    """The stretch of a part that holds the text, if one does; `positions` and `grams` are the part's hits."""
    wanted, own = index.texts[text], index.runs[text]
    for start in positions[grams == own[0]].tolist():
        if np.array_equal(batch.numbers[start : start + len(wanted)], wanted):
            return _Stretch("exact", start, 1.0)
    if len(wanted) < FEWEST_NEAR:
        return None
    times = Counter(own.tolist())
    hits = [(at, gram) for at, gram in zip(positions.tolist(), grams.tolist(), strict=True) if gram in times]
    first, last = _densest(hits, times, _width(len(wanted)))
    # the text goes on before the first and after the last of the runs, in words that were changed
    start = max(first[0] - int(np.flatnonzero(own == first[1])[0]), int(batch.starts[part]))
    end = min(last[0] + GRAM + len(own) - 1 - int(np.flatnonzero(own == last[1])[-1]), int(batch.ends[part]))
    stretch = batch.numbers[start:end].tolist()
    in_order = _in_order(wanted.tolist(), stretch)
    near = in_order >= max(FEWEST_NEAR, IN_ORDER * len(wanted)) or _quoted(wanted.tolist(), stretch)
    return _Stretch("near", start, in_order / len(wanted)) if near else None


def _densest(hits: list[Hit], times: Counter[int], width: int) -> tuple[Hit, Hit]:
    """The first and the last of the hits that, within `width` words, have the most of a text's runs of 5."""
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


def _in_order(wanted: list[int], stretch: list[int]) -> int:
    """The length of the longest common subsequence, by the bits of whole numbers: 1 where a word is still free."""
    places: dict[int, int] = {}
    for i, word in enumerate(wanted):
        places[word] = places.get(word, 0) | 1 << i
    everywhere = free = (1 << len(wanted)) - 1
    for word in stretch:
        here = free & places.get(word, 0)
        free = (free + here | free - here) & everywhere
    return len(wanted) - free.bit_count()


def _quoted(wanted: list[int], stretch: list[int]) -> bool:
    """Whether a fifth of the text's runs of 13 words stands in the stretch."""
    there = set(zip(*(stretch[k:] for k in range(LONG_GRAM)), strict=False))
    own = list(zip(*(wanted[k:] for k in range(LONG_GRAM)), strict=False))
    return bool(own) and sum(run in there for run in own) * ONE_IN >= len(own)
