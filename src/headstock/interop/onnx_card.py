"""What an ONNX folder says of itself: how texts are shown to the model, what comes out, a script that runs it."""

from collections.abc import Sequence
from typing import Any

from headstock.data.sentencepiece_tokenizer import SentencePieceBackend
from headstock.data.word_joining import WORD
from headstock.errors import UserError
from headstock.inference.pipeline import Pipeline
from headstock.interop.onnx_graph import Answering, Continuing, Embedding, Graph, Tagging
from headstock.report.markdown import escape_markdown
from headstock.tasks.answer import Answer
from headstock.tasks.classify import Classify
from headstock.tasks.labelled import LabelledTask
from headstock.tasks.pair import Pair
from headstock.tasks.special_tokens import special_tokens_for
from headstock.tasks.tag import Tag
from headstock.train.loop import sequence_length
from headstock.train.model_card import make_card, with_intervals

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

CLASSES = """
def scores(part):
    row = np.array([about["before"] + part + about["after"]])
    return session.run(["logits"], {{"input_ids": row, "attention_mask": np.ones_like(row)}})[0][0]

for text in sys.argv[1:]:
    ids, room = {cut}, about["room"]
    found = np.mean([scores(part) for part in {parts}], axis=0)
    likely = {likely}
    print(json.dumps(dict(zip(about["classes"], likely.tolist()))))
"""
PARTS = {
    "head": "[ids[:room]]",
    "tail": "[ids[-room:]]",
    "head+tail": "[ids if len(ids) <= room else ids[: room // 4] + ids[room // 4 - room :]]",
    "windows": "[ids[at : at + room] for at in range(0, max(1, len(ids) - room + room // 2), max(1, room // 2))]",
}
SOFTMAX = "np.exp(found - found.max()) / np.exp(found - found.max()).sum()"
SIGMOID = "1 / (1 + np.exp(-found))"

PAIRS = """
first, second = ({cut} for text in sys.argv[1:3])
while len(first) + len(second) > about["length"] - 3:  # the longer of the two loses its end
    (first if len(first) > len(second) else second).pop()
row = np.array([[about["start"], *first, about["separator"], *second, about["separator"]]])
given = {{"input_ids": row, "attention_mask": np.ones_like(row)}}
{kinds}found = session.run(["logits"], given)[0][0]
likely = {likely}
print(json.dumps(dict(zip(about["classes"], likely.tolist()))))
"""
KINDS = 'given["token_type_ids"] = (np.arange(row.shape[1]) >= {before}).astype(np.int64)[None]\n'

TAGS = """
for text in sys.argv[1:]:
    cut = tokenizer.encode(text, add_special_tokens=False)
    row = np.array([about["before"] + cut.ids[: about["room"]] + about["after"]])
    scores = session.run(["logits"], {"input_ids": row, "attention_mask": np.ones_like(row)})[0][0, 1:]
    for word in re.finditer(about["word"], text):  # a word's tag is that of its first piece
        place = next((i for i, (_, end) in enumerate(cut.offsets) if end > word.start()), about["room"])
        print(word[0], about["classes"][scores[place].argmax()] if place < about["room"] else "-", sep="\\t")
"""

ANSWER = """
question, context = sys.argv[1:3]
asked = tokenizer.encode(question, add_special_tokens=False).ids[: about["longest_question"]]
cut, lead = tokenizer.encode(context, add_special_tokens=False), len(asked) + 2
reach = range(lead, min(lead + len(cut.ids), about["length"] - 1))
row = np.array([[about["start"], *asked, about["separator"], *cut.ids[: len(reach)], about["separator"]]])
given = {{"input_ids": row, "attention_mask": np.ones_like(row)}}
{kinds}start, end = (scores[0] for scores in session.run(["start_logits", "end_logits"], given))
spans = [(i, j) for i in reach for j in reach if 0 <= j - i < about["longest_answer"]]
first, last = max(spans, key=lambda span: start[span[0]] + end[span[1]])
answer = context[cut.offsets[first - lead][0] : cut.offsets[last - lead][1]].strip()
print(json.dumps({{"answer": {answer}}}, ensure_ascii=False))
"""
NO_ANSWER = '"" if start[0] + end[0] - start[first] - end[last] > about["threshold"] else answer'

VECTORS = """
for text in sys.argv[1:]:
    row = np.array([about["before"] + {cut}[: about["room"]] + about["after"]])
    found = session.run(["sentence_embedding"], {{"input_ids": row, "attention_mask": np.ones_like(row)}})[0]
    print(json.dumps(found[0].tolist()))
"""

TEXT = """
text = sys.argv[1]
read = new = [about["start"], *{cut}]
past = {{name: np.zeros(about["past"], np.float32) for name in about["inputs"] if name.startswith("past")}}
while len(read) < about["length"]:
    given = {{"input_ids": np.array([new]), "attention_mask": np.ones((1, len(read)), np.int64)}}
    scores, *present = session.run(None, given | past)
    past = dict(zip(past, present))  # the keys and values of all that was read
    scores[0, -1, about["never"]] = -np.inf
    new = [int(scores[0, -1].argmax())]  # the likeliest; draw from softmax(scores) for another text each time
    if new[0] == about["end"]:
        break
    read = read + new
print({text})
"""


