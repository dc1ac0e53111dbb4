"""`headstock explain`: what a model consists of and what it computes, as tables, pages, pictures and JSON.

Each verb computes the facts of one subject, describes them as a document, and lets `present` print or write it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headstock.cli.command import Common, command, command_group
from headstock.cli.options import Columns, Preset, RunName, RunPath, Settings
from headstock.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from headstock.explain.document import ExplainDocument
    from headstock.explain.subject import ExplainSubject
    from headstock.inference.pipeline import Pipeline

explain = command_group("explain", "Look inside", "Show what a run or a preset consists of and what it computes.")

TEXT_HELP = "A text; two for a task that reads pairs, or a question and its context."
ATTENTION_KINDS = ("encoder", "decoder", "cross", "forward", "backward")
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

    def open(self) -> "ExplainSubject":
        from headstock.explain.subject import open_subject

        return open_subject(
            self.run, self.preset, self.settings, task=self.task, classes=self.classes, device="cpu", weights=False
        )


def explains(function: Any) -> Any:
    """Register a verb that takes --out, which must name a page or a picture."""
    return command(explain, writes=lambda options: [checked_out(options["out"])])(function)


def checked_out(out: Path | None) -> Path | None:
    from headstock.report.render import check_output_path

    check_output_path(out)
    return out


def present(common: Common, document: "ExplainDocument", out: Path | None) -> dict[str, Any]:
    """Print a document, write it where --out names a file, and return what --json prints."""
    from headstock.explain.render_document import terminal, write_document

    if out is not None:
        write_document(document, out)
    for part in terminal(document):
        common.show_prose(part)
    if out is not None:
        common.log(f"wrote {out}")
    return document.json | ({"page": str(out)} if out else {})


def one_of(value: str | None, choices: tuple[str, ...], option: str) -> Any:
    if value is not None and value not in choices:
        raise UserError(f"{option} {value}: must be {', '.join(choices)}{did_you_mean(value, choices)}")
    return value


def check_text_or_file(text: list[str] | None, file: str | None) -> None:
    if bool(text) == bool(file):
        raise UserError("give a text or --file, not both" if text else "no text: give one, or name a --file")


def open_in_double(run: str, device: str) -> "Pipeline":
    """A run whose gradients are computed in double precision, which MPS does not have."""
    from headstock.explain.subject import open_single_run

    pipeline = open_single_run(run, device=device)
    if pipeline.model.device.type == "mps":
        pipeline.model.to("cpu")
    return pipeline


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
    from headstock.explain.parameters import explain_parameters
    from headstock.explain.parameters_document import parameter_document

    facts = explain_parameters(options.open(), classes=options.classes, batch=batch, length=length)
    return present(common, parameter_document(facts), out)


@explains
def model(common: Common, options: SubjectOptions, out: Out = None) -> dict[str, Any]:
    """Draw the architecture: the modules a text passes through, with shapes and parameter counts.

    Example: headstock explain model --preset bert-nano --out bert.svg
    """
    from headstock.explain.diagram import model_document
    from headstock.explain.parameters import explain_parameters

    subject = options.open()
    if out is None:
        common.log("for the diagram: --out FILE.svg or FILE.html")
    return present(common, model_document(subject, explain_parameters(subject)), out)


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
    from headstock.explain import masks

    one_of(where, ATTENTION_KINDS, "--where")
    names = masks.token_names(tokens, length)
    if run is None and preset is None:
        if text or where or target or left_to_right:
            raise UserError("a text, --where, --target and --left-to-right need a run or a preset")
        mask_kind = one_of(kind or "causal", masks.MASK_KINDS, "--kind")
        lengths = masks.parse_lengths(documents, len(names))
        facts = [
            masks.explain_mask(
                mask_kind, names, padding=padding, documents=lengths, prefix=prefix, causal=not both_ways
            )
        ]
    elif kind is not None:
        raise UserError("--kind does not go with a run or a preset, which has its own mask")
    else:
        model, row, name = masks.open_input(
            run, preset, settings, text or [], names, device=common.device, target=target, left_to_right=left_to_right
        )
        facts = masks.explain_model_masks(model, row, name, where=where)
    return present(common, masks.mask_document(facts), out)


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
    from headstock.explain.positions import (
        POSITION_KINDS,
        explain_model_positions,
        explain_positions,
        position_document,
    )
    from headstock.explain.relative_positions import explain_relative_positions, relative_position_document
    from headstock.explain.subject import open_subject
    from headstock.train.loop import sequence_length

    one_of(kind, (*POSITION_KINDS, "relative"), "--kind")
    one_of(where, ("encoder", "decoder"), "--where")
    if run is None and preset is None:
        if where is not None:
            raise UserError("--where needs an encoder-decoder: name a run or a preset")
        if kind == "relative":
            raise UserError("relative positions belong to a model: name a run, or a preset with --preset")
        position_kind = one_of(kind or "sinusoidal", POSITION_KINDS, "--kind")
        size = (128 if length is None else length, 64 if width is None else width)
        return present(common, position_document([explain_positions(position_kind, *size)]), out)
    if width is not None:
        raise UserError("--width does not go with a run or a preset, which has its own width")
    subject = open_subject(run, preset, settings, device=common.device)
    if getattr(subject.config.model, "positions", None) == "relative":
        if kind not in (None, "relative"):
            raise UserError(f"--kind {kind}: the positions of {subject.name} are relative")
        biases = explain_relative_positions(subject.model, subject.name, length=length, trained=run is not None)
        biases = [facts for facts in biases if where is None or facts.where in (None, where)]
        return present(common, relative_position_document(biases), out)
    trained_length = sequence_length(subject.model, subject.config.train) if run is not None else None
    tables = explain_model_positions(
        subject.model, subject.name, length=length, trained=run is not None, trained_length=trained_length
    )
    if kind is not None and kind != tables[0].kind:
        raise UserError(f"--kind {kind}: the positions of {subject.name} are {tables[0].kind}")
    tables = [facts for facts in tables if where is None or facts.where in (None, where)]
    return present(common, position_document(tables), out)


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
    from headstock.explain.attention import explain_attention, explain_file_attention, need_attention, select_heads
    from headstock.explain.attention_document import attention_document
    from headstock.explain.inputs import encode_file, encode_input
    from headstock.explain.subject import open_single_run

    one_of(where, ATTENTION_KINDS, "--where")
    check_text_or_file(text, file)
    if file and (target is not None or left_to_right):
        raise UserError("--target and --left-to-right go with a text, not with --file")
    if rows is not None and (not file or rows < 1):
        raise UserError("--rows goes with --file" if not file else f"--rows {rows}: must be 1 or more")
    pipeline = open_single_run(run, device=common.device)
    need_attention(pipeline.model, str(run), None if left_to_right else where)
    if file:
        batches = encode_file(pipeline, file, rows=rows)
        facts = explain_file_attention(pipeline.model, batches, str(run), where=where)
    else:
        encoded = encode_input(pipeline, text or [], target=target, left_to_right=left_to_right)
        facts = explain_attention(pipeline.model, encoded, str(run), where=where)
    facts = select_heads(facts, layer=layer, head=head)
    return present(common, attention_document(facts, file or " / ".join(text or [])), out)


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
    from headstock.explain.layer_walkthrough import explain_layer
    from headstock.explain.layer_walkthrough_document import layer_document

    pipeline = open_in_double(run, common.device)
    facts = explain_layer(pipeline, text, layer=number, head=head, word=word, where=where, label=label)
    document = layer_document(facts, str(run), " / ".join(text), steps=step or (), direction=way)
    return present(common, document, out)


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
    from dataclasses import replace

    from headstock.explain.gradients import block_settings, depth_study, explain_gradients
    from headstock.explain.gradients_document import gradient_document, recurrence_document
    from headstock.explain.hooks import need_block_stacks
    from headstock.explain.inputs import file_target, training_target
    from headstock.explain.recurrence import explain_recurrence, recurrent_stacks

    check_text_or_file(text, file)
    if file and label is not None:
        raise UserError("--label goes with a text; the rows of a --file have their own labels")
    pipeline = open_in_double(run, common.device)
    names = columns.names()
    target = file_target(pipeline, file, columns=names) if file else training_target(pipeline, text or [], label=label)
    title = " / ".join(text or [])
    if recurrent_stacks(pipeline.model.backbone):
        recurrence = explain_recurrence(pipeline.model, target)
        return present(common, recurrence_document(recurrence, str(run), title), out)
    need_block_stacks(pipeline.model.backbone, run)
    facts = explain_gradients(pipeline.model, target)
    if depths:
        facts = replace(facts, depths=depth_study(block_settings(pipeline.model.backbone.config)))
    return present(common, gradient_document(facts, str(run), title), out)


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
    from headstock.explain.residual import explain_residual
    from headstock.explain.residual_document import residual_document
    from headstock.explain.subject import open_single_run

    facts = explain_residual(open_single_run(run, device=common.device), text, label=label)
    return present(common, residual_document(facts, str(run), " / ".join(text)), out)


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
    from headstock.explain.prediction import explain_prediction, prediction_document
    from headstock.explain.subject import open_single_run

    facts = explain_prediction(open_single_run(run, device=common.device), text, label=label, at=at)
    return present(common, prediction_document(facts, str(run)), out)
