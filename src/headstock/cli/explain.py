"""`headstock explain`: what a model consists of and what it computes, as tables, pages, pictures and JSON."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstock.cli import explain_attention, explain_flow, explain_layer
from headstock.cli.command import Common, command, command_group
from headstock.cli.options import Preset, RunName, Settings

if TYPE_CHECKING:
    from headstock.explain.document import Document

explain = command_group("explain", "Look inside", "Show what a run or a preset consists of and what it computes.")

TaskName = Annotated[str | None, typer.Option("--task", help="Use the heads of this task: classify, tag, answer, …")]
Classes = Annotated[int | None, typer.Option("--classes", help="Number of classes of a classification head.", min=1)]
Out = Annotated[Path | None, typer.Option("--out", help="Write a page (.html), or its main picture (.svg).")]
Where = Annotated[str | None, typer.Option("--where", help="encoder, decoder or cross; all of them by default.")]
Target = Annotated[
    str | None, typer.Option("--target", help="The decoder input of an encoder-decoder; its own output by default.")
]
LeftToRight = Annotated[
    bool, typer.Option("--left-to-right", help="Run a hybrid model with a causal mask, as it generates.")
]
ATTENTIONS = ("encoder", "decoder", "cross")
TEXT = "A text; two for a task that reads pairs or a question and its context."
Texts = Annotated[list[str] | None, typer.Argument(help=TEXT, show_default=False)]


def present(common: Common, document: "Document", out: Path | None) -> dict[str, Any]:
    """Print a document, write it where --out names a file, and return what --json prints."""
    from headstock.explain.render_document import terminal, write_document

    if out is not None:
        write_document(document, out)
    for part in terminal(document):
        common.tell(part)
    if out is not None:
        common.say(f"wrote {out}")
    return document.json | ({"page": str(out)} if out else {})


def one_of(value: str | None, known: tuple[str, ...], option: str) -> Any:
    from headstock.errors import UserError, did_you_mean

    if value is not None and value not in known:
        raise UserError(f"{option} {value}: must be {', '.join(known)}{did_you_mean(value, known)}")
    return value


def explains(function: Any) -> Any:
    """Register a verb that may write the file named by --out, which must be a page or a picture."""
    return command(explain, writes=lambda arguments: [checked_out(arguments["out"])])(function)


def checked_out(out: Path | None) -> Path | None:
    from headstock.report.standalone import check_output_path

    check_output_path(out)
    return out


@explains
def params(
    common: Common,
    run: RunName = None,
    preset: Preset = None,
    settings: Settings = None,
    task: TaskName = None,
    classes: Classes = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Rows per step, for its memory.", min=1)] = None,
    length: Annotated[int | None, typer.Option("--length", help="Tokens per row.", min=1)] = None,
    out: Out = None,
) -> dict[str, Any]:
    """Count every parameter beside its formula, and the cost of a token and of a training step.

    Example: headstock explain params --preset classic --set vocabulary=50001 --out params.html
    """
    from headstock.explain.parameters import explain_params
    from headstock.explain.parameters_page import params_page, params_tables, picture
    from headstock.explain.subject import open_subject
    from headstock.report.standalone import write_page_or_svg

    subject = open_subject(run, preset, settings, task=task, classes=classes, device="cpu", weights=False)
    for note in subject.notes:
        common.say(note)
    found = explain_params(subject, classes=classes, batch=batch, length=length)
    if out is None:
        for part in params_tables(found):
            common.show(part)
    else:
        write_page_or_svg(out, lambda: params_page(found), lambda: picture(found))
        common.show(str(out))
    return found.facts() | ({"page": str(out)} if out else {})


@explains
def model(
    common: Common,
    run: RunName = None,
    preset: Preset = None,
    settings: Settings = None,
    task: TaskName = None,
    classes: Classes = None,
    out: Out = None,
) -> dict[str, Any]:
    """Draw the architecture: the modules a text passes through, with shapes and parameter counts.

    Example: headstock explain model --preset bert-nano --out bert.svg
    """
    from headstock.explain.diagram import facts, model_page, model_svg
    from headstock.explain.parameters import explain_params
    from headstock.explain.parameters_page import parts_table
    from headstock.explain.subject import open_subject
    from headstock.report.standalone import write_page_or_svg

    subject = open_subject(run, preset, settings, task=task, classes=classes, device="cpu", weights=False)
    for note in subject.notes:
        common.say(note)
    found = explain_params(subject)
    if out is None:
        common.show(parts_table(found, tensors=False))
        common.say("a picture: --out FILE.svg or FILE.html")
    else:
        write_page_or_svg(out, lambda: model_page(subject, found), lambda: model_svg(subject, found))
        common.show(str(out))
    return facts(subject, found) | ({"page": str(out)} if out else {})


@explains
def mask(
    common: Common,
    run: RunName = None,
    text: Texts = None,
    preset: Preset = None,
    settings: Settings = None,
    kind: Annotated[str | None, typer.Option("--kind", help="causal, none, padding, document or prefix.")] = None,
    length: Annotated[int | None, typer.Option("--length", help="Number of tokens.")] = None,
    tokens: Annotated[str | None, typer.Option("--tokens", help="Token names instead of numbers.")] = None,
    padding: Annotated[int, typer.Option("--padding", help="padding: number of padding tokens.")] = 2,
    documents: Annotated[
        str | None, typer.Option("--documents", help="document: tokens of each document, such as 2,3.")
    ] = None,
    prefix: Annotated[int, typer.Option("--prefix", help="prefix: number of bidirectional tokens.")] = 2,
    both_ways: Annotated[
        bool, typer.Option("--both-ways", help="document: documents are bidirectional, not causal.")
    ] = False,
    where: Where = None,
    target: Target = None,
    left_to_right: LeftToRight = False,
    out: Out = None,
) -> dict[str, Any]:
    """Show an attention mask of a kind, or those of a run on a text, and count its masked entries.

    Example: headstock explain mask --kind causal --tokens "the cat sat on mats"
    """
    from headstock.errors import UserError
    from headstock.explain.attention_patterns import need_place
    from headstock.explain.inputs import open_input
    from headstock.explain.masks import (
        MASK_KINDS,
        explain_mask,
        explain_model_masks,
        mask_document,
        parse_lengths,
        token_names,
    )

    one_of(where, ATTENTIONS, "--where")
    names = token_names(tokens, length)
    if run is None and preset is None:
        if text or where or target or left_to_right:
            raise UserError("a text, --where, --target and --left-to-right need a run or a preset")
        kind = one_of(kind or "causal", MASK_KINDS, "--kind")
        lengths = parse_lengths(documents, len(names))
        masks = [
            explain_mask(kind, names, padding=padding, documents=lengths, prefix=prefix, causal=not both_ways)  # type: ignore[arg-type]
        ]
    elif kind is not None:
        raise UserError("--kind does not go with a run or a preset, which has its own mask")
    else:
        model, row, name = open_input(
            run,
            preset,
            settings,
            text or [],
            names,
            device=common.device,
            target=target,
            left_to_right=left_to_right,
        )
        need_place(model, name, None if left_to_right else where)
        masks = explain_model_masks(model, row.batch, name, tokens=row.tokens, source=row.source)
        masks = [one for one in masks if where in (None, one.attention)]
    return present(common, mask_document(masks), out)


@explains
def positions(
    common: Common,
    run: RunName = None,
    preset: Preset = None,
    settings: Settings = None,
    kind: Annotated[str | None, typer.Option("--kind", help="sinusoidal, learned or rotary.")] = None,
    length: Annotated[int | None, typer.Option("--length", help="Number of positions.")] = None,
    width: Annotated[
        int | None, typer.Option("--width", help="Features per position; for rotary ones the width of a head.")
    ] = None,
    where: Where = None,
    out: Out = None,
) -> dict[str, Any]:
    """Show the position encodings, their similarity by distance, and that no two are the same.

    Example: headstock explain positions --kind rotary --length 128 --width 64 --out positions.html
    """
    from headstock.errors import UserError
    from headstock.explain.positions import (
        POSITION_KINDS,
        explain_model_positions,
        explain_positions,
        position_document,
    )
    from headstock.explain.subject import open_subject
    from headstock.train.loop import sequence_length

    one_of(kind, POSITION_KINDS, "--kind")
    one_of(where, ("encoder", "decoder"), "--where")
    if run is None and preset is None:
        if where is not None:
            raise UserError("--where needs an encoder-decoder: name a run or a preset")
        kind = one_of(kind or "sinusoidal", POSITION_KINDS, "--kind")
        tables = [explain_positions(kind, 128 if length is None else length, 64 if width is None else width)]  # type: ignore[arg-type]
    else:
        if width is not None:
            raise UserError("--width does not go with a run or a preset, which has its own width")
        subject = open_subject(run, preset, settings, device=common.device)
        trained_length = sequence_length(subject.model, subject.config.train) if run is not None else None
        tables = explain_model_positions(
            subject.model, subject.name, length=length, trained=run is not None, trained_length=trained_length
        )
        if kind is not None and kind != tables[0].kind:
            raise UserError(f"--kind {kind}: the positions of {subject.name} are {tables[0].kind}")
        tables = [facts for facts in tables if where is None or facts.where in (None, where)]
    return present(common, position_document(tables), out)


for part in (explain_layer, explain_attention, explain_flow):
    part.add_to(explain)
