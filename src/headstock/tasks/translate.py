"""Translation with an encoder-decoder and beam search."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from headstock.config import added
from headstock.data.parallel import SOURCE, TARGET, read_parallel
from headstock.data.records import Records
from headstock.data.tokenizer import Tokenizer
from headstock.decoding.beam_search import beam_search
from headstock.decoding.sampling import suppressed_tokens
from headstock.errors import ConfigError, UserError
from headstock.intervals import Formula
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE_INDEX, Batch, find_label_positions, pad
from headstock.model.heads import LMHead
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Examples, token_losses, token_score
from headstock.tasks.class_labels import MAX_PROBLEMS, join_some
from headstock.tasks.error_analysis import MAX_ERRORS, error_record
from headstock.tasks.labelled import (
    Attribution,
    EncodedRows,
    LabelledTask,
    Nouns,
    RowExamples,
    RowLocations,
    RowMetrics,
)
from headstock.tasks.predictions import Prediction
from headstock.tasks.special_tokens import decoder_start_id
from headstock.tasks.text_metrics import bleu, bleu_counts, chrf, chrf_counts, sacrebleu_signatures
from headstock.tasks.widgets import DisplayPart, PlainText, Widget

MIN_LIMIT = 32  # tokens that any translation may have


@dataclass(frozen=True)
class TranslateConfig:
    beams: int = 4  # beams of the search; 1 is greedy
    length_penalty: float = 1.0  # log-probabilities are divided by length ** length_penalty
    no_repeat: int = 0  # n-grams of this size do not repeat; 0 for no limit
    max_tokens: int | None = None  # of a translation; about twice the source unless given
    long: Literal["cut", "refuse"] = "cut"  # sentences that are longer than a row
    two_tokenizers: bool = False  # separate source and target tokenizers for a model from a preset
    validate_bleu: bool = False  # select the best checkpoint by the BLEU of greedy translations instead of the loss
    decoder_start: Literal["bos", "pad"] = added("bos")  # the first token of a translation

    def __post_init__(self) -> None:
        problems = []
        for name, minimum in (("beams", 1), ("no_repeat", 0), ("max_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < minimum:
                problems.append((name, f"must be {minimum} or more, not {value}"))
        if not np.isfinite(self.length_penalty):
            problems.append(("length_penalty", f"must be a number, not {self.length_penalty}"))
        if problems:
            raise ConfigError(problems)


@dataclass
class EncodedPairs(EncodedRows):
    """Tokenized sources and targets; the labels are the reference translations as text."""

    targets: list[list[int]] | None

    def longest_side(self, row: int) -> int:
        """The number of tokens of the longer side."""
        return max(len(self.tokens[row]), 0 if self.targets is None else len(self.targets[row]))


@dataclass(frozen=True, eq=False)
class TranslationPrediction(Prediction):
    """The translation of a text."""

    text: str


@TASKS.add("translate")
class Translate(LabelledTask):
    """Translates by beam search."""

    Config: ClassVar[type] = TranslateConfig
    prediction_class: ClassVar[type[Prediction]] = TranslationPrediction
    target = TARGET
    input_column = SOURCE
    input_columns = (SOURCE,)
    example_row: ClassVar[Any] = "I like tea."
    prediction_settings: ClassVar[dict[str, tuple[float, float]]] = {
        "beams": (1, 16),
        "length_penalty": (0.0, 10.0),
        "no_repeat": (0, 100),
        "max_tokens": (1, 1024),
    }
    primary_metric = "bleu"
    huggingface_head = "ForConditionalGeneration"
    title = "translator"
    nouns = Nouns("sentence", "sentence", "sentence", "badly translated sentences", "next-token accuracy", unit="pair")
    verb = "translate"
    input_example = "Two young men are playing football in the park."
    translates = True
    lens = "token"
    needs_encoder_decoder = True
    is_language_model = True
    pretraining_objective = "denoise"
    can_ensemble = False
    can_freeze_backbone = False
    reuses_head = True
    formulas: ClassVar[dict[str, Formula]] = {"bleu": Formula(bleu), "chrf": Formula(chrf)}
    training_defaults: ClassVar[dict[str, Any]] = {
        "batch_tokens": 4096,
        "label_smoothing": 0.1,
        "schedule": "cosine",
        "beta2": 0.98,
        "lr": 1e-3,
        "epochs": 10.0,
    }

    def __init__(self, config: TranslateConfig, tokenizer: Tokenizer | None):
        super().__init__(config, tokenizer)
        if tokenizer is None:
            return
        self.source_tokenizer = tokenizer.source_tokenizer or tokenizer
        if tokenizer.eos is None or self.source_tokenizer.eos is None:
            raise UserError("this tokenizer has no EOS token, which a translation must end with")
        if config.two_tokenizers and tokenizer.source_tokenizer is None:
            raise UserError("task.two_tokenizers: the pretrained run has one tokenizer for both sides")
        self.eos, self.source_eos = tokenizer.eos, self.source_tokenizer.eos
        self.bos = decoder_start_id(tokenizer, config.decoder_start)

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        return {"token": LMHead(backbone)}

    # From files to batches

    @classmethod
    def read_file(cls, path: str | Path, *, config: Any, **options: Any) -> Records:
        return read_parallel(path, **options)

    def columns_of(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        return {SOURCE: list(rows)}

    def prepare(self, records: Records, *, labelled: bool = True) -> EncodedPairs:
        references = records.columns.get(TARGET) if labelled else None
        return EncodedPairs(
            tokens=self.source_tokenizer.encode_batch(records.columns[SOURCE]),
            labels=references,
            locations=RowLocations(records),
            targets=None if references is None else self.tokenizer.encode_batch(references),
        )

    def row_examples(self, data: EncodedPairs, length: int) -> Examples:
        if self.config.long == "refuse" and (rows := self.too_long(data, length)):
            problems = [f"{data.locations[row]} has {data.longest_side(row)} tokens" for row in rows]
            hint = "set long=cut to truncate them"
            raise UserError(f"longer than a row of {length} with EOS: {join_some(problems, MAX_PROBLEMS)} ({hint})")
        return TranslationExamples(self, data, length)

    def row_length(self, data: EncodedPairs) -> int:
        return data.longest_side(0) + 1

    def too_long(self, data: EncodedPairs, length: int) -> list[int]:
        """The rows in which a side does not fit into `length` tokens with its EOS token."""
        return [row for row in range(len(data)) if data.longest_side(row) >= length]

    def reading_warnings(self, data: EncodedPairs, *, length: int) -> list[str]:
        rows = self.too_long(data, length)
        if not rows:
            return []
        subject = "1 sentence is" if len(rows) == 1 else f"{len(rows):,} sentences are"
        return [f"{subject} longer than a row of {length} tokens and truncated, first {data.locations[rows[0]]}"]

    # From batches to predictions

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        sums = token_losses(model, model(batch).hidden, batch, smoothing=smoothing)
        if self.config.validate_bleu and not model.training:
            sums |= {f"bleu {i}": count for i, count in enumerate(self.greedy_bleu_counts(model, batch))}
        return sums

    def greedy_bleu_counts(self, model: Model, batch: Batch) -> Tensor:
        """The summed BLEU statistics of greedy translations."""
        labels = [[token for token in row if token != IGNORE_INDEX] for row in batch.labels["token"].tolist()]
        references = [self.tokenizer.decode(row) for row in labels if row]  # padding examples come last
        hypotheses = [self.tokenizer.decode(tokens) for tokens in self.search(model, batch, beams=1)[: len(references)]]
        return torch.from_numpy(bleu_counts(hypotheses, references).sum(0)).float()

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        metrics = token_score(sums, counts)
        if "bleu 0" in sums:
            statistics = [sums[name] for i in range(len(sums)) if (name := f"bleu {i}") in sums]
            metrics["bleu"] = float(bleu(np.array(statistics)))
        return metrics

    def selection_score(self, metrics: Mapping[str, float]) -> float:
        return -metrics["bleu"] if self.config.validate_bleu else metrics["loss"]

    def search(self, model: Model, batch: Batch, *, beams: int) -> list[list[int]]:
        """The tokens of each translation. Length limits depend on the source alone, so batching changes nothing."""
        assert batch.source is not None
        tokens, padding = batch.source.tokens, batch.source.padding
        lengths = [tokens.size(1)] * len(tokens) if padding is None else (~padding).sum(1).tolist()
        sources = [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
        rows_by_limit: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            rows_by_limit.setdefault(self.token_limit(length), []).append(row)
        translations: list[list[int]] = [[] for _ in sources]
        for limit, rows in rows_by_limit.items():
            results = beam_search(
                model,
                [[self.bos]] * len(rows),
                beams=beams,
                max_tokens=limit,
                end=self.eos,
                length_penalty=self.config.length_penalty,
                no_repeat=self.config.no_repeat,
                suppress_tokens=suppressed_tokens(self.tokenizer, model.backbone.config.vocabulary),
                sources=[sources[row] for row in rows],
            )
            for row, hypotheses in zip(rows, results, strict=True):
                translations[row] = hypotheses[0].tokens
        return translations

    def token_limit(self, source_length: int) -> int:
        """The maximum length of a translation: a power of two, so that similar lengths share a batch."""
        if self.config.max_tokens is not None:
            return self.config.max_tokens
        return 1 << (max(MIN_LIMIT, 2 * source_length + 8) - 1).bit_length()

    def outputs(self, model: Model, batch: Batch) -> list[Tensor]:
        """The tokens of each translation."""
        return [torch.tensor(tokens, dtype=torch.long) for tokens in self.search(model, batch, beams=self.config.beams)]

    def predictions(self, data: EncodedPairs, outputs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        return [{"text": self.tokenizer.decode(int(token) for token in tokens)} for tokens in outputs]

    def predicted_target(self, prediction: Mapping[str, Any]) -> str:
        return prediction["text"]

    def as_text(self, prediction: dict[str, Any]) -> str:
        return prediction["text"]

    @property
    def widgets(self) -> tuple[Widget, ...]:
        (widget,) = super().widgets
        return (replace(widget, aligned=True),)

    def display(self, row: Any, prediction: Mapping[str, Any]) -> list[DisplayPart]:
        return [PlainText(prediction["text"], "Translation")]

    # Metrics and error analysis

    def row_metrics(self, data: EncodedPairs, outputs: Sequence[np.ndarray]) -> RowMetrics:
        hypotheses = [row["text"] for row in self.predictions(data, outputs)]
        counts = {"bleu": bleu_counts(hypotheses, data.labels), "chrf": chrf_counts(hypotheses, data.labels)}
        return {name: self.formulas[name].of(values) for name, values in counts.items()}

    def extra_metrics(self, data: EncodedPairs, outputs: Sequence[np.ndarray]) -> dict[str, Any]:
        return {"signature": self.metric_signatures()}

    def metric_signatures(self) -> dict[str, str]:
        return sacrebleu_signatures()

    def error_analysis(
        self, rows: Records, data: Any, outputs: Sequence[np.ndarray], *, attribute: Attribution | None = None
    ) -> dict[str, Any]:
        """The translations with the lowest chrF."""
        predicted, texts = [row["text"] for row in self.predictions(data, outputs)], rows.display_texts
        scores = chrf(chrf_counts(predicted, data.labels))
        errors = [
            error_record(
                data.locations[row],
                texts[row],
                label=data.labels[row],
                predicted=predicted[row],
                confidence=None,
                chrf=round(float(scores[row]), 5),
            )
            for row in np.argsort(scores, kind="stable")[:MAX_ERRORS].tolist()
        ]
        return {"mistakes": errors}

    # Explanations

    def for_loss(self) -> "Translate":
        return self.with_settings(validate_bleu=False) if self.config.validate_bleu else self


class TranslationExamples(RowExamples):
    """Sources with their translations."""

    data: EncodedPairs

    def __init__(self, task: Translate, data: EncodedPairs, length: int):
        super().__init__(data)
        self.task, self.length = task, length
        sides = [data.tokens] if data.targets is None else [data.tokens, data.targets]
        self.lengths = np.sum([[min(len(row) + 1, length) for row in side] for side in sides], axis=0)

    def batch(self, indices: Sequence[int]) -> Batch:
        task, targets = self.task, self.data.targets
        return teacher_forcing_batch(
            [self.data.tokens[i] for i in indices],
            None if targets is None else [targets[i] for i in indices],
            bos=task.bos,
            eos=task.eos,
            source_eos=task.source_eos,
            filler=task.pad_id,
            length=self.length,
        )


def teacher_forcing_batch(
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]] | None,
    *,
    bos: int,
    eos: int,
    source_eos: int,
    filler: int,
    length: int,
) -> Batch:
    """Sources S <eos> with decoder inputs <bos> A B C and labels A B C <eos>; without targets, inputs <bos>.

    Each target token is predicted from the source and the true tokens before it. Both sides are truncated to `length`
    tokens; a truncated target has no EOS label.
    """
    source = Batch(*pad([[*tokens[: length - 1], source_eos] for tokens in sources], filler))
    if targets is None:
        return Batch(torch.full((len(sources), 1), bos), source=source)
    inputs, padding = pad([[bos, *target][:length] for target in targets], filler)
    labels, _ = pad([[*target, eos][:length] for target in targets], IGNORE_INDEX)
    positions = find_label_positions(labels)
    return Batch(inputs, padding, source=source, labels={"token": labels}, label_positions={"token": positions})
