"""How the model of a task is exported as a graph, and the example program that runs it without torch."""

from dataclasses import dataclass, field
from typing import Any

CLASSIFY = """
def scores(part):
    row = np.array([about["before"] + part + about["after"]])
    return session.run(["logits"], {{"input_ids": row, "attention_mask": np.ones_like(row)}})[0][0]

for text in sys.argv[1:]:
    ids, room = {cut}, about["room"]
    found = np.mean([scores(part) for part in PARTS], axis=0)
    likely = LIKELY
    print(json.dumps(dict(zip(about["classes"], likely.tolist()))))
"""
TRUNCATION = {
    "head": "[ids[:room]]",
    "tail": "[ids[-room:]]",
    "head+tail": "[ids if len(ids) <= room else ids[: room // 4] + ids[room // 4 - room :]]",
    "windows": "[ids[at : at + room] for at in range(0, max(1, len(ids) - room + room // 2), max(1, room // 2))]",
}
SOFTMAX = "np.exp(found - found.max()) / np.exp(found - found.max()).sum()"
SIGMOID = "1 / (1 + np.exp(-found))"

PAIR = """
first, second = ({cut} for text in sys.argv[1:3])
while len(first) + len(second) > about["length"] - 3:  # the end of the longer text is cut
    (first if len(first) > len(second) else second).pop()
row = np.array([[about["start"], *first, about["separator"], *second, about["separator"]]])
given = {{"input_ids": row, "attention_mask": np.ones_like(row)}}
{segments}found = session.run(["logits"], given)[0][0]
likely = LIKELY
print(json.dumps(dict(zip(about["classes"], likely.tolist()))))
"""

TAG = """
for text in sys.argv[1:]:
    cut = tokenizer.encode(text, add_special_tokens=False)
    row = np.array([about["before"] + cut.ids[: about["room"]] + about["after"]])
    scores = session.run(["logits"], {{"input_ids": row, "attention_mask": np.ones_like(row)}})[0][0, 1:]
    for word in re.finditer(about["word"], text):  # a word's tag is that of its first token
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
{segments}start, end = (scores[0] for scores in session.run(["start_logits", "end_logits"], given))
spans = [(i, j) for i in reach for j in reach if 0 <= j - i < about["longest_answer"]]
first, last = max(spans, key=lambda span: start[span[0]] + end[span[1]])
answer = context[cut.offsets[first - lead][0] : cut.offsets[last - lead][1]].strip()
print(json.dumps({{"answer": ANSWER}}, ensure_ascii=False))
"""
NO_ANSWER = '"" if start[0] + end[0] - start[first] - end[last] > about["threshold"] else answer'

RAW_OUTPUTS = """
for text in sys.argv[1:]:
    row = np.array([about["before"] + {cut}[: about["room"]] + about["after"]])
    found = session.run(None, {{"input_ids": row, "attention_mask": np.ones_like(row)}})
    print(json.dumps([one[0].tolist() for one in found]))
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
