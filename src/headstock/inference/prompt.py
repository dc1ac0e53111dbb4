"""Classification by prompting: a language model scores label words in a template, without training.

N texts, C classes, W label words.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from headstock.data.mask_gaps import MASK
from headstock.data.records import Records
from headstock.data.tokenizer import Tokenizer
from headstock.decoding.batching import token_batches
from headstock.decoding.fill_mask import MaskFiller
from headstock.errors import ConfigError, UserError, did_you_mean
from headstock.inference.score import ScoredPositions, score_rows
from headstock.model.model import Model
from headstock.tasks.base import Task
from headstock.tasks.calibration import softmax
from headstock.tasks.classify import Classify
from headstock.tasks.labelled import EncodedRows, RowLocations
from headstock.tasks.special_tokens import special_tokens_for

TEXT = "{text}"
DEFAULT_TEMPLATE = f"{TEXT} It was {MASK}."
CHUNK = 128  # texts whose label words are scored together
SEAM_TOKENS = 2  # that joining texts with spaces may add
MIN_TEXT_TOKENS = 4  # that must remain of a text beside the template and the examples

LabelWords = Mapping[str, Sequence[str]]
WordScores = Callable[[Sequence[str]], np.ndarray]  # N prompts -> (N, W) log-probabilities of the label words


@dataclass(frozen=True)
class PromptSettings:
    """How a language model is asked for a class."""

    template: str = DEFAULT_TEMPLATE  # with {text} and one [MASK], where the label words are scored
    label_words: tuple[str, ...] = ()  # LABEL=WORD or LABEL=WORD|WORD; the names of the classes unless given
    shots: int = 0  # labelled examples in the context; 0 is zero-shot
    # what probabilities are divided by: nothing, those without a text (PMI, contextual calibration), or the mean over
    # the texts that are classified together (batch calibration)
    prior: Literal["none", "content-free", "batch"] = "content-free"

    def __post_init__(self) -> None:
        problems = [
            ("template", f"must contain {part} once, as in {DEFAULT_TEMPLATE!r}, not {self.template!r}")
            for part in (TEXT, MASK)
            if self.template.count(part) != 1
        ]
        if self.shots < 0:
            problems.append(("shots", f"must be 0 or more, not {self.shots}"))
        for entry in self.label_words:
            label, _, words = entry.partition("=")
            if not label.strip() or ("=" in entry and not all(word.strip() for word in words.split("|"))):
                problems.append(("label_words", f"must be LABEL=WORD or LABEL=WORD|WORD, not {entry!r}"))
        if problems:
            raise ConfigError(problems)

    def words_by_label(self) -> dict[str, list[str]]:
        """The label words as given; a label without words is its own."""
        result: dict[str, list[str]] = {}
        for entry in self.label_words:
            label, _, words = entry.partition("=")
            if label.strip() in result:
                raise UserError(f"label_words: {label.strip()} is given twice; separate its words with |")
            result[label.strip()] = [word.strip() for word in (words or label).split("|")]
        return result

    def verbalizer(self, classes: Sequence[str]) -> dict[str, list[str]]:
        """The words of each class, which must differ between classes; the class names unless given."""
        given = self.words_by_label()
        if unknown := [label for label in given if label not in classes]:
            names = ", ".join(map(repr, classes))
            raise UserError(f"label_words: no class {unknown[0]!r}{did_you_mean(unknown[0], classes)} (have: {names})")
        if given and (missing := [label for label in classes if label not in given]):
            raise UserError(f"label_words: no words for {', '.join(map(repr, missing))}")
        words = {label: given.get(label, [label]) for label in classes}
        owners: dict[str, str] = {}
        for label, own in words.items():
            for name in own:
                if owners.setdefault(name, label) != label:
                    raise UserError(f"label_words: {name!r} stands for both {owners[name]!r} and {label!r}")
        return words


@dataclass(frozen=True)
class PromptTemplate:
    """Renders texts, and labelled examples before them, so that they fit into the model's context."""

    settings: PromptSettings
    tokenizer: Tokenizer
    capacity: int  # tokens of a prompt
    word_tokens: int = 1  # of the longest label word
    examples: Sequence[tuple[str, str]] = ()  # texts and label words

    def render(self, text: str) -> str:
        """The prompt of a text, with [MASK] where the label words are scored."""
        shown = [self.fill(example, word) for example, word in self.examples]
        return " ".join([*shown, self.fill(text, MASK)])

    def fill(self, text: str, word: str) -> str:
        before, after = self.settings.template.split(TEXT)
        own_mask = MASK if self.tokenizer.mask is None else self.tokenizer.id_to_token(self.tokenizer.mask)
        text = text.replace(MASK, "").replace(own_mask, "")
        shortened = self.shorten(text.strip()) if text else ""
        return f"{before}{shortened}{after}".replace(MASK, word).strip()

    def shorten(self, text: str) -> str:
        """The beginning of a text that leaves room for the template and the examples."""
        parts = 1 + len(self.examples)
        template = len(self.tokenizer.encode(self.settings.template.replace(TEXT, "").replace(MASK, "")))
        room = self.capacity // parts - template - self.word_tokens - SEAM_TOKENS
        if room < MIN_TEXT_TOKENS:
            shots = f" with {len(self.examples)} examples" if self.examples else ""
            raise UserError(f"template{shots}: leaves no room for a text; this run reads {self.capacity:,} tokens")
        offsets = self.tokenizer.offsets(text)
        return text if len(offsets) <= room else text[: offsets[room - 1][1]]


