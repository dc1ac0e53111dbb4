"""`headstock tokenizer`: train one, or look at one."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, verb
from headstock.cli.options import Column, Columns, text_column

tokenizer = typer.Typer(help="Train a tokenizer, or look at how one splits text.", no_args_is_help=True)


@verb(tokenizer, writes=lambda given: [given["out"]])
def train(
    common: Common,
    corpus: Annotated[list[str], typer.Argument(help="Files, folders, globs, or - for standard input.")],
    out: Annotated[Path, typer.Option("--out", help="The tokenizer.json to write.")],
    kind: Annotated[str, typer.Option("--kind", help="bpe, unigram, wordpiece, word or char.")] = "bpe",
    vocab: Annotated[int, typer.Option("--vocab", help="Entries at the most, special tokens included.")] = 8000,
    documents: Annotated[str, typer.Option("--documents", help="line, block, file, or auto to guess.")] = "auto",
    column: Column = None,
    columns: Columns = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Fold case.")] = False,
    strip_accents: Annotated[bool, typer.Option("--strip-accents", help="Take accents off.")] = False,
) -> dict[str, Any]:
    """Train a tokenizer on text."""
    from headstock import config
    from headstock.data.corpus import read_corpus
    from headstock.data.sampling import first, sampled
    from headstock.data.tokenizer import TokenizerSettings, train_tokenizer

    wish = {"kind": kind, "vocabulary": vocab, "lowercase": lowercase, "strip_accents": strip_accents}
    settings = config.build(TokenizerSettings, wish)
    text = read_corpus(corpus, documents=documents, column=text_column(columns, column) or "text")  # type: ignore[arg-type]
    common.say(text.how())
    made = train_tokenizer(sampled(text), settings)
    made.save(out)
    texts = first(text, 1000)
    return {"tokenizer": str(out)} | show_facts(common, made, texts, sample=" ".join(texts[0].split()[:40]))


@verb(tokenizer)
def show(
    common: Common,
    run: Annotated[
        Path, typer.Argument(help="A run or a stock, a tokenizer.json, a SentencePiece .model or a lab dict.txt.")
    ],
    text: Annotated[str, typer.Argument(help="Any text.")],
) -> dict[str, Any]:
    """How a tokenizer splits a text."""
    from headstock.data.tokenizer import open_tokenizer
    from headstock.errors import UserError

    found = open_tokenizer(tokenizer_of(run))
    if not text.strip() or not found.encode(text):  # some tokenizers also drop characters that cannot be seen
        raise UserError(f"the text {text!r} is empty, so there is nothing to split")
    return show_facts(common, found, [text], sample=text)


def tokenizer_of(path: Path) -> Path:
    """The tokenizer's file where a stock or a checkpoint is named; anything else as it is."""
    from headstock.errors import UserError

    if path.is_file() or (path / "tokenizer.json").is_file():
        return path
    from headstock.train.run_folder import open_run

    try:
        return open_run(path).tokenizer_file
    except UserError:
        if not path.is_dir() and len(path.parts) == 1 and not path.suffix:
            raise  # it says which stocks and runs are near
        return path


def show_facts(common: Common, made: Any, texts: list[str], *, sample: str) -> dict[str, Any]:
    from headstock.data.tokenizer import describe

    facts = describe(made, texts, sample=sample)
    common.show(
        f"{made.kind}: {facts['vocabulary']:,} entries, {facts['tokens_per_word']:.2f} tokens a word, "
        f"{facts['unknown_rate']:.2%} unknown"
    )
    common.show(" | ".join(facts["sample"]))
    for note in made.notes:
        common.say(note)
    return {**facts, "ids": made.encode(sample)}


def add_to(app: typer.Typer) -> None:
    app.add_typer(tokenizer, name="tokenizer")
