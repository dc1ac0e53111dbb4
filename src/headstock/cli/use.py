"""Verbs that use a finished run: generate, score, predict, evaluate."""

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.options import Columns, RunPath
from headstock.cli.verb import Common, verb


def generate(
    common: Common,
    run: RunPath,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="One or more beginnings; nothing starts a new text.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Prompts from a file, one a line.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens to add at the most.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy, 1 as learned.")] = 1.0,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Only the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Only the likeliest that reach probability p.")] = None,
    min_p: Annotated[float | None, typer.Option("--min-p", help="Only those this share as likely as the best.")] = None,
    repetition_penalty: Annotated[float, typer.Option("--repetition-penalty", help="Above 1: fewer repeats.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text.")] = None,
    samples: Annotated[int, typer.Option("--samples", help="Continuations of each prompt.")] = 1,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Keep keys and values between tokens.")] = True,
    stream: Annotated[bool, typer.Option("--stream", help="Show the text as it grows.")] = False,
) -> dict[str, Any]:
    """Continue a text."""
    from headstock.errors import UserError
    from headstock.train.loaded import load

    prompts = texts_from(prompt, file) if prompt or file else [""]
    if stream and (len(prompts) > 1 or samples > 1):
        raise UserError("--stream shows one text: give one prompt and one sample")
    loaded = load(run, device=common.device)
    streaming = stream and not common.json
    if streaming:
        print(prompts[0], end="", flush=True)
    made = loaded.generate(
        prompts,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop or (),
        samples=samples,
        seed=common.seed or 0,
        cache=cache,
        stream=(lambda text: print(text, end="", flush=True)) if streaming else None,
    )
    if streaming:
        print(flush=True)
    else:
        common.show("\n---\n".join(row.text for row in made))
    if any(row.slid for row in made):
        common.say(f"longer than the context of {loaded.model.backbone.context} tokens: the window slid on")
    return {"texts": [row.text for row in made], "ended": [row.ended for row in made]}


def score(
    common: Common,
    run: RunPath,
    text: Annotated[list[str] | None, typer.Argument(help="Texts to judge.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Texts from a file, one a line; - is stdin.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show each token's part too.")] = False,
) -> dict[str, Any]:
    """How likely a text is: log-likelihood in all and per token."""
    from headstock.train.loaded import load

    scores = load(run, device=common.device).score(texts_from(text, file))
    for row in scores:
        count = max(1, len(row.tokens))
        common.show(
            f"{row.log_likelihood:10.3f}  {len(row.tokens):5d} tokens  {row.log_likelihood / count:8.3f}  {row.text}"
        )
        if tokens:
            for piece, value in row.tokens:
                common.show(f"{value:10.3f}    {piece}")
    return {
        "scores": [
            {
                "text": row.text,
                "log_likelihood": row.log_likelihood,
                "tokens": [{"token": piece, "log_likelihood": value} for piece, value in row.tokens],
            }
            for row in scores
        ]
    }


def predict(
    common: Common,
    run: RunPath,
    text: Annotated[list[str] | None, typer.Argument(help="Texts to classify.")] = None,
    file: Annotated[
        str | None, typer.Option("--file", help="Texts from a file: .txt (one a line) or a table; - is stdin.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write JSON lines here, one a text.")] = None,
    columns: Columns = None,
) -> dict[str, Any]:
    """The class of each text, with the probability of every class."""
    import json

    from headstock.errors import UserError
    from headstock.files import whole_file
    from headstock.text.records import parse_columns, stream_texts
    from headstock.train.loaded import load

    if text and file:
        raise UserError("give texts or --file, not both")
    if not text and file is None and sys.stdin.isatty():
        raise UserError("no text: give one, name a --file, or pipe text in")
    named = parse_columns(columns) if columns else None
    texts: Iterable[str] = text or (row for _, row in stream_texts(file or "-", columns=named))
    made, count = [], 0
    with ExitStack() as stack:
        lines = stack.enter_context(stack.enter_context(whole_file(out)).open("w", encoding="utf-8")) if out else None
        for row in load(run, device=common.device).predictions(texts):
            count += 1
            if lines is not None:
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")
            else:
                common.show(f"{row['label']}\t{max(row['probabilities'].values()):.3f}")
            if common.json:
                made.append(row)
    if out is not None:
        common.show(f"{out}: {count:,} predictions")
    return {"predictions": made}


def evaluate(
    common: Common,
    run: RunPath,
    file: Annotated[list[str] | None, typer.Argument(help="Text or labelled rows; else what the run held out.")] = None,
    documents: Annotated[str, typer.Option("--documents", help="line, block, file, or auto to guess.")] = "auto",
    columns: Columns = None,
) -> dict[str, Any]:
    """How good a run is: perplexity and bits per byte on text, or accuracy with its interval on labelled rows."""
    from headstock.text.records import parse_columns
    from headstock.train.loaded import load

    named = parse_columns(columns) if columns else None
    metrics = load(run, device=common.device).evaluate(file or (), documents=documents, columns=named)
    intervals = metrics.get("intervals", {})
    for name, value in metrics.items():
        if name == "intervals":
            continue
        low, high = intervals.get(name, (None, None))
        around = f"  (95%: {low:.4f} to {high:.4f})" if low is not None else ""
        shown = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        common.show(f"{name.replace('_', ' '):14s} {shown}{around}")
    return {"metrics": metrics}


def texts_from(given: list[str] | None, file: Path | None) -> list[str]:
    """Texts named on the command line, in a file, or on standard input."""
    from headstock.errors import UserError

    if given and file:
        raise UserError("give texts or --file, not both")
    if given:
        return given
    if file is None and sys.stdin.isatty():
        raise UserError("no text: give one, name a --file, or pipe text in")
    try:
        text = sys.stdin.read() if file is None or str(file) == "-" else file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file") from None
    except UnicodeDecodeError as wrong:
        raise UserError(f"{file or 'standard input'}: not UTF-8 at byte {wrong.start}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise UserError(f"{file or 'standard input'}: no text in it")
    return lines


def add_to(app: typer.Typer) -> None:
    for function in (generate, score, predict, evaluate):
        verb(app)(function)
