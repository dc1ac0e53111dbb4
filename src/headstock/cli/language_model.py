"""`headstock generate`, `fill`, `score` and `embed`: verbs that use a run as a language model."""

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack

import typer

from headstock.cli.command import Common, command
from headstock.cli.input_files import check_text_source, load, read_texts
from headstock.cli.options import Columns, Int8, RunPath, SkipBlank
from headstock.cli.terminal import write_out
from headstock.errors import UserError

logger = logging.getLogger(__name__)

Texts = Annotated[list[str] | None, typer.Argument(help="One or more texts.")]
TextFile = Annotated[Path | None, "Texts, one per line, or a table; - is stdin."]


class SamplingOptions(TypedDict):
    top_k: Annotated[int | None, "Sample from the k most likely tokens."]
    top_p: Annotated[float | None, "Sample from the smallest set with probability p."]
    min_p: Annotated[float | None, "Drop tokens less likely than this fraction of the most likely one."]
    beams: Annotated[int | None, "Beam search with this many beams."]


@command("Use a run")
def generate(
    common: Common,
    run: RunPath,
    columns: Columns,
    prompt: Annotated[list[str] | None, typer.Argument(help="One or more prompts; without one, a new text.")] = None,
    file: Annotated[Path | None, "Prompts from a file: one per line, or a table."] = None,
    max_tokens: Annotated[int, "Maximum number of new tokens."] = 128,
    temperature: Annotated[float, "Sampling temperature; 0 is greedy."] = 1.0,
    repetition_penalty: Annotated[float, "Above 1: fewer repeats."] = 1.0,
    stop: Annotated[list[str] | None, "Stop before this text; repeatable."] = None,
    samples: Annotated[int, "Continuations per prompt."] = 1,
    cache: Annotated[bool, "Use the key-value cache."] = True,
    stream: Annotated[bool, "Print the text as it is generated."] = False,
    length_penalty: Annotated[float, "Beams: above 1 favours long texts."] = 1.0,
    no_repeat: Annotated[int, "Beams: no repeated n-grams of this size."] = 0,
    int8: Int8 = False,
    **sampling: Unpack[SamplingOptions],
) -> dict[str, Any]:
    """Continue a text."""
    prompts = read_texts(prompt, file, columns.text()) if prompt or file else [""]
    if stream and (len(prompts) > 1 or samples > 1):
        raise UserError("--stream prints one text: give one prompt and one sample")
    if stream and sampling["beams"] is not None:
        raise UserError("--stream does not work with --beams, which know their text only at the end")
    pipeline = load(run, device=common.device, int8=int8)
    streaming = stream and not common.json
    if streaming:
        write_out(prompts[0], end="")
    rows = pipeline.generate(
        prompts,
        max_tokens=max_tokens,
        temperature=temperature,
        repetition_penalty=repetition_penalty,
        stop=stop or (),
        samples=samples,
        seed=common.seed or 0,
        cache=cache,
        stream=(lambda text: write_out(text, end="")) if streaming else None,
        length_penalty=length_penalty,
        no_repeat=no_repeat,
        **sampling,
    )
    if streaming:
        write_out("")
    else:
        common.show("\n---\n".join(row.text for row in rows))
    if any(row.slid for row in rows):
        context = pipeline.model.backbone.context
        logger.info("longer than the context of %d tokens: generated with a sliding window", context)
    return {"texts": [row.text for row in rows], "ended": [row.ended for row in rows]}


@command("Use a run")
def fill(
    common: Common,
    run: RunPath,
    columns: Columns,
    text: Annotated[list[str] | None, typer.Argument(help="Texts with [MASK] for each missing word.")] = None,
    file: TextFile = None,
    top: Annotated[int, "Candidates per mask."] = 5,
    pieces: Annotated[int, "Maximum number of tokens in a word."] = 3,
    among: Annotated[str | None, "Rank only these words: good,bad."] = None,
    normalize: Annotated[bool, "With --among: compare words by their log-probability per token."] = False,
) -> dict[str, Any]:
    """Fill in each [MASK] with the most likely words.

    With --among, a candidate's share is its probability normalised over the candidates. A candidate of several tokens
    is scored by the product of their probabilities, with one mask per token, which favours short ones; --normalize
    compares the mean log-probability per token instead.
    """
    if normalize and among is None:
        raise UserError("--normalize is only for --among")
    words = [word.strip() for word in (among or "").split(",") if word.strip()]
    if among is not None and not words:
        raise UserError("--among: no word; give some, such as --among good,bad")
    texts = read_texts(text, file, columns.text())
    rows = load(run, device=common.device).fill(texts, top=top, pieces=pieces, among=words, normalize=normalize)
    for row in rows:
        common.show(row.filled)
        for number, candidates in enumerate(row.fills, 1):
            prefix = f"{number}: " if len(row.fills) > 1 else ""
            common.show(f"  {prefix}" + "  ".join(map(format_candidate, candidates)))
    texts_with_fills = [asdict(row) for row in rows]
    return {"fills": [fills for row in texts_with_fills for fills in row["fills"]], "texts": texts_with_fills}


