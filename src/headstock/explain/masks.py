"""Attention masks: the matrix added to the scores, 0 where a query may attend to a key and minus infinity elsewhere.

L tokens, P of them a prefix or padding, n of them in one document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from headstock.errors import UserError
from headstock.explain import document as doc
from headstock.explain.attention import as_applied, need_attention
from headstock.explain.inputs import EncodedInput, encode_input
from headstock.explain.render_document import heatmap_svg
from headstock.explain.subject import open_single_run, open_subject
from headstock.model.attention_mask import make_attention_mask
from headstock.model.attention_weights import AttentionRecord, record_attention
from headstock.model.batch import Batch
from headstock.model.model import Model

MaskKind = Literal["causal", "none", "padding", "document", "prefix"]
MASK_KINDS: tuple[MaskKind, ...] = get_args(MaskKind)
REASONS = {
    "causal": "Each position attends to itself and to earlier positions: later tokens are what is predicted.",
    "none": "Every position attends to every other, as in an encoder, which reads the whole text at once.",
    "padding": "The rows of a batch are padded to the longest one, and no position attends to padding. Under a causal "
    "mask, padding on the right needs no mask of its own: no real token attends to its right.",
    "document": "Several documents are packed into one row; each position attends only within its own document.",
    "prefix": "The prefix is bidirectional; what follows is causal and attends to all of the prefix. In an "
    "encoder-decoder the source is that prefix: the encoder's mask, the decoder's causal mask and the cross-attention "
    "are the blocks of this matrix, and the encoder never sees the target.",
    "backward": "This stack reads from right to left: each position attends to itself and to later positions.",
    "cross": "Every target position attends to the whole source, which is encoded before the target is generated.",
}
CAUSAL_KINDS = ("decoder", "forward", "backward")  # of attention; backward is causal from right to left
MAX_ROWS = 32  # tokens up to which a page lists them one by one


@dataclass(frozen=True)
class MaskFacts:
    """One mask, and the number of masked entries that its formula predicts."""

    kind: str
    name: str  # the run and its attention, or the kind of mask
    tokens: list[str]  # of the queries
    keys: list[str]
    allowed: list[list[bool]]  # True where the query of a row may attend to the key of a column
    formula: str
    expected: int
    reason: str
    attention: str | None = None  # an AttentionKind, for a model's own mask

    @property
    def title(self) -> str:
        return self.name.capitalize() if self.attention is None else f"{self.name} mask"

    @property
    def masked(self) -> int:
        return sum(not allowed for row in self.allowed for allowed in row)

    @property
    def entries(self) -> int:
        return len(self.tokens) * len(self.keys)

    def matrix(self) -> list[list[float]]:
        """What is added to the scores before the softmax."""
        return [[0.0 if allowed else -torch.inf for allowed in row] for row in self.allowed]

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "of": self.name,
            "length": len(self.tokens),
            "masked": self.masked,
            "entries": self.entries,
            "formula": self.formula,
            "expected": self.expected,
            "tokens": self.tokens,
            "keys": self.keys,
            "matrix": [[0 if allowed else "-inf" for allowed in row] for row in self.allowed],  # JSON has no infinity
        }


def explain_mask(
    kind: MaskKind,
    tokens: Sequence[str],
    *,
    padding: int = 1,
    documents: Sequence[int] = (),
    prefix: int = 1,
    causal: bool = True,
) -> MaskFacts:
    """A mask of one kind, built by the code that the models use.

    `padding` and `prefix` are numbers of tokens, `documents` the length of each document, and `causal` says whether
    documents are read from left to right.
    """
    names, length = list(tokens), len(tokens)
    check_lengths(kind, length, padding=padding, documents=documents, prefix=prefix)
    batch, causal = Batch(torch.zeros(1, length, dtype=torch.long)), causal if kind == "document" else kind == "causal"
    if kind == "padding":
        batch.padding = torch.arange(length)[None] >= length - padding
        names[length - padding :] = ["<pad>"] * padding
    if kind == "document":
        batch.document_ids = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))[None]
    if kind == "prefix":
        allowed = prefix_mask(length, prefix)
    else:
        allowed = make_attention_mask(batch, causal=causal).dense(length, length)[0, 0]
    formula, expected = masked_count(kind, length, padding=padding, documents=documents, prefix=prefix, causal=causal)
    title = "no mask" if kind == "none" else f"{kind} mask"
    return MaskFacts(kind, title, names, names, allowed.tolist(), formula, expected, REASONS[kind])


def prefix_mask(length: int, prefix: int) -> Tensor:
    """(L, L) the masks of an encoder-decoder, with source and target written as one row."""
    source, target = Batch(torch.zeros(1, prefix)), Batch(torch.zeros(1, length - prefix))
    allowed = torch.zeros(length, length, dtype=torch.bool)  # the encoder never attends to the target
    allowed[:prefix, :prefix] = make_attention_mask(source, causal=False).dense(prefix, prefix)[0, 0]
    allowed[prefix:, prefix:] = make_attention_mask(target, causal=True).dense(length - prefix, length - prefix)[0, 0]
    allowed[prefix:, :prefix] = make_attention_mask(source, causal=False).dense(length - prefix, prefix)[0, 0]
    return allowed


def check_lengths(kind: MaskKind, length: int, *, padding: int, documents: Sequence[int], prefix: int) -> None:
    if length < 1:
        raise UserError(f"--length {length}: a mask needs at least one token")
    if kind == "padding" and not 0 <= padding < length:
        raise UserError(f"--padding {padding}: must be between 0 and {length - 1} for {length} tokens")
    if kind == "prefix" and not 0 < prefix < length:
        raise UserError(f"--prefix {prefix}: must be between 1 and {length - 1} for {length} tokens")
    if kind == "document" and (not documents or min(documents) < 1 or sum(documents) != length):
        sizes = ",".join(map(str, documents)) or "nothing"
        raise UserError(f"--documents {sizes}: must be positive lengths that sum to the {length} tokens")


def masked_count(
    kind: MaskKind,
    length: int,
    *,
    padding: int = 0,
    documents: Sequence[int] = (),
    prefix: int = 0,
    causal: bool = False,
) -> tuple[str, int]:
    """The number of masked entries: its formula and its value."""
    triangle = length * (length - 1) // 2
    if kind == "causal":
        return "L(L−1)/2", triangle
    if kind == "padding":
        return "L·P", length * padding
    if kind == "prefix":
        return "L(L−1)/2 − P(P−1)/2", triangle - prefix * (prefix - 1) // 2
    if kind == "document" and causal:
        return "L² − Σ n(n+1)/2", length**2 - sum(n * (n + 1) // 2 for n in documents)
    if kind == "document":
        return "L² − Σ n²", length**2 - sum(n * n for n in documents)
    return "0", 0


def applied_masks(model: Model, batch: Batch) -> dict[str, Tensor]:
    """(T, S) per kind of attention: the mask that the model applied to a row."""
    masks: dict[str, Tensor] = {}

    def collect(record: AttentionRecord) -> None:
        mask = masks.setdefault(as_applied(record, batch).kind, record.allowed[0, 0])
        assert torch.equal(mask, record.allowed[0, 0]), "the layers of one stack share one mask"

    with torch.no_grad(), record_attention(model, collect):
        model(batch)
    return masks


def open_input(
    run: str | None,
    preset: str | None,
    settings: list[str] | None,
    texts: Sequence[str],
    names: Sequence[str],
    *,
    device: str,
    target: str | None,
    left_to_right: bool,
) -> tuple[Model, EncodedInput, str]:
    """The model of a run with its encoding of a text; without a text, or for a preset, a row of zeros."""
    if run is not None and preset is None and texts:
        pipeline = open_single_run(run, device=device)
        need_attention(pipeline.model, str(pipeline.run))
        encoded = encode_input(pipeline, texts, target=target, left_to_right=left_to_right)
        return pipeline.model, encoded, str(pipeline.run)
    if texts:
        raise UserError("a preset has no tokenizer for a text; name a run, or give --tokens")
    subject = open_subject(run, preset, settings, device=device)
    backbone = subject.model.backbone
    need_attention(subject.model, subject.name)
    if backbone.context is not None and len(names) > backbone.context:
        raise UserError(f"{subject.name}: {len(names):,} tokens exceed its context of {backbone.context:,}")
    tokens = torch.zeros(1, len(names), dtype=torch.long, device=subject.model.device)
    source = Batch(tokens) if backbone.is_encoder_decoder else None
    batch = Batch(tokens, source=source, causal=True if left_to_right else None)
    return subject.model, EncodedInput(batch, list(names), list(names) if source else []), subject.name


def explain_model_masks(model: Model, text: EncodedInput, name: str, *, where: str | None = None) -> list[MaskFacts]:
    """The masks that a model applies when it reads a row, one per kind of attention."""
    batch, tokens, source = text.batch, text.tokens, text.source
    need_attention(model, name, None if batch.causal is True else where)
    facts = []
    for attention, allowed in applied_masks(model, batch).items():
        if where not in (None, attention):
            continue
        queries = source if attention == "encoder" and source else tokens
        keys = tokens if attention in CAUSAL_KINDS else source or tokens
        is_causal = len(queries) > 1 and not allowed.triu(1).any()
        kind: MaskKind = "causal" if is_causal or attention in CAUSAL_KINDS else "none"
        formula, expected = masked_count(kind, len(queries))
        reason = REASONS[attention if attention in ("cross", "backward") else kind]
        title = f"{name}: {'cross-attention' if attention == 'cross' else attention}"
        axes = (list(queries), list(keys), allowed.tolist())
        facts.append(MaskFacts(kind, title, *axes, formula, expected, reason, attention))
    return facts


def token_names(tokens: str | None, length: int | None) -> list[str]:
    """The words of --tokens, or numbers from 1."""
    if tokens is None:
        return [str(number) for number in range(1, (5 if length is None else length) + 1)]
    words = tokens.split()
    if length is not None and len(words) != length:
        raise UserError(f"--tokens has {len(words)} words and --length is {length}; give one of them")
    return words


def parse_lengths(documents: str | None, length: int) -> list[int]:
    """The lengths of --documents; two halves by default."""
    if documents is None:
        return [size for size in (length // 2, length - length // 2) if size]
    try:
        return [int(size) for size in documents.split(",")]
    except ValueError:
        raise UserError(f"--documents {documents}: must be numbers separated by commas, such as 2,3") from None


# Document


def mask_document(masks: Sequence[MaskFacts]) -> doc.ExplainDocument:
    single = masks[0] if len(masks) == 1 else None
    return doc.ExplainDocument(
        subject="attention mask",
        title=single.title if single else f"{masks[0].name.split(': ')[0]}: attention masks",
        summary="",
        sections=[doc.Section("" if single else mask.title, mask_blocks(mask)) for mask in masks],
        json={"masks": [mask.to_dict() for mask in masks]} | (single.to_dict() if single else {}),
        picture=lambda: mask_picture(masks),
    )


def mask_blocks(mask: MaskFacts) -> list[doc.DocumentBlock]:
    count = f"{mask.masked:,} of {mask.entries:,} entries are masked"
    meaning = "Added to the attention scores before the softmax: 0 leaves a score as it is, −∞ makes its weight 0."
    by_formula = "" if mask.formula == "0" else f", {mask.formula} = {mask.expected:,}"
    differs = "" if mask.expected == mask.masked else " differs from the count"
    tiles = [
        ("masked entries", f"{mask.masked:,}", f"of {mask.entries:,}"),
        ("by formula", f"{mask.expected:,}", f"{mask.formula}{differs}"),
    ]
    blocks: list[doc.DocumentBlock] = [
        doc.Text(meaning, "soft", only="page"),
        doc.Text(f"{mask.name}: {count}{by_formula}", only="terminal"),
        mask_heatmap(mask),
        doc.KeyFigures(tiles, only="page"),
        doc.Text(mask.reason, only="page"),
    ]
    if len(mask.tokens) <= MAX_ROWS:
        columns = {"position": "text", "attends to": "count", "masked": "count", "even weight": "percent"}
        counts = [(token, sum(row), len(row)) for token, row in zip(mask.tokens, mask.allowed, strict=True)]
        rows = [[token, count, size - count, 1 / count] for token, count, size in counts]
        caption = "With equal scores, a position distributes its weight evenly over the positions it attends to."
        blocks.append(doc.Table("Position by position", columns, rows, caption, only="page"))
    return blocks


def mask_heatmap(mask: MaskFacts) -> doc.TokenHeatmap:
    def hint(row: int, column: int) -> str:
        verb = "attends to" if mask.allowed[row][column] else "is masked from"
        return f"{mask.tokens[row]} ({row + 1}) {verb} {mask.keys[column]} ({column + 1})"

    return doc.TokenHeatmap(
        f"{mask.name}: {mask.masked} of {mask.entries} entries are masked",
        mask.tokens,
        mask.keys,
        [[0.55 if allowed else 0.0 for allowed in row] for row in mask.allowed],
        hint,
        value=(lambda row, column: "0" if mask.allowed[row][column] else "−∞"),
        caption="Rows are queries, columns are keys. Filled squares may be attended to.",
    )


def mask_picture(masks: Sequence[MaskFacts]) -> str:
    if len(masks) > 1:
        names = ", ".join(mask.name for mask in masks)
        raise UserError(f"--out: an .svg holds one mask, and these are {len(masks)} ({names}); choose with --where")
    return heatmap_svg(mask_heatmap(masks[0]))
