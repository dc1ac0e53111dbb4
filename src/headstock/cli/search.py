"""`headstock search`: the documents of a corpus that are most similar to a query."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, command
from headstock.cli.input_files import load, read_texts
from headstock.cli.options import Columns, Documents, Int8, RunPath
from headstock.errors import UserError

EXCERPT_CHARACTERS = 100  # of a document in the terminal


@command("Use a run", writes=lambda options: [options["out"]])
def search(
    common: Common,
    run: RunPath,
    columns: Columns,
    query: Annotated[list[str] | None, typer.Argument(help="One or more queries.")] = None,
    corpus: Annotated[list[str] | None, "Text to search: a file, folder, glob or URL; repeatable."] = None,
    file: Annotated[Path | None, "Queries from a file: one per line, or a table; - is stdin."] = None,
    top: Annotated[int, "Documents to show for each query."] = 5,
    documents: Documents = "auto",
    layers: Annotated[str, "last, sum4, concat4, mix, or a layer's number."] = "last",
    pool: Annotated[str | None, "mean, cls or last; default mean."] = None,
    transform: Annotated[str, "Of the vectors, estimated on the corpus: none, center or whiten."] = "center",
    index: Annotated[str, "exact, or faiss (approximate, for millions of documents)."] = "exact",
    dtype: Annotated[str, "Of the stored vectors: float32, or float16 for half the space."] = "float32",
    out: Annotated[Path | None, "Write one JSON line per query to this .jsonl file."] = None,
    int8: Int8 = False,
) -> dict[str, Any]:
    """Find the documents that are most similar to a query.

    Documents are ranked by the cosine similarity of the run's embeddings. The embeddings of the corpus are computed
    once and kept in the cache, until the corpus, the weights or the options change.

    Example: headstock search reviews-en --corpus reviews.txt "a slow film with a great ending" --top 3
    """
    from headstock.data.corpus import read_corpus
    from headstock.inference.output_files import open_prediction_file
    from headstock.inference.search import IndexKind, SearchSettings, check_choice, get_args, open_documents, open_index
    from headstock.report.format import excerpt

    if not corpus:
        raise UserError("no text to search: name it with --corpus")
    if out is not None and out.suffix != ".jsonl":
        raise UserError(f"--out {out}: must end in .jsonl")
    if top < 1:
        raise UserError(f"--top {top}: must be 1 or more")
    settings = SearchSettings(layers, pool, transform, dtype)  # type: ignore[arg-type]
    check_choice("index", index, get_args(IndexKind))
    queries = read_texts(query, file)
    text = read_corpus(corpus, documents=documents, column=columns.text() or "text")  # type: ignore[arg-type]
    pipeline = load(run, device=common.device, int8=int8)
    searchable = open_index(pipeline, open_documents(text), settings)
    if index == "faiss":
        searchable.faiss_index()
    start = time.perf_counter()
    rows = searchable.search(queries, top=top, kind=index)  # type: ignore[arg-type]
    seconds = time.perf_counter() - start
    found = [
        {"query": query, "hits": [hit.to_dict() for hit in hits]} for query, hits in zip(queries, rows, strict=True)
    ]
    if out is not None:
        with open_prediction_file(out) as write:
            for row in found:
                write(row)
        common.show(f"{out}: {len(found):,} queries")
    else:
        for query_text, hits in zip(queries, rows, strict=True):
            common.show(query_text)
            for hit in hits:
                common.show(f"  {hit.score:6.3f}  {hit.source}:{hit.line}  {excerpt(hit.text, EXCERPT_CHARACTERS)}")
    described = searchable.describe(index)  # type: ignore[arg-type]
    return {"results": found, "index": described, "queries_per_second": round(len(queries) / max(1e-9, seconds), 1)}