def format_candidate(candidate: Any) -> str:
    """`good 0.312`, or `good 71.3% (log p -4.21)` with --among."""
    if candidate.share is not None:
        return f"{candidate.token} {candidate.share:.1%} (log p {candidate.log_probability:.2f})"
    return f"{candidate.token} {candidate.probability:{'.3f' if candidate.probability >= 0.001 else '.1e'}}"


@command("Use a run")
def score(
    common: Common,
    run: RunPath,
    columns: Columns,
    text: Texts = None,
    file: TextFile = None,
    tokens: Annotated[bool, "Also show the score of each token."] = False,
    pseudo: Annotated[bool, "Score each token given all others, not only those to its left."] = False,
    schema: Annotated[list[str] | None, 'A Winograd schema: "text with [pronoun] | A | B"; repeatable.'] = None,
    schemas: Annotated[Path | None, "Schemas from a file: one per line, or the .xml of the challenge."] = None,
    normalize: Annotated[bool, "Schemas: mean per token instead of the sum."] = False,
) -> dict[str, Any]:
    """Score how likely texts are: their (pseudo-)log-likelihood.

    With --schema, each candidate replaces the pronoun; the full score is that of the whole text, the partial one that
    of what follows the candidate. * marks the correct candidate.

    Example: headstock score runs/gpt --schema "The cup fell off the table because [it] was wet. | the cup | *the table"
    """
    if schema or schemas is not None:
        if text or file:
            raise UserError("give texts or schemas, not both")
        return score_schemas(common, run, schema or [], schemas, pseudo=pseudo, normalize=normalize)
    if normalize:
        raise UserError("--normalize is only for --schema and --schemas")
    pipeline = load(run, device=common.device)
    kind = pipeline.likelihood_kind(pseudo or None)
    scores = pipeline.score(read_texts(text, file, columns.text()), pseudo=pseudo or None)
    logger.info("%s of the text, number of tokens, mean per token", kind)
    for row in scores:
        mean = row.log_likelihood / max(1, len(row.tokens))
        common.show(f"{row.log_likelihood:10.3f}  {len(row.tokens):5d} tokens  {mean:8.3f}  {row.text}")
        if tokens:
            for token, value in row.tokens:
                common.show(f"{value:10.3f}    {token}")
    tokenizer = pipeline.tokenizer
    name = None if tokenizer.unk is None else tokenizer.id_to_token(tokenizer.unk)
    if unknown := sum(token == name for row in scores for token, _ in row.tokens):
        logger.info(f"{unknown:,} tokens are unknown ({name}): their likelihood is that of any unknown word")
    return {
        "kind": kind,
        "scores": [
            {
                "text": row.text,
                "log_likelihood": row.log_likelihood,
                "tokens": [{"token": token, "log_likelihood": value} for token, value in row.tokens],
            }
            for row in scores
        ],
    }


