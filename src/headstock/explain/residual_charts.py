"""Draws the residual stream: its length, what is added on the way, its tokens, and what it would say by now."""

from collections.abc import Sequence
from typing import Any

from headstock.explain.gradient_charts import BLUE, ORANGE, both, with_legend
from headstock.explain.hooks import SUBLAYERS
from headstock.explain.residual import Guess, Residuals, Step
from headstock.report.render import render
from headstock.report.standalone import standalone_svg
from headstock.report.theme import ARMS, GRID, SOFT, WIDE, Gallery, make_figure, percent_axis

SHORT = {"attention": "a", "cross": "c", "feed": "f"}
ROWS = 48  # tokens and places that a page shows at once
CLASSES = 8  # lines in a chart of classes


def of_stack(found: Residuals, stack: str) -> list[Step]:
    return [step for step in found.steps if step.stack == stack]


def ticks(axes: Any, steps: Sequence[Step], *, first: bool) -> None:
    """Layer and sublayer below each point, some left out where there are many."""
    names = [f"{step.layer}{SHORT[step.sublayer]}" for step in steps]
    every = max(1, len(names) // 16)
    shown = [name if at % every == 0 else "" for at, name in enumerate(names)]
    begin = 1 if first else 0
    axes.set_xticks(range(len(shown) + begin), ["in", *shown] if first else shown)
    kinds = [key for key in SUBLAYERS if any(step.sublayer == key for step in steps)]
    means = ", ".join(f"{SHORT[key]} {SUBLAYERS[key]}" for key in kinds)
    axes.set_xlabel(f"layer and sublayer:{' ' if len(kinds) < 3 else chr(10)}{means}")  # a telephone has room for two


def length_panel(axes: Any, found: Residuals, stack: str) -> None:
    steps = of_stack(found, stack)
    axes.bar(range(1, len(steps) + 1), [step.added for step in steps], 0.6, color=ORANGE, label="what is added")
    lengths = [found.embedding[stack], *(step.norm for step in steps)]
    axes.plot(range(len(lengths)), lengths, color=BLUE, marker="o", markersize=4.5, label="the stream")
    ticks(axes, steps, first=True)
    axes.set_ylabel("mean length of a token's vector")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")


def angle_panel(axes: Any, found: Residuals, stack: str) -> None:
    steps = of_stack(found, stack)
    axes.bar(range(len(steps)), [step.cosine for step in steps], 0.6, color=BLUE)
    axes.axhline(0, color=GRID, linewidth=0.8)
    most = max(0.2, *(abs(step.cosine) for step in steps)) * 1.15
    axes.set_ylim(-most, most)
    ticks(axes, steps, first=False)
    axes.set_ylabel("cosine of what is added\nand the stream")
    axes.grid(axis="y")


def class_panel(axes: Any, guess: Guess) -> None:
    """The probability of each class after every layer."""
    last = dict(guess.layers[-1])
    names = list(last)[:CLASSES]
    colours = [ARMS[kind][1][0][0] for kind in ARMS] + [SOFT]
    for number, name in enumerate(names):
        line = [dict(layer).get(name, 0.0) for layer in guess.layers]
        axes.plot(line, color=colours[number % len(colours)], marker="o", markersize=4.5, label=name)
    axes.set_xticks(range(len(guess.layers)), ["in", *(str(layer) for layer in range(1, len(guess.layers)))])
    axes.set_xlabel("embedding, then behind each layer")
    axes.set_ylabel("probability of the class")
    axes.set_ylim(-0.02, 1.02)
    percent_axis(axes.yaxis)
    axes.grid(axis="y")


def picture(found: Residuals) -> str:
    """The length of each stack's stream and what is added to it."""
    stacks = list(found.tokens)

    def paint(figure: Any) -> None:
        panels = figure.subplots(1, len(stacks), squeeze=False)[0]
        for axes, stack in zip(panels, stacks, strict=True):
            length_panel(axes, found, stack)
            axes.set_title("" if stack == "stack" else stack)
            axes.legend(fontsize=9)

    figure = make_figure(paint, WIDE * len(stacks), 0.62 * WIDE)
    return standalone_svg(str(Gallery().embed("stream", figure, "length of the stream and of what is added")))


def page(found: Residuals, *, name: str, text: str) -> str:
    gallery, stacks = Gallery(), []
    for stack, tokens in found.tokens.items():
        label = f"length of the stream and of what is added, {stack}"
        stacks.append(
            {
                "name": stack,
                "length": both(gallery, f"length-{stack}", with_legend(length_panel, found, stack, columns=2), label),
                "angle": both(
                    gallery, f"angle-{stack}", with_legend(angle_panel, found, stack), "cosine of what is added", 0.5
                ),
                "steps": of_stack(found, stack),
                "tokens": tokens[:ROWS],
                "more": max(0, len(tokens) - ROWS),
                "layers": len(tokens[0].moved),
            }
        )
    classes = None
    if found.says == "class" and found.lens:
        classes = both(gallery, "classes", with_legend(class_panel, found.lens[0], columns=4), "classes by layer")
    return render(
        "headstock.explain",
        "residual.html",
        found=found,
        stacks=stacks,
        classes=classes,
        lens=found.lens[-ROWS:],
        hidden=max(0, len(found.lens) - ROWS),
        sublayers=SUBLAYERS,
        name=name,
        text=text,
    )
