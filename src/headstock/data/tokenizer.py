"""Text to ids and back, by a tokenizer trained here, Hugging Face's, SentencePiece's or the course lab's."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import compress, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers

from headstock.data import sentencepiece_tokenizer as sentencepieces
from headstock.data.special_tokens import SPECIAL_TOKENS, find_special_ids
from headstock.data.tokenizer_training import MOST_ENTRIES, TokenizerSettings, learn
from headstock.data.word_starts import word_tables
from headstock.errors import UserError, WorkError, suggest_path
from headstock.io import write_text

KINDS = {"BPE": "bpe", "Unigram": "unigram", "WordPiece": "wordpiece", "WordLevel": "word"}
# Latin letters, most marks and the euro: composed characters stay as they are, and none of them is an ideograph
COMPOSED = re.compile("[\\u0000-\\u02ff\\u2010-\\u2027\\u20ac]*")

LONG_TEXT = 1 << 18  # characters; longer texts are cut into parts, so that memory does not grow with a text
BATCH_CHARACTERS = 1 << 20  # that are given to a library at once
SEAM, SEAMS = 128, 8  # characters on each side of a cut that are looked at, and how many places are tried


class TokenizerBackend(Protocol):
    """What cuts text: the `tokenizers` library or SentencePiece."""

    kind: str
    size: int
    special_ids: dict[str, int]
    all_special_ids: frozenset[int]  # ids that plain text must never give, and that decoding leaves out

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def spans(self, text: str) -> list[tuple[int, int, int]]: ...  # (id, first character, one past the last)
    def decode(self, ids: Sequence[int]) -> str: ...
    def id_to_token(self, number: int) -> str: ...
    def token_to_id(self, token: str) -> int | None: ...
    def to_json(self) -> str: ...  # the whole tokenizer as one JSON file
    def behaviour(self) -> bytes: ...  # the part of it that decides which ids come out


class Tokenizer:
    """Cuts text into numbered pieces; special tokens are put in by those who need them, never found in text."""

    def __init__(self, backend: TokenizerBackend, notes: Sequence[str] = ()):
        self.backend, self.notes = backend, tuple(notes)
        self.kind, self.vocabulary = backend.kind, backend.size
        self.bos = backend.special_ids.get("bos")
        self.pad = backend.special_ids.get("pad")
        self.eos = backend.special_ids.get("eos")
        self.unk = backend.special_ids.get("unk")
        self.cls = backend.special_ids.get("cls")
        self.sep = backend.special_ids.get("sep")
        self.mask = backend.special_ids.get("mask")
        self.source_tokenizer: Tokenizer | None = (
            None  # what cuts the texts an encoder-decoder reads, where that is another
        )
        self.all_special_ids = backend.all_special_ids
        self._forged = backend.all_special_ids - {
            self.unk
        }  # unknown is a fair answer to plain text, the others are not

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, vocabulary {self.vocabulary})"

    def __reduce__(self) -> tuple[Any, ...]:  # the library forgets, when pickled, that special tokens are not text
        return _from_content, (self.backend.to_json(), "tokenizer", self.notes)

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.backend.behaviour()).hexdigest()

    @property
    def word_starts(self) -> np.ndarray:
        """(V,) True for entries that begin a word."""
        return self._words[0]

    @property
    def punctuation(self) -> np.ndarray:
        """(V,) True for entries without a letter or digit: words of their own, after which another begins."""
        return self._words[1]

    @cached_property
    def _words(self) -> tuple[np.ndarray, np.ndarray]:
        return word_tables(self.backend)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        rows: list[list[int]] = []
        for batch in _batches(texts):
            if len(batch) == 1 and isinstance(batch[0], str) and len(batch[0]) > LONG_TEXT:
                rows.append(
                    [number for part, _ in self.split_long_text(batch[0]) for number in self._encode([part])[0]]
                )
            else:
                rows += self._encode(batch)
        return rows

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            with rust_errors():
                rows = self.backend.encode_batch(texts)
        except (TypeError, RuntimeError, UnicodeEncodeError) as wrong:
            raise _no_text(texts, wrong) from None
        for i, ids in enumerate(rows):
            if not self._forged.isdisjoint(ids):
                rows[i] = [number for number, _, _ in self._spans(texts[i])]
        return rows

    def split_long_text(self, text: str) -> Iterator[tuple[str, int]]:
        """A long text in parts, each with where it begins, that together give the tokens of the whole.

        Libraries take some 200 bytes of memory for each byte of a text while they cut it. Parts begin at a space where
        the tokens around it are the same with the cut as without; a text without such places is cut all the same.
        """
        begin = 0
        while len(text) - begin > LONG_TEXT:
            end, skip = self._seam(text, begin, begin + LONG_TEXT)
            yield text[begin:end], begin
            begin = end + skip
        yield text[begin:], begin

    def _seam(self, text: str, begin: int, end: int) -> tuple[int, int]:
        """Where to cut a text before `end`, and how many characters to leave out there: a space, or nothing."""
        at = end
        for _ in range(SEAMS):
            at = text.rfind(" ", begin + 1, at)
            if at < 0:
                break
            before, after = text[max(begin, at - SEAM) : at], text[at : at + SEAM]
            whole, left, right, bare = self._encode([before + after, before, after, after[1:]])
            if whole == left + right:
                return at, 0
            if whole == left + bare:  # a tokenizer that begins every text with a space
                return at, 1
        return end, 0

    def tokenize(self, text: str) -> list[str]:
        """The tokens of a text as the vocabulary spells them (`Ġle`, `▁le`, `##le`)."""
        return [self.id_to_token(number) for number in self.encode(text)]

    @cached_property
    def can_produce_unk(self) -> bool:
        """Whether some text becomes unknown tokens; bytes as a fallback leave none unknown."""
        rare = self.encode("qjxzvkw\u1e9e \u34b4 \U00010380")  # a word nobody writes, an ideograph, a Ugaritic letter
        return self.unk is not None and self.unk in rare

    def unk_spans(self, text: str) -> list[tuple[int, int]]:
        """The characters behind each unknown token of a text."""
        if len(text) <= LONG_TEXT:
            return [(begin, end) for number, begin, end in self._spans(text) if number == self.unk]
        return [
            (at + begin, at + end) for part, at in self.split_long_text(text) for begin, end in self.unk_spans(part)
        ]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """The characters each token stands for; tokens that share one multi-byte character have the same span."""
        if len(text) <= LONG_TEXT:
            return [(begin, end) for _, begin, end in self._spans(text)]
        return [(at + begin, at + end) for part, at in self.split_long_text(text) for begin, end in self.offsets(part)]

    def _spans(self, text: str) -> list[tuple[int, int, int]]:
        try:
            with rust_errors():
                spans = self.backend.spans(text)
            if self._forged.isdisjoint(number for number, _, _ in spans):
                return spans
            return self._unforged(text)
        except (TypeError, RuntimeError, UnicodeEncodeError) as wrong:
            raise _no_text([text], wrong) from None

    def _unforged(self, text: str) -> list[tuple[int, int, int]]:
        """Cuts a text that spells out special tokens, each broken after its first character."""
        names = "|".join(re.escape(self.id_to_token(number)) for number in self._forged)
        breaks = [match.start() + 1 for match in re.finditer(names, text)]
        spans = []
        for begin, end in zip([0, *breaks], [*breaks, len(text)], strict=True):
            for number, first, last in self.backend.spans(text[begin:end]):
                if number not in self._forged:
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
        except RuntimeError as wrong:
            raise UserError(f"the tokenizer cannot turn these ids into text ({wrong})") from None

    def id_to_token(self, number: int) -> str:
        if not 0 <= number < self.vocabulary:
            raise IndexError(f"id {number} is outside this tokenizer's vocabulary of {self.vocabulary}")
        return self.backend.id_to_token(number)

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def save(self, path: Path) -> None:
        write_text(path, self.backend.to_json())


class TokenizersBackend:
    """A tokenizer of the `tokenizers` library, set to never read special tokens out of plain text."""

    def __init__(self, library: tokenizers.Tokenizer):
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True  # not kept in its JSON, so set on every opening
        described = json.loads(library.to_str())
        model = described["model"]
        self.kind = "char" if model.get("merges") == [] else KINDS.get(model["type"], "other")
        self.special_ids = find_special_ids(library.token_to_id)
        unknown = library.token_to_id(_unknown(model) or "")
        if unknown is not None:
            self.special_ids["unk"] = unknown
        self.size = max(library.get_vocab().values(), default=-1) + 1
        added = library.get_added_tokens_decoder()
        self.all_special_ids = frozenset(self.special_ids.values()) | {
            number for number, token in added.items() if token.special
        }
        self._library = library
        self._bare = _without_composing(library, described["normalizer"], added)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Texts in composed Latin letters go past the library's normalizer where it would leave them as they are."""
        bare = self._bare
        if bare is None:
            return _ids(self._library, texts)
        composed = [text.isascii() or COMPOSED.fullmatch(text) is not None for text in texts]
        if all(composed):
            return _ids(bare, texts)
        others = iter(_ids(self._library, [text for text, is_so in zip(texts, composed, strict=True) if not is_so]))
        plain = iter(_ids(bare, compress(texts, composed)))
        return [next(plain if is_so else others) for is_so in composed]

    def spans(self, text: str) -> list[tuple[int, int, int]]:
        cut = self._library.encode(text, add_special_tokens=False)
        return [(number, begin, end) for number, (begin, end) in zip(cut.ids, cut.offsets, strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids), skip_special_tokens=False)

    def id_to_token(self, number: int) -> str:
        return self._library.id_to_token(number) or ""  # "" where a foreign vocabulary leaves a number out

    def token_to_id(self, token: str) -> int | None:
        return self._library.token_to_id(token)

    def to_json(self) -> str:
        return self._library.to_str()

    def behaviour(self) -> bytes:
        described = json.loads(self.to_json())
        if isinstance(pieces := described["model"]["vocab"], list):  # unigram scores lose their last bit in the file
            described["model"]["vocab"] = [(piece, round(score, 6)) for piece, score in pieces]
        deciding = ("added_tokens", "normalizer", "pre_tokenizer", "decoder", "model")
        return json.dumps({part: described[part] for part in deciding}, sort_keys=True).encode()


