"""Classification of text pairs, such as entailment or paraphrase, read as [CLS] A [SEP] B [SEP]."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from headstock.data.labelled_texts import read_records
from headstock.data.records import Records
from headstock.data.tokenizer import Tokenizer
from headstock.tasks.base import TASKS
from headstock.tasks.class_labels import ClassConfig
from headstock.tasks.classify import Classify, EncodedTexts
from headstock.tasks.graph_spec import PAIR, SOFTMAX, GraphSpec
from headstock.tasks.labelled import segment_ids, separator_id, texts_in
from headstock.tasks.wording import Nouns

MARKS = 3  # the first token, and a separator after each text


@dataclass(frozen=True)
class PairConfig(ClassConfig):
    """The longer text of a pair is truncated first."""


@TASKS.add("pair")
class Pair(Classify):
    """Predicts a class for two texts."""

    Config = PairConfig
    title = "classifier of pairs"
    nouns = Nouns("pair", "pair", "pair", "wrongly classified pairs", "accuracy")
    example = "--file pairs.csv"
    row_form = "two texts, such as ('It rains.', 'The street is wet.')"
    row_is_text = False
    texts_per_row = 2
    row_description = "two texts"

    def __init__(self, config: PairConfig, tokenizer: Tokenizer | None):
        super().__init__(config, tokenizer)
        if tokenizer is not None:
            self.separator = separator_id(tokenizer)

    @classmethod
    def read_rows(cls, path: str | Path, config: Any, **options: Any) -> Records:
        return read_records(path, required=("text", "text_b"), **options)

    def graph_spec(self) -> GraphSpec:
        return replace(
            super().graph_spec(),
            script=PAIR.replace("LIKELY", SOFTMAX),
            segment_start="len(first) + 2",
            arguments="two texts",
        )

    @staticmethod
    def is_row(row: Any) -> bool:
        return len(texts_in(row) or ()) == 2

    def columns_of(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        self.check_rows(rows)
        return {"text": [first for first, _ in rows], "text_b": [second for _, second in rows]}

    def prepare(self, records: Records, *, labelled: bool = True) -> EncodedTexts:
        first, second = records.columns["text"], records.columns["text_b"]
        cut = self.tokenizer.encode_batch([*first, *second])
        pairs = list(zip(cut[: len(records)], cut[len(records) :], strict=True))
        return self.labelled(records, pairs, [*first, *second], labelled=labelled)

    def rows(self, tokens: Sequence[Any], length: int) -> list[list[int]]:
        first, second = shortened(*tokens, room=length - MARKS)
        return [[self.bos, *first, self.separator, *second, self.separator]]

    def length_of(self, tokens: Sequence[Any], length: int) -> int:
        return min(sum(map(len, tokens)) + MARKS, length)

    def which_text(self, tokens: Tensor) -> Tensor:
        return segment_ids(tokens, self.separator)


def shortened(first: Sequence[int], second: Sequence[int], *, room: int) -> tuple[Sequence[int], Sequence[int]]:
    """Both texts, the longer one truncated until they fit."""
    if len(first) + len(second) <= room:
        return first, second
    half = room // 2
    if len(first) <= half:
        return first, second[: room - len(first)]
    if len(second) <= half:
        return first[: room - len(second)], second
    return first[: room - half], second[:half]
