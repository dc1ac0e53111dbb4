"""`headstock explain context`: the loss of language models by position and by context length."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headstock.cli.command import Common
from headstock.cli.explain import Out, explains, present
from headstock.cli.options import Columns, Documents
from headstock.errors import UserError

if TYPE_CHECKING:
    from headstock.data.token_store import TokenStore
    from headstock.inference.pipeline import Pipeline


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
    from headstock.explain.context import explain_context
    from headstock.explain.context_document import context_document
    from headstock.explain.subject import open_single_run

    pipelines = [open_single_run(run, device=common.device) for run in runs]
    for pipeline in pipelines:
        pipeline.require("generates", "predict a token from those before it")
    facts = explain_context(
        pipelines,
        read_stores(pipelines, data or [], documents=documents, column=columns.text()),
        text=", ".join(data or []) or f"validation text of {pipelines[0].run}",
        by=by,
        row_length=length,
        max_context=max_context,
        targets=targets,
        max_tokens=tokens,
        bos=bos,
    )
    return present(common, context_document(facts), out)


def read_stores(
    pipelines: "list[Pipeline]", data: list[str], *, documents: str, column: str | None
) -> "list[TokenStore]":
    """The same text as tokens of each run; runs with the same tokenizer share them."""
    from headstock.inference.evaluation import evaluation_store

    stores: dict[str, TokenStore] = {}
    for pipeline in pipelines:
        key = pipeline.tokenizer.fingerprint
        if stores and key not in stores and not data:
            raise UserError(f"{pipeline.run}: has another tokenizer than {pipelines[0].run}; name the text with --data")
        if key not in stores:
            stores[key] = evaluation_store(
                pipeline.run, pipeline.config, pipeline.task, data, documents=documents, column=column
            )
    return [stores[pipeline.tokenizer.fingerprint] for pipeline in pipelines]