def describe_reading(loaded: Pipeline, graph: Graph) -> dict[str, Any]:
    """What model.json says: all that a program without Headstock must know to show the model a text."""
    task, tokenizer = loaded.task, loaded.tokenizer
    about: dict[str, Any] = {"kind": graph.kind, "length": sequence_length(loaded.model, loaded.config.train)}
    about["padding"] = tokenizer.pad or 0
    if isinstance(engine := tokenizer.backend, SentencePieceBackend):
        if isinstance(graph, Tagging | Answering):
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
    assert isinstance(task, LabelledTask)
    if isinstance(task, Pair | Answer):
        about |= {"start": task.bos, "separator": task.separator}
    else:
        about |= around((task.bos,), task.suffix, about["length"])
    if isinstance(task, Classify | Tag):
        about["classes"] = list(task.config.classes)
    if isinstance(task, Tag):
        about["word"] = f"(?ix){WORD.pattern}"
    if isinstance(task, Answer):
        config = task.config
        about |= {"longest_question": config.longest_question, "longest_answer": config.longest_answer}
        about |= {"threshold": config.threshold} if config.unanswerable else {}
    return about


def around(before: Sequence[int], after: Sequence[int], length: int) -> dict[str, Any]:
    """The marks around a text, and how many of its own tokens fit between them."""
    return {"before": list(before), "after": list(after), "room": max(1, length - len(before) - len(after))}


def script_of(loaded: Pipeline, graph: Graph) -> str:
    """The program of the card, which needs neither torch nor Headstock."""
    task, pieces = loaded.task, isinstance(loaded.tokenizer.backend, SentencePieceBackend)
    cut = (PIECES_CUT if pieces else LIBRARY_CUT).format("text")
    likely = SIGMOID if getattr(task, "multilabel", False) else SOFTMAX
    kinds = KINDS if "token_type_ids" in graph.inputs else ""
    if isinstance(graph, Embedding):
        body = VECTORS.format(cut=cut)
    elif isinstance(graph, Continuing):
        written = '"".join(about["pieces"][i] or "" for i in read).replace("▁", " ").strip()'
        body = TEXT.format(cut=cut, text=written if pieces else "tokenizer.decode(read)")
    elif isinstance(task, Pair):
        body = PAIRS.format(cut=cut, likely=likely, kinds=kinds.format(before="len(first) + 2"))
    elif isinstance(task, Classify):
        body = CLASSES.format(cut=cut, likely=likely, parts=PARTS[task.config.long])
    elif isinstance(task, Answer):
        answer = NO_ANSWER if task.config.unanswerable else "answer"
        body = ANSWER.format(kinds=kinds.format(before="lead"), answer=answer)
    else:
        body = TAGS
    head = LIBRARY if not pieces else PIECES
    imports, _, ready = head.partition("\n\n")
    script = SCRIPT.format(reader=imports + "\n", body=ready + body).strip()
    return script if isinstance(graph, Tagging) else script.replace("json, re, sys", "json, sys", 1)


def card_of(loaded: Pipeline, graph: Graph, about: dict[str, Any], result: dict[str, Any]) -> str:
    task, run = loaded.task, loaded.run
    what = {
        "classification": "Which class a text is of.",
        "tagging": "Which tag each word of a text has.",
        "answering": "Where in a text the answer to a question stands.",
        "embedding": "A vector for every text, and one for every token.",
        "causal": "How a text goes on.",
    }
    pieces = isinstance(loaded.tokenizer.backend, SentencePieceBackend)
    own = make_card(run).partition("\n")[2].strip().replace("\n## ", "\n### ")
    card = CARD.format(
        name=escape_markdown(run.path.name),
        what=what[graph.kind],
        files="\n".join(f"| `{name}` | {size:,} bytes |" for name, size in result["files"].items()),
        inputs="\n".join(f"| `{name}` | {kind_of(name)} | {shape(sizes)} |" for name, sizes in about["inputs"].items()),
        outputs="\n".join(f"| `{name}` | {shape(sizes)} |" for name, sizes in about["outputs"].items()),
        length=about["length"],
        padding=about["padding"],
        same=sameness(result),
        library="sentencepiece" if pieces else "tokenizers",
        script=script_of(loaded, graph),
        use=f"Saved as `run.py`, it is called with {called(task, graph)}.",
        limits=limits(task, graph),
    )
    return f"{card.rstrip()}\n\n## The run\n\n{own}\n"


def kind_of(name: str) -> str:
    return "float32" if name.startswith("past") else "int64"


def shape(sizes: tuple[str, ...]) -> str:
    return " × ".join(sizes)


def called(task: Any, graph: Graph) -> str:
    if isinstance(graph, Continuing):
        return "the beginning of a text"
    if isinstance(graph, Answering):
        return "a question and a text"
    return "two texts" if isinstance(task, Pair) and not isinstance(graph, Embedding) else "one or more texts"


def limits(task: Any, graph: Graph) -> str:
    """What Headstock does with long texts and this script does not."""
    if isinstance(graph, Tagging):
        return "It reads one row: words beyond its length have no tag, where Headstock would read on in further rows."
    if isinstance(graph, Answering):
        return "It reads one row: what is beyond its length is not seen, where Headstock would read on in further rows."
    if isinstance(graph, Embedding):
        return "It reads one row of a long text, where Headstock averages over as many as it takes."
    if isinstance(graph, Continuing):
        return "It ends where the model's context does, where Headstock forgets the beginning and goes on."
    return ""


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
