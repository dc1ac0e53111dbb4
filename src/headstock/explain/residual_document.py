"""Presents the residual stream: its norm, what each sublayer adds, and the predictions read from it (logit lens)."""

from functools import partial
from typing import Any

from headstock.explain import document as doc
from headstock.explain.gradients_document import BLUE, ORANGE, stack_suffix, sublayer_axis
from headstock.explain.hooks import SUBLAYERS
from headstock.explain.render_document import Panel, chart_svg, side_by_side, with_legend
from headstock.explain.residual import LensPrediction, ResidualFacts, ResidualStep, TokenPath
from headstock.report.format import pluralize
from headstock.report.theme import ARMS, GRID, SOFT, WIDE, percent_axis

MAX_ROWS = 48  # tokens that a page shows
MAX_PRINTED = 20  # tokens that a terminal shows
MAX_CLASSES = 8  # lines in a chart of classes


def residual_document(facts: ResidualFacts, name: str, text: str) -> doc.ExplainDocument:
    stacks = list(facts.tokens)
    panels: list[Panel] = [partial(norm_panel, facts=facts, stack=stack) for stack in stacks]
    counts = []
    for stack, tokens in facts.tokens.items():
        prefix = "" if stack == "stack" else f"{stack}: "
        counts.append(f"{prefix}{pluralize(len(tokens[0].moved), 'layer')}, {pluralize(len(tokens), 'token')}")
    sections = [doc.Section("", doc.notes(facts.notes, text=text))]
    if facts.lens:
        sections.append(doc.Section("Predictions after each layer", lens_blocks(facts)))
    sections += [
        doc.Section(f"What each sublayer adds{stack_suffix(stack)}", stack_blocks(facts, stack)) for stack in stacks
    ]
    return doc.ExplainDocument(
        subject="residual stream",
        title=f"{name}: residual stream",
        summary="; ".join(counts),
        page_title=f"The residual stream of {name}",
        sections=sections,
        json=facts.to_dict(),
        picture=lambda: chart_svg(
            "stream", side_by_side(panels), "norm of the residual stream", WIDE * len(stacks), 0.62 * WIDE
        ),
    )


# Logit lens


def lens_blocks(facts: ResidualFacts) -> list[doc.DocumentBlock]:
    """The run's own head on the stream after each layer."""
    explanation = (
        "The run's own head applied to the residual stream after each layer, behind the final norm where there is one. "
        "The last column is the run's prediction."
    )
    rows = facts.lens[-MAX_ROWS:]
    if facts.predicts == "class":
        chart = doc.Chart(
            "classes",
            "class probabilities after each layer",
            with_legend(lambda axes: class_panel(axes, facts.lens[0]), columns=4),
            explanation,
        )
        return [chart, lens_table(facts, rows, only="terminal")]
    if len(facts.lens) > MAX_ROWS:
        explanation += f" The last {MAX_ROWS} of {len(facts.lens):,} positions are shown."
    blocks: list[doc.DocumentBlock] = [
        doc.Text(explanation, only="page"),
        lens_table(facts, rows, only="page"),
        lens_table(facts, facts.lens[-MAX_PRINTED:], only="terminal"),
    ]
    if len(rows) <= 4:
        blocks += [answers_table(facts, guess, number) for number, guess in enumerate(rows, 1)]
    return blocks


def lens_table(facts: ResidualFacts, rows: list[LensPrediction], *, only: Any) -> doc.HeatTable:
    def cells(guess: LensPrediction) -> list[doc.HeatCell]:
        return [
            doc.HeatCell(*top[0], f"{top[0][1]:.0%}", f"{answers_text(top)}; rank of the final answer: {rank}")
            for top, rank in zip(guess.layers, guess.ranks, strict=True)
        ]

    def name(guess: LensPrediction) -> str:
        expected = f" → {guess.expected}" if guess.expected and only == "page" else ""
        return f"{guess.token or 'text'}{expected}"

    columns = ["in", *(str(layer) for layer in range(1, len(rows[0].layers)))]
    caption = "with its probability; hover for the next ones and for the rank of the final answer."
    table = [(name(guess), cells(guess)) for guess in rows]
    return doc.HeatTable(f"The most probable {facts.predicts} after each layer", columns, table, caption, only=only)


def answers_table(facts: ResidualFacts, guess: LensPrediction, number: int) -> doc.Table:
    names = ["embedding", *(f"layer {layer}" for layer in range(1, len(guess.layers)))]
    rows = list(zip(names, map(answers_text, guess.layers), guess.ranks, strict=True))
    columns = {"after": "text", "most probable": "text", f"rank of “{guess.layers[-1][0][0]}”": "count"}
    suffix = f" {number}" if len(facts.lens) > 1 else ""
    return doc.Table(f"{facts.predicts.capitalize()}{suffix}, layer by layer", columns, rows, only="page")


def answers_text(answers: list[tuple[str, float]]) -> str:
    return ", ".join(f"{answer} {probability:.1%}" for answer, probability in answers)


