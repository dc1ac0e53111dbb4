"""`headstock explain gradients`, `residual`, `prediction`: what flows through a run, and why it says what it says."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, command
from headstock.cli.options import Columns, RunPath

Texts = Annotated[
    list[str] | None, typer.Argument(help="The text; two for a run that reads pairs.", show_default=False)
]
Out = Annotated[Path | None, typer.Option("--out", help="A page (.html), or its picture alone (.svg).")]


def gradients(
    common: Common,
    run: RunPath,
    columns: Columns,
    text: Texts = None,
    file: Annotated[
        str | None, typer.Option("--file", help="Text, or labelled rows as the run was trained on.")
    ] = None,
    label: Annotated[
        str | None, typer.Option("--label", help="What is true of the text; else the run's own word.")
    ] = None,
    depths: Annotated[bool, typer.Option("--depths/--no-depths", help="Fresh models of 2 to 48 layers too.")] = True,
    out: Out = None,
) -> dict[str, Any]:
    """One backward pass of a run's own loss: what every layer, residual connection and parameter receives.

    Example: headstock explain gradients reviews-en "I liked this film a lot." --out gradients.html
    """
    from dataclasses import replace

    from headstock.errors import UserError
    from headstock.explain import gradient_charts
    from headstock.explain.depth_study import depth_study, settings_like
    from headstock.explain.gradients import gradients as look
    from headstock.explain.recurrence import recurrence, stacks_of_cells
    from headstock.explain.targets import lesson, lesson_of_file, open_one
    from headstock.report.standalone import check_output_path

    check_output_path(out)
    if bool(text) == bool(file):
        raise UserError("give a text or --file, not both" if text else "no text: give one, or name a --file")
    if file and label is not None:
        raise UserError("--label is for a text; the rows of a --file bring their own")
    loaded = open_one(run, device=common.device)
    if loaded.model.device.type == "mps":  # which has no double precision
        loaded.model.to("cpu")
    named = columns.names()
    asked = lesson_of_file(loaded, file, columns=named) if file else lesson(loaded, text or [], label=label)
    shown = {"name": str(run), "text": " / ".join(text or [])}
    if stacks_of_cells(loaded.model.backbone):
        through_time = recurrence(loaded.model, asked)
        for table in time_tables(through_time):
            common.show(table)
        write(
            out,
            lambda: gradient_charts.time_page(through_time, **shown),
            lambda: gradient_charts.time_picture(through_time),
            common,
        )
        return through_time.facts()
    found = look(loaded.model, asked)
    if depths:
        found = replace(found, depths=depth_study(settings_like(loaded.model.backbone.config), say=common.say))
    for table in gradient_tables(found):
        common.show(table)
    write(out, lambda: gradient_charts.page(found, **shown), lambda: gradient_charts.picture(found), common)
    return found.facts()


def residual(
    common: Common,
    run: RunPath,
    text: Annotated[list[str], typer.Argument(help="The text; two for a run that reads pairs.")],
    label: Annotated[
        str | None, typer.Option("--label", help="The translation to be read; else the run's own.")
    ] = None,
    out: Out = None,
) -> dict[str, Any]:
    """The residual stream after each sublayer: its length, what is added, and what the run would say by then.

    Example: headstock explain residual reviews-en "It was a [MASK] film." --out residual.html
    """
    from headstock.explain import residual_charts
    from headstock.explain.residual import residuals
    from headstock.explain.targets import open_one
    from headstock.report.standalone import check_output_path

    check_output_path(out)
    found = residuals(open_one(run, device=common.device), text, label=label)
    for table in residual_tables(found):
        common.show(table)
    for note in found.notes:
        common.show(note)
    shown = {"name": str(run), "text": " / ".join(text)}
    write(out, lambda: residual_charts.page(found, **shown), lambda: residual_charts.picture(found), common)
    return found.facts()


def prediction(
    common: Common,
    run: RunPath,
    text: Annotated[list[str], typer.Argument(help="The text; two for a run that reads pairs.")],
    label: Annotated[
        str | None, typer.Option("--label", help="The class, word or translation to explain; else what the run says.")
    ] = None,
    at: Annotated[int | None, typer.Option("--at", help="Which [MASK] of several, from 1.")] = None,
    out: Out = None,
) -> dict[str, Any]:
    """Why this class, this next token or this masked word: what each token weighs, and what is said without each word.

    Example: headstock explain prediction runs/reviews "A dull film with a great ending." --out why.html
    """
    from headstock.explain import prediction_charts
    from headstock.explain.prediction import predict
    from headstock.explain.targets import open_one
    from headstock.report.standalone import check_output_path

    check_output_path(out)
    found = predict(open_one(run, device=common.device), text, label=label, at=at)
    for table in prediction_tables(found):
        common.show(table)
    for note in found.notes:
        common.show(note)
    write(out, lambda: prediction_charts.page(found, name=str(run)), lambda: prediction_charts.picture(found), common)
    return found.facts()


def write(out: Path | None, page: Callable[[], str], picture: Callable[[], str], common: Common) -> None:
    from headstock.report.standalone import write_page_or_svg

    if out is not None:
        write_page_or_svg(out, page, picture)
        common.say(f"wrote {out}")


# Tables for the terminal


def table_of(title: str, heads: list[str], rows: list[list[str]], *, words: int = 1) -> Any:
    """The first `words` columns are text, all others numbers. A cell is never cut: a number would be another one."""
    from shutil import get_terminal_size

    from rich.markup import escape
    from rich.table import Table

    room, columns = get_terminal_size().columns, list(zip(heads, *rows, strict=True))
    wide = [max(map(len, column)) for column in columns]
    least = [max(map(len, (*head.split(), *cells))) for head, *cells in columns]  # a head may stand in several lines
    widths = wide if sum(wide) + 2 * len(wide) <= room else least
    gap = 2 if sum(widths) + 2 * len(widths) <= room else 1
    table = Table(title=escape(title), title_justify="left", box=None, padding=(0, gap, 0, 0), pad_edge=False)
    for place, (head, width) in enumerate(zip(heads, widths, strict=True)):
        table.add_column(head, justify="left" if place < words else "right", width=width)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def number(value: float) -> str:
    return f"{value:.3g}"


def stacks_in(parts: list[Any]) -> list[tuple[str, list[Any]]]:
    """What belongs to each stack, the upper one first, each from its top down, with the words that name the stack."""
    stacks = list(dict.fromkeys(part.stack for part in parts))
    named = {stack: "" if stack == "stack" else f", {stack}" for stack in stacks}
    return [(named[stack], [part for part in reversed(parts) if part.stack == stack]) for stack in reversed(stacks)]


def layer_of(one: Any) -> str:
    return str(one.layer) if one.stack == "stack" else f"{one.stack} {one.layer}"


def gradient_tables(found: Any) -> list[Any]:
    from headstock.explain.gradient_charts import ends_of
    from headstock.explain.hooks import SUBLAYERS

    tables: list[Any] = [f"loss {found.loss:.4f} over {found.wanted} ({found.norm}-norm)", *found.notes]
    heads = ["layer", "sublayer", "|dL/dO|", "skip term", "sublayer term", "cosine", "|dL/dH|", "error"]
    for named, connections in stacks_in(found.connections):
        rows = [
            [
                str(one.layer),
                SUBLAYERS[one.sublayer],
                *map(number, (one.received, one.skip, one.through)),
                f"{one.cosine:+.2f}",
                number(one.passed),
                f"{one.error:.1e}",
            ]
            for one in connections
        ]
        tables.append(table_of(f"Residual connections{named}, from the top", heads, rows, words=2))
    for named, layers in stacks_in(found.layers):
        groups = list(layers[0].parameters)
        rows = [
            [str(layer.layer), *map(number, (layer.received, layer.passed, *(layer.parameters[g] for g in groups)))]
            for layer in layers
        ]
        heads = ["layer", "received", "passed down", *(group.replace("-", " ") for group in groups)]
        tables.append(table_of(f"Gradient lengths by layer{named}", heads, rows))
    tables.append(", ".join(f"{name} {number(length)}" for name, length in found.parameters.items()))
    bottom = [("as it is", found.loss, found.stream[0][3])]
    names = {"skip": "no skip at all", "skip-gradient": "no gradient through the skip"}
    bottom += [(names[one.what], one.loss, one.received[0]) for one in found.ablations]
    rows = [[name, f"{loss:.4f}", number(length)] for name, loss, length in bottom]
    tables.append(table_of("Without residual connections, the same weights", ["", "loss", "at the embedding"], rows))
    if found.depths:
        ends = ends_of(found.depths)
        deepest = max(one.depth for one in found.depths)
        rows = [[norm, *(number(ends[f"{norm} {way}"].share) for way in ("whole", *names))] for norm in ("pre", "post")]
        title = f"Fresh models of {deepest} layers: gradient at the bottom / at the top"
        tables.append(table_of(title, ["norm", "with skip", *names.values()], rows))
    return tables


def time_tables(found: Any) -> list[Any]:
    tables: list[Any] = [f"loss {found.loss:.4f} over {found.wanted} ({found.cell})"]
    for named, layers in stacks_in(found.layers):
        groups = list(dict.fromkeys(group for layer in layers for group in layer.parameters))
        rows = [
            [
                str(layer.layer),
                *map(number, (layer.received, layer.passed)),
                *(number(layer.parameters[group]) if group in layer.parameters else "" for group in groups),
                *(map(number, (layer.steps[0], layer.steps[-1])) if any(layer.steps) else ("–", "–")),
            ]
            for layer in layers
        ]
        heads = ["layer", "received", "passed down", *groups, "first token", "last token"]
        tables.append(table_of(f"Gradient lengths by layer{named}", heads, rows))
    return tables


def residual_tables(found: Any) -> list[Any]:
    from headstock.explain.hooks import SUBLAYERS

    heads = ["layer", "sublayer", "point", "stream", "added", "share", "cosine", "moved"]
    rows = [
        [
            layer_of(step),
            SUBLAYERS[step.sublayer],
            step.point,
            f"{step.norm:.2f}",
            f"{step.added:.2f}",
            f"{step.share:.0%}",
            f"{step.cosine:+.2f}",
            f"{step.moved:.0%}",
        ]
        for step in found.steps
    ]
    tables = [table_of("The residual stream", heads, rows, words=3)]
    if found.lens:
        layers = ["in", *(str(layer) for layer in range(1, len(found.lens[0].layers)))]
        rows = [
            [guess.token or "text", *(f"{layer[0][0]} {layer[0][1]:.0%}" for layer in guess.layers)]
            for guess in found.lens[-20:]
        ]
        tables.append(table_of(f"The likeliest {found.says} after each layer", ["", *layers], rows))
    return tables


def prediction_tables(found: Any) -> list[Any]:
    others = ", ".join(f"{name} {chance:.1%}" for name, chance in found.answers)
    tables: list[Any] = [f"{found.answer}  {found.probability:.1%}  ({others})"]
    heads = ["word", "without it", "log-odds", "gradient", "then it says"]
    rows = [
        [
            word.word,
            f"{word.probability:.1%}",
            f"{word.change:+.2f}",
            f"{word.weight:+.2f}",
            word.says if word.says != found.answer else "",
        ]
        for word in found.words
    ]
    return [*tables, table_of(f"Why this {found.kind}", heads, rows)] if rows else tables


def add_to(app: typer.Typer) -> None:
    for function in (gradients, residual, prediction):
        command(app, writes=lambda given: [given["out"]])(function)
