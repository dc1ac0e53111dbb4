"""model.json and README.md of an ONNX folder: tokenization, inputs, outputs, and a script that runs the model."""

from collections.abc import Sequence
from typing import Any

from headstock.data.tokenizer_backends import SentencePieceBackend
from headstock.errors import UserError
from headstock.inference.pipeline import Pipeline
from headstock.interop.onnx_graph import CausalGraph, EmbeddingGraph, Graph, Names
from headstock.markdown import escape_markdown
from headstock.tasks.labelled import is_labelled
from headstock.tasks.special_tokens import separator_id, special_tokens_for
from headstock.train.metrics import format_labelled_metrics
from headstock.train.model_card import render_card

CARD = """# {name}, for ONNX Runtime

{summary} Exported by Headstock from the run {name}, whose own card follows below.

| | |
|---|---|
{files}

| input | type | shape |
|---|---|---|
{inputs}

| output | shape |
|---|---|
{outputs}

Batch size and length are dynamic, up to {length:,} tokens per row. Rows are padded with `{padding}` on the right;
`attention_mask` is 1 at real tokens.

{parity}

## Run it

In this folder, with `onnxruntime` and `{library}` installed:

```python
{script}
```

Saved as `run.py`, it is called with {arguments}.
{limits}
"""

TOKENIZERS = """from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("tokenizer.json")
tokenizer.encode_special_tokens = True  # special tokens in a text are plain text
"""
TOKENIZERS_ENCODE = "tokenizer.encode({}, add_special_tokens=False).ids"

SENTENCEPIECE = """from sentencepiece import SentencePieceProcessor

processor = SentencePieceProcessor(model_file="sentencepiece.model")
vocabulary = {piece: i for i, piece in enumerate(about["pieces"])}
"""
SENTENCEPIECE_ENCODE = '[vocabulary.get(piece, about["unknown"]) for piece in processor.encode({}, out_type=str)]'

SCRIPT = """import json, re, sys
import numpy as np
import onnxruntime
{imports}
session, about = onnxruntime.InferenceSession("model.onnx"), json.load(open("model.json", encoding="utf-8"))
{body}"""

SEGMENTS = 'inputs["token_type_ids"] = (np.arange(row.shape[1]) >= {before}).astype(np.int64)[None]\n'


