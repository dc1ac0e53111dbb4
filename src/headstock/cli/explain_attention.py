"""`headstock explain mask`, `positions` and `attention`: who may look at whom, where things stand, who does look."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, verb
from headstock.cli.options import Preset, RunName, Settings

Out = Annotated[Path | None, typer.Option("--out", help="A page (.html) or its picture alone (.svg).")]
Place = Annotated[
    str | None, typer.Option("--where", help="encoder, decoder or cross; all that there are unless given.")
]
Target = Annotated[
    str | None, typer.Option("--target", help="What an encoder-decoder writes, where that is not left to it.")
]
Way = Annotated[bool, typer.Option("--left-to-right", help="Read by a model that learned both ways as it generates.")]
PLACES = ("encoder", "decoder", "cross")
SHOWN = 24  # places of a mask that a terminal has room for


def mask(
    common: Common,
    run: RunName = None,
    text: Annotated[list[str] | None, typer.Argument(help="What a run reads.", show_default=False)] = None,
    preset: Preset = None,
    settings: Settings = None,
    kind: Annotated[str | None, typer.Option("--kind", help="causal, none, padding, document or prefix.")] = None,
    length: Annotated[int | None, typer.Option("--length", help="Tokens of the row.")] = None,
    tokens: Annotated[str | None, typer.Option("--tokens", help="Its words instead of numbers.")] = None,
    padding: Annotated[int, typer.Option("--padding", help="Of the padding mask: tokens that are padding.")] = 2,
    documents: Annotated[
        str | None, typer.Option("--documents", help="Of the document mask: tokens of each document, such as 2,3.")
    ] = None,
    prefix: Annotated[int, typer.Option("--prefix", help="Of the prefix mask: tokens that are read both ways.")] = 2,
    both_ways: Annotated[
        bool, typer.Option("--both-ways", help="Documents are read both ways, not left to right.")
    ] = False,
    where: Place = None,
    target: Target = None,
    left_to_right: Way = False,
    out: Out = None,
) -> dict[str, Any]:
    """The mask as a table of 0 and -inf, and how many entries it masks: of a kind, or those of a run on a text.

    Example: headstock explain mask --kind causal --tokens "the cat sat on mats"
    """
    from headstock.errors import UserError
    from headstock.explain.attention_patterns import need_place
    from headstock.explain.mask_page import as_text, page, pictures
    from headstock.explain.masks import KINDS, explain_mask, explain_own_masks
    from headstock.report.standalone import check_out, write_out

    check_out(out)
    chosen(where, PLACES, "--where")
    words = row_words(tokens, length)
    if run is None and preset is None:
        if text or where or target or left_to_right:
            raise UserError("a text, --where, --target and --left-to-right are of a run's own mask: name the run first")
        made_of: Any = chosen(kind or "causal", KINDS, "--kind")
        sizes = parse_sizes(documents) if documents else halves(len(words))
        how: dict[str, Any] = {"padding": padding, "documents": sizes, "prefix": prefix, "causal": not both_ways}
        found = [explain_mask(made_of, words, **how)]
    elif kind is not None:
        raise UserError("--kind is of a mask by itself; a run or preset has its own")
    else:
        row, name = read_row(
            common, run, preset, settings, text or [], words, target=target, left_to_right=left_to_right
        )
        need_place(row.model, name, None if left_to_right else where)
        masks = explain_own_masks(row.model, row.batch, name, tokens=row.tokens, source=row.source)
        found = [one for one, place in masks if where in (None, place)]
    for one in found:
        common.show(f"{one.name}: {one.masked:,} of {one.entries:,} entries are masked{by_formula(one)}")
        if max(len(one.tokens), len(one.keys)) <= SHOWN:
            common.show(as_text(one))
    if out is not None:
        write_out(out, lambda: page(found), lambda: pictures(found))
        common.show(str(out))
    return {"masks": [one.facts() for one in found]} | (found[0].facts() if len(found) == 1 else {})


def by_formula(found: Any) -> str:
    return "" if found.formula in (None, "0") else f", {found.formula} = {found.expected:,}"


def row_words(tokens: str | None, length: int | None) -> list[str]:
    """What stands beside the rows of a mask: words, or numbers from 1."""
    from headstock.errors import UserError

    if tokens is None:
        return [str(place + 1) for place in range(5 if length is None else length)]
    words = tokens.split()
    if length is not None and len(words) != length:
        raise UserError(f"--tokens has {len(words)} words and --length is {length}; give one of them")
    return words


def halves(length: int) -> list[int]:
    return [size for size in (length // 2, length - length // 2) if size]


def parse_sizes(given: str) -> list[int]:
    from headstock.errors import UserError

    try:
        return [int(size) for size in given.split(",")]
    except ValueError:
        raise UserError(f"--documents {given}: must be numbers with commas between them, such as 2,3") from None


def chosen(given: str | None, known: tuple[str, ...], option: str) -> str | None:
    from headstock.errors import UserError, did_you_mean

    if given is not None and given not in known:
        raise UserError(f"{option} {given}: must be {', '.join(known)}{did_you_mean(given, known)}")
    return given


@dataclass(frozen=True)
class Row:
    """A row of tokens and the model that is to read it."""

    model: Any
    batch: Any
    tokens: list[str]
    source: list[str]


def read_row(
    common: Common,
    run: str | None,
    preset: str | None,
    settings: list[str] | None,
    text: list[str],
    words: list[str],
    *,
    target: str | None,
    left_to_right: bool,
) -> tuple[Row, str]:
    """A text as a run reads it; without a text, or of a preset, a row of as many tokens as there are words."""
    import torch

    from headstock.errors import UserError
    from headstock.explain.attention_patterns import need_attention
    from headstock.explain.inputs import show
    from headstock.explain.subject import open_subject
    from headstock.explain.targets import open_one
    from headstock.model.batch import Batch

    if run is not None and preset is None and text:
        loaded = open_one(run, device=common.device)
        need_attention(loaded.model, str(loaded.run))
        shown = show(loaded, text, target=target, left_to_right=left_to_right)
        return Row(loaded.model, shown.batch, shown.tokens, shown.source), str(loaded.run)
    if text:
        raise UserError("a preset has no tokenizer to cut a text with; name a run, or give --tokens")
    subject = open_subject(run, preset, settings, device=common.device)
    backbone = subject.model.backbone
    need_attention(subject.model, subject.name)
    if backbone.context is not None and len(words) > backbone.context:
        raise UserError(f"{subject.name}: {len(words):,} tokens are more than its context of {backbone.context:,}")
    tokens = torch.zeros(1, len(words), dtype=torch.long, device=subject.model.device)
    source = Batch(tokens) if backbone.reads_source else None
    batch = Batch(tokens, source=source, causal=True if left_to_right else None)
    return Row(subject.model, batch, words, words if source else []), subject.name


def positions(
    common: Common,
    run: RunName = None,
    preset: Preset = None,
    settings: Settings = None,
    kind: Annotated[str | None, typer.Option("--kind", help="sinusoidal, learned or rotary.")] = None,
    length: Annotated[int | None, typer.Option("--length", help="How many positions.")] = None,
    width: Annotated[int | None, typer.Option("--width", help="Features of each; of rotary ones, a head's.")] = None,
    where: Place = None,
    out: Out = None,
) -> dict[str, Any]:
    """What stands for each position, how alike two positions are by distance, and that no two are the same.

    Example: headstock explain positions --kind rotary --length 128 --width 64 --out positions.html
    """
    from headstock.errors import UserError
    from headstock.explain.position_charts import page, picture
    from headstock.explain.positions import KINDS, explain_model_positions, explain_positions
    from headstock.explain.subject import open_subject
    from headstock.report.standalone import alone, check_out, write_out
    from headstock.train.loop import sequence_length

    check_out(out)
    asked: Any = chosen(kind, KINDS, "--kind")
    chosen(where, ("encoder", "decoder"), "--where")
    if run is None and preset is None:
        if where is not None:
            raise UserError("--where is of an encoder-decoder: name a run or a preset")
        found = [
            explain_positions(asked or "sinusoidal", 128 if length is None else length, 64 if width is None else width)
        ]
    else:
        if width is not None:
            raise UserError("--width is of positions by formula; a run or preset has its own")
        subject = open_subject(run, preset, settings, device=common.device)
        read = sequence_length(subject.model, subject.config.train) if run is not None else None
        found = explain_model_positions(subject.model, subject.name, length=length, trained=run is not None, read=read)
        if asked is not None and asked != found[0].kind:
            raise UserError(f"--kind {asked}: the positions of {subject.name} are {found[0].kind}")
        found = [one for one in found if where is None or one.where in (None, where)]
    for one in found:
        show_positions(common, one)
    if out is not None:
        if len(found) > 1 and out.suffix.lower() == ".svg":
            raise UserError("--out: an .svg holds one table; choose with --where encoder or decoder")
        write_out(out, lambda: page(found), lambda: alone(picture(found[0])))
        common.show(str(out))
    return {"positions": [one.facts() for one in found]} | (found[0].facts() if len(found) == 1 else {})


def show_positions(common: Common, found: Any) -> None:
    from rich.table import Table

    length, width = found.table.shape
    of = f", {found.where}" if found.where else ""
    common.show(f"{found.name}{of}: {found.kind}, {length:,} positions of {width:,} features")
    for note in found.notes:
        common.show(f"note: {note}")
    if found.distinct:
        near = f"the two nearest, {found.nearest[0]} and {found.nearest[1]}, are {found.gap:.4g} apart"
        common.show(f"no two positions are alike: {near}")
    else:
        common.show(f"positions {found.nearest[0]} and {found.nearest[1]} are the same")
    alone = "on the distance alone" if found.by_distance_alone else f"on the place too (up to {found.spread:.3g} apart)"
    common.show(f"how alike two positions are depends {alone}")
    shown = Table("distance", "cosine", "least", "most", title=None, box=None)
    for distance in [0, 1, 2, 3, *(d for d in (4, 8, 16, 32, 64, 128, 256, 512, 1024) if d < length)]:
        if distance < length:
            row = (found.similarity[distance], found.low[distance], found.high[distance])
            shown.add_row(str(distance), *(f"{value:.3f}" for value in row))
    common.show(shown)


def attention(
    common: Common,
    run: Annotated[str, typer.Argument(help="A run folder, or a stock that ships.", show_default=False)],
    text: Annotated[list[str] | None, typer.Argument(help="A text; of pairs two, a question and its context.")] = None,
    file: Annotated[
        str | None, typer.Option("--file", help="Texts or rows to average over instead; - is stdin.")
    ] = None,
    rows: Annotated[int | None, typer.Option("--rows", help="So many rows of the file at the most.")] = None,
    where: Place = None,
    layer: Annotated[int | None, typer.Option("--layer", help="One layer, the lowest is 1.")] = None,
    head: Annotated[int | None, typer.Option("--head", help="One head, the first is 1.")] = None,
    target: Target = None,
    left_to_right: Way = False,
    out: Out = None,
) -> dict[str, Any]:
    """What every layer and head looks at: its weights on a text, and how they are spread, there or over a file.

    Example: headstock explain attention reviews-en "The film was [MASK]." --out attention.html
    """
    from headstock.errors import UserError
    from headstock.explain.attention import explain_attention, explain_file_attention, only
    from headstock.explain.attention_page import page, picture
    from headstock.explain.attention_patterns import need_place
    from headstock.explain.inputs import show, show_file
    from headstock.explain.targets import open_one
    from headstock.report.standalone import check_out, write_out

    check_out(out)
    chosen(where, PLACES, "--where")
    if bool(text) == bool(file):
        raise UserError("give a text or --file, not both" if text else "no text: give one, or name a --file")
    if file and (target is not None or left_to_right):
        raise UserError("--target and --left-to-right go with a text, not with --file")
    if rows is not None and (not file or rows < 1):
        raise UserError("--rows goes with --file" if not file else f"--rows {rows}: must be 1 or more")
    loaded = open_one(run, device=common.device)
    need_place(loaded.model, run, None if left_to_right else where)
    if file:
        batches = show_file(loaded, file, rows=rows)
        found = explain_file_attention(loaded.model, batches, run, where=where, say=common.say)
    else:
        shown = show(loaded, text or [], target=target, left_to_right=left_to_right)
        found = explain_attention(loaded.model, shown, run, where=where)
    found = only(found, layer=layer, head=head)
    show_heads(common, found)
    if out is not None:
        write_out(out, lambda: page(found, file or " / ".join(text or [])), lambda: picture(found))
        common.show(str(out))
    return found.facts()


def show_heads(common: Common, found: Any) -> None:
    from rich.table import Table

    from headstock.explain.attention_page import SHARES, told

    for note in found.notes:
        common.show(note)
    for claim, holds, said in found.checks():
        common.show(f"{'yes' if holds else 'NO'}: {claim} ({said})")
    names = list(found.heads[0].measures)
    shown = Table("", "layer", "head", *(f"{name} %" if name in SHARES else name for name in names), box=None)
    for head in found.heads:
        shown.add_row(head.where, str(head.layer), str(head.head), *cells(head, names, told))
    for even in found.even:
        shown.add_row(even.where, "even", "", *cells(even, names, told), style="dim")
    common.show(shown)


def cells(head: Any, names: list[str], told: Any) -> list[str]:
    return ["–" if head.measures[name] is None else told(name, head.measures[name]).rstrip("%") for name in names]


def add_to(app: typer.Typer) -> None:
    for function in (mask, positions, attention):
        verb(app, writes=lambda given: [given["out"]])(function)
