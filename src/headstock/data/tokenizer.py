"""Tokenizers: text to ids and back, by the `tokenizers` library, SentencePiece, or the course lab's vocabulary."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from headstock.data import remote, urls
from headstock.data.tokenizer_backends import (
    SENTENCEPIECE_FORMAT,
    SPECIAL_TOKENS,
    SentencePieceBackend,
    TokenizersBackend,
    open_lab_vocabulary,
    open_sentencepiece_model,
    rust_errors,
    sentencepiece_from_json,
)
from headstock.data.tokenizer_training import MAX_VOCABULARY, TokenizerSettings, train_library_tokenizer
from headstock.data.words import word_tables
from headstock.errors import UserError, WorkError, suggest_path
from headstock.io import write_text
from headstock.signals import interruptible

MAX_BYTES = 128 << 20  # of a tokenizer.json; the largest vocabularies have 30 MB
LONG_TEXT = 1 << 18  # characters; longer texts are encoded in parts, so that memory does not grow with their length
BATCH_CHARACTERS = 1 << 20  # given to the library at once
SEAM_CHARACTERS, SEAM_ATTEMPTS = 128, 8  # context on each side of a cut, and how many cuts are tried


class Tokenizer:
    """Encodes text to ids. Special tokens are added by the tasks; plain text that spells one never produces its id."""

    def __init__(self, backend: TokenizersBackend | SentencePieceBackend, notes: Sequence[str] = ()):
        self.backend, self.notes = backend, tuple(notes)
        self.kind, self.vocabulary = backend.kind, backend.size
        ids = backend.special_ids
        self.bos, self.eos, self.pad, self.unk = ids.get("bos"), ids.get("eos"), ids.get("pad"), ids.get("unk")
        self.cls, self.sep, self.mask = ids.get("cls"), ids.get("sep"), ids.get("mask")
        self.all_special_ids = backend.all_special_ids
        self.source_tokenizer: Tokenizer | None = None  # of an encoder-decoder with a separate source vocabulary
        self._forbidden = backend.all_special_ids - {self.unk}  # ids that plain text must not produce

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, vocabulary {self.vocabulary})"

    def __reduce__(self) -> tuple[Any, ...]:  # pickling the library's object loses `encode_special_tokens`
        return _from_json, (self.backend.to_json(), "tokenizer", self.notes)

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.backend.behaviour()).hexdigest()

    @property
    def word_starts(self) -> np.ndarray:
        """(V,) True for tokens that begin a word."""
        return self._word_tables[0]

    @property
    def punctuation(self) -> np.ndarray:
        """(V,) True for tokens without a letter or digit, which are words of their own."""
        return self._word_tables[1]

    @cached_property
    def _word_tables(self) -> tuple[np.ndarray, np.ndarray]:
        return word_tables(self.backend)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        rows: list[list[int]] = []
        for batch in _batches(texts):
            if len(batch) == 1 and isinstance(batch[0], str) and len(batch[0]) > LONG_TEXT:
                parts = self.split_long_text(batch[0])
                rows.append([number for part, _ in parts for number in self._encode([part])[0]])
            else:
                rows += self._encode(batch)
        return rows

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            with rust_errors():
                rows = self.backend.encode_batch(texts)
        except (TypeError, RuntimeError, UnicodeEncodeError) as error:
            raise _encoding_error(texts, error) from None
        for i, ids in enumerate(rows):
            if not self._forbidden.isdisjoint(ids):
                rows[i] = [number for number, _, _ in self._spans(texts[i])]
        return rows

    def split_long_text(self, text: str) -> Iterator[tuple[str, int]]:
        """Parts of a long text, each with its offset, whose tokens together are those of the whole text.

        The libraries need about 200 bytes of memory per byte of text. Parts begin at a space around which the tokens
        are the same with and without the cut; a text without such a space is cut anyway.
        """
        begin = 0
        while len(text) - begin > LONG_TEXT:
            end, skip = self._find_seam(text, begin, begin + LONG_TEXT)
            yield text[begin:end], begin
            begin = end + skip
        yield text[begin:], begin

    def _find_seam(self, text: str, begin: int, end: int) -> tuple[int, int]:
        """Where to cut a text before `end`, and how many characters to skip there: a space, or nothing."""
        cut = end
        for _ in range(SEAM_ATTEMPTS):
            cut = text.rfind(" ", begin + 1, cut)
            if cut < 0:
                break
            before, after = text[max(begin, cut - SEAM_CHARACTERS) : cut], text[cut : cut + SEAM_CHARACTERS]
            uncut, left, right, without_space = self._encode([before + after, before, after, after[1:]])
            if uncut == left + right:
                return cut, 0
            if uncut == left + without_space:  # a tokenizer that prepends a space to every text
                return cut, 1
        return end, 0

    def tokenize(self, text: str) -> list[str]:
        """The tokens of a text as the vocabulary spells them (`Ġle`, `▁le`, `##le`)."""
        return [self.id_to_token(number) for number in self.encode(text)]

    @cached_property
    def can_produce_unk(self) -> bool:
        """Whether some text becomes unk; with byte fallback none does."""
        rare = self.encode("qjxzvkw\u1e9e \u34b4 \U00010380")  # an improbable word, an ideograph, a Ugaritic letter
        return self.unk is not None and self.unk in rare

    def unk_spans(self, text: str) -> list[tuple[int, int]]:
        """The character span of each unk token of a text."""
        return [(begin, end) for number, begin, end in self._spans_in_parts(text) if number == self.unk]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """The character span of each token; tokens that share a multi-byte character have the same span."""
        return [(begin, end) for _, begin, end in self._spans_in_parts(text)]

    def _spans_in_parts(self, text: str) -> Iterator[tuple[int, int, int]]:
        for part, offset in self.split_long_text(text):
            for number, begin, end in self._spans(part):
                yield number, offset + begin, offset + end

    def _spans(self, text: str) -> list[tuple[int, int, int]]:
        try:
            with rust_errors():
                spans = self.backend.spans(text)
            if self._forbidden.isdisjoint(number for number, _, _ in spans):
                return spans
            return self._spans_without_special(text)
        except (TypeError, RuntimeError, UnicodeEncodeError) as error:
            raise _encoding_error([text], error) from None

    def _spans_without_special(self, text: str) -> list[tuple[int, int, int]]:
        """Tokenize a text that spells special tokens, splitting each after its first character."""
        names = "|".join(re.escape(self.id_to_token(number)) for number in self._forbidden)
        breaks = [match.start() + 1 for match in re.finditer(names, text)]
        spans = []
        for begin, end in zip([0, *breaks], [*breaks, len(text)], strict=True):
            for number, first, last in self.backend.spans(text[begin:end]):
                if number not in self._forbidden:
                    spans.append((number, first + begin, last + begin))
                elif self.unk is not None:
                    spans.append((self.unk, first + begin, last + begin))
        return spans

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        numbers = [int(i) for i in ids]
        if skip_special:
            numbers = [i for i in numbers if i not in self.all_special_ids]
        try:
            with rust_errors():
                return self.backend.decode(numbers)
        except RuntimeError as error:
            raise UserError(f"the tokenizer cannot decode these ids ({error})") from None

    def id_to_token(self, number: int) -> str:
        if not 0 <= number < self.vocabulary:
            raise IndexError(f"id {number} is outside this tokenizer's vocabulary of {self.vocabulary}")
        return self.backend.id_to_token(number)

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def save(self, path: Path) -> None:
        write_text(path, self.backend.to_json())


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Batches of about BATCH_CHARACTERS, with long texts alone, to bound the library's memory."""
    batch: list[str] = []
    size = 0
    for text in texts:
        length = len(text) if isinstance(text, str) else 0  # other types are rejected by _encode
        if batch and (length > LONG_TEXT or size + length > BATCH_CHARACTERS):
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += length if length <= LONG_TEXT else BATCH_CHARACTERS  # nothing is added after a long text
    if batch:
        yield batch


