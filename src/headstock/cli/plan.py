"""`headstock presets` and `headstock plan`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, command
from headstock.cli.options import DOCUMENTS_HELP, Columns
from headstock.errors import UserError


@command("Start")
def presets(common: Common) -> dict[str, Any]:
    """List the model presets and their sizes.

    Example: headstock pretrain corpus.txt --preset gpt-nano --out runs/mine
    """
    from rich.table import Table

    from headstock.report.format import compact_number
    from headstock.train.models import describe_preset
    from headstock.train.settings import preset_names

    rows = [describe_preset(name) for name in preset_names()]
    rows.sort(key=lambda row: (row["preset"].rpartition("-")[0] or row["preset"], row["parameters"]))
    table = Table()
    for name in rows[0]:
        if name != "about":
            table.add_column(name, justify="left" if name in ("preset", "family", "objective") else "right")
    for row in rows:
        cells = row | {name: f"{row[name]:,}" for name in ("context", "vocabulary")}
        cells |= {"parameters": compact_number(row["parameters"])}
        table.add_row(*(str(value) for name, value in cells.items() if name != "about"))
    common.show(table)
    common.show_prose("Change any setting with --set; `headstock explain params --preset NAME` counts every weight.")
    return {"presets": rows}


@command("Start", writes=lambda options: [options["out"]])
def plan(
    common: Common,
    corpus: Annotated[list[str], typer.Argument(help="Files, folders or globs.")],
    columns: Columns,
    minutes: Annotated[float | None, "Time budget for training."] = None,
    objective: Annotated[str | None, "causal, masked, hybrid, electra, both-ways or denoise; else proposed."] = None,
    probe: Annotated[bool, "Measure real steps here to correct the estimate."] = False,
    out: Annotated[Path | None, "Write the settings to this .toml file."] = None,
    documents: Annotated[str | None, DOCUMENTS_HELP] = None,
) -> dict[str, Any]:
    """Propose a model for a text; estimate time and memory.

    Example: headstock plan corpus.txt --minutes 30 --probe --out mine.toml
    """
    from headstock.errors import shell_quote
    from headstock.experiments.recipe import to_toml
    from headstock.io import write_text
    from headstock.planner import planner
    from headstock.planner.summary import plan_notes, plan_table, recipe_heading

    if out is not None and out.suffix != ".toml":
        raise UserError(f"--out {out}: must end in .toml")
    proposal = planner.plan(
        corpus,
        device=common.device,
        minutes=minutes,
        objective=objective,
        probe=probe,
        documents=documents,
        column=columns.text(),
        seed=common.seed,
    )
    common.show(plan_table(proposal))
    for line in plan_notes(proposal):
        common.show_prose(line)
    recipe = to_toml(proposal.config, recipe_heading(proposal))
    if out is None:
        common.show(f"\n{recipe}")
        return proposal.to_dict()
    write_text(out, recipe)
    common.show(f"try: headstock pretrain --config {shell_quote(out)} --out runs/mine")
    return proposal.to_dict() | {"recipe": str(out)}
