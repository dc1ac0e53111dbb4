"""Classification of text pairs, such as entailment or paraphrase, read as [CLS] A [SEP] B [SEP]."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from headstock.data.labelled_texts import read_records
from headstock.data.records import Records
from headstock.tasks.base import TASKS
from headstock.tasks.class_labels import ClassConfig
from headstock.tasks.classify import Classify
from headstock.tasks.labelled import Nouns
from headstock.tasks.pooled_text import PAIR_FORM


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
    row_form = PAIR_FORM
    texts_per_row = 2
    input_columns = ("text", "text_b")
    example_row: ClassVar[Any] = {"text": "It rains.", "text_b": "The sun shines."}
    row_description = "two texts"

    @classmethod
    def read_file(cls, path: str | Path, *, config: Any, **options: Any) -> Records:
        return read_records(path, required=("text", "text_b"), **options)
