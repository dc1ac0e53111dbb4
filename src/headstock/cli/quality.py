"""`headstock quality`: measures generated text beside human text."""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstock.cli.command import Common, command
from headstock.cli.input_files import load, read_texts
from headstock.cli.options import Columns, Documents
from headstock.errors import HeadstockError, UserError

if TYPE_CHECKING:
    from headstock.inference.generation_quality import Passage, QualityReport, TextSet
    from headstock.inference.pipeline import Pipeline

logger = logging.getLogger(__name__)

# tables: title and, by column, the measure, its factor and decimals
TABLES: dict[str, dict[str, tuple[str, float, int]]] = {
    "Repetition within a text, diversity across texts": {
        "rep-4 %": ("rep_4", 100, 1),
        "longest repeat": ("longest_repeat", 1, 1),
        "distinct-2 %": ("distinct_2", 100, 1),
        "self-BLEU": ("self_bleu", 1, 1),
        "Zipf": ("zipf", 1, 2),
    },
    "Likeness to human text, copies of training text": {
        "perplexity": ("perplexity", 1, 1),
        "MAUVE": ("mauve", 1, 3),
        "longest copy": ("longest_copy", 1, 1),
        "copied %": ("copied", 100, 1),
    },
}


@command("Compare and measure", writes=lambda options: [options["out"]])
def quality(
    common: Common,
    columns: Columns,
    source: Annotated[list[str], typer.Argument(help="A run that generates, or files with one text per line.")],
    reference: Annotated[list[str] | None, "Human text; default: the run's held-out text."] = None,
    documents: Documents = "auto",
    judge: Annotated[Path | None, "A language model that measures the perplexity."] = None,
    embed: Annotated[Path | None, "The run whose embeddings MAUVE uses; default: the judge, or the run itself."] = None,
    decoding: Annotated[
        list[str] | None, "greedy, sample, or such as top_p=0.9,temperature=0.8; repeatable. Default: five usual ones."
    ] = None,
    texts: Annotated[int, "Texts in each set."] = 200,
    prompt_tokens: Annotated[int, "Tokens of human text before each continuation."] = 16,
    max_tokens: Annotated[int, "Tokens of a continuation."] = 64,
    controls: Annotated[bool, "Also measure texts that must fail: shuffled, looped, repeated, copied."] = False,
    copies: Annotated[bool, "Search the run's training text for copies."] = True,
    out: Annotated[Path | None, "Write all texts to this .jsonl file."] = None,
) -> dict[str, Any]:
    """Measure generated text beside human text.

    Measured are repetition, diversity, perplexity, MAUVE and copies of the training text. A run continues the
    beginnings of held-out passages with each way of decoding; the true continuations are measured alike. Intervals
    are 95% over the texts.

    Example: headstock quality runs/gpt --judge runs/judge --decoding greedy --decoding top_p=0.9 --controls
    Example: headstock quality a.txt b.txt --reference human.txt --judge runs/gpt
    """
    from headstock.inference.generation_quality import QualityJudge, control_sets
    from headstock.io import write_text

    if texts < 2 or prompt_tokens < 0 or max_tokens < 1:
        raise UserError("--texts must be 2 or more, --prompt-tokens 0 or more and --max-tokens 1 or more")
    if out is not None and out.suffix != ".jsonl":
        raise UserError(f"--out {out}: must end in .jsonl")
    judging = load(judge, device=common.device) if judge is not None else None
    if judging is not None:
        judging.likelihood_kind()  # refuses what is no language model
    training: list[str] | None = None
    own: Pipeline | None = None
    if all(Path(name).is_file() for name in source):
        for option, used in (("--decoding", decoding), ("--controls", controls)):
            if used:
                raise UserError(f"{option} is for a run that generates; here texts are read from files")
        sets, human = read_sets(source, reference, columns.text(), texts)
    elif len(source) > 1:
        raise UserError("give one run, or files with texts")
    else:
        own = load(Path(source[0]), device=common.device)
        own.require("generates", "generate text")
        passages = human_passages(own, reference, documents, columns.text(), 2 * texts, prompt_tokens, max_tokens)
        sets, human = generate_sets(own, passages, decoding, seed=common.seed or 0, max_tokens=max_tokens)
        if copies or controls:
            training, trained_passages = training_text(own, len(sets[0].passages), prompt_tokens, max_tokens)
            sets += control_sets(sets[0], trained_passages) if controls else []
    embedder = load(embed, device=common.device) if embed is not None else judging or own
    judged = QualityJudge(human, judging, embedder, training if copies else None)
    reports = []
    for part in sets:
        logger.info("measuring %s", part.name)
        reports.append(judged.measure(part))
    for number, table in enumerate(tables(reports)):
        common.show("" if number else f"{len(sets[0].passages):,} texts in each set; ± is half of a 95% interval")
        common.show(table)
    if out is not None:
        rows = [{"set": part.name} | asdict(passage) for part in sets for passage in part.passages]
        write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        common.show(f"{out}: {len(rows):,} texts")
    names = {"judge": str(judge) if judge else None, "embeddings": str(embedder.run) if embedder and human else None}
    return {"sets": [report.to_dict() for report in reports]} | names


