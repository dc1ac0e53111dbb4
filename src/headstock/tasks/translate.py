"""Translation with an encoder-decoder and beam search."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from headstock.data.parallel import SOURCE, TARGET, read_parallel
from headstock.data.records import Records
from headstock.data.tokenizer import Tokenizer
from headstock.decoding.beam_search import beam_search
from headstock.errors import ConfigError, UserError
from headstock.intervals import SufficientStatistics
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.heads import LMHead
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Examples
from headstock.tasks.error_analysis import SHOWN
from headstock.tasks.labelled import Attribution, LabelledTask, RowMetrics
from headstock.tasks.teacher_forcing import teacher_forcing_batch, token_losses, token_score
from headstock.tasks.translation_metrics import bleu, bleu_counts, chrf, chrf_counts, signatures
from headstock.tasks.wording import Nouns

SHORTEST_LIMIT = 32  # tokens that any translation may have


@dataclass(frozen=True)
class TranslateConfig:
    beams: int = 4  # beams of the search; 1 is greedy
    length_penalty: float = 1.0  # log-probabilities are divided by length ** length_penalty
    no_repeat: int = 0  # n-grams of this size do not repeat; 0 for no limit
    max_tokens: int | None = None  # of a translation; about twice the source unless given
    long: Literal["cut", "refuse"] = "cut"  # sentences that are longer than a row
    two_tokenizers: bool = False  # separate source and target tokenizers for a model from a preset
    validate_bleu: bool = False  # select the best checkpoint by the BLEU of greedy translations instead of the loss

    def __post_init__(self) -> None:
        problems = []
        for name, least in (("beams", 1), ("no_repeat", 0), ("max_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                problems.append((name, f"must be {least} or more, not {value}"))
        if not np.isfinite(self.length_penalty):
            problems.append(("length_penalty", f"must be a number, not {self.length_penalty}"))
        if problems:
            raise ConfigError(problems)


@dataclass
class EncodedPairs:
    """Tokenized sources and targets."""

    sources: list[list[int]]
    targets: list[list[int]] | None
    labels: list[str] | None  # the reference translations
    places: list[str]
    bytes: int

    def __len__(self) -> int:
        return len(self.sources)

    def select(self, rows: Sequence[int]) -> "EncodedPairs":
        def chosen(values: list[Any] | None) -> Any:
            return None if values is None else [values[i] for i in rows]

        sides = chosen(self.sources), chosen(self.targets), chosen(self.labels)
        return EncodedPairs(*sides, chosen(self.places), self.bytes)


@TASKS.add("translate")
class Translate(LabelledTask):
    """Translates by beam search."""

    Config: ClassVar[type] = TranslateConfig
    target = TARGET
    input_column = SOURCE
    primary_metric = "bleu"
    huggingface_head = "ForConditionalGeneration"
    title = "translator"
    nouns = Nouns(
        "sentence", "sentence", "sentence", "badly translated sentences", "share of next tokens right", unit="pair"
    )
    verb = "translate"
    translates = True
    lens = "token"
    needs_encoder_decoder = True
    is_language_model = True
    can_ensemble = False
    can_freeze_backbone = False
    reuses_head = True
    formulas: ClassVar[dict[str, Callable[[np.ndarray], np.ndarray]]] = {"bleu": bleu, "chrf": chrf}
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
        self.source_tokenizer = tokenizer.source_tokenizer or tokenizer  # what cuts the sources
        if tokenizer.eos is None or self.source_tokenizer.eos is None:
            raise UserError("this tokenizer has no end mark, which a translation must end with")
        if config.two_tokenizers and tokenizer.source_tokenizer is None:
            raise UserError("task.two_tokenizers: the run to begin from has one tokenizer for both sides")
        self.eos, self.source_eos = tokenizer.eos, self.source_tokenizer.eos

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        return {"token": LMHead(backbone)}

    # From files to batches

    @classmethod
    def read_rows(cls, path: str | Path, config: Any, **options: Any) -> Records:
        return read_parallel(path, **options)

    def columns_of(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        return {SOURCE: list(rows)}

    def check(self, records: Records) -> None:
        """Any text may be a translation."""

    def prepare(self, records: Records, *, labelled: bool = True) -> EncodedPairs:
        sources, wanted = records.columns[SOURCE], records.columns.get(TARGET) if labelled else None
        return EncodedPairs(
            self.source_tokenizer.encode_batch(sources),
            None if wanted is None else self.tokenizer.encode_batch(wanted),
            wanted,
            [records.location(i) for i in range(len(records))],
            sum(len(text.encode()) for text in (sources if wanted is None else wanted)),
        )

    def examples(self, data: EncodedPairs, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        if self.config.long == "refuse" and (found := too_long(data, length)):
            named = "; ".join(f"{data.places[i]} has {count} tokens" for i, count in found[:5])
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise UserError(f"longer than a row of {length} tokens with its mark: {named}{more} (set long=cut to cut)")
        return TranslationExamples(self, data, length)

    def reading_warnings(self, data: EncodedPairs, *, length: int) -> list[str]:
        found = too_long(data, length)
        if not found:
            return []
        one = "1 sentence is" if len(found) == 1 else f"{len(found):,} sentences are"
        return [f"{one} longer than a row of {length} tokens with its mark and cut, first {data.places[found[0][0]]}"]

    # From batches to numbers

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        sums = token_losses(model, batch, smoothing=smoothing)
        return sums | self.bleu_of(model, batch) if self.config.validate_bleu and not model.training else sums

    def bleu_of(self, model: Model, batch: Batch) -> dict[str, Tensor]:
        """The BLEU statistics of greedy translations: `bleu 0`, `bleu 1`, ..."""
        real = [row for row in batch.labels["token"].tolist() if any(token != IGNORE_INDEX for token in row)]
        wanted = [self.tokenizer.decode(token for token in row if token != IGNORE_INDEX) for row in real]
        found = self.search(model, batch, beams=1)[: len(wanted)]  # padding rows come last
        counts = bleu_counts([self.tokenizer.decode(tokens) for tokens in found], wanted).sum(0)
        return {f"bleu {place}": torch.tensor(float(count)) for place, count in enumerate(counts)}

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        metrics = token_score(sums, counts)
        found = [sums[name] for place in range(len(sums)) if (name := f"bleu {place}") in sums]
        return metrics | ({"bleu": float(bleu(np.array(found)))} if found else {})

    def selection_score(self, metrics: Mapping[str, float]) -> float:
        return -metrics["bleu"] if self.config.validate_bleu else metrics["loss"]

    def search(self, model: Model, batch: Batch, *, beams: int) -> list[list[int]]:
        """The tokens of each translation. Length limits depend on the source alone, so batching changes nothing."""
        assert batch.source is not None
        padding = batch.source.padding
        counts = [batch.source.tokens.size(1)] * len(batch.source.tokens)
        counts = counts if padding is None else (~padding).sum(1).tolist()
        sources = [row[:count] for row, count in zip(batch.source.tokens.tolist(), counts, strict=True)]
        by_limit: dict[int, list[int]] = {}
        for row, count in enumerate(counts):
            by_limit.setdefault(self.limit(count), []).append(row)
        found: list[list[int]] = [[] for _ in sources]
        for limit, rows in by_limit.items():
            best = beam_search(
                model,
                [[self.bos]] * len(rows),
                beams=beams,
                max_tokens=limit,
                end=self.eos,
                length_penalty=self.config.length_penalty,
                no_repeat=self.config.no_repeat,
                forbidden=self.unspoken(model.backbone.config.vocabulary),
                sources=[sources[row] for row in rows],
            )
            for row, hypotheses in zip(rows, best, strict=True):
                found[row] = hypotheses[0].tokens
        return found

    def limit(self, count: int) -> int:
        """The token limit of a translation: a power of two, so that similar lengths share a batch."""
        if self.config.max_tokens is not None:
            return self.config.max_tokens
        return 1 << (max(SHORTEST_LIMIT, 2 * count + 8) - 1).bit_length()

    def unspoken(self, vocabulary: int) -> list[int]:
        """Token ids that are never generated."""
        special = (number for number in self.tokenizer.all_special_ids if number != self.eos)
        return [*special, *range(self.tokenizer.vocabulary, vocabulary)]

    def outputs(self, model: Model, batch: Batch) -> list[Tensor]:
        """The tokens of each translation."""
        return [torch.tensor(tokens, dtype=torch.long) for tokens in self.search(model, batch, beams=self.config.beams)]

    def predictions(self, data: EncodedPairs, outputs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        return [{"text": self.tokenizer.decode(int(token) for token in tokens)} for tokens in outputs]

    def as_text(self, prediction: dict[str, Any]) -> str:
        return prediction["text"]

    def row_metrics(self, data: EncodedPairs, outputs: Sequence[np.ndarray]) -> RowMetrics:
        assert data.labels is not None
        said = [row["text"] for row in self.predictions(data, outputs)]
        counted = {"bleu": bleu_counts(said, data.labels), "chrf": chrf_counts(said, data.labels)}
        return {name: SufficientStatistics(counts, self.formulas[name]) for name, counts in counted.items()}

    def row_length(self, data: EncodedPairs) -> int:
        return max(len(data.sources[0]), len((data.targets or data.sources)[0])) + 1

    def for_loss(self) -> "Translate":
        return self.with_settings(validate_bleu=False) if self.config.validate_bleu else self

    def predicted_target(self, prediction: Mapping[str, Any]) -> str:
        return prediction["text"]

    def error_analysis(
        self, rows: Records, data: Any, outputs: Sequence[np.ndarray], *, attribute: Attribution | None = None
    ) -> dict[str, Any]:
        """The translations with the lowest chrF."""
        predicted, texts = [row["text"] for row in self.predictions(data, outputs)], rows.display_texts
        scores = chrf(chrf_counts(predicted, data.labels))
        mistakes = [
            {
                "place": data.places[row],
                "text": texts[row],
                "label": data.labels[row],
                "predicted": predicted[row],
                "confidence": None,
                "chrf": round(float(scores[row]), 5),
                "tokens": [],
            }
            for row in np.argsort(scores, kind="stable")[:SHOWN].tolist()
        ]
        return {"mistakes": mistakes}

    def extra_metrics(self, data: EncodedPairs, outputs: Sequence[np.ndarray]) -> dict[str, Any]:
        return {"signature": self.metric_signatures()}

    def metric_signatures(self) -> dict[str, str]:
        return signatures()


def too_long(data: EncodedPairs, length: int) -> list[tuple[int, int]]:
    """The rows in which a side does not fit into `length` tokens, with the tokens of the longer side."""
    sides = zip(data.sources, data.targets or data.sources, strict=True)
    longest = (max(len(source), len(target)) for source, target in sides)
    return [(row, count) for row, count in enumerate(longest) if count >= length]


class TranslationExamples:
    """Sources with their translations."""

    def __init__(self, task: Translate, data: EncodedPairs, length: int):
        self.task, self.data, self.length = task, data, length
        sides = [data.sources] if data.targets is None else [data.sources, data.targets]
        self.lengths = np.sum([[min(len(row) + 1, length) for row in side] for side in sides], axis=0)

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: Sequence[int]) -> Batch:
        data, task = self.data, self.task
        rows = [(data.sources[i], None if data.targets is None else data.targets[i]) for i in indices]
        marks = {"start": task.bos, "end": task.eos, "source_end": task.source_eos, "filler": task.pad_id}
        return teacher_forcing_batch(rows, **marks, length=self.length)

    def name(self, index: int) -> str:
        return self.data.places[index]
