"""`headstock presets`: the model settings that come with Headstock."""

from typing import Any

import typer

from headstock.cli.command import Common, verb


def presets(common: Common) -> dict[str, Any]:
    """List the presets: family, objective, parameters, context and vocabulary.

    Example: headstock pretrain corpus.txt --preset gpt-nano --out runs/mine
    """
    from rich.table import Table

    from headstock.experiments.compare_table import compact_number
    from headstock.train.blueprint import describe_preset
    from headstock.train.settings import preset_names

    rows = [describe_preset(name) for name in preset_names()]
    rows.sort(key=lambda row: (row["preset"].rpartition("-")[0] or row["preset"], row["parameters"]))
    table = Table()
    for name in rows[0]:
        if name != "about":
            table.add_column(name, justify="left" if name in ("preset", "family", "objective") else "right")
    for row in rows:
        shown = row | {name: f"{row[name]:,}" for name in ("context", "vocabulary")}
        shown |= {"parameters": compact_number(row["parameters"])}
        table.add_row(*(str(value) for name, value in shown.items() if name != "about"))
    common.show(table)
    common.tell("Any setting can be changed with --set; headstock explain params --preset NAME counts every weight.")
    return {"presets": rows}


def add_to(app: typer.Typer) -> None:
    verb(app)(presets)
