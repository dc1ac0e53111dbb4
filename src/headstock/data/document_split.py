"""Assigns each document of a corpus to training or validation, so that no validation text is trained on."""

import hashlib
import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from headstock.data.corpus import Corpus, DocumentChunk
from headstock.errors import UserError, WorkError
from headstock.rng import splitmix64

logger = logging.getLogger(__name__)

DROP, TRAIN, VALID, CUT = range(4)  # the assignment of a document; CUT: its tail goes to validation
MIN_CUT_CHARACTERS = 1000  # a shorter single document is too small to split
BATCH_CHARACTERS = 1 << 19  # larger batches only take memory: their encodings no longer fit the CPU caches


@dataclass
class SplitPlan:
    """The assignment of each document of a corpus, in reading order."""

    corpus: Corpus
    assignment: np.ndarray  # uint8: DROP, TRAIN, VALID or CUT
    duplicates: int = 0  # dropped as copies of earlier documents
    in_validation: int = 0  # dropped from training as copies of validation documents


@dataclass
class DocumentBatch:
    """Documents to encode for one split."""

    split: int
    texts: list[str] = field(default_factory=list)
    locations: list[tuple[int, int]] = field(default_factory=list)  # file and line
    characters: int = 0

    def add(self, text: str, file: int, line: int) -> None:
        self.texts.append(text)
        self.locations.append((file, line))
        self.characters += len(text)


Hasher = Callable[[Corpus], tuple[np.ndarray, int]]


def make_plans(
    corpus: Corpus, valid: Corpus | None, fraction: float, deduplicate: bool, seed: int, *, hasher: Hasher | None = None
) -> list[SplitPlan]:
    """Plan the split of a corpus, or of a training and a validation corpus."""
    hash_all = hasher or hash_documents
    hashes, longest = hash_all(corpus)
    if valid:
        valid_hashes, _ = hash_all(valid)
        plan = plan_without_validation(corpus, hashes, valid_hashes, deduplicate)
        return [plan, SplitPlan(valid, np.full(len(valid_hashes), VALID, np.uint8))]
    plan = plan_split(corpus, hashes, fraction, deduplicate, seed)
    if CUT in plan.assignment:
        if longest < MIN_CUT_CHARACTERS:
            raise UserError(
                f"the corpus is too small to split: one document of {longest} characters "
                f"(expected two documents, one of at least {MIN_CUT_CHARACTERS} characters, or a validation corpus)"
            )
        logger.info(f"the corpus is a single document: about the last {fraction:.0%} of it is used for validation")
    return [plan]


def hash_documents(corpus: Corpus) -> tuple[np.ndarray, int]:
    """A 64-bit hash of every document, in order, and the length of the longest document."""
    hashes, longest = array("Q"), 0
    for chunk in corpus.chunks():
        hashes.frombytes(hash_texts(chunk.texts))
        longest = max(longest, max(map(len, chunk.texts)))
    return np.frombuffer(hashes, np.uint64), longest


def hash_texts(texts: Sequence[str]) -> bytes:
    """Hashes of 8 bytes each."""
    return b"".join([hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts])


def first_copies(hashes: np.ndarray) -> np.ndarray:
    """True for each document that is not a copy of an earlier one."""
    first = np.zeros(len(hashes), dtype=bool)
    first[np.unique(hashes, return_index=True)[1]] = True
    return first


def seeded_hashes(hashes: np.ndarray, seed: int) -> np.ndarray:
    """Independent hashes for every seed."""
    key = np.frombuffer(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), np.uint64)
    return splitmix64(hashes ^ key)


def plan_split(corpus: Corpus, hashes: np.ndarray, fraction: float, deduplicate: bool, seed: int) -> SplitPlan:
    """Hold out the documents with the smallest seeded hashes."""
    first = first_copies(hashes)
    unique = int(first.sum())
    if unique == 1:  # copies are always dropped here: training would see what the first holds out
        return SplitPlan(corpus, np.where(first, np.uint8(CUT), np.uint8(DROP)), duplicates=len(hashes) - 1)
    count = min(max(1, round(fraction * unique)), unique - 1)
    ranks = seeded_hashes(hashes, seed)
    threshold = np.partition(ranks[first], count - 1)[count - 1]
    assignment = np.where(ranks <= threshold, np.uint8(VALID), np.uint8(TRAIN))  # copies, if kept, share a split
    if deduplicate:
        assignment[~first] = DROP
    return SplitPlan(corpus, assignment, duplicates=int((assignment == DROP).sum()))


def plan_without_validation(
    corpus: Corpus, hashes: np.ndarray, valid_hashes: np.ndarray, deduplicate: bool
) -> SplitPlan:
    """Train on the documents that are not in the validation corpus."""
    assignment = np.full(len(hashes), TRAIN, np.uint8)
    if deduplicate:
        assignment[~first_copies(hashes)] = DROP
    duplicates = int((assignment == DROP).sum())
    assignment[np.isin(hashes, valid_hashes)] = DROP
    if TRAIN not in assignment:
        raise UserError("every training document is also in the validation corpus")
    return SplitPlan(corpus, assignment, duplicates, int((assignment == DROP).sum()) - duplicates)


def document_batches(
    plan: SplitPlan, fraction: float, first_file: int, *, chunks: Iterable[DocumentChunk] | None = None
) -> Iterator[DocumentBatch]:
    """The kept documents, in batches for one split each. `chunks` are those of the plan, if not of its whole corpus."""
    pending = {split: DocumentBatch(split) for split in (TRAIN, VALID)}
    count = 0
    for chunk in plan.corpus.chunks() if chunks is None else chunks:
        assignment = plan.assignment[count : count + len(chunk.texts)].tolist()
        count += len(chunk.texts)
        file = first_file + chunk.file
        for text, line, split in zip(chunk.texts, chunk.lines, assignment, strict=False):
            if split == DROP:
                continue
            if split == CUT:
                cut = tail_start(text, fraction)
                pending[VALID].add(text[cut:].lstrip(), file, line + text.count("\n", 0, cut))
                text, split = text[:cut].rstrip(), TRAIN
            batch = pending[split]
            batch.add(text, file, line)
            if batch.characters >= BATCH_CHARACTERS:
                yield batch
                pending[split] = DocumentBatch(split)
    if count != len(plan.assignment):
        raise WorkError(f"{', '.join(plan.corpus.paths)}: changed while it was being read")
    yield from (batch for batch in pending.values() if batch.texts)


def tail_start(text: str, fraction: float) -> int:
    """Where the last `fraction` of a text begins: after a line break or, failing that, a space."""
    target = min(max(1, int(len(text) * (1 - fraction))), len(text) - 1)
    earliest = target - (len(text) - target)  # then the tail is at most twice the fraction
    for boundary in ("\n", " "):
        position = text.rfind(boundary, max(1, earliest), target)
        if position > 0:
            return position + 1
    return target
