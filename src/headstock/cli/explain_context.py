"""`headstock explain context`: the loss of language models by position and by context length."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headstock.cli.command import Common
from headstock.cli.explain import Out, explains, present
from headstock.cli.options import Columns, Documents


@explains
def context(
    common: Common,
    columns: Columns,
    runs: Annotated[list[Path], typer.Argument(help="Runs or bundled models to compare.", show_default=False)],
    data: Annotated[list[str] | None, "Held-out text; default: the validation text of the first run."] = None,
    documents: Documents = "auto",
    by: Annotated[Literal["position", "context"] | None, "Only the loss by position, or by context length."] = None,
    length: Annotated[int | None, "Tokens per row; default: what all runs read at once."] = None,
    max_context: Annotated[int | None, "Longest context that is measured."] = None,
    targets: Annotated[int, "Tokens that are predicted from each context length."] = 2000,
    tokens: Annotated[int, "Tokens that are read for the loss by position."] = 200_000,
    bos: Annotated[bool, "Start truncated contexts with the BOS token."] = False,
    out: Out = None,
) -> dict[str, Any]:
    """Show the loss by position and by context length: how far back a language model's predictions reach.

    Example: headstock explain context runs/gpt runs/lstm --data held-out.txt --out context.html
    """
    from headstock.api.explain import explain_context

    explanation = explain_context(
        runs,
        data=data or (),
        documents=documents,
        column=columns.text(),
        by=by,
        length=length,
        max_context=max_context,
        targets=targets,
        tokens=tokens,
        bos=bos,
        device=common.device,
    )
    return present(common, explanation, out)
