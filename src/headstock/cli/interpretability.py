"""`headstock explain hooks, logits, heads, patch and induction`: what the parts of a Transformer do for its answer."""

from typing import Annotated, Any, Literal

import typer

from headstock.cli.command import Common
from headstock.cli.explain import Out, SubjectOptions, Text, explain, explains, present
from headstock.cli.options import Columns, RunPath

__all__ = ["explain"]

Answer = Annotated[str | None, "The class, token or translation to explain; default: the run's prediction."]


@explains
def hooks(common: Common, options: SubjectOptions, out: Out = None) -> dict[str, Any]:
    """List the named points at which activations can be read and replaced from Python.

    Example: headstock explain hooks reviews-en
    """
    from headstock.api.explain import explain_hooks

    return present(common, explain_hooks(**options.keywords()), out)


@explains
def logits(
    common: Common,
    run: RunPath,
    text: Text,
    label: Answer = None,
    versus: Annotated[str | None, "Explain the difference from the logit of this answer."] = None,
    at: Annotated[int | None, "Which [MASK], or which token of a translation, from 1."] = None,
    out: Out = None,
) -> dict[str, Any]:
    """Split a logit into what the embedding, each head, each feed-forward layer and the biases add to it.

    Example: headstock explain logits reviews-en "It was a [MASK] film." --label great --versus terrible
    """
    from headstock.api.explain import explain_logits

    return present(common, explain_logits(run, text, label=label, versus=versus, at=at, device=common.device), out)


@explains
def heads(
    common: Common,
    run: RunPath,
    columns: Columns,
    file: Annotated[str, "A text file, or labelled rows as the run was trained on."],
    rows: Annotated[int, typer.Option("--rows", help="Read at most this many rows.", min=1)] = 64,
    method: Annotated[Literal["zero", "mean", "both"], "Set a head to zero, to its mean output, or both in turn."] = (
        "both"
    ),
    out: Out = None,
) -> dict[str, Any]:
    """Ablate each attention head in turn, and show how the loss over a file changes.

    Example: headstock explain heads reviews-en --file reviews.txt --out heads.html
    """
    from headstock.api.explain import explain_heads

    reading: dict[str, Any] = {"file": file, "columns": columns.names(), "rows": rows}
    return present(common, explain_heads(run, **reading, method=method, device=common.device), out)


@explains
def patch(
    common: Common,
    run: RunPath,
    text: Text,
    corrupted: Annotated[list[str], typer.Option("--corrupted", help="The text to patch; twice for a pair.")],
    label: Annotated[str | None, "The answer to the clean text; default: the run's prediction."] = None,
    versus: Annotated[str | None, "The answer to the corrupted text; default: the run's prediction."] = None,
    out: Out = None,
) -> dict[str, Any]:
    """Put activations of a clean text into a corrupted one, and show which bring its answer back.

    Example: headstock explain patch reviews-en "A good film. I [MASK] it." --corrupted "A bad film. I [MASK] it."
    """
    from headstock.api.explain import explain_patch

    explanation = explain_patch(run, text, corrupted, label=label, versus=versus, device=common.device)
    return present(common, explanation, out)


@explains
def induction(
    common: Common,
    run: RunPath,
    length: Annotated[int | None, "Random tokens that are repeated; default: as many as fit, at most 64."] = None,
    rows: Annotated[int, typer.Option("--rows", help="Number of rows.", min=1)] = 16,
    out: Out = None,
) -> dict[str, Any]:
    """Score each head on repeated random tokens: does it look up what followed the current token before?

    Example: headstock explain induction runs/gpt --out induction.html
    """
    from headstock.api.explain import explain_induction

    explanation = explain_induction(run, length=length, rows=rows, seed=common.seed or 0, device=common.device)
    return present(common, explanation, out)