class PromptClassifier:
    """The probabilities of classes, from those of their label words in a template."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        task: Task,
        settings: PromptSettings,
        classes: Sequence[str],
        *,
        length: int,
        examples: Sequence[tuple[str, str]] = (),
    ):
        """`examples` are texts and their classes; the first `settings.shots` become part of every prompt."""
        verbalizer = settings.verbalizer(classes)
        self.words = [word for label in classes for word in verbalizer[label]]
        self.owners = np.array([number for number, label in enumerate(classes) for _ in verbalizer[label]])  # (W,)
        self.classes, self.prior = list(classes), settings.prior
        masked = task.fills_masks
        special = special_tokens_for(task, tokenizer, left_to_right=not masked)
        if masked:
            filler = MaskFiller(model, tokenizer, special=special, length=length, shift=task.mask_shift)
            self.score: WordScores = partial(masked_word_scores, filler, self.words)
        else:
            self.score = partial(causal_word_scores, model, tokenizer, self.words, special=special)
        shown = [(text, verbalizer[label][0]) for text, label in examples[: settings.shots]]
        check_label_words(tokenizer, dict(zip(self.words, (classes[i] for i in self.owners), strict=True)))
        longest = max(len(tokenizer.encode(word)) for word in self.words)
        self.template = PromptTemplate(settings, tokenizer, special.capacity(length), longest, shown)

    def probabilities(self, texts: Sequence[str]) -> np.ndarray:
        """(N, C)"""
        if not len(texts):
            return np.zeros((0, len(self.classes)))
        scores = self.class_scores(texts)
        if self.prior == "content-free":
            scores = scores - self.class_scores([""])
        elif self.prior == "batch":
            scores = scores - np.log(softmax(scores).mean(0) + 1e-300)
        return softmax(scores)

    def class_scores(self, texts: Sequence[str]) -> np.ndarray:
        """(N, C) log-probabilities, summed over the words of a class."""
        chunks = [texts[start : start + CHUNK] for start in range(0, len(texts), CHUNK)]
        words = np.concatenate([self.score([self.template.render(text) for text in chunk]) for chunk in chunks])
        owned = (words[:, self.owners == number] for number in range(len(self.classes)))
        return np.stack([np.logaddexp.reduce(part, axis=1) for part in owned], axis=1)


def check_label_words(tokenizer: Tokenizer, words: Mapping[str, str]) -> None:
    """Refuse words that the tokenizer cannot represent or distinguish; the values are their labels."""
    seen: dict[tuple[int, ...], str] = {}
    for word, label in words.items():
        ids = tuple(tokenizer.encode(word))
        if (other := seen.setdefault(ids, word)) != word:
            raise UserError(f"label words {other!r} and {word!r}: the run's tokenizer does not distinguish them")
        if not ids or tokenizer.unk in ids:
            raise UserError(
                f"label word {word!r} of {label!r}: the run's tokenizer cannot represent it; choose another with "
                f"--label-words {label}=WORD"
            )


def masked_word_scores(filler: MaskFiller, words: Sequence[str], prompts: Sequence[str]) -> np.ndarray:
    """(N, W) the log-probability of each word at the mask of each prompt; a row is read once for all words it fits."""
    rows: dict[tuple[tuple[int, ...], int], None] = {}
    terms: list[list[list[tuple[tuple[tuple[int, ...], int], int]]]] = []  # per prompt and word: rows and tokens
    for prompt in prompts:
        ids, (gap,) = filler.spelling.tokenize(prompt)
        by_word = []
        for word in words:
            pieces = filler.spelling.tokens_at(gap, word)
            steps = [filler.masked_row(ids, gap, pieces[:step], len(pieces)) for step in range(len(pieces))]
            keys = [(tuple(row), position) for row, position in steps]
            rows |= dict.fromkeys(keys)
            by_word.append(list(zip(keys, pieces, strict=True)))
        terms.append(by_word)
    unique = sorted(rows, key=lambda key: -len(key[0]))
    values = filler.mask_log_probabilities([(list(row), position) for row, position in unique])
    numbers = {key: number for number, key in enumerate(unique)}
    return np.array(
        [[sum(values[numbers[key], piece] for key, piece in word) for word in by_word] for by_word in terms]
    )


def causal_word_scores(
    model: Model, tokenizer: Tokenizer, words: Sequence[str], prompts: Sequence[str], *, special: Any
) -> np.ndarray:
    """(N, W) the log-likelihood of each word and the rest of the template, given what all words share before them."""
    rows: list[ScoredPositions] = []
    for prompt in prompts:
        tokens = tokenizer.encode_batch([prompt.replace(MASK, word) for word in words])
        shortest = min(map(len, tokens))
        shared = next((i for i in range(shortest) if len({ids[i] for ids in tokens}) > 1), shortest - 1)
        for ids in tokens:
            full, lead = special.wrap(ids), len(special.prefix) + shared
            rows.append(ScoredPositions(full[:-1], range(lead - 1, len(full) - 1), full[lead:], len(rows), 0))
    scores = np.zeros(len(rows))
    order = sorted(rows, key=lambda row: -len(row.tokens))
    for batch in token_batches(order, lambda row: len(row.tokens), model.device):
        for row, values in zip(batch, score_rows(model, batch, pad_id=special.pad, causal=True), strict=True):
            scores[row.text] = values.sum()
    return scores.reshape(len(prompts), len(words))


class PromptTask(Classify):
    """A classifier of raw texts, whose outputs come from a prompt rather than from a head."""

    title = "prompted language model"

    def prepare(self, records: Records, *, labelled: bool = True) -> EncodedRows:
        labels = self.label_array(records) if labelled and records.labels is not None else None
        return EncodedRows(records.display_texts, labels, RowLocations(records))
