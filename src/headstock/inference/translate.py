"""What a finished model translates, and where it looked while it did.

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
from headstock.train.outputs import model_outputs


def translate_texts(
    model: Model, task: Translate, texts: Sequence[str], *, length: int, dtype: str = "auto"
) -> list[str]:
    """The translation of each text; of what is blank, nothing."""
    rows = [row for row, text in enumerate(texts) if text and not text.isspace()]
    made = [""] * len(texts)
    if rows:
        data = prepare_texts(task, [texts[row] for row in rows])
        found = model_outputs(model, task, data, length=length, dtype=dtype)
        for row, prediction in zip(rows, task.predictions(data, found), strict=True):
            made[row] = prediction["text"]
    return made


def prepare_texts(task: Translate, texts: Sequence[str]) -> EncodedPairs:
    records = Records("text", list(range(1, len(texts) + 1)), task.columns_of(texts))
    return task.prepare(records, labelled=False)


@dataclass(frozen=True)
class Alignment:
    """How much each token of a translation looked at each token of its source."""

    text: str
    source: list[str]  # S, the end mark last
    target: list[str]  # T, the end mark last unless the translation was cut off before it
    weights: np.ndarray  # (T, S), each row sums to one


@torch.no_grad()
def align_translation(model: Model, task: Translate, text: str, *, length: int) -> Alignment:
    """Translate one text and see what its tokens looked at: the mean over the heads of the decoder's last layer."""
    if not text.strip():
        raise UserError("no text to translate")
    data = prepare_texts(task, [text])
    (found,) = model_outputs(model, task, data, length=length)
    data.targets = [[int(token) for token in found]]
    batch = task.examples(data, length=length).batch([0]).to(model.device)
    assert batch.source is not None
    model.eval()
    seen: list[AttentionRecord] = []
    with record_attention(model, seen.append):
        model(batch)
    last = [look for look in seen if look.kind == "cross"][-1]
    written = batch.labels["token"][0].tolist()
    return Alignment(
        task.predictions(data, [found])[0]["text"],
        display_tokens(task.source_tokenizer, batch.source.tokens[0].tolist()),
        display_tokens(task.tokenizer, written),
        last.weights[0].mean(0).cpu().numpy(),
    )


def display_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Tokens as a person reads them; marks and parts of a character as the vocabulary spells them."""
    plain = [tokenizer.decode([token]) for token in tokens]
    return [
        tokenizer.id_to_token(token) if not text or "\ufffd" in text else text.strip() or "\u2423"
        for text, token in zip(plain, tokens, strict=True)
    ]
