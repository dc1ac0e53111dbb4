"""Classification of text pairs, such as entailment or paraphrase, read as [CLS] A [SEP] B [SEP]."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from headstock.data.records import Records
from headstock.tasks.base import TASKS
from headstock.tasks.classify import Classify, read_class_records
from headstock.tasks.labelled import Nouns
from headstock.tasks.pooled_text import PAIR_FORM
from headstock.tasks.soft_labels import SoftLabelConfig


@dataclass(frozen=True)
class PairConfig(SoftLabelConfig):
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
        return read_class_records(path, config, required=("text", "text_b"), **options)
