"""SentencePiece models, and the course lab's vocabulary on top of one."""

import base64
import binascii
import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import sentencepiece

from headstock.data.special_tokens import SPECIAL_TOKENS
from headstock.errors import UserError

FORMAT = "headstock-sentencepiece-1"
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
        rows = [[] if SPACE not in text else self._split_pieces(text) for text in texts]
        if raw:
            for i, ids in zip(raw, self._require_model().encode([texts[i] for i in raw], out_type=int), strict=True):
                rows[i] = [self._from_model[number] for number in ids]
                if self._model_unk in ids:  # our list may have pieces that the model lacks
                    rows[i] = [
                        self._ids.get(piece, self._unk) for piece in self._require_model().encode_as_pieces(texts[i])
                    ]
        return rows

    def _split_pieces(self, text: str) -> list[int]:
        return [self._ids.get(piece, self._unk) for piece in text.split()]

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
            spans, at = [], 0
            for piece in text.split():
                at = text.index(piece, at)
                spans.append((self._ids.get(piece, self._unk), at, at + len(piece)))
                at += len(piece)
            return spans
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
        value = {"format": FORMAT, "kind": self.kind, "roles": roles, "pieces": self.pieces, "model": model}
        return json.dumps(value, ensure_ascii=False)

    def behaviour(self) -> bytes:
        return self.to_json().encode()


def from_json(value: dict[str, Any], name: str) -> SentencePieceBackend:
    """Read what `to_json` wrote."""
    try:
        model = None if value["model"] is None else base64.b64decode(value["model"], validate=True)
        stored = {STORED_ROLES.get(role, role): role for role in SPECIAL_TOKENS}
        special_ids = {stored[role]: int(i) for role, i in value["roles"].items() if role in stored}
        pieces = [str(piece) for piece in value["pieces"]]
        if "unk" not in special_ids or not all(0 <= i < len(pieces) for i in special_ids.values()):
            raise ValueError("its special tokens are not among its pieces")
        return SentencePieceBackend(pieces, special_ids, model, kind=str(value["kind"]))
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error, RuntimeError) as error:
        raise UserError(f"{name}: damaged tokenizer ({error})") from None


def open_model(path: Path) -> tuple[SentencePieceBackend, tuple[str, ...]]:
    """Open a SentencePiece .model; special tokens that it lacks get ids after its own."""
    model, processor = _read_model(path)
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    own = {
        "unk": processor.unk_id(),
        "bos": processor.bos_id(),
        "eos": processor.eos_id(),
        "pad": processor.pad_id(),
    }
    special_ids = {role: i for role, i in own.items() if i >= 0}
    names = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    special_ids |= {role: pieces.index(name) for role, name in names.items() if name in pieces}
    if "<mask>" in pieces:
        special_ids.setdefault("mask", pieces.index("<mask>"))
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