def model_json(pipeline: Pipeline, graph: Graph) -> dict[str, Any]:
    """The content of model.json: all that a program needs to tokenize texts for the model."""
    task, tokenizer = pipeline.task, pipeline.tokenizer
    about: dict[str, Any] = {"kind": graph.spec.kind, "length": pipeline.length}
    about["padding"] = tokenizer.pad or 0
    if isinstance(backend := tokenizer.backend, SentencePieceBackend):
        if graph.spec.needs_offsets:
            raise UserError(f"{pipeline.run}: its SentencePiece tokenizer has no character offsets")
        if backend.model is None:
            raise UserError(f"{pipeline.run}: its tokenizer has no SentencePiece model, so it cannot tokenize text")
        about["unknown"] = tokenizer.unk
        about["pieces"] = [None if i in backend.all_special_ids else piece for i, piece in enumerate(backend.pieces)]
    if isinstance(graph, EmbeddingGraph):
        special = special_tokens_for(task, tokenizer)
        return about | around(special.prefix, special.suffix, about["length"]) | {"pool": graph.pool}
    if isinstance(graph, CausalGraph):
        config = pipeline.model.backbone.config
        start = special_tokens_for(task, tokenizer, left_to_right=True).prefix[0]
        about |= {"start": start, "end": tokenizer.eos, "never": sorted(pipeline.suppressed_tokens())}
        past = [1, config.heads, 0, config.width // config.heads]
        return about | {"past": past, "length": pipeline.model.backbone.context}
    assert is_labelled(task)
    if task.texts_per_row > 1:
        about |= {"start": task.bos, "separator": separator_id(tokenizer)}
    else:
        about |= around(task.special.prefix, task.special.suffix, about["length"])
    return about | graph.spec.settings


def around(before: Sequence[int], after: Sequence[int], length: int) -> dict[str, Any]:
    """The special tokens around a text, and how many of its tokens fit between them."""
    return {"before": list(before), "after": list(after), "room": max(1, length - len(before) - len(after))}


def example_script(pipeline: Pipeline, graph: Graph) -> str:
    """The script in the card, which needs neither torch nor Headstock."""
    spec, setup, encode, decode = graph.spec, TOKENIZERS, TOKENIZERS_ENCODE, "tokenizer.decode(tokens)"
    if isinstance(pipeline.tokenizer.backend, SentencePieceBackend):
        setup, encode = SENTENCEPIECE, SENTENCEPIECE_ENCODE
        decode = '"".join(about["pieces"][i] or "" for i in tokens).replace("▁", " ").strip()'
    segments = SEGMENTS.format(before=spec.segment_start) if "token_type_ids" in graph.inputs else ""
    body = spec.script.format(cut=encode.format("text"), segments=segments, text=decode)
    imports, _, setup = setup.partition("\n\n")
    script = SCRIPT.format(imports=imports + "\n", body=setup + body).strip()
    return script if "re." in body else script.replace("json, re, sys", "json, sys", 1)


def folder_card(pipeline: Pipeline, graph: Graph, about: dict[str, Any], result: dict[str, Any]) -> str:
    run = pipeline.run
    sentencepiece = isinstance(pipeline.tokenizer.backend, SentencePieceBackend)
    run_card = render_card(run).partition("\n")[2].strip().replace("\n## ", "\n### ")
    card = CARD.format(
        name=escape_markdown(run.path.name),
        summary=graph.spec.summary,
        files="\n".join(f"| `{name}` | {size:,} bytes |" for name, size in result["files"].items()),
        inputs=tensor_table(about["inputs"], types=True),
        outputs=tensor_table(about["outputs"], types=False),
        length=about["length"],
        padding=about["padding"],
        parity=parity_section(result),
        library="sentencepiece" if sentencepiece else "tokenizers",
        script=example_script(pipeline, graph),
        arguments=graph.spec.arguments,
        limits=graph.spec.limits,
    )
    return f"{card.rstrip()}\n\n## The run\n\n{run_card}\n"


def tensor_table(tensors: Names, *, types: bool) -> str:
    rows = []
    for name, sizes in tensors.items():
        dtype = "float32" if name.startswith("past") else "int64"
        rows.append(" | ".join([f"| `{name}`", *([dtype] if types else []), f"{' × '.join(sizes)} |"]))
    return "\n".join(rows)


def parity_section(result: dict[str, Any]) -> str:
    """The numerical difference to the run, and the effect of quantization."""
    lines = [f"On rows of several lengths its outputs differ from the run's by at most {result['difference']:.1e}."]
    measured = result.get("measured")
    if measured is not None:
        lines += ["", f"| on {escape_markdown(measured['file'])} | |", "|---|---|"]
        names = {"float32": "`model.onnx`", "int8": "`model_int8.onnx`"}
        models = {file: measured[name] for name, file in names.items() if name in measured}
        lines += [f"| {file} | {format_labelled_metrics(metrics)} |" for file, metrics in models.items()]
        if "change" in measured:
            rows, headline = measured["int8"]["rows"], measured["headline"].replace("_", " ")
            cost = f"int8 weights change {headline} by {100 * measured['change']:+.2f} points"
            lines += ["", f"{cost}: {measured['changed']:,} of {rows:,} predictions change."]
    elif "int8_difference" in result:
        lines += [
            f"Those of `model_int8.onnx` differ by up to {result['int8_difference']:.1e}.",
            "The effect on the metrics was not measured: export again with `--measure` and a labelled file.",
        ]
    if "int8_difference" in result:
        lines += ["", "CPUs without VNNI round int8 products more coarsely: measure again on the target machine."]
    return "\n".join(lines)