@contextmanager
def rust_errors() -> Iterator[None]:
    """Turns the bare exceptions of the `tokenizers` library, and its panics, which are none, into RuntimeErrors."""
    try:
        yield
    except BaseException as wrong:
        if type(wrong) is not Exception and type(wrong).__name__ != "PanicException":
            raise
        raise RuntimeError(str(wrong)) from None


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Texts in batches of about BATCH_CHARACTERS, long ones alone: what libraries make of a batch takes much memory."""
    batch: list[str] = []
    size = 0
    for text in texts:
        length = len(text) if isinstance(text, str) else 0  # what is no text is refused with a reason further on
        if batch and (length > LONG_TEXT or size + length > BATCH_CHARACTERS):
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += length if length <= LONG_TEXT else BATCH_CHARACTERS  # nothing joins a long one
    if batch:
        yield batch


def _ids(library: tokenizers.Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    return [cut.ids for cut in library.encode_batch_fast(list(texts), add_special_tokens=False)]


def _without_composing(
    library: tokenizers.Tokenizer, normalizer: dict[str, Any] | None, added: Mapping[int, tokenizers.AddedToken]
) -> tokenizers.Tokenizer | None:
    """The same without its normalizer, where that does nothing to composed Latin letters; it shares the vocabulary."""
    if normalizer is None or not _only_composes(normalizer):
        return None
    bare = tokenizers.Tokenizer(library.model)
    bare.pre_tokenizer = library.pre_tokenizer
    bare.add_tokens([added[number] for number in sorted(added)])
    bare.encode_special_tokens = True
    theirs = bare.get_added_tokens_decoder()  # a vocabulary with gaps may number them otherwise
    numbered = {number: (token.content, token.special) for number, token in added.items()}
    return bare if {number: (token.content, token.special) for number, token in theirs.items()} == numbered else None


def _only_composes(normalizer: dict[str, Any]) -> bool:
    """Whether it does no more than to compose characters (NFC) and to set ideographs apart, as BERT's does."""
    if normalizer["type"] == "Sequence":
        return all(map(_only_composes, normalizer["normalizers"]))
    others = ("clean_text", "strip_accents", "lowercase")
    return normalizer["type"] == "NFC" or (
        normalizer["type"] == "BertNormalizer" and all(normalizer[name] is False for name in others)
    )


