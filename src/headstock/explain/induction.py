"""Induction heads: which heads attend to the token after the previous occurrence of the current one.

B rows, H heads, T tokens, N repeated tokens. A row is the special first token and N random tokens, twice. Nothing but
the first copy can predict the second, so a model that copies has a lower loss there.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headstock.errors import UserError
from headstock.explain import document as doc
from headstock.explain.attention import attention_patterns, need_attention
from headstock.explain.render_document import chart_svg
from headstock.inference.pipeline import Pipeline
from headstock.model.batch import Batch
from headstock.report.format import pluralize
from headstock.report.theme import WIDE
from headstock.rng import generator
from headstock.tasks.special_tokens import special_tokens_for

OFFSETS = {  # of the attended position from the query, beside -N
    "induction": (1, "on the token after the previous occurrence of the current one"),
    "duplicate": (0, "on the previous occurrence of the current token"),
}
MEASURES = {name: meaning for name, (_, meaning) in OFFSETS.items()} | {"previous": "on the previous token"}
MAX_LENGTH = 64  # tokens that are repeated


@dataclass(frozen=True)
class RepetitionScore:
    """The mean attention weights of one head in the second copy."""

    layer: int  # from 1
    head: int  # from 1
    induction: float
    duplicate: float
    previous: float


@dataclass(frozen=True)
class InductionFacts:
    """The heads of a run on repeated random tokens."""

    rows: int
    length: int  # N
    first_loss: float  # in nats per token, in the first copy
    second_loss: float  # and in the second
    uniform: float  # the score of a head with uniform weights
    heads: list[RepetitionScore]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def explain_induction(
    pipeline: Pipeline, *, length: int | None = None, rows: int = 16, seed: int = 0
) -> InductionFacts:
    """Score every head on `rows` rows of `length` random tokens, each repeated once."""
    model, task = pipeline.model.eval(), pipeline.task
    need_attention(model, str(pipeline.run))
    pipeline.require("generates", "predict the next token")
    special = special_tokens_for(task, pipeline.tokenizer, left_to_right=True)
    context = model.backbone.context or 2 * MAX_LENGTH + len(special)
    longest = (context - len(special)) // 2
    length = min(MAX_LENGTH, longest) if length is None else length
    if not 2 <= length <= longest:
        raise UserError(f"--length {length}: must be from 2 to {longest}, which fits into its context twice")
    ids = [token for token in range(pipeline.tokenizer.vocabulary) if token not in set(pipeline.suppressed_tokens())]
    drawn = torch.from_numpy(generator("induction", seed).choice(ids, (rows, length)))
    prefix = torch.tensor(special.prefix, dtype=torch.long).expand(rows, -1)
    batch = Batch(torch.cat([prefix, drawn, drawn], 1), causal=True).to(model.device)
    start = len(special.prefix)
    first, second = copy_losses(model.heads["token"](model(batch).hidden), batch.tokens, start, length)
    heads = []
    for record in attention_patterns(model, batch):
        scores = repetition_scores(record.weights, start, length)
        for head in range(record.weights.size(1)):
            values = {name: float(score[head]) for name, score in scores.items()}
            heads.append(RepetitionScore(record.layer, head + 1, **values))
    positions = torch.arange(start + length, start + 2 * length)
    return InductionFacts(rows, length, first, second, float((1 / (positions + 1.0)).mean()), heads)


def copy_losses(logits: Tensor, tokens: Tensor, start: int, length: int) -> tuple[float, float]:
    """The mean cross-entropy of the tokens of each copy, but the first, which nothing predicts."""
    losses = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), tokens[:, 1:], reduction="none")  # (B, T - 1)
    begins = (start, start + length)
    first, second = (float(losses[:, begin : begin + length - 1].mean()) for begin in begins)
    return first, second


def repetition_scores(weights: Tensor, start: int, length: int) -> dict[str, Tensor]:
    """(H,) per measure: the mean weight of queries in the second copy, from weights (B, H, T, T)."""
    queries = torch.arange(start + length, start + 2 * length, device=weights.device)
    keys = {name: queries - length + offset for name, (offset, _) in OFFSETS.items()} | {"previous": queries - 1}
    return {name: weights[:, :, queries, key].mean((0, 2)) for name, key in keys.items()}


# Document


def induction_document(facts: InductionFacts, name: str) -> doc.ExplainDocument:
    best = max(facts.heads, key=lambda head: head.induction)
    gain = facts.first_loss - facts.second_loss
    findings = [
        f"Loss in the first copy {facts.first_loss:.3f}, in the second {facts.second_loss:.3f}: "
        + (f"repetition saves {gain:.3f} nats per token." if gain > 0 else "repetition saves nothing."),
        f"Highest induction score: layer {best.layer}, head {best.head}, {best.induction:.1%} "
        f"(uniform attention: {facts.uniform:.1%}).",
    ]
    explanation = (
        "Random tokens are shown twice. An induction head looks up what followed the current token the first time; it "
        "usually relies on a head of an earlier layer that attends to the previous token."
    )
    tables = [score_table(facts.heads, measure) for measure in MEASURES]
    return doc.ExplainDocument(
        subject="induction heads",
        title=f"{name}: induction heads",
        summary=f"{pluralize(facts.rows, 'row')} of {facts.length} random tokens, repeated once",
        page_title=f"Induction heads of {name}",
        sections=[doc.Section("", [doc.Bullets(findings), doc.Text(explanation, only="page"), doc.Grid(tables)])],
        json=facts.to_dict(),
        picture=lambda: induction_picture(facts),
    )


def score_table(heads: Sequence[RepetitionScore], measure: str) -> doc.HeatTable:
    rows = []
    for layer in dict.fromkeys(head.layer for head in heads):
        values = [getattr(head, measure) for head in heads if head.layer == layer]
        rows.append((f"layer {layer}", [doc.HeatCell(f"{value:.1%}", value) for value in values]))
    columns = [str(number) for number in dict.fromkeys(head.head for head in heads)]
    return doc.HeatTable(f"{measure.capitalize()} score of each head", columns, rows, f"weight {MEASURES[measure]}")


def induction_picture(facts: InductionFacts) -> str:
    layers = [[head.induction for head in facts.heads if head.layer == layer] for layer in layer_numbers(facts)]

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        image = axes.imshow(layers, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(layers[0])), [str(head) for head in range(1, len(layers[0]) + 1)])
        axes.set_yticks(range(len(layers)), [str(layer) for layer in layer_numbers(facts)])
        axes.set_xlabel("head")
        axes.set_ylabel("layer")
        figure.colorbar(image, ax=axes, label="induction score")

    return chart_svg("induction", paint, "induction score of each head", WIDE, 120 + 30 * len(layers))


def layer_numbers(facts: InductionFacts) -> list[int]:
    return list(dict.fromkeys(head.layer for head in facts.heads))
