"""The libraries behind `Tokenizer`: `tokenizers`, and SentencePiece with the course lab's vocabulary on top of it.

A backend has a `kind`, a `size`, `special_ids` by role (bos, eos, ...) and `all_special_ids`, which plain text must
never produce and decoding skips.
"""

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, compress
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from headstock.errors import UserError

# The first four have the ids of the course lab. Every tokenizer has all seven, because all model families share it.
SPECIAL_TOKENS = {
    "bos": "<sos>",
    "pad": "<pad>",
    "eos": "<eos>",
    "unk": "<unk>",
    "cls": "[CLS]",
    "sep": "[SEP]",
    "mask": "[MASK]",
}

# In order of preference. GPT-2's one token is both bos and eos; RoBERTa's and CamemBERT's <s> and </s> are also cls and
# sep.
COMMON_NAMES = {
    "bos": ("<sos>", "<s>", "<bos>", "[BOS]", "<|startoftext|>", "<|begin_of_text|>", "<|endoftext|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>"),
    "eos": ("<eos>", "</s>", "[EOS]", "<|end_of_text|>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]", "<oov>", "<|unk|>"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>", "<extra_id_0>"),  # T5's first sentinel
}


def find_special_ids(token_to_id: Callable[[str], int | None]) -> dict[str, int]:
    """The special tokens of a vocabulary, by role."""
    special_ids = {}
    for role, names in COMMON_NAMES.items():
        ids = (token_to_id(name) for name in names)
        number = next((i for i in ids if i is not None), None)
        if number is not None:
            special_ids[role] = number
    return special_ids


# The tokenizers library

KINDS = {"BPE": "bpe", "Unigram": "unigram", "WordPiece": "wordpiece", "WordLevel": "word"}
# Latin letters, general punctuation and the euro sign: NFC leaves these unchanged, and none is an ideograph.
NFC_STABLE = re.compile("[\\u0000-\\u02ff\\u2010-\\u2027\\u20ac]*")


class TokenizersBackend:
    """A tokenizer of the `tokenizers` library that never reads special tokens out of plain text."""

    def __init__(self, library: tokenizers.Tokenizer):
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True  # not stored in its JSON, so set whenever it is opened
        description = json.loads(library.to_str())
        model = description["model"]
        self.kind = "char" if model.get("merges") == [] else KINDS.get(model["type"], "other")
        self.special_ids = find_special_ids(library.token_to_id)
        unk = library.token_to_id(_unk_token(model) or "")
        if unk is not None:
            self.special_ids["unk"] = unk
        self.size = max(library.get_vocab().values(), default=-1) + 1
        added = library.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special}
        self.all_special_ids = frozenset(self.special_ids.values()) | special
        self._library = library
        self._without_normalizer = _remove_normalizer(library, description["normalizer"], added)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts, bypassing the normalizer for those that it would leave unchanged, which is faster."""
        bypass = self._without_normalizer
        if bypass is None:
            return _ids(self._library, texts)
        is_stable = [text.isascii() or NFC_STABLE.fullmatch(text) is not None for text in texts]
        if all(is_stable):
            return _ids(bypass, texts)
        others = iter(_ids(self._library, [text for text, stable in zip(texts, is_stable, strict=True) if not stable]))
        plain = iter(_ids(bypass, compress(texts, is_stable)))
        return [next(plain if stable else others) for stable in is_stable]

    def spans(self, text: str) -> list[tuple[int, int, int]]:
        encoding = self._library.encode(text, add_special_tokens=False)
        return [(number, begin, end) for number, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids), skip_special_tokens=False)

    def id_to_token(self, number: int) -> str:
        return self._library.id_to_token(number) or ""  # "" for ids that an imported vocabulary leaves out

    def token_to_id(self, token: str) -> int | None:
        return self._library.token_to_id(token)

    def to_json(self) -> str:
        return self._library.to_str()

    def behaviour(self) -> bytes:
        description = json.loads(self.to_json())
        if isinstance(pieces := description["model"]["vocab"], list):  # JSON rounds the last bit of unigram scores
            description["model"]["vocab"] = [(piece, round(score, 6)) for piece, score in pieces]
        parts = ("added_tokens", "normalizer", "pre_tokenizer", "decoder", "model")
        return json.dumps({part: description[part] for part in parts}, sort_keys=True).encode()


@contextmanager
def rust_errors() -> Iterator[None]:
    """Raise the bare Exceptions and PanicExceptions of the `tokenizers` library as RuntimeErrors."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(str(error)) from None