def _encoding_error(texts: Sequence[str], error: Exception) -> Exception:
    """Why the library rejected these texts."""
    for text in texts:
        if not isinstance(text, str):
            return TypeError(f"expected text, found {type(text).__name__}")
        if half := re.search(r"[\ud800-\udfff]", text):
            return UserError(
                f"{text[:40]!r}: character {half.start() + 1} is half of a surrogate pair; is the text UTF-8?"
            )
    return UserError(f"the tokenizer cannot encode this text ({error})")


def train_tokenizer(texts: Iterable[str], settings: TokenizerSettings) -> Tokenizer:
    """Train a tokenizer in one pass over `texts`, or open `settings.file` if it is given."""
    if settings.file is not None:
        return open_tokenizer(Path(settings.file))
    try:
        with rust_errors():
            library = interruptible(lambda: train_library_tokenizer(texts, settings))
            return Tokenizer(TokenizersBackend(library))
    except RuntimeError as error:
        raise WorkError(f"no tokenizer could be trained on this text: {error}") from None


def open_tokenizer(path: Path) -> Tokenizer:
    """Open a tokenizer.json (ours or Hugging Face's), SentencePiece .model, lab dict.txt, folder with one, or URL."""
    path = remote.cached_copy(str(path)) if urls.is_url(path) else Path(path)
    if path.is_dir():
        path = _find_in_folder(path)
    elif not path.exists():
        hint = suggest_path(path.name, (p.name for p in path.parent.glob("*"))) if path.parent.is_dir() else ""
        raise UserError(f"{path}: no such tokenizer file{hint}")
    if path.suffix == ".model":
        return Tokenizer(*open_sentencepiece_model(path))
    if path.suffix == ".txt":
        return Tokenizer(*open_lab_vocabulary(path))
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise UserError(f"{path}: has {size:,} bytes, expected a tokenizer of at most {MAX_BYTES:,}")
        return _from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a tokenizer ({error})") from None