def read_sets(
    files: list[str], reference: list[str] | None, column: str | None, texts: int
) -> "tuple[list[TextSet], TextSet | None]":
    """The texts of each file, and those of the reference; all sets have the same size, as diversity depends on it."""
    from headstock.inference.generation_quality import Passage, TextSet

    lines = {name: read_texts(None, Path(name), column) for name in [*files, *(reference or [])]}
    size = min(texts, *(len(rows) for rows in lines.values())) if len(lines) > 1 else min(texts, len(lines[files[0]]))
    if any(len(rows) > size for rows in lines.values()):
        logger.info("comparing the first %d texts of each file", size)
    sets = {name: TextSet(name, [Passage("", text) for text in rows[:size]]) for name, rows in lines.items()}
    human = [passage for name in reference or [] for passage in sets[name].passages]
    ordered = [sets[name] for name in [*(reference or []), *files]]
    return ordered, TextSet("reference", human) if human else None


def human_passages(
    pipeline: "Pipeline",
    reference: list[str] | None,
    documents: str,
    column: str | None,
    count: int,
    prompt_tokens: int,
    max_tokens: int,
) -> "list[Passage]":
    from headstock.inference.evaluation import evaluation_store
    from headstock.inference.generation_quality import held_out_passages

    store = evaluation_store(
        pipeline.run, pipeline.config, pipeline.task, reference or (), documents=documents, column=column
    )
    passages = held_out_passages(
        pipeline.tokenizer, store, prompt_tokens=prompt_tokens, max_tokens=max_tokens, count=count
    )
    if len(passages) < 4:
        size = prompt_tokens + max_tokens
        raise UserError(f"the human text has {len(passages)} passages of about {size} tokens; at least 4 are needed")
    return passages


def generate_sets(
    pipeline: "Pipeline", passages: "list[Passage]", decoding: list[str] | None, *, seed: int, max_tokens: int
) -> "tuple[list[TextSet], TextSet]":
    """Half of the passages and the model's continuations of them; the other half is the reference of MAUVE."""
    from headstock.inference.generation_quality import DEFAULT_DECODING, TextSet, continue_passages, parse_decoding

    for text in decoding or ():
        parse_decoding(text)
    half = len(passages) // 2  # diversity depends on the number of texts, so that all sets have the same
    prompts, others = passages[0 : 2 * half : 2], passages[1 : 2 * half : 2]
    sets = [TextSet("human", prompts)]
    for text in decoding or DEFAULT_DECODING:
        logger.info("generating %d texts: %s", half, text)
        sets.append(continue_passages(pipeline, prompts, text, max_tokens=max_tokens, seed=seed))
    return sets, TextSet("reference", others)


def training_text(
    pipeline: "Pipeline", count: int, prompt_tokens: int, max_tokens: int
) -> "tuple[list[str] | None, list[Passage]]":
    """The documents that the run was trained on, and passages of them; none if they are no longer there."""
    from headstock.inference.generation_quality import held_out_passages
    from headstock.logs import muted
    from headstock.train.pretrain import reopen_stores

    try:
        with muted():
            store = reopen_stores(pipeline.run, pipeline.config, pipeline.task).train
    except HeadstockError as error:
        logger.info("no search for copies: %s", error)
        return None, []
    tokenizer = pipeline.tokenizer
    size = {"prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "count": count}
    documents = [tokenizer.decode(store.document(i).tolist()) for i in range(store.documents)]
    return documents, held_out_passages(tokenizer, store, **size)


def tables(reports: "list[QualityReport]") -> list[Any]:
    """One row per set; cells are the measure and half the width of its interval."""
    from rich.markup import escape
    from rich.table import Table

    result = []
    for title, measures in TABLES.items():
        used = {name: spec for name, spec in measures.items() if any(spec[0] in report.measures for report in reports)}
        if not used:
            continue
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, title=title, title_justify="left")
        table.add_column("text")
        for name in used:
            table.add_column(name, justify="right")
        for report in reports:
            table.add_row(
                escape(report.name),
                *(cell(report.measures.get(key), factor, decimals) for key, factor, decimals in used.values()),
            )
        result.append(table)
    return result


def cell(value: Any, factor: float = 1, decimals: int = 1) -> str:
    if value is None or value.mean != value.mean:
        return "–"
    if value.low is None or value.high is None:
        return f"{factor * value.mean:.{decimals}f}"
    return f"{factor * value.mean:.{decimals}f} ±{factor * (value.high - value.low) / 2:.{decimals}f}"
