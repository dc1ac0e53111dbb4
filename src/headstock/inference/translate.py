"""Translates texts and aligns translations with their sources by cross-attention.

T target tokens, S source tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headstock.data.records import Records
from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError
from headstock.model.attention_weights import AttentionRecord, record_attention
from headstock.model.model import Model
from headstock.tasks.translate import EncodedPairs, Translate
from headstock.train.evaluate import model_outputs

MAX_CHARACTER_TOKENS = 4  # a character has at most four bytes


def translate_texts(
    model: Model, task: Translate, texts: Sequence[str], *, length: int, dtype: str = "auto"
) -> list[str]:
    """The translation of each text; a blank text gives an empty string."""
    rows = [row for row, text in enumerate(texts) if text and not text.isspace()]
    result = [""] * len(texts)
    if rows:
        data = prepare_texts(task, [texts[row] for row in rows])
        outputs = model_outputs(model, task, data, length=length, dtype=dtype)
        for row, prediction in zip(rows, task.predictions(data, outputs), strict=True):
            result[row] = prediction["text"]
    return result


def prepare_texts(task: Translate, texts: Sequence[str]) -> EncodedPairs:
    records = Records("text", list(range(1, len(texts) + 1)), task.columns_of(texts))
    return task.prepare(records, labelled=False)


@dataclass(frozen=True)
class Alignment:
    """A translation and its cross-attention weights."""

    text: str
    source: list[str]  # S tokens, EOS last
    target: list[str]  # T tokens, EOS last unless the translation was truncated
    weights: np.ndarray  # (T, S), each row sums to one


@torch.no_grad()
def align_translation(model: Model, task: Translate, text: str, *, length: int) -> Alignment:
    """Translate one text and average the cross-attention of the decoder's last layer over its heads."""
    if not text.strip():
        raise UserError("no text to translate")
    data = prepare_texts(task, [text])
    (output,) = model_outputs(model, task, data, length=length)
    data.targets = [[int(token) for token in output]]
    batch = task.examples(data, length=length).batch([0]).to(model.device)
    assert batch.source is not None
    model.eval()
    records: list[AttentionRecord] = []
    with record_attention(model, records.append):
        model(batch)
    last = [record for record in records if record.kind == "cross"][-1]
    return Alignment(
        task.predictions(data, [output])[0]["text"],
        display_tokens(task.source_tokenizer, batch.source.tokens[0].tolist()),
        display_tokens(task.tokenizer, batch.labels["token"][0].tolist()),
        last.weights[0].mean(0).cpu().numpy(),
    )


def display_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Readable tokens. Of a character in several tokens, each shows the whole with its number: `\u00e9 (1/2)`.

    Special tokens, and bytes that give no character, appear as in the vocabulary.
    """
    texts: list[str] = []
    while len(texts) < len(tokens):
        start = len(texts)
        count = complete_tokens(tokenizer, tokens[start:])
        text = tokenizer.decode(list(tokens[start : start + count]))
        if not text or "\ufffd" in text:
            texts.append(tokenizer.id_to_token(tokens[start]))
        elif count == 1:
            texts.append(text.strip() or "\u2423")
        else:
            texts += [f"{text.strip()} ({number}/{count})" for number in range(1, count + 1)]
    return texts


def complete_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> int:
    """How many of the first tokens give whole characters; 1 if none of the next few do."""
    counts = range(1, min(MAX_CHARACTER_TOKENS, len(tokens)) + 1)
    return next((count for count in counts if "\ufffd" not in tokenizer.decode(list(tokens[:count]))), 1)
