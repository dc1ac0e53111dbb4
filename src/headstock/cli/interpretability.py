"""`headstock explain hooks, logits, heads, patch and induction`: what the parts of a Transformer do for its answer."""

from typing import Annotated, Any, Literal

import typer

from headstock.cli.command import Common
from headstock.cli.explain import Out, SubjectOptions, Text, explain, explains, present
from headstock.cli.options import Columns, RunPath
from headstock.errors import UserError

__all__ = ["explain"]

Answer = Annotated[str | None, "The class, token or translation to explain; default: the run's prediction."]


@explains
def hooks(common: Common, options: SubjectOptions, out: Out = None) -> dict[str, Any]:
    """List the named points at which activations can be read and replaced from Python.

    Example: headstock explain hooks reviews-en
    """
    from headstock.explain.hooks import hook_document

    subject = options.open()
    return present(common, hook_document(subject.model, subject.name), out)


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
    from headstock.explain.logit_attribution import explain_logits, logit_document
    from headstock.explain.subject import open_single_run

    facts = explain_logits(open_single_run(run, device=common.device), text, label=label, versus=versus, at=at)
    return present(common, logit_document(facts, str(run), " / ".join(text)), out)


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
    from headstock.explain.head_ablation import METHODS, explain_heads, head_document
    from headstock.explain.subject import open_single_run

    pipeline = open_single_run(run, device=common.device)
    methods = list(METHODS) if method == "both" else [method]
    facts = explain_heads(pipeline, file, columns=columns.names(), rows=rows, methods=methods)
    return present(common, head_document(facts, str(run), file), out)


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
    from headstock.explain.patching import explain_patch, patch_document
    from headstock.explain.subject import open_single_run

    if len(corrupted) != len(text):
        raise UserError(f"--corrupted: found {len(corrupted)} texts; expected as many as the clean ones, {len(text)}")
    facts = explain_patch(open_single_run(run, device=common.device), text, corrupted, label=label, versus=versus)
    return present(common, patch_document(facts, str(run), " / ".join(text), " / ".join(corrupted)), out)


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
    from headstock.explain.induction import explain_induction, induction_document
    from headstock.explain.subject import open_single_run

    pipeline = open_single_run(run, device=common.device)
    facts = explain_induction(pipeline, length=length, rows=rows, seed=common.seed or 0)
    return present(common, induction_document(facts, str(run)), out)
