"""`headstock explain mask`, `positions` and `attention`: who may look at whom, where things stand, who does look."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, command

Out = Annotated[Path | None, typer.Option("--out", help="A page (.html) or its picture alone (.svg).")]
Place = Annotated[
    str | None, typer.Option("--where", help="encoder, decoder or cross; all that there are unless given.")
]
Target = Annotated[
    str | None, typer.Option("--target", help="What an encoder-decoder writes, where that is not left to it.")
]
Way = Annotated[bool, typer.Option("--left-to-right", help="Read by a model that learned both ways as it generates.")]
PLACES = ("encoder", "decoder", "cross")


def chosen(given: str | None, known: tuple[str, ...], option: str) -> str | None:
    from headstock.errors import UserError, did_you_mean

    if given is not None and given not in known:
        raise UserError(f"{option} {given}: must be {', '.join(known)}{did_you_mean(given, known)}")
    return given


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
    from headstock.report.standalone import check_output_path, write_page_or_svg

    check_output_path(out)
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
        write_page_or_svg(out, lambda: page(found, file or " / ".join(text or [])), lambda: picture(found))
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
    for function in (attention,):
        command(app, writes=lambda given: [given["out"]])(function)