def _find_in_folder(folder: Path) -> Path:
    for name in ("tokenizer.json", "dict.txt"):
        if (folder / name).is_file():
            return folder / name
    models = sorted(folder.glob("*.model"))
    if len(models) == 1:
        return models[0]
    actual = f"{len(models)} .model files" if models else "none of them"
    raise UserError(f"{folder}: expected tokenizer.json, dict.txt or one .model in this folder, found {actual}")


def _from_json(content: str, name: str, notes: Sequence[str] = ()) -> Tokenizer:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: invalid JSON ({error})") from None
    if isinstance(value, dict) and value.get("format") == SENTENCEPIECE_FORMAT:
        return Tokenizer(sentencepiece_from_json(value, name), notes)
    if not isinstance(value, dict) or not isinstance(value.get("model"), dict):
        raise UserError(f"{name}: not a tokenizer: the JSON has no `model`")
    _check_description(value, name)
    try:
        with rust_errors():
            library = tokenizers.Tokenizer.from_str(content)
            backend = TokenizersBackend(library)
            if "eos" not in backend.special_ids:
                eos = SPECIAL_TOKENS["eos"]
                library.add_special_tokens([eos])
                backend = TokenizersBackend(library)
                notes = (*notes, f"{name} has no end-of-text token; added {eos} as {backend.special_ids['eos']}")
            backend.encode_batch(["a"])  # fails for models with inconsistent content
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f"{name}: not a tokenizer: {error}") from None
    return Tokenizer(backend, notes)


def _check_description(value: dict[str, Any], name: str) -> None:
    """Reject what crashes the library: it allocates up to the largest id, and strips prefixes without checking."""
    model, added = value["model"], value.get("added_tokens")
    entries = model.get("vocab")
    ids = [*entries.values()] if isinstance(entries, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    largest = max((number for number in ids if isinstance(number, int)), default=0)
    if largest >= MAX_VOCABULARY:
        raise UserError(f"{name}: contains the id {largest:,}, expected ids below {MAX_VOCABULARY:,}")
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if prefix and isinstance(merges, list):
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
        if not all(isinstance(pair, list) and str(pair[-1]).startswith(str(prefix)) for pair in pairs if pair):
            raise UserError(f"{name}: not a tokenizer: merges without the continuing_subword_prefix {prefix!r}")


def tokenizer_statistics(tokenizer: Tokenizer, texts: Iterable[str], sample: str) -> dict[str, Any]:
    """How well a tokenizer fits some texts, and the tokens of a sample."""
    words = size = tokens = unknown = 0
    stream = iter(texts)
    while batch := list(islice(stream, 256)):
        for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
            words += len(text.split())
            size += len(text.encode())
            tokens += len(ids)
            unknown += 0 if tokenizer.unk is None else ids.count(tokenizer.unk)
    return {
        "kind": tokenizer.kind,
        "vocabulary": tokenizer.vocabulary,
        "tokens": tokens,
        "tokens_per_word": tokens / words if words else None,
        "bytes_per_token": size / tokens if tokens else None,
        "unknown_rate": unknown / tokens if tokens else None,
        "sample": [sample[begin:end] for begin, end in tokenizer.offsets(sample)],
        "pieces": tokenizer.tokenize(sample),
        "notes": list(tokenizer.notes),
    }
