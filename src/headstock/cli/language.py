"""Verbs that use a finished run as a language model: generate, score, fill, embed."""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, verb
from headstock.cli.options import Column, Columns, Int8, RunPath, SkipBlank, named_columns, text_column
from headstock.cli.terminal import write_out

TextFile = Annotated[Path | None, typer.Option("--file", help="Texts from a file: one a line, or a table; - is stdin.")]


def generate(
    common: Common,
    run: RunPath,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="One or more beginnings; nothing starts a new text.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Prompts from a file: one a line, or a table.")] = None,
    columns: Columns = None,
    column: Column = None,
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
    beams: Annotated[int | None, typer.Option("--beams", help="The likeliest text that so many rows find.")] = None,
    length_penalty: Annotated[float, typer.Option("--length-penalty", help="Above 1: longer, with beams.")] = 1.0,
    no_repeat: Annotated[int, typer.Option("--no-repeat", help="No so many tokens twice, with beams.")] = 0,
    int8: Int8 = False,
) -> dict[str, Any]:
    """Continue a text."""
    from headstock.cli.loading import load
    from headstock.errors import UserError

    prompts = texts_from(prompt, file, text_column(columns, column)) if prompt or file else [""]
    if stream and (len(prompts) > 1 or samples > 1):
        raise UserError("--stream shows one text: give one prompt and one sample")
    if stream and beams is not None:
        raise UserError("--stream shows a text as it grows, and --beams know theirs only in the end")
    loaded = load(run, device=common.device, int8=int8)
    streaming = stream and not common.json
    if streaming:
        write_out(prompts[0], end="")
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
        stream=(lambda text: write_out(text, end="")) if streaming else None,
        beams=beams,
        length_penalty=length_penalty,
        no_repeat=no_repeat,
    )
    if streaming:
        write_out("")
    else:
        common.show("\n---\n".join(row.text for row in made))
    if any(row.slid for row in made):
        common.say(f"longer than the context of {loaded.model.backbone.context} tokens: the window slid on")
    return {"texts": [row.text for row in made], "ended": [row.ended for row in made]}


def score(
    common: Common,
    run: RunPath,
    text: Annotated[list[str] | None, typer.Argument(help="Texts to judge.")] = None,
    file: TextFile = None,
    columns: Columns = None,
    column: Column = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show each token's part too.")] = False,
    pseudo: Annotated[bool, typer.Option("--pseudo", help="Each token given all others, not those before.")] = False,
) -> dict[str, Any]:
    """How likely a text is, in all and per token: log-likelihood, or of a masked model pseudo-log-likelihood."""
    from headstock.cli.loading import load

    loaded = load(run, device=common.device)
    kind = loaded.likelihood_kind(pseudo or None)
    scores = loaded.score(texts_from(text, file, text_column(columns, column)), pseudo=pseudo or None)
    common.say(f"{kind} in all, tokens, and per token")
    for row in scores:
        count = max(1, len(row.tokens))
        common.show(
            f"{row.log_likelihood:10.3f}  {len(row.tokens):5d} tokens  {row.log_likelihood / count:8.3f}  {row.text}"
        )
        if tokens:
            for piece, value in row.tokens:
                common.show(f"{value:10.3f}    {piece}")
    name = None if loaded.tokenizer.unknown is None else loaded.tokenizer.token(loaded.tokenizer.unknown)
    if unknown := sum(piece == name for row in scores for piece, _ in row.tokens):
        common.say(f"{unknown:,} tokens are unknown ({name}): their likelihood is that of any unknown word")
    return {
        "kind": kind,
        "scores": [
            {
                "text": row.text,
                "log_likelihood": row.log_likelihood,
                "tokens": [{"token": piece, "log_likelihood": value} for piece, value in row.tokens],
            }
            for row in scores
        ],
    }


def fill(
    common: Common,
    run: RunPath,
    text: Annotated[list[str] | None, typer.Argument(help="Texts with [MASK] where a word is wanted.")] = None,
    file: TextFile = None,
    columns: Columns = None,
    column: Column = None,
    top: Annotated[int, typer.Option("--top", help="So many words for each mask.")] = 5,
    pieces: Annotated[int, typer.Option("--pieces", help="Words of up to so many tokens.")] = 3,
    among: Annotated[str | None, typer.Option("--among", help="Rank these words only: good,bad.")] = None,
) -> dict[str, Any]:
    """Fill in words: the likeliest for each [MASK], with their probabilities.

    With --among, each candidate's share is its probability normalised over the candidates; a candidate of several
    tokens is scored by the product of their probabilities, with as many masks in its place.
    """
    from dataclasses import asdict

    from headstock.cli.loading import load
    from headstock.errors import UserError

    words = [word.strip() for word in among.split(",") if word.strip()] if among is not None else []
    if among is not None and not words:
        raise UserError("--among: no word; give some, such as --among good,bad")
    made = load(run, device=common.device).fill(
        texts_from(text, file, text_column(columns, column)), top=top, pieces=pieces, among=words
    )
    for row in made:
        common.show(row.filled)
        for number, fills in enumerate(row.fills, 1):
            which = f"{number}: " if len(row.fills) > 1 else ""
            common.show(f"  {which}" + "  ".join(shown_fill(one) for one in fills))
    rows = [asdict(row) for row in made]
    return {"fills": [fills for row in rows for fills in row["fills"]], "texts": rows}