def _unknown(model: dict[str, Any]) -> str | None:
    if model.get("unk_id") is not None:
        return model["vocab"][model["unk_id"]][0]
    return model.get("unk_token")


def _no_text(texts: Sequence[str], wrong: Exception) -> Exception:
    """Why a library refused these texts."""
    for text in texts:
        if not isinstance(text, str):
            return TypeError(f"wanted text, got {type(text).__name__}")
        if half := re.search(r"[\ud800-\udfff]", text):
            return UserError(f"{text[:40]!r}: character {half.start() + 1} is half a character; is the text UTF-8?")
    return UserError(f"the tokenizer cannot cut this text ({wrong})")


def train_tokenizer(texts: Iterable[str], settings: TokenizerSettings) -> Tokenizer:
    """Learns from one pass over `texts`, or opens `settings.file` where there is one."""
    if settings.file is not None:
        return open_tokenizer(Path(settings.file))
    try:
        with rust_errors():
            return Tokenizer(TokenizersBackend(learn(texts, settings)))
    except RuntimeError as wrong:
        raise WorkError(f"no tokenizer could be trained on this text: {wrong}") from None


def open_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer.json (ours or Hugging Face's), SentencePiece .model, lab dict.txt, or a folder that has one."""
    path = Path(path)
    if path.is_dir():
        path = _inside(path)
    elif not path.exists():
        near = suggest_path(path.name, (p.name for p in path.parent.glob("*"))) if path.parent.is_dir() else ""
        raise UserError(f"{path}: no such tokenizer file{near}")
    if path.suffix == ".model":
        return Tokenizer(*sentencepieces.open_model(path))
    if path.suffix == ".txt":
        return Tokenizer(*sentencepieces.open_lab_vocabulary(path))
    try:
        return _from_content(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as wrong:
        raise UserError(f"{path}: cannot be read as a tokenizer ({wrong})") from None


def _inside(folder: Path) -> Path:
    for name in ("tokenizer.json", "dict.txt"):
        if (folder / name).is_file():
            return folder / name
    models = sorted(folder.glob("*.model"))
    if len(models) == 1:
        return models[0]
    found = f"{len(models)} .model files" if models else "none of them"
    raise UserError(f"{folder}: wanted tokenizer.json, dict.txt or one .model in this folder, found {found}")


def _from_content(content: str, named: str, notes: Sequence[str] = ()) -> Tokenizer:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as wrong:
        raise UserError(f"{named}: not JSON ({wrong})") from None
    if isinstance(value, dict) and value.get("format") == sentencepieces.FORMAT:
        return Tokenizer(sentencepieces.from_content(value, named), notes)
    if not isinstance(value, dict) or not isinstance(value.get("model"), dict):
        raise UserError(f"{named}: JSON, but no tokenizer: it has no `model`")
    _check_description(value, named)
    try:
        with rust_errors():
            library = tokenizers.Tokenizer.from_str(content)
            backend = TokenizersBackend(library)
            if "eos" not in backend.special_ids:
                library.add_special_tokens([SPECIAL_TOKENS["eos"]])
                backend = TokenizersBackend(library)
                notes = (
                    *notes,
                    f"{named} has no end-of-text token; added {SPECIAL_TOKENS['eos']} as {backend.special_ids['eos']}",
                )
            backend.encode_batch(["a"])  # which fails for models that are broken inside
    except Exception as wrong:  # the library raises plain Exceptions
        raise UserError(f"{named}: JSON, but no tokenizer: {wrong}") from None
    return Tokenizer(backend, notes)


def _check_description(value: dict[str, Any], named: str) -> None:
    """Refuses what the library does not survive: it counts up to the largest id, and cuts off prefixes unseen."""
    model, added = value["model"], value.get("added_tokens")
    entries = model.get("vocab")
    ids = [*entries.values()] if isinstance(entries, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    largest = max((number for number in ids if isinstance(number, int)), default=0)
    if largest >= MOST_ENTRIES:
        raise UserError(f"{named}: has the id {largest:,}; wanted ids below {MOST_ENTRIES:,}")
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if prefix and isinstance(merges, list):
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
        if not all(isinstance(pair, list) and str(pair[-1]).startswith(str(prefix)) for pair in pairs if pair):
            raise UserError(f"{named}: JSON, but no tokenizer: merges without the continuing_subword_prefix {prefix!r}")


def tokenizer_statistics(tokenizer: Tokenizer, texts: Iterable[str], sample: str) -> dict[str, Any]:
    """How well a tokenizer fits some texts, and how it cuts one sample."""
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
