"""Options that several verbs take, each spelled and explained once."""

from pathlib import Path
from typing import Annotated

import typer

A_RUN = "A run folder, a checkpoint in one (RUN/checkpoints/step-N), or a stock that ships (reviews-en)."
RunPath = Annotated[Path, typer.Argument(help=A_RUN, show_default=False)]
RunName = Annotated[str | None, typer.Argument(help=A_RUN, show_default=False)]
Preset = Annotated[str | None, typer.Option("--preset", help="A preset instead of a run, with fresh weights.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Any setting, such as --set lr=3e-4; may be repeated.")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Settings: a TOML file or a run's config.json.")]
Columns = Annotated[str | None, typer.Option("--columns", help="Their names, such as text=review,label=stars.")]
Column = Annotated[
    str | None, typer.Option("--column", help="The text's column in tables; the same as --columns text=NAME.")
]
SkipBlank = Annotated[bool, typer.Option("--skip-blank", help="Leave out rows with a blank text or label.")]
Documents = Annotated[str | None, typer.Option("--documents", help="line, block, file, or auto to guess.")]
Train = Annotated[Path | None, typer.Option("--train", help="Labelled texts: .csv, .tsv, .jsonl, .parquet.")]
Valid = Annotated[Path | None, typer.Option("--valid", help="More of them, to choose the best epoch by.")]
Test = Annotated[Path | None, typer.Option("--test", help="Measured at the end; predicted if unlabelled.")]
Int8 = Annotated[bool, typer.Option("--int8", help="On a CPU: large products in 8 bits, nearly the same and sooner.")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on where the run stopped. Refused where there is no run: one that was killed before its folder "
        "was written begins without --resume.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is there.")]


def named_columns(columns: str | None, column: str | None, *, main: str = "text") -> dict[str, str] | None:
    """What --columns and --column say together: `main` is the column that --column names."""
    from headstock.data.records import parse_columns
    from headstock.errors import UserError

    named = parse_columns(columns) if columns else {}
    if column is not None and named.get(main, column) != column:
        raise UserError(f"--column {column}: --columns says {main}={named[main]}; give one of the two")
    return (named | ({main: column} if column is not None else {})) or None


def text_column(columns: str | None, column: str | None) -> str | None:
    """The column that holds the text, for verbs that read no other."""
    from headstock.errors import UserError, did_you_mean

    named = named_columns(columns, column) or {}
    if other := next((name for name in named if name != "text"), None):
        raise UserError(f"--columns {other}={named[other]}: only the text is read here{did_you_mean(other, ['text'])}")
    return named.get("text")
