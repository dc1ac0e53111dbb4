"""`headstock data`: real data by name."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, verb

data = typer.Typer(help="Real data by name, from packages of the Python package index.", no_args_is_help=True)


@verb(data, "list")
def list_entries(common: Common) -> dict[str, Any]:
    """What there is, where it comes from, and under which licence."""
    from headstock.data import catalog

    cards = [entry.card() for entry in catalog.entries()]
    for card in cards:
        hashes = [digest[:12] for digest in card["sha256"].values() if digest]
        sha = hashes[0] + (f" and {len(hashes) - 1} more" if len(hashes) > 1 else "")
        common.show(f"{card['name']:17s} {card['bytes'] / 1e6:5.1f} MB  {card['summary']}")
        common.show(f"{'':27s}from {card['source']} (sha256 {sha})")
        common.show(f"{'':27s}licence: {card['licence']}")
        for note in card["notes"]:
            common.show(f"{'':27s}{note}")
    return {"entries": cards}


@verb(data)
def get(
    common: Common,
    name: Annotated[str, typer.Argument(help="A name from `headstock data list`.")],
    to: Annotated[Path | None, typer.Option("--to", help="Put a copy into this folder.")] = None,
    source: Annotated[Path | None, typer.Option("--from", help="Files or archive you have already.")] = None,
) -> dict[str, Any]:
    """Fetch a data set once, check it, and say where it is."""
    from headstock.data import catalog

    folder = catalog.get(name, to=to, source=source, say=common.say)
    files = sorted(file.name for file in folder.iterdir() if file.is_file())
    common.show(f"{folder}: {', '.join(files)}")
    return {"name": name, "folder": str(folder), "files": files}


def add_to(app: typer.Typer) -> None:
    app.add_typer(data, name="data")
