"""How the model of a task is exported as a graph, and the example program that runs it without torch."""

from dataclasses import dataclass, field
from typing import Any

CLASSIFY = """
def logits(part):
    row = np.array([about["before"] + part + about["after"]])
    return session.run(["logits"], {{"input_ids": row, "attention_mask": np.ones_like(row)}})[0][0]

for text in sys.argv[1:]:
    ids, room = {cut}, about["room"]
    scores = np.mean([logits(part) for part in PARTS], axis=0)
    probabilities = PROBABILITIES
    print(json.dumps(dict(zip(about["classes"], probabilities.tolist()))))
"""
TRUNCATION = {
    "head": "[ids[:room]]",
    "tail": "[ids[-room:]]",
    "head+tail": "[ids if len(ids) <= room else ids[: room // 4] + ids[room // 4 - room :]]",
    "windows": "[ids[i : i + room] for i in range(0, max(1, len(ids) - room + room // 2), max(1, room // 2))]",
}
SOFTMAX = "np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()"
SIGMOID = "1 / (1 + np.exp(-scores))"

PAIR = """
first, second = ({cut} for text in sys.argv[1:3])
while len(first) + len(second) > about["length"] - 3:  # the end of the longer text is cut
    (first if len(first) > len(second) else second).pop()
row = np.array([[about["start"], *first, about["separator"], *second, about["separator"]]])
inputs = {{"input_ids": row, "attention_mask": np.ones_like(row)}}
{segments}scores = session.run(["logits"], inputs)[0][0]
probabilities = PROBABILITIES
print(json.dumps(dict(zip(about["classes"], probabilities.tolist()))))
"""

VALUE = """
def value(part):
    row = np.array([about["before"] + part + about["after"]])
    return session.run(["value"], {{"input_ids": row, "attention_mask": np.ones_like(row)}})[0][0, 0]

for text in sys.argv[1:]:
    ids, room = {cut}, about["room"]
    print(float(np.mean([value(part) for part in PARTS])))
"""

PAIR_VALUE = """
first, second = ({cut} for text in sys.argv[1:3])
while len(first) + len(second) > about["length"] - 3:  # the end of the longer text is cut
    (first if len(first) > len(second) else second).pop()
row = np.array([[about["start"], *first, about["separator"], *second, about["separator"]]])
inputs = {{"input_ids": row, "attention_mask": np.ones_like(row)}}
{segments}print(float(session.run(["value"], inputs)[0][0, 0]))
"""

TAG = """
for text in sys.argv[1:]:
    encoding = tokenizer.encode(text, add_special_tokens=False)
    row = np.array([about["before"] + encoding.ids[: about["room"]] + about["after"]])
    scores = session.run(["logits"], {{"input_ids": row, "attention_mask": np.ones_like(row)}})[0][0, 1:]
    for word in re.finditer(about["word"], text):  # a word's tag is that of its first token
        token = next((i for i, (_, end) in enumerate(encoding.offsets) if end > word.start()), about["room"])
        print(word[0], about["classes"][scores[token].argmax()] if token < about["room"] else "-", sep="\\t")
"""

ANSWER = """
question, context = sys.argv[1:3]
question_ids = tokenizer.encode(question, add_special_tokens=False).ids[: about["longest_question"]]
encoding, first_token = tokenizer.encode(context, add_special_tokens=False), len(question_ids) + 2
tokens = range(first_token, min(first_token + len(encoding.ids), about["length"] - 1))
context_ids = encoding.ids[: len(tokens)]
row = np.array([[about["start"], *question_ids, about["separator"], *context_ids, about["separator"]]])
inputs = {{"input_ids": row, "attention_mask": np.ones_like(row)}}
{segments}start, end = (scores[0] for scores in session.run(["start_logits", "end_logits"], inputs))
spans = [(i, j) for i in tokens for j in tokens if 0 <= j - i < about["longest_answer"]]
first, last = max(spans, key=lambda span: start[span[0]] + end[span[1]])
answer = context[encoding.offsets[first - first_token][0] : encoding.offsets[last - first_token][1]].strip()
print(json.dumps({{"answer": ANSWER}}, ensure_ascii=False))
"""
NO_ANSWER = '"" if start[0] + end[0] - start[first] - end[last] > about["threshold"] else answer'

RAW_OUTPUTS = """
for text in sys.argv[1:]:
    row = np.array([about["before"] + {cut}[: about["room"]] + about["after"]])
    outputs = session.run(None, {{"input_ids": row, "attention_mask": np.ones_like(row)}})
    print(json.dumps([output[0].tolist() for output in outputs]))
"""


@dataclass(frozen=True)
class GraphSpec:
    """A description of an exported graph for model.json and the model card.

    The graph reads `input_ids` and `attention_mask`, and `token_type_ids` where the task joins two texts.
    """

    kind: str
    summary: str  # one sentence
    outputs: tuple[str, ...] = ("logits",)
    settings: dict[str, Any] = field(default_factory=dict)  # what model.json adds to the tokenizer's settings
    script: str = RAW_OUTPUTS  # with {cut} for the ids of `text` and {segments} where it sets token_type_ids
    segment_start: str = ""  # in the script, the position at which the second text starts
    arguments: str = "one or more texts"  # of the script
    needs_offsets: bool = False  # the script maps tokens to characters
    limits: str = ""  # what the script does not do with long texts


def pair_graph(kind: str, summary: str, script: str, **details: Any) -> GraphSpec:
    """The graph of a task that reads two texts."""
    return GraphSpec(kind, summary, script=script, segment_start="len(first) + 2", arguments="two texts", **details)
