"""What an ONNX folder says of itself: how texts are shown to the model, what comes out, a script that runs it."""

from collections.abc import Sequence
from typing import Any

from headstock.data.sentencepiece_tokenizer import SentencePieceBackend
from headstock.errors import UserError
from headstock.inference.pipeline import Pipeline
from headstock.interop.onnx_graph import Continuing, Embedding, Graph
from headstock.markdown import escape_markdown
from headstock.tasks.labelled import is_labelled, separator_id
from headstock.tasks.special_tokens import special_tokens_for
from headstock.train.loop import sequence_length
from headstock.train.model_card import render_card, with_intervals

CARD = """# {name}, for ONNX Runtime

{what} Made by Headstock from the run {name}, whose own card follows below.

| | |
|---|---|
{files}

| goes in | type | shape |
|---|---|---|
{inputs}

| comes out | shape |
|---|---|
{outputs}

Batch and length may be of any size, a row's length up to {length:,} tokens. Rows are padded with `{padding}` on the
right, and `attention_mask` is 1 where there is a token.

{same}

## Run it

With `onnxruntime`, `{library}` and nothing else, in this folder:

```python
{script}
```

{use}
{limits}
"""

LIBRARY = """from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("tokenizer.json")
tokenizer.encode_special_tokens = True  # a text that spells out a special token is only text
"""
LIBRARY_CUT = "tokenizer.encode({}, add_special_tokens=False).ids"

PIECES = """from sentencepiece import SentencePieceProcessor

pieces = SentencePieceProcessor(model_file="sentencepiece.model")
number = {piece: i for i, piece in enumerate(about["pieces"])}
"""
PIECES_CUT = '[number.get(piece, about["unknown"]) for piece in pieces.encode({}, out_type=str)]'

SCRIPT = """import json, re, sys
import numpy as np
import onnxruntime
{reader}
session, about = onnxruntime.InferenceSession("model.onnx"), json.load(open("model.json", encoding="utf-8"))
{body}"""

SEGMENTS = 'given["token_type_ids"] = (np.arange(row.shape[1]) >= {before}).astype(np.int64)[None]\n'


def describe_reading(loaded: Pipeline, graph: Graph) -> dict[str, Any]:
    """What model.json says: all that a program without Headstock must know to show the model a text."""
    task, tokenizer = loaded.task, loaded.tokenizer
    about: dict[str, Any] = {"kind": graph.spec.kind, "length": sequence_length(loaded.model, loaded.config.train)}
    about["padding"] = tokenizer.pad or 0
    if isinstance(engine := tokenizer.backend, SentencePieceBackend):
        if graph.spec.needs_offsets:
            raise UserError(f"{loaded.run}: its tokenizer is SentencePiece's, whose pieces this script cannot place")
        if engine.model is None:
            raise UserError(f"{loaded.run}: its tokenizer has no SentencePiece model, so no text can be read with it")
        about["unknown"] = tokenizer.unk
        about["pieces"] = [None if i in engine.all_special_ids else piece for i, piece in enumerate(engine.pieces)]
    if isinstance(graph, Embedding):
        marks = special_tokens_for(task, tokenizer)
        return about | around(marks.prefix, marks.suffix, about["length"]) | {"pool": graph.pool}
    if isinstance(graph, Continuing):
        config = loaded.model.backbone.config
        start = special_tokens_for(task, tokenizer, left_to_right=True).prefix[0]
        past = [1, config.heads, 0, config.width // config.heads]
        context = loaded.model.backbone.context
        told = {"start": start, "end": tokenizer.eos, "never": sorted(loaded.suppressed_tokens()), "past": past}
        return about | told | {"length": context}
    assert is_labelled(task)
    if task.texts_per_row > 1:
        about |= {"start": task.bos, "separator": separator_id(tokenizer)}
    else:
        about |= around((task.bos,), task.suffix, about["length"])
    return about | graph.spec.settings


def around(before: Sequence[int], after: Sequence[int], length: int) -> dict[str, Any]:
    """The marks around a text, and how many of its own tokens fit between them."""
    return {"before": list(before), "after": list(after), "room": max(1, length - len(before) - len(after))}


def script_of(loaded: Pipeline, graph: Graph) -> str:
    """The program of the card, which needs neither torch nor Headstock."""
    pieces = isinstance(loaded.tokenizer.backend, SentencePieceBackend)
    cut = (PIECES_CUT if pieces else LIBRARY_CUT).format("text")
    spec = graph.spec
    segments = SEGMENTS.format(before=spec.segment_start) if "token_type_ids" in graph.inputs else ""
    decoded = '"".join(about["pieces"][i] or "" for i in read).replace("▁", " ").strip()'
    body = spec.script.format(cut=cut, segments=segments, text=decoded if pieces else "tokenizer.decode(read)")
    head = LIBRARY if not pieces else PIECES
    imports, _, ready = head.partition("\n\n")
    script = SCRIPT.format(reader=imports + "\n", body=ready + body).strip()
    return script if "re." in body else script.replace("json, re, sys", "json, sys", 1)


def card_of(loaded: Pipeline, graph: Graph, about: dict[str, Any], result: dict[str, Any]) -> str:
    run = loaded.run
    pieces = isinstance(loaded.tokenizer.backend, SentencePieceBackend)
    own = render_card(run).partition("\n")[2].strip().replace("\n## ", "\n### ")
    card = CARD.format(
        name=escape_markdown(run.path.name),
        what=graph.spec.summary,
        files="\n".join(f"| `{name}` | {size:,} bytes |" for name, size in result["files"].items()),
        inputs="\n".join(f"| `{name}` | {kind_of(name)} | {shape(sizes)} |" for name, sizes in about["inputs"].items()),
        outputs="\n".join(f"| `{name}` | {shape(sizes)} |" for name, sizes in about["outputs"].items()),
        length=about["length"],
        padding=about["padding"],
        same=sameness(result),
        library="sentencepiece" if pieces else "tokenizers",
        script=script_of(loaded, graph),
        use=f"Saved as `run.py`, it is called with {graph.spec.arguments}.",
        limits=graph.spec.limits,
    )
    return f"{card.rstrip()}\n\n## The run\n\n{own}\n"


def kind_of(name: str) -> str:
    return "float32" if name.startswith("past") else "int64"


def shape(sizes: tuple[str, ...]) -> str:
    return " × ".join(sizes)


def sameness(result: dict[str, Any]) -> str:
    """How near the numbers are to the run's own, and what 8-bit numbers cost."""
    told = [f"On rows of several lengths its numbers differ from the run's own by {result['difference']:.1e} at most."]
    found = result.get("measured")
    if found is not None:
        told += ["", f"| on {escape_markdown(found['file'])} | |", "|---|---|"]
        names = {"float32": "`model.onnx`", "int8": "`model_int8.onnx`"}
        told += [f"| {names[name]} | {with_intervals(found[name])} |" for name in names if name in found]
        if "change" in found:
            rows, headline = found["int8"]["rows"], found["headline"].replace("_", " ")
            cost = f"8-bit numbers change {headline} by {100 * found['change']:+.2f} points"
            told += ["", f"{cost}: {found['changed']:,} of {rows:,} rows get another answer."]
    elif "int8_difference" in result:
        told += [
            f"Those of `model_int8.onnx`, whose weights are 8-bit, differ by up to {result['int8_difference']:.1e}.",
            "What that costs was not measured: export again with `--measure` and a labelled file.",
        ]
    if "int8_difference" in result:
        told += ["", "Processors without VNNI round 8-bit products more coarsely: measure again where it is to run."]
    return "\n".join(told)
