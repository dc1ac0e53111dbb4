"""`headstock explain`: what a model consists of and what it computes, as tables, pages, pictures and JSON.

Each verb calls the function of the Python API and lets `present` print or write the explanation.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headstock.cli.command import Common, command, command_group
from headstock.cli.options import Columns, Preset, RunName, RunPath, Settings

if TYPE_CHECKING:
    from headstock.api.explain import Explanation

explain = command_group("explain", "Look inside", "Show what a run or a preset consists of and what it computes.")

TEXT_HELP = "A text; two for a task that reads pairs, or a question and its context."
Text = Annotated[list[str], typer.Argument(help=TEXT_HELP, show_default=False)]
OptionalText = Annotated[list[str] | None, typer.Argument(help=TEXT_HELP, show_default=False)]
Out = Annotated[Path | None, "Write a page (.html), or its main picture (.svg)."]
Where = Annotated[str | None, "encoder, decoder or cross; forward or backward of a bidirectional model; default: all."]
Target = Annotated[str | None, "Decoder input of an encoder-decoder; default: its output."]
LeftToRight = Annotated[bool, "Run a hybrid model with a causal mask, as it generates."]
Label = Annotated[str | None, "The label of the text; default: the run's prediction."]
Classes = Annotated[int | None, typer.Option("--classes", help="Number of classes of a classification head.", min=1)]
TaskHeads = Annotated[str | None, "Use the heads of this task: classify, tag, answer, …"]


@dataclass(frozen=True)
class SubjectOptions:
    """A run or a preset, possibly with the heads of another task."""

    run: RunName = None
    preset: Preset = None
    settings: Settings = None
    task: TaskHeads = None
    classes: Classes = None

    def keywords(self) -> dict[str, Any]:
        names = ("run", "preset", "settings", "task", "classes")
        return {name: getattr(self, name) for name in names}


def explains(function: Any) -> Any:
    """Register a verb that takes --out, which must name a page or a picture."""
    return command(explain, writes=lambda options: [checked_out(options["out"])])(function)


def checked_out(out: Path | None) -> Path | None:
    from headstock.report.render import check_output_path

    check_output_path(out)
    return out


def present(common: Common, explanation: "Explanation", out: Path | None) -> dict[str, Any]:
    """Print an explanation, write it where --out names a file, and return what --json prints."""
    from headstock.explain.render_document import terminal

    if out is not None:
        explanation.save(out)
    for part in terminal(explanation.document):
        common.show_prose(part)
    if out is not None:
        common.log(f"wrote {out}")
    return explanation.to_dict() | ({"page": str(out)} if out else {})


# A model


@explains
def params(
    common: Common,
    options: SubjectOptions,
    batch: Annotated[int | None, typer.Option("--batch", help="Rows per step, for its memory.", min=1)] = None,
    length: Annotated[int | None, typer.Option("--length", help="Tokens per row.", min=1)] = None,
    out: Out = None,
) -> dict[str, Any]:
    """Count every parameter beside its formula, and the cost of a token and of a training step.

    Example: headstock explain params --preset classic --set vocabulary=50001 --out params.html
    """
    from headstock.api.explain import explain_parameters

    return present(common, explain_parameters(**options.keywords(), batch=batch, length=length), out)


@explains
def model(common: Common, options: SubjectOptions, out: Out = None) -> dict[str, Any]:
    """Draw the architecture: the modules a text passes through, with shapes and parameter counts.

    Example: headstock explain model --preset bert-nano --out bert.svg
    """
    from headstock.api.explain import explain_model

    if out is None:
        common.log("for the diagram: --out FILE.svg or FILE.html")
    return present(common, explain_model(**options.keywords()), out)


# Attention


@explains
def mask(
    common: Common,
    run: RunName = None,
    text: OptionalText = None,
    preset: Preset = None,
    settings: Settings = None,
    kind: Annotated[str | None, "causal, none, padding, document or prefix."] = None,
    length: Annotated[int | None, "Number of tokens."] = None,
    tokens: Annotated[str | None, "Token names instead of numbers."] = None,
    padding: Annotated[int, "padding: number of padding tokens."] = 2,
    documents: Annotated[str | None, "document: tokens of each document, such as 2,3."] = None,
    prefix: Annotated[int, "prefix: number of bidirectional tokens."] = 2,
    both_ways: Annotated[bool, "document: documents are bidirectional, not causal."] = False,
    where: Where = None,
    target: Target = None,
    left_to_right: LeftToRight = False,
    out: Out = None,
) -> dict[str, Any]:
    """Show an attention mask of a kind, or those of a run on a text, and count its masked entries.

    Example: headstock explain mask --kind causal --tokens "the cat sat on mats"
    """
    from headstock.api.explain import explain_mask

    explanation = explain_mask(
        run,
        text,
        preset=preset,
        settings=settings,
        kind=kind,  # type: ignore[arg-type]
        length=length,
        tokens=tokens,
        padding=padding,
        documents=documents,
        prefix=prefix,
        both_ways=both_ways,
        where=where,  # type: ignore[arg-type]
        target=target,
        left_to_right=left_to_right,
        device=common.device,
    )
    return present(common, explanation, out)


@explains
def positions(
    common: Common,
    run: RunName = None,
    preset: Preset = None,
    settings: Settings = None,
    kind: Annotated[str | None, "sinusoidal, learned, rotary or relative."] = None,
    length: Annotated[int | None, "Number of positions."] = None,
    width: Annotated[int | None, "Features per position; for rotary ones the width of a head."] = None,
    where: Where = None,
    out: Out = None,
) -> dict[str, Any]:
    """Show the position encodings, their similarity by distance, and that no two are the same.

    Example: headstock explain positions --kind rotary --length 128 --width 64 --out positions.html
    """
    from headstock.api.explain import explain_positions

    size: dict[str, Any] = {"kind": kind, "length": length, "width": width, "where": where}
    return present(common, explain_positions(run, preset=preset, settings=settings, device=common.device, **size), out)


@explains
def attention(
    common: Common,
    run: RunPath,
    text: OptionalText = None,
    file: Annotated[str | None, "Average over these texts or rows; - is stdin."] = None,
    rows: Annotated[int | None, "Read at most this many rows of the file."] = None,
    where: Where = None,
    layer: Annotated[int | None, "One layer, from 1."] = None,
    head: Annotated[int | None, "One head, from 1."] = None,
    target: Target = None,
    left_to_right: LeftToRight = False,
    out: Out = None,
) -> dict[str, Any]:
    """Show the attention weights of every head on a text, and how they are distributed, there or over a file.

    Example: headstock explain attention reviews-en "The film was [MASK]." --out attention.html
    """
    from headstock.api.explain import explain_attention

    selected: dict[str, Any] = {"where": where, "layer": layer, "head": head}
    reading: dict[str, Any] = {"file": file, "rows": rows, "target": target, "left_to_right": left_to_right}
    return present(common, explain_attention(run, text, **reading, **selected, device=common.device), out)


# One text


@explains
def layer(
    common: Common,
    run: RunPath,
    text: Text,
    number: Annotated[int, typer.Option("--layer", help="Layer, from 1.")] = 1,
    head: Annotated[int, "Attention head, from 1."] = 1,
    word: Annotated[str | None, "A token or its position, from 1; the last one by default."] = None,
    step: Annotated[list[str] | None, "Only this step, such as scores; repeatable."] = None,
    way: Annotated[Literal["forward", "backward"] | None, "One direction; backward from the top down."] = None,
    where: Annotated[str | None, "encoder or decoder of an encoder-decoder; default: decoder."] = None,
    label: Label = None,
    out: Out = None,
) -> dict[str, Any]:
    """Follow one token through one layer: every formula with its values, forward and backward.

    Example: headstock explain layer reviews-en "I liked this film." --word film --out layer.html
    """
    from headstock.api.explain import explain_layer

    part: dict[str, Any] = {"layer": number, "head": head, "word": word, "where": where}
    shown: dict[str, Any] = {"steps": step or (), "way": way}
    return present(common, explain_layer(run, text, **part, **shown, label=label, device=common.device), out)


@explains
def gradients(
    common: Common,
    run: RunPath,
    columns: Columns,
    text: OptionalText = None,
    file: Annotated[str | None, "A text file, or labelled rows as the run was trained on."] = None,
    label: Label = None,
    depths: Annotated[bool, "Also study fresh models of 2 to 48 layers."] = True,
    out: Out = None,
) -> dict[str, Any]:
    """Show the gradients of one backward pass in every layer, residual connection and group of parameters.

    Example: headstock explain gradients reviews-en "I liked this film a lot." --out gradients.html
    """
    from headstock.api.explain import explain_gradients

    reading: dict[str, Any] = {"file": file, "columns": columns.names(), "label": label}
    return present(common, explain_gradients(run, text, **reading, depths=depths, device=common.device), out)


@explains
def residual(
    common: Common,
    run: RunPath,
    text: Text,
    label: Annotated[str | None, "The translation to read; default: the run's own."] = None,
    out: Out = None,
) -> dict[str, Any]:
    """Show the residual stream after each sublayer, what is added to it, and its predictions (logit lens).

    Example: headstock explain residual reviews-en "It was a [MASK] film." --out residual.html
    """
    from headstock.api.explain import explain_residual

    return present(common, explain_residual(run, text, label=label, device=common.device), out)


@explains
def prediction(
    common: Common,
    run: RunPath,
    text: Text,
    label: Annotated[str | None, "The class, token or translation to explain; default: the run's prediction."] = None,
    at: Annotated[int | None, "Which [MASK] of several, from 1."] = None,
    out: Out = None,
) -> dict[str, Any]:
    """Explain a class, next token, masked word or translation by gradients and by leaving out each word.

    Example: headstock explain prediction runs/reviews "A dull film with a great ending." --out why.html
    """
    from headstock.api.explain import explain_prediction

    return present(common, explain_prediction(run, text, label=label, at=at, device=common.device), out)
