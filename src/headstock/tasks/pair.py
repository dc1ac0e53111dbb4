"""Classification of text pairs, such as entailment or paraphrase, read as [CLS] A [SEP] B [SEP]."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from headstock.data.labelled_texts import read_records
from headstock.data.records import Records
from headstock.tasks.base import TASKS
from headstock.tasks.class_labels import ClassConfig
from headstock.tasks.classify import Classify
from headstock.tasks.graph_spec import PAIR, SOFTMAX, GraphSpec
from headstock.tasks.labelled import EncodedRows, Nouns, texts_in
from headstock.tasks.special_tokens import PAIR_SPECIAL_TOKENS, segment_ids


@dataclass(frozen=True)
class PairConfig(ClassConfig):
    """The longer text of a pair is truncated first."""


@TASKS.add("pair")
class Pair(Classify):
    """Predicts a class for two texts."""

    Config = PairConfig
    title = "classifier of pairs"
    nouns = Nouns("pair", "pair", "pair", "wrongly classified pairs")
    example = "--file pairs.csv"
    row_form = "two texts, such as ('It rains.', 'The street is wet.')"
    texts_per_row = 2
    row_description = "two texts"

    @classmethod
    def read_file(cls, path: str | Path, *, config: Any, **options: Any) -> Records:
        return read_records(path, required=("text", "text_b"), **options)

    @staticmethod
    def is_row(row: Any) -> bool:
        return len(texts_in(row) or ()) == 2

    def columns_of(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        self.check_rows(rows)
        return {"text": [first for first, _ in rows], "text_b": [second for _, second in rows]}

    def prepare(self, records: Records, *, labelled: bool = True) -> EncodedRows:
        first, second = (self.tokenizer.encode_batch(records.columns[column]) for column in ("text", "text_b"))
        return self.encoded(records, list(zip(first, second, strict=True)), labelled=labelled)

    def row_tokens(self, tokens: Sequence[Any], length: int) -> int:
        return min(sum(map(len, tokens)) + PAIR_SPECIAL_TOKENS, length)

    def sequences(self, tokens: Sequence[Any], length: int) -> list[list[int]]:
        first, second = truncate_pair(*tokens, room=length - PAIR_SPECIAL_TOKENS)
        return [[self.bos, *first, self.separator, *second, self.separator]]

    def segment_ids(self, tokens: Tensor) -> Tensor:
        return segment_ids(tokens, self.separator)

    def graph_spec(self) -> GraphSpec:
        script = PAIR.replace("PROBABILITIES", SOFTMAX)
        return replace(super().graph_spec(), script=script, segment_start="len(first) + 2", arguments="two texts")


def truncate_pair(first: Sequence[int], second: Sequence[int], *, room: int) -> tuple[Sequence[int], Sequence[int]]:
    """Both texts, the longer one truncated until they fit."""
    if len(first) + len(second) <= room:
        return first, second
    half = room // 2
    if len(first) <= half:
        return first, second[: room - len(first)]
    if len(second) <= half:
        return first[: room - len(second)], second
    return first[: room - half], second[:half]
