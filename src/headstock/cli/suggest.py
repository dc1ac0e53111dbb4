"""`headstock suggest`: which rows of an unlabelled pool to label next."""

from pathlib import Path
from typing import Annotated, Any

from headstock.cli.command import Common, command
from headstock.cli.input_files import load
from headstock.cli.options import Columns, Int8, RunPath
from headstock.errors import UserError

EXCERPT_CHARACTERS = 70  # of a text in the terminal


@command("Use a run", writes=lambda options: [options["out"]])
def suggest(
    common: Common,
    run: RunPath,
    columns: Columns,
    pool: Annotated[str | None, "Unlabelled rows: a table, or one text per line; - is stdin."] = None,
    count: Annotated[int, "How many rows to suggest."] = 20,
    method: Annotated[
        str | None, "margin (default), entropy, uncertainty, diversity, or badge (uncertain and diverse)."
    ] = None,
    out: Annotated[Path | None, "Write the rows to this .csv, .tsv or .jsonl file."] = None,
    with_: Annotated[str | None, "Columns of the pool to copy, such as id; label becomes input.label."] = None,
    int8: Int8 = False,
) -> dict[str, Any]:
    """Suggest which rows of a pool to label next.

    Rows are ranked by how much a label would teach the classifier. Texts that it was trained on are left out, and equal
    texts are suggested once. A run without a classification head suggests a diverse first set.

    The column label has the prediction, to be corrected; without a classification head it is empty, to be filled in. A
    column that is copied with --with is named input.NAME if the suggestions have a column NAME.

    Example: headstock suggest runs/reviews --pool unlabelled.csv --count 50 --out to-label.csv
    """
    from headstock.data.labelled_texts import stream_texts
    from headstock.inference.output_files import InputColumns, check_suffix, open_prediction_file
    from headstock.report.format import excerpt

    if pool is None:
        raise UserError("no rows to choose from: name them with --pool")
    check_suffix(out)
    pipeline = load(run, device=common.device, int8=int8)
    names = pipeline.resolve_columns(pool, columns.names())
    copied = [name.strip() for name in (with_ or "").split(",") if name.strip()]
    inputs = InputColumns(copied, pool, names)
    texts = stream_texts(pool, columns={"text": names["text"]} if names and "text" in names else None, skipped=[])
    rows = pipeline.suggest(texts, count=count, method=method, seed=common.seed or 0)
    by_rank: dict[int, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row.row):  # the columns are read in the order of the file
        inputs.pending.append((row.row, row.text))
        by_rank[row.rank] = inputs.merge(row.to_dict())
    table = [by_rank[rank] for rank in sorted(by_rank)]
    if out is not None:
        with open_prediction_file(out) as write:
            for entry in table:
                write(entry)
        common.show(f"{out}: {len(table):,} rows to label")
    else:
        for row in rows:
            text = excerpt(row.text, EXCERPT_CHARACTERS)
            common.show(f"{row.rank:4d}  {pool}:{row.row}  {text}\n      {row.reason}")
    return {"method": method or ("margin" if rows[0].label is not None else "diversity"), "suggestions": table}
