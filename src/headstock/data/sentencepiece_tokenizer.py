"""Runs SentencePiece models, and the course lab's list of pieces over one, exactly as the library does."""

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
STORED_ROLES = {"bos": "start", "pad": "padding", "eos": "end", "unk": "unknown", "sep": "separator"}  # in our JSON
WORD = "▁"  # what a piece that starts a word begins with


class SentencePieceBackend:
    """A list of pieces whose places are the ids, and the model that cuts raw text into them.

    A text that already holds ▁ is taken as cut: its pieces are what stands between spaces.
    """

    def __init__(self, pieces: Sequence[str], special_ids: dict[str, int], model: bytes | None, *, kind: str):
        self.pieces, self.special_ids, self.model, self.kind = list(pieces), dict(special_ids), model, kind
        self.size = len(self.pieces)
        self.all_special_ids = frozenset(special_ids.values())
        self._ids = {piece: i for i, piece in enumerate(self.pieces) if i not in self.all_special_ids}
        self._unknown = special_ids["unk"]
        self._processor: Any = None
        if model is not None:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            self._strange = self._processor.unk_id()
            names = [self._processor.id_to_piece(i) for i in range(self._processor.get_piece_size())]
            self._ours = [self._ids.get(name, self._unknown) for name in names]  # the model's id -> our id
            self._theirs = {ours: theirs for theirs, ours in enumerate(self._ours) if ours != self._unknown}

    def id_to_token(self, number: int) -> str:
        return self.pieces[number]

    def token_to_id(self, token: str) -> int | None:
        if token in self._ids:
            return self._ids[token]
        return next((i for i in self.all_special_ids if self.pieces[i] == token), None)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        raw = [i for i, text in enumerate(texts) if WORD not in text]
        rows = [[] if WORD not in text else self._cut_already(text) for text in texts]
        if raw:
            for i, ids in zip(raw, self._running().encode([texts[i] for i in raw], out_type=int), strict=True):
                rows[i] = [self._ours[theirs] for theirs in ids]
                if self._strange in ids:  # what the model has no piece for may still be in a list that is not its own
                    rows[i] = [
                        self._ids.get(piece, self._unknown) for piece in self._running().encode_as_pieces(texts[i])
                    ]
        return rows

    def _cut_already(self, text: str) -> list[int]:
        return [self._ids.get(piece, self._unknown) for piece in text.split()]

    def _running(self) -> Any:
        if self._processor is None:
            raise UserError(
                "this tokenizer is a list of pieces without a SentencePiece model, so it takes only text already cut "
                "into pieces (▁un ▁texte); put the .model file beside the list and open it again"
            )
        return self._processor

    def spans(self, text: str) -> list[tuple[int, int, int]]:
        """(id, first character, one past the last) of every piece."""
        if WORD in text:
            spans, place = [], 0
            for piece in text.split():
                place = text.index(piece, place)
                spans.append((self._ids.get(piece, self._unknown), place, place + len(piece)))
                place += len(piece)
            return spans
        from sentencepiece import sentencepiece_pb2  # brings in protobuf, which nothing else here needs

        cut = sentencepiece_pb2.SentencePieceText()  # type: ignore[attr-defined]
        cut.ParseFromString(self._running().encode(text, out_type="serialized_proto"))
        # the library counts in bytes
        character = {byte: i for i, byte in enumerate(accumulate((len(c.encode()) for c in text), initial=0))}
        return [
            (self._ids.get(p.piece, self._unknown), character.get(p.begin, 0), character.get(p.end, len(text)))
            for p in cut.pieces
        ]

    def decode(self, ids: Sequence[int]) -> str:
        if self._processor is not None and all(i in self._theirs for i in ids):
            return self._processor.decode([self._theirs[i] for i in ids])
        return "".join(self.pieces[i] for i in ids).replace(WORD, " ").removeprefix(" ")

    def to_json(self) -> str:
        model = None if self.model is None else base64.b64encode(self.model).decode("ascii")
        roles = {STORED_ROLES.get(role, role): i for role, i in self.special_ids.items()}
        value = {"format": FORMAT, "kind": self.kind, "roles": roles, "pieces": self.pieces, "model": model}
        return json.dumps(value, ensure_ascii=False)

    def behaviour(self) -> bytes:
        return self.to_json().encode()