def shown_fill(fill: Any) -> str:
    """`good 0.312`, or of a given candidate `good 71.3% (log p -4.21)`."""
    if fill.share is not None:
        return f"{fill.token} {fill.share:.1%} (log p {fill.log_probability:.2f})"
    return (
        f"{fill.token} {fill.probability:.3f}" if fill.probability >= 0.001 else f"{fill.token} {fill.probability:.1e}"
    )


def embed(
    common: Common,
    run: RunPath,
    text: Annotated[list[str] | None, typer.Argument(help="Texts to turn into vectors.")] = None,
    file: Annotated[
        str | None, typer.Option("--file", help="Texts from a file: .txt (one a line) or a table; - is stdin.")
    ] = None,
    layers: Annotated[str, typer.Option("--layers", help="last, sum4, concat4, mix, or a layer's number.")] = "last",
    pool: Annotated[
        str | None, typer.Option("--pool", help="mean, cls, last, or none for one vector a token; else what suits.")
    ] = None,
    words: Annotated[bool, typer.Option("--words", help="One vector a word: the mean of its tokens.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write them here: .npy or .jsonl.")] = None,
    columns: Columns = None,
    column: Column = None,
    skip_blank: SkipBlank = False,
    int8: Int8 = False,
) -> dict[str, Any]:
    """Texts as vectors: one a text, word or token, from the layers you choose."""
    from headstock.cli.loading import load
    from headstock.data.records import stream_texts
    from headstock.errors import UserError
    from headstock.inference.embed import align_tokens, word_vectors, write_vectors

    if text and file:
        raise UserError("give texts or --file, not both")
    if not text and file is None and sys.stdin.isatty():
        raise UserError("no text: give one, name a --file, or pipe text in")
    if words and pool not in (None, "none"):
        raise UserError(f"--words gives one vector a word, which does not go with --pool {pool}")
    if out is not None and out.suffix not in (".npy", ".jsonl"):
        raise UserError(f"--out {out}: must end in .npy or .jsonl")
    loaded = load(run, device=common.device, int8=int8)
    how = "none" if words else pool
    named, skipped = named_columns(columns, column), list[int]() if skip_blank else None
    texts: Iterable[str] = text or (row for _, row in stream_texts(file or "-", columns=named, skipped=skipped))

    def rows() -> Iterator[tuple[dict[str, Any], Any]]:
        read: deque[str] = deque()  # those whose vectors are still to come: they are read ahead

        def noted() -> Iterator[str]:
            for one in texts:
                read.append(one)
                yield one

        for vectors in loaded.iter_embeddings(noted(), layers=layers, pool=how):
            one = read.popleft()
            if vectors.ndim == 1:
                yield {"text": one}, vectors
                continue
            whose = align_tokens(loaded.tokenizer, one)
            if words:
                whose, vectors = word_vectors(whose, vectors)
            yield whose.to_dict(), vectors

    if out is not None:
        made = write_vectors(out, rows())
        if skipped:
            common.say(f"warning: {file or '-'}: {len(skipped):,} blank rows left out")
        common.show(f"{out}: {' x '.join(f'{size:,}' for size in made['shape'])}, {made['texts']:,} texts")
        return {"out": str(out), "layers": layers} | made
    found = list(rows())
    if skipped:
        common.say(f"warning: {file or '-'}: {len(skipped):,} blank rows left out")
    for whose, vectors in found:
        common.show(f"{' x '.join(map(str, vectors.shape)):>12s}  {whose['text']}")
    result = {"layers": layers, "texts": len(found), "vectors": [vectors.tolist() for _, vectors in found]}
    return result | ({"aligned": [whose for whose, _ in found]} if how == "none" else {})


def vector_files(given: dict[str, Any]) -> list[Path]:
    """What `embed` writes: the vectors and, where an array has several of each text, whose they are."""
    out = given["out"]
    if out is None:
        return []
    several = given["words"] or given["pool"] == "none"
    return [out, out.with_suffix(".tokens.jsonl")] if several and out.suffix == ".npy" else [out]


def texts_from(given: list[str] | None, file: Path | None, column: str | None = None) -> list[str]:
    """Texts named on the command line, in a file, or on standard input; blank ones are left out."""
    from headstock.data.records import is_table, stream_texts
    from headstock.errors import UserError

    if given and file:
        raise UserError("give texts or --file, not both")
    if given:
        return given
    if file is None and sys.stdin.isatty():
        raise UserError("no text: give one, name a --file, or pipe text in")
    if file is not None and is_table(file):
        found = [text for _, text in stream_texts(file, columns={"text": column} if column else None, skipped=[])]
        if not found:
            raise UserError(f"{file}: no text in it")
        return found
    try:
        text = sys.stdin.read() if file is None or str(file) == "-" else file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file") from None
    except UnicodeDecodeError as wrong:
        raise UserError(f"{file or 'standard input'}: not UTF-8 at byte {wrong.start}") from None
    # reading has made every line end a newline; splitlines would also cut at characters that may stand inside a text
    lines = [line for line in text.removeprefix("\ufeff").split("\n") if line.strip()]
    if not lines:
        raise UserError(f"{file or 'standard input'}: no text in it")
    return lines


def add_to(app: typer.Typer) -> None:
    for function in (generate, score, fill):
        verb(app)(function)
    verb(app, writes=vector_files)(embed)