# The stream


def steps_of(facts: ResidualFacts, stack: str) -> list[ResidualStep]:
    return [step for step in facts.steps if step.stack == stack]


def stack_blocks(facts: ResidualFacts, stack: str) -> list[doc.DocumentBlock]:
    tokens, suffix = facts.tokens[stack], stack_suffix(stack)
    blocks: list[doc.DocumentBlock] = [
        doc.Chart(
            f"norm-{stack}",
            f"norm of the residual stream and of what is added{suffix}",
            with_legend(lambda axes: norm_panel(axes, facts, stack), columns=2),
            "The mean norm of a token's vector in the residual stream, and of what each sublayer adds to it.",
        ),
        doc.Chart(
            f"cosine-{stack}",
            f"cosine of what is added and the stream{suffix}",
            with_legend(lambda axes: cosine_panel(axes, facts, stack)),
            "The cosine of what is added and the stream it is added to: above zero it reinforces the stream, near zero "
            "it writes a new direction, below zero it removes something.",
            height=0.5,
        ),
        step_table(facts, stack),
        path_table(facts, stack),
    ]
    if len(tokens) > MAX_ROWS:
        blocks.append(doc.Text(f"{len(tokens) - MAX_ROWS:,} more tokens in the JSON.", "soft", only="page"))
    return blocks


def step_table(facts: ResidualFacts, stack: str) -> doc.Table:
    caption = (
        "Means over the tokens. Share: the norm of what is added relative to the vector it is added to. Moved: the "
        "distance the vector moves relative to its norm before."
    )
    return doc.Table.from_records(
        f"The residual stream{stack_suffix(stack)}",
        steps_of(facts, stack),
        {
            "layer": ("text", "layer"),
            "sublayer": ("text", lambda step: SUBLAYERS[step.sublayer]),
            "point": ("code", "point"),
            "stream": ("decimal", "norm"),
            "added": ("decimal", "added"),
            "share": ("share", "share"),
            "cosine": ("signed", "cosine"),
            "moved": ("share", "moved"),
        },
        caption,
    )


def path_table(facts: ResidualFacts, stack: str) -> doc.HeatTable:
    def cells(path: TokenPath) -> list[doc.HeatCell]:
        values = zip(path.home[1:], path.norms[1:], path.moved, strict=True)
        return [
            doc.HeatCell(
                f"{cosine:.2f}", max(0.0, 1 - cosine), hint=f"norm {norm:.2f}, moved by {moved:.0%} of its norm before"
            )
            for cosine, norm, moved in values
        ]

    tokens = facts.tokens[stack][:MAX_ROWS]
    caption = (
        "the cosine of each token's vector and its own embedding after each layer: 1 is the same direction, 0 "
        "unrelated. Hover for its norm and its last move."
    )
    columns = [str(layer) for layer in range(1, len(tokens[0].moved) + 1)]
    rows = [(path.token, cells(path)) for path in tokens]
    return doc.HeatTable("Distance from the embedding", columns, rows, caption, "scratch", only="page")


# Panels


def norm_panel(axes: Any, facts: ResidualFacts, stack: str) -> None:
    steps = steps_of(facts, stack)
    axes.bar(range(1, len(steps) + 1), [step.added for step in steps], 0.6, color=ORANGE, label="added")
    norms = [facts.embedding[stack], *(step.norm for step in steps)]
    axes.plot(range(len(norms)), norms, color=BLUE, marker="o", markersize=4.5, label="residual stream")
    sublayer_axis(axes, steps, embedding=True)
    axes.set_ylabel("mean norm of a token's vector")
    axes.set_title("" if stack == "stack" else stack)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")


def cosine_panel(axes: Any, facts: ResidualFacts, stack: str) -> None:
    steps = steps_of(facts, stack)
    axes.bar(range(len(steps)), [step.cosine for step in steps], 0.6, color=BLUE)
    axes.axhline(0, color=GRID, linewidth=0.8)
    limit = max(0.2, *(abs(step.cosine) for step in steps)) * 1.15
    axes.set_ylim(-limit, limit)
    sublayer_axis(axes, steps)
    axes.set_ylabel("cosine of what is added\nand the stream")
    axes.grid(axis="y")


def class_panel(axes: Any, guess: LensPrediction) -> None:
    """The probability of each class after every layer."""
    colours = [ARMS[kind][1][0][0] for kind in ARMS] + [SOFT]
    for number, (name, _) in enumerate(guess.layers[-1][:MAX_CLASSES]):
        line = [dict(layer).get(name, 0.0) for layer in guess.layers]
        axes.plot(line, color=colours[number % len(colours)], marker="o", markersize=4.5, label=name)
    axes.set_xticks(range(len(guess.layers)), ["in", *(str(layer) for layer in range(1, len(guess.layers)))])
    axes.set_xlabel("embedding, then after each layer")
    axes.set_ylabel("probability of the class")
    axes.set_ylim(-0.02, 1.02)
    percent_axis(axes.yaxis)
    axes.grid(axis="y")