def score_schemas(
    common: Common, run: str, lines: list[str], file: Path | None, *, pseudo: bool, normalize: bool
) -> dict[str, Any]:
    """The candidates of each schema, and the accuracy where the correct ones are known."""
    from headstock.data.winograd import parse_schema, read_schemas
    from headstock.inference.schemas import schema_metrics

    schemas = [*map(parse_schema, lines), *(read_schemas(file) if file is not None else [])]
    pipeline = load(run, device=common.device)
    kind = pipeline.likelihood_kind(pseudo or None)
    scores = pipeline.score_schemas(schemas, pseudo=pseudo or None, normalize=normalize)
    logger.info("%s%s of the text, and of what follows the candidate", "mean " if normalize else "", kind)
    for score in scores:
        common.show(score.schema.text)
        width = max(map(len, score.schema.candidates))
        common.show(f"  {'':{width}s}       full   share    partial   share")
        for number, row in enumerate(score.candidates):
            full = f"{row.log_likelihood:10.3f}  {row.share:6.1%}"
            partial = f"{row.partial_log_likelihood:10.3f}  {row.partial_share:6.1%}"
            mark = "  correct" if number == score.schema.correct else ""
            common.show(f"  {row.candidate:{width}s} {full} {partial}{mark}")
    metrics = schema_metrics(scores)
    for name in ("accuracy", "partial_accuracy"):
        if metrics["rows"] > 1:  # one schema has no accuracy worth an interval
            low, high = metrics["intervals"][name]
            label, rows = name.replace("_", " "), f"{metrics['rows']:,} schemas, chance {metrics['chance']:.1%}"
            common.show(f"{label:16s} {metrics[name]:.1%} (95%: {low:.1%} to {high:.1%}; {rows})")
    return {"kind": kind, "schemas": [score.to_dict() for score in scores], "metrics": metrics}


def embedding_files(options: dict[str, Any]) -> list[Path]:
    """The vectors and, for a .npy file with several vectors per text, the tokens or words they belong to."""
    out = options["out"]
    if out is None:
        return []
    per_token = options["words"] or options["pool"] == "none"
    return [out, out.with_suffix(".tokens.jsonl")] if per_token and out.suffix == ".npy" else [out]


@command("Use a run", writes=embedding_files)
def embed(
    common: Common,
    run: RunPath,
    columns: Columns,
    text: Texts = None,
    file: Annotated[str | None, "Texts from a file: one per line, or a table; - is stdin."] = None,
    layers: Annotated[str, "last, sum4, concat4, mix, or a layer's number."] = "last",
    pool: Annotated[str | None, "mean, cls, last, or none for one vector per token."] = None,
    words: Annotated[bool, "One vector per word: the mean of its tokens."] = False,
    out: Annotated[Path | None, "Write the vectors to this .npy or .jsonl file."] = None,
    skip_blank: SkipBlank = False,
    int8: Int8 = False,
) -> dict[str, Any]:
    """Embed texts: one vector per text, word or token."""
    from headstock.data.labelled_texts import stream_texts
    from headstock.inference.embed import align_tokens, word_vectors
    from headstock.inference.output_files import write_vectors

    check_text_source(text, file)
    if words and pool not in (None, "none"):
        raise UserError(f"--words gives one vector per word and cannot be combined with --pool {pool}")
    if out is not None and out.suffix not in (".npy", ".jsonl"):
        raise UserError(f"--out {out}: must end in .npy or .jsonl")
    pipeline = load(run, device=common.device, int8=int8)
    pooling = "none" if words else pool
    skipped: list[int] | None = [] if skip_blank else None
    texts: Iterable[str] = text or (
        row for _, row in stream_texts(file or "-", columns=columns.names(), skipped=skipped)
    )
    pending: deque[str] = deque()  # texts are read ahead of their vectors

    def queued_texts() -> Iterator[str]:
        for row in texts:
            pending.append(row)
            yield row

    def rows() -> Iterator[tuple[dict[str, Any], Any]]:
        for vectors in pipeline.iter_embeddings(queued_texts(), layers=layers, pool=pooling):
            row = pending.popleft()
            if vectors.ndim == 1:
                yield {"text": row}, vectors
                continue
            units = align_tokens(pipeline.tokenizer, row)
            if words:
                units, vectors = word_vectors(units, vectors)
            yield units.to_dict(), vectors

    result: dict[str, Any]
    if out is not None:
        result = write_vectors(out, rows())
        common.show(f"{out}: {' x '.join(f'{size:,}' for size in result['shape'])}, {result['texts']:,} texts")
        result = {"out": str(out), "layers": layers} | result
    else:
        embedded = list(rows())
        for units, vectors in embedded:
            common.show(f"{' x '.join(map(str, vectors.shape)):>12s}  {units['text']}")
        result = {"layers": layers, "texts": len(embedded), "vectors": [vectors.tolist() for _, vectors in embedded]}
        result |= {"aligned": [units for units, _ in embedded]} if pooling == "none" else {}
    if skipped:
        logger.warning(f"warning: {file or '-'}: {len(skipped):,} blank rows skipped")
    return result