def from_content(value: dict[str, Any], named: str) -> SentencePieceBackend:
    """What `content` wrote, read back."""
    try:
        model = None if value["model"] is None else base64.b64decode(value["model"], validate=True)
        stored = {STORED_ROLES.get(role, role): role for role in SPECIAL_TOKENS}
        roles = {stored[name]: int(i) for name, i in value["roles"].items() if name in stored}
        pieces = [str(piece) for piece in value["pieces"]]
        if "unk" not in roles or not all(0 <= i < len(pieces) for i in roles.values()):
            raise ValueError("its special tokens are not among its pieces")
        return SentencePieceBackend(pieces, roles, model, kind=str(value["kind"]))
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error, RuntimeError) as wrong:
        raise UserError(f"{named}: damaged tokenizer ({wrong})") from None


def open_model(path: Path) -> tuple[SentencePieceBackend, tuple[str, ...]]:
    """A SentencePiece .model; special tokens it lacks get ids after its own."""
    model, processor = _read_model(path)
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    own = {
        "unk": processor.unk_id(),
        "bos": processor.bos_id(),
        "eos": processor.eos_id(),
        "pad": processor.pad_id(),
    }
    roles = {role: i for role, i in own.items() if i >= 0}
    usual = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    roles |= {role: pieces.index(name) for role, name in usual.items() if name in pieces}
    if "<mask>" in pieces:
        roles.setdefault("mask", pieces.index("<mask>"))
    missing = [role for role in SPECIAL_TOKENS if role not in roles]
    for role in missing:
        roles[role] = len(pieces)
        pieces.append(SPECIAL_TOKENS[role])
    added = ", ".join(f"{SPECIAL_TOKENS[role]} {roles[role]}" for role in missing)
    notes = (f"{path.name} has no token for some parts; added after its own: {added}",) if missing else ()
    return SentencePieceBackend(pieces, roles, model, kind="sentencepiece"), notes


def open_lab_vocabulary(path: Path, *, model: Path | None = None) -> tuple[SentencePieceBackend, tuple[str, ...]]:
    """The lab's dict.txt (`piece count` a line, ids from 4) and a SentencePiece model, by default the one beside it."""
    pieces = list(LAB_SPECIAL_TOKENS.values())
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as wrong:
        raise UserError(f"{path}: cannot be read as a list of pieces ({wrong})") from None
    for number, line in enumerate(lines, 1):
        piece, space, count = line.rstrip("\r").rpartition(" ")
        if not piece or not space or not count.isdigit():
            raise UserError(f"{path}:{number}: wanted `piece count`, such as `▁livre 12`, got {line[:60]!r}")
        pieces.append(piece)
    models = [model] if model is not None else sorted(path.parent.glob("*.model"))
    if len(models) > 1:
        names = ", ".join(model.name for model in models)
        raise UserError(f"{path}: wanted one SentencePiece model beside it, found {names}")
    roles = {role: i for i, role in enumerate(LAB_SPECIAL_TOKENS)}
    if models:
        return SentencePieceBackend(pieces, roles, _read_model(models[0])[0], kind="lab"), ()
    notes = (f"no SentencePiece model beside {path.name}: only text already cut into pieces can be read",)
    return SentencePieceBackend(pieces, roles, None, kind="lab"), notes


def _read_model(path: Path) -> tuple[bytes, Any]:
    try:
        model = path.read_bytes()
        if not model:
            raise RuntimeError("it is empty")
        return model, sentencepiece.SentencePieceProcessor(model_proto=model)
    except OSError as wrong:
        raise UserError(f"{path}: cannot be read ({wrong.strerror})") from None
    except RuntimeError:
        raise UserError(f"{path}: damaged, or no SentencePiece model") from None