def _ids(library: tokenizers.Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    return [encoding.ids for encoding in library.encode_batch_fast(list(texts), add_special_tokens=False)]


def _remove_normalizer(
    library: tokenizers.Tokenizer, normalizer: dict[str, Any] | None, added: Mapping[int, tokenizers.AddedToken]
) -> tokenizers.Tokenizer | None:
    """The same tokenizer without its normalizer, if that leaves NFC_STABLE text unchanged; it shares the vocabulary."""
    if normalizer is None or not _is_nfc_only(normalizer):
        return None
    bare = tokenizers.Tokenizer(library.model)
    bare.pre_tokenizer = library.pre_tokenizer
    bare.add_tokens([added[number] for number in sorted(added)])
    bare.encode_special_tokens = True

    def contents(tokens: Mapping[int, tokenizers.AddedToken]) -> dict[int, tuple[str, bool]]:
        return {number: (token.content, token.special) for number, token in tokens.items()}

    # a vocabulary with gaps may number the added tokens differently
    return bare if contents(bare.get_added_tokens_decoder()) == contents(added) else None


def _is_nfc_only(normalizer: dict[str, Any]) -> bool:
    """Whether it only applies NFC and separates ideographs, as BERT's does."""
    if normalizer["type"] == "Sequence":
        return all(map(_is_nfc_only, normalizer["normalizers"]))
    options = ("clean_text", "strip_accents", "lowercase")
    return normalizer["type"] == "NFC" or (
        normalizer["type"] == "BertNormalizer" and all(normalizer[name] is False for name in options)
    )


def _unk_token(model: dict[str, Any]) -> str | None:
    if model.get("unk_id") is not None:
        return model["vocab"][model["unk_id"]][0]
    return model.get("unk_token")


# SentencePiece

SENTENCEPIECE_FORMAT = "headstock-sentencepiece-1"
LAB_SPECIAL_TOKENS = {"bos": "<sos>", "pad": "<pad>", "eos": "<eos>", "unk": "<oov>"}
# the names of the roles in our JSON
STORED_ROLES = {"bos": "start", "pad": "padding", "eos": "end", "unk": "unknown", "sep": "separator"}
SPACE = "▁"  # begins a piece that starts a word


class SentencePieceBackend:
    """A list of pieces, whose indices are the ids, and the SentencePiece model that tokenizes raw text.

    A text that contains ▁ counts as already tokenized: its pieces are separated by spaces.
    """

    def __init__(self, pieces: Sequence[str], special_ids: dict[str, int], model: bytes | None, *, kind: str):
        self.pieces, self.special_ids, self.model, self.kind = list(pieces), dict(special_ids), model, kind
        self.size = len(self.pieces)
        self.all_special_ids = frozenset(special_ids.values())
        self._ids = {piece: i for i, piece in enumerate(self.pieces) if i not in self.all_special_ids}
        self._unk = special_ids["unk"]
        self._processor: Any = None
        if model is not None:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            self._model_unk = self._processor.unk_id()
            names = [self._processor.id_to_piece(i) for i in range(self._processor.get_piece_size())]
            self._from_model = [self._ids.get(name, self._unk) for name in names]  # the model's id -> our id
            self._to_model = {ours: theirs for theirs, ours in enumerate(self._from_model) if ours != self._unk}

    def id_to_token(self, number: int) -> str:
        return self.pieces[number]

    def token_to_id(self, token: str) -> int | None:
        if token in self._ids:
            return self._ids[token]
        return next((i for i in self.all_special_ids if self.pieces[i] == token), None)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        raw = [i for i, text in enumerate(texts) if SPACE not in text]
        rows = [self._piece_ids(text.split()) if SPACE in text else [] for text in texts]
        if raw:
            model = self._require_model()
            for i, ids in zip(raw, model.encode([texts[i] for i in raw], out_type=int), strict=True):
                rows[i] = [self._from_model[number] for number in ids]
                if self._model_unk in ids:  # our list may have pieces that the model lacks
                    rows[i] = self._piece_ids(model.encode_as_pieces(texts[i]))
        return rows

    def _piece_ids(self, pieces: Iterable[str]) -> list[int]:
        return [self._ids.get(piece, self._unk) for piece in pieces]

    def _require_model(self) -> Any:
        if self._processor is None:
            raise UserError(
                "this tokenizer is a list of pieces without a SentencePiece model, so it accepts only text split into "
                "pieces (▁un ▁texte); put the .model file beside the list and open it again"
            )
        return self._processor

    def spans(self, text: str) -> list[tuple[int, int, int]]:
        """(id, first character, one past the last) of every piece."""
        if SPACE in text:
            pieces = [(match[0], *match.span()) for match in re.finditer(r"\S+", text)]
            return [(self._ids.get(piece, self._unk), begin, end) for piece, begin, end in pieces]
        from sentencepiece import sentencepiece_pb2  # imports protobuf, which nothing else needs

        encoded = sentencepiece_pb2.SentencePieceText()  # type: ignore[attr-defined]
        encoded.ParseFromString(self._require_model().encode(text, out_type="serialized_proto"))
        # the library reports byte offsets
        character = {byte: i for i, byte in enumerate(accumulate((len(c.encode()) for c in text), initial=0))}
        return [
            (self._ids.get(p.piece, self._unk), character.get(p.begin, 0), character.get(p.end, len(text)))
            for p in encoded.pieces
        ]

    def decode(self, ids: Sequence[int]) -> str:
        if self._processor is not None and all(i in self._to_model for i in ids):
            return self._processor.decode([self._to_model[i] for i in ids])
        return "".join(self.pieces[i] for i in ids).replace(SPACE, " ").removeprefix(" ")

    def to_json(self) -> str:
        model = None if self.model is None else base64.b64encode(self.model).decode("ascii")
        roles = {STORED_ROLES.get(role, role): i for role, i in self.special_ids.items()}
        value = {"format": SENTENCEPIECE_FORMAT, "kind": self.kind, "roles": roles, "pieces": self.pieces}
        return json.dumps(value | {"model": model}, ensure_ascii=False)

    def behaviour(self) -> bytes:
        return self.to_json().encode()


def sentencepiece_from_json(value: dict[str, Any], name: str) -> SentencePieceBackend:
    """Read what `to_json` wrote."""
    try:
        model = None if value["model"] is None else base64.b64decode(value["model"], validate=True)
        stored = {STORED_ROLES.get(role, role): role for role in SPECIAL_TOKENS}
        special_ids = {stored[role]: int(i) for role, i in value["roles"].items() if role in stored}
        pieces = [str(piece) for piece in value["pieces"]]
        if "unk" not in special_ids or not all(0 <= i < len(pieces) for i in special_ids.values()):
            raise ValueError("its special tokens are not among its pieces")
        return SentencePieceBackend(pieces, special_ids, model, kind=str(value["kind"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        raise UserError(f"{name}: damaged tokenizer ({error})") from None


def open_sentencepiece_model(path: Path) -> tuple[SentencePieceBackend, tuple[str, ...]]:
    """Open a SentencePiece .model; special tokens that it lacks get ids after its own."""
    model, processor = _read_model(path)
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    own = {role: getattr(processor, f"{role}_id")() for role in ("unk", "bos", "eos", "pad")}
    special_ids = {role: i for role, i in own.items() if i >= 0}
    names = {"[CLS]": "cls", "[SEP]": "sep", "[MASK]": "mask", "<mask>": "mask"}
    for name, role in names.items():
        if name in pieces:
            special_ids.setdefault(role, pieces.index(name))
    missing = [role for role in SPECIAL_TOKENS if role not in special_ids]
    for role in missing:
        special_ids[role] = len(pieces)
        pieces.append(SPECIAL_TOKENS[role])
    added = ", ".join(f"{SPECIAL_TOKENS[role]} {special_ids[role]}" for role in missing)
    notes = (f"{path.name} lacks some special tokens; added after its own: {added}",) if missing else ()
    return SentencePieceBackend(pieces, special_ids, model, kind="sentencepiece"), notes


def open_lab_vocabulary(path: Path, *, model: Path | None = None) -> tuple[SentencePieceBackend, tuple[str, ...]]:
    """Open the lab's dict.txt (`piece count` per line, ids from 4) and a SentencePiece model, by default beside it."""
    pieces = list(LAB_SPECIAL_TOKENS.values())
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a list of pieces ({error})") from None
    for number, line in enumerate(lines, 1):
        piece, space, count = line.rstrip("\r").rpartition(" ")
        if not piece or not space or not count.isdigit():
            raise UserError(f"{path}:{number}: expected `piece count`, such as `▁livre 12`, found {line[:60]!r}")
        pieces.append(piece)
    models = [model] if model is not None else sorted(path.parent.glob("*.model"))
    if len(models) > 1:
        names = ", ".join(model.name for model in models)
        raise UserError(f"{path}: expected one SentencePiece model beside it, found {names}")
    special_ids = {role: i for i, role in enumerate(LAB_SPECIAL_TOKENS)}
    if models:
        return SentencePieceBackend(pieces, special_ids, _read_model(models[0])[0], kind="lab"), ()
    notes = (f"no SentencePiece model beside {path.name}: only text split into pieces can be read",)
    return SentencePieceBackend(pieces, special_ids, None, kind="lab"), notes


def _read_model(path: Path) -> tuple[bytes, Any]:
    try:
        model = path.read_bytes()
        if not model:
            raise RuntimeError("empty")
        return model, sentencepiece.SentencePieceProcessor(model_proto=model)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except RuntimeError:
        raise UserError(f"{path}: damaged, or not a SentencePiece model") from None
