"""`headstock explain`: what a model is made of and what goes on inside it, as tables, pages and JSON."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli import explain_attention, explain_flow, explain_layer
from headstock.cli.command import Common, verb
from headstock.cli.options import Preset, RunName, Settings

explain = typer.Typer(
    help="Look inside a run or a preset: its parts, its numbers, and what they do to a text.", no_args_is_help=True
)

TaskName = Annotated[str | None, typer.Option("--task", help="With the heads of this task: classify, tag, answer, …")]
Classes = Annotated[int | None, typer.Option("--classes", help="How many classes a head chooses among.", min=1)]


@verb(explain, writes=lambda given: [given["out"]])
def params(
    common: Common,
    run: RunName = None,
    preset: Preset = None,
    settings: Settings = None,
    task: TaskName = None,
    classes: Classes = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Rows in a step, for its memory.", min=1)] = None,
    length: Annotated[int | None, typer.Option("--length", help="Tokens in a row.", min=1)] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write a page here (.html), or the chart alone (.svg).")
    ] = None,
) -> dict[str, Any]:
    """Every weight counted beside its formula, and what a token and a training step cost.

    Example: headstock explain params --preset classic --set vocabulary=50001 --out params.html
    """
    from headstock.explain.parameters import explain_params
    from headstock.explain.parameters_page import params_page, params_tables, picture
    from headstock.explain.subject import open_subject
    from headstock.report.standalone import check_out, write_out

    check_out(out)
    subject = open_subject(run, preset, settings, task=task, classes=classes, device="cpu", weights=False)
    for note in subject.notes:
        common.say(note)
    found = explain_params(subject, classes=classes, batch=batch, length=length)
    if out is None:
        for part in params_tables(found):
            common.show(part)
    else:
        write_out(out, lambda: params_page(found), lambda: picture(found))
        common.show(str(out))
    return found.facts() | ({"page": str(out)} if out else {})


@verb(explain, writes=lambda given: [given["out"]])
def model(
    common: Common,
    run: RunName = None,
    preset: Preset = None,
    settings: Settings = None,
    task: TaskName = None,
    classes: Classes = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the picture here: a page (.html) or .svg.")] = None,
) -> dict[str, Any]:
    """The architecture as a picture: what a text passes through, with shapes and weights on each part.

    Example: headstock explain model --preset bert-nano --out bert.svg
    """
    from headstock.explain.diagram import facts, model_page, model_svg
    from headstock.explain.parameters import explain_params
    from headstock.explain.parameters_page import parts_table
    from headstock.explain.subject import open_subject
    from headstock.report.standalone import check_out, write_out

    check_out(out)
    subject = open_subject(run, preset, settings, task=task, classes=classes, device="cpu", weights=False)
    for note in subject.notes:
        common.say(note)
    found = explain_params(subject)
    if out is None:
        common.show(parts_table(found, tensors=False))
        common.say("a picture: --out FILE.svg or FILE.html")
    else:
        write_out(out, lambda: model_page(subject, found), lambda: model_svg(subject, found))
        common.show(str(out))
    return facts(subject, found) | ({"page": str(out)} if out else {})


for part in (explain_layer, explain_attention, explain_flow):
    part.add_to(explain)


def add_to(app: typer.Typer) -> None:
    app.add_typer(explain, name="explain")
