"""A run opened for use: text in, text and numbers out."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headstock.errors import UserError
from headstock.model.batch import IGNORE
from headstock.model.generate import generate
from headstock.model.model import Model
from headstock.model.sampling import Sampling
from headstock.randomness import number
from headstock.tasks.causal import Causal
from headstock.tasks.classify import Classify, label_numbers
from headstock.tasks.task import Task
from headstock.text.reading import read_corpus
from headstock.text.records import Records, read_records
from headstock.text.store import build_store
from headstock.text.tokenizer import Tokenizer
from headstock.train.evaluate import measure
from headstock.train.labelled import read_splits, with_labels
from headstock.train.loop import row_length
from headstock.train.metrics import as_predictions, metrics_of
from headstock.train.predict import probabilities
from headstock.train.pretrain import build_model, prepare_again
from headstock.train.run import Run, open_run
from headstock.train.settings import RunConfig, make_config
from headstock.train.world import World, choose_device

ROWS = 16  # texts read at once
AT_ONCE = 4096  # texts that are sorted by length together when many are classified


def load(run: str | Path, *, device: str = "auto") -> "Loaded":
    """Open a finished run; everything it can do is a method of what comes back."""
    found = open_run(run)
    chosen = make_config(found.config())
    tokenizer = found.tokenizer()
    if tokenizer.fingerprint != found.data()["tokenizer"]:
        raise UserError(
            f"{found}: its tokenizer.json ({tokenizer.vocabulary} entries) does not belong to this run: "
            "it is not the one the model was trained with"
        )
    where = choose_device(device)
    models = []
    for part in members(found, chosen):
        model, task = build_model(chosen, tokenizer)
        model.load_tensors(part.weights(), source=str(part))
        models.append(model.to(where).eval())
    return Loaded(found, chosen, tokenizer, models, task)


def members(run: Run, chosen: RunConfig) -> list[Run]:
    """The runs whose weights make up a run: itself, or the models of an ensemble."""
    count = chosen.transfer.ensemble if chosen.transfer else 1
    return [run] if count == 1 else [run.member(number) for number in range(count)]


@dataclass(frozen=True)
class Score:
    """How likely a text is; natural logarithms."""

    text: str
    log_likelihood: float
    tokens: list[tuple[str, float]]  # each token and its part in the sum


@dataclass(frozen=True)
class Generated:
    text: str  # the prompt and what was made of it
    ended: str  # "length", "end" or "stop"
    slid: bool  # it outgrew the model's context, so that the model no longer saw its beginning


class Loaded:
    """What a run can do: generate and score as a language model, predict as a classifier."""

    def __init__(self, run: Run, config: RunConfig, tokenizer: Tokenizer, models: list[Model], task: Task):
        self.run, self.config, self.tokenizer, self.task = run, config, tokenizer, task
        self.models, self.model = models, models[0]  # more than one in an ensemble, which only classifiers are

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_tokens: int = 128,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: Sequence[str] = (),
        samples: int = 1,
        seed: int = 0,
        cache: bool = True,
        stream: Callable[[str], None] | None = None,
    ) -> list[Generated]:
        """Continue each prompt, `samples` times. `stream` hears the first one's text as it grows."""
        causal = self.causal()
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        if max_tokens < 0 or samples < 1:
            raise UserError(f"max_tokens must be 0 or more and samples 1 or more, not {max_tokens} and {samples}")
        texts = [prompt for prompt in ([prompts] if isinstance(prompts, str) else prompts) for _ in range(samples)]
        prompted = self.tokenizer.encode_batch(texts)
        writers = [Writer(self.tokenizer, ids, stop, stream if i == 0 else None) for i, ids in enumerate(prompted)]
        made = generate(
            self.model,
            [[causal.start, *ids] for ids in prompted],
            max_tokens=max_tokens,
            sampling=sampling,
            end=self.tokenizer.end,
            seeds=[number(seed, i % samples, "sample") for i in range(len(texts))],
            forbidden=self.unspoken(),
            stop=(lambda row, tokens: writers[row].done(tokens)) if stop or stream else None,
            cache=cache,
        )
        return [
            Generated(text + writer.finish(row.tokens), row.ended, row.slid)
            for text, writer, row in zip(texts, writers, made, strict=True)
        ]

    def unspoken(self) -> list[int]:
        """Entries that are never part of a text: special ones, and those the tokenizer does not have."""
        t = self.tokenizer
        special = {t.start, t.padding, t.unknown, t.cls, t.separator, t.mask} - {None, t.end}
        return [*(i for i in special if i is not None), *range(t.vocabulary, self.config.model.vocabulary)]

    def score(self, texts: str | Sequence[str]) -> list[Score]:
        """How likely each text is, and each of its tokens given those before."""
        causal = self.causal()
        wanted = [texts] if isinstance(texts, str) else list(texts)
        context = self.model.backbone.context or 1024
        rows = [
            (place, shown, labels)
            for place, ids in enumerate(self.tokenizer.encode_batch(wanted))
            for shown, labels in windows([causal.start, *ids[:-1]], ids, context)
        ]
        likelihoods: list[list[float]] = [[] for _ in wanted]
        for at in range(0, len(rows), ROWS):
            part = rows[at : at + ROWS]
            found = self.token_likelihoods(causal, [(shown, labels) for _, shown, labels in part])
            for (place, _, _), values in zip(part, found, strict=True):
                likelihoods[place] += values
        return [
            Score(text, sum(values), list(zip(self.tokenizer.pieces(text), values, strict=True)))
            for text, values in zip(wanted, likelihoods, strict=True)
        ]

    @torch.inference_mode()
    def token_likelihoods(self, causal: Causal, pairs: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        """The log-probability of each wanted token, those to be ignored left out."""
        batch = causal.collate(pairs).to(self.model.device)
        labels = batch.labels["token"]
        scores = self.model.heads["token"](self.model(batch).hidden)  # in full precision: small differences count here
        chosen = scores.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        return [row[keep].tolist() for row, keep in zip(chosen, labels != IGNORE, strict=True)]

    def predict(self, texts: str | Iterable[str]) -> list[dict[str, Any]]:
        """The class of each text, with the probability of every class."""
        return list(self.predictions([texts] if isinstance(texts, str) else texts))

    def predictions(self, texts: Iterable[str]) -> Iterator[dict[str, Any]]:
        """The same one by one, in the order of the texts, however many come: a few thousand are read at a time."""
        task = self.classifier()
        waiting = iter(texts)
        while part := list(islice(waiting, AT_ONCE)):
            yield from as_predictions(task.config, self.probabilities(part))

    def probabilities(self, texts: Sequence[str] | Records) -> np.ndarray:
        """(N, C) the probability of every class, averaged over the models of an ensemble."""
        task = self.classifier()
        records = (
            texts if isinstance(texts, Records) else Records("text", list(range(len(texts))), {"text": list(texts)})
        )
        data = task.prepare(records, labelled=False)
        length, dtype = row_length(self.model, self.config.train), self.config.train.dtype
        return np.mean([probabilities(model, task, data, length=length, dtype=dtype) for model in self.models], axis=0)

    def classifier(self) -> Classify:
        if not isinstance(self.task, Classify):
            raise UserError(f"{self.run}: has no head to classify with; make one with headstock finetune")
        return self.task

    def evaluate(
        self,
        corpus: str | Path | Sequence[str | Path] = (),
        *,
        documents: str = "auto",
        columns: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """The task's metrics on given text, or on what was held out when the run was made."""
        if isinstance(self.task, Classify):
            files = [corpus] if isinstance(corpus, str | Path) else list(corpus)
            return self.evaluate_rows(files, columns)
        return self.evaluate_text(corpus, documents)

    def evaluate_rows(self, files: Sequence[str | Path], columns: dict[str, str] | None) -> dict[str, Any]:
        """A classifier's metrics with their intervals."""
        task, data = self.classifier(), self.config.data
        if len(files) > 1:
            raise UserError(f"a classifier is measured on one labelled file at a time, {len(files)} came")
        if files:
            separator = task.config.separator
            records = with_labels(read_records(files[0], columns=columns, separator=separator), "to measure by")
        else:
            splits = read_splits(
                data, separator=task.config.separator, seed=self.config.train.seed, say=lambda line: None
            )
            if splits.fingerprint() != self.run.data()["fingerprint"]:
                changed = "its labelled files are not what they were when it was made"
                raise UserError(f"{self.run}: {changed}; name the file to measure it on")
            records = splits.test if splits.test is not None and splits.test.labels else splits.valid
        labels = label_numbers(records, task.config)
        return metrics_of(task.config, self.probabilities(records), labels) | {"file": records.source}

    def evaluate_text(self, corpus: str | Path | Sequence[str | Path], documents: str) -> dict[str, Any]:
        length = row_length(self.model, self.config.train)
        if corpus:
            text = read_corpus(corpus, documents=documents, column=self.config.data.column)  # type: ignore[arg-type]
            store = build_store(text, self.tokenizer)
        else:
            store = prepare_again(self.run, self.config, lambda line: None).valid
        examples = self.task.examples(store, length=length)
        world = World(self.model.device)
        metrics = measure(
            self.model, self.task, examples, world=world, rows=ROWS, size=store.bytes, dtype=self.config.train.dtype
        )
        return metrics | {"tokens": store.tokens, "documents": store.documents, "bytes": store.bytes}

    def causal(self) -> Causal:
        """The run as a left-to-right language model, which only some are."""
        if not self.model.backbone.causal or "token" not in self.model.heads:
            raise UserError(f"{self.run}: is no left-to-right language model, so it cannot generate or score text")
        return self.task if isinstance(self.task, Causal) else Causal(Causal.Config(), self.tokenizer)


def windows(shown: list[int], wanted: list[int], context: int) -> Iterator[tuple[list[int], list[int]]]:
    """A long text in overlapping windows; every token is wanted once, after at least half a window where it can be."""
    begin = 0
    while True:
        stop = min(begin + context, len(shown))
        again = 0 if begin == 0 else context - max(1, context // 2)  # already scored by the window before
        labels = [IGNORE] * again + wanted[begin + again : stop]
        if labels:
            yield shown[begin:stop], labels
        if stop == len(shown):
            return
        begin += max(1, context // 2)


class Writer:
    """Turns a growing row of tokens into text, watching for where it must stop."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: list[int], stop: Sequence[str], stream: Callable[[str], None] | None
    ):
        self.tokenizer, self.prompt, self.before = tokenizer, prompt, tokenizer.decode(prompt)
        self.stop, self.stream = [s for s in stop if s], stream
        self.told = 0  # characters already given to the stream

    def text(self, tokens: list[int]) -> str:
        """What the tokens add to the prompt. They are read together with it: many tokenizers drop a first space."""
        whole = self.tokenizer.decode([*self.prompt, *tokens])
        return whole[len(self.before) :] if whole.startswith(self.before) else self.tokenizer.decode(tokens)

    def done(self, tokens: list[int]) -> bool:
        text = self.text(tokens)
        cut = self.cut(text)
        # what may still change stays back: half a character, or the beginning of a stop string
        settled = len(text.rstrip("\ufffd")) - max((len(s) - 1 for s in self.stop), default=0)
        self.tell(text[: settled if cut is None else cut])
        return cut is not None

    def finish(self, tokens: list[int]) -> str:
        text = self.text(tokens)
        text = text[: self.cut(text)]
        self.tell(text)
        return text

    def cut(self, text: str) -> int | None:
        return min((place for s in self.stop if (place := text.find(s)) >= 0), default=None)

    def tell(self, text: str) -> None:
        if self.stream is not None and len(text) > self.told:
            self.stream(text[self.told :])
            self.told = len(text)
