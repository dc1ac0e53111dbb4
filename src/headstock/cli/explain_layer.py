"""`headstock explain layer`: one token through one layer, step by step, forward and backward."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headstock.cli.command import Common, command
from headstock.cli.options import RunPath


def layer(
    common: Common,
    run: RunPath,
    text: Annotated[list[str], typer.Argument(help="The text; two for a run that reads pairs.")],
    number: Annotated[int, typer.Option("--layer", help="Which layer; the lowest is 1.")] = 1,
    head: Annotated[int, typer.Option("--head", help="Which of its heads; the first is 1.")] = 1,
    word: Annotated[
        str | None, typer.Option("--word", help="Which token: itself or its place, from 1; else the last.")
    ] = None,
    step: Annotated[
        list[str] | None, typer.Option("--step", help="Only this step, such as scores; may be repeated.")
    ] = None,
    way: Annotated[
        Literal["forward", "backward"] | None, typer.Option("--way", help="One way alone; backward from the top down.")
    ] = None,
    where: Annotated[
        str | None, typer.Option("--where", help="encoder or decoder, where there are both; else the decoder.")
    ] = None,
    label: Annotated[
        str | None, typer.Option("--label", help="What is true of the text; else the run's own word.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="A page (.html), or its picture alone (.svg).")] = None,
) -> dict[str, Any]:
    """One token through one layer: each formula with its numbers, from the embedding to the stream that leaves it.

    Example: headstock explain layer reviews-en "I liked this film." --word film --out layer.html
    """
    from dataclasses import replace

    from headstock.errors import UserError, did_you_mean
    from headstock.explain.layer_walkthrough import walk
    from headstock.explain.layer_walkthrough_page import as_lines, closing, heading, page, picture
    from headstock.explain.targets import open_one
    from headstock.report.standalone import check_output_path, write_page_or_svg

    check_output_path(out)
    loaded = open_one(run, device=common.device)
    if loaded.model.device.type == "mps":  # which has no double precision
        loaded.model.to("cpu")
    found = walk(loaded, text, layer=number, head=head, word=word, where=where, label=label)
    names = [one.name for one in found.steps]
    if unknown := [name for name in step or [] if name not in names]:
        raise UserError(
            f"--step {unknown[0]}: no such step{did_you_mean(unknown[0], names)} (have: {', '.join(names)})"
        )
    if step:
        found = replace(found, steps=[one for one in found.steps if one.name in step])
    common.show(heading(found))
    for line in as_lines(found, way):
        common.show(line)
    if not step:
        common.show("")
        for line in [*closing(found), *found.notes]:
            common.show(line)
    if out is not None:
        write_page_or_svg(out, lambda: page(found, name=str(run), text=" / ".join(text)), lambda: picture(found))
        common.say(f"wrote {out}")
    return found.facts()


def add_to(app: typer.Typer) -> None:
    command(app, writes=lambda given: [given["out"]])(layer)
