"""A run opened for use: text in, text and numbers out."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from headstock.data import formats
from headstock.data.corpus import read_corpus
from headstock.data.formats import detect_format
from headstock.data.labelled_texts import find_file, is_table, stream_texts
from headstock.data.minimal_pairs import read_minimal_pairs
from headstock.data.records import LABEL, Records, parse_columns
from headstock.data.token_store import build_store
from headstock.data.tokenizer import Tokenizer
from headstock.decoding.batching import tokenizer_threads
from headstock.decoding.beam_search import Hypothesis, beam_search, check_beams
from headstock.decoding.fill_mask import FilledText, MaskFiller
from headstock.decoding.generate import generate
from headstock.decoding.sampling import Sampling
from headstock.decoding.text_streamer import TextStreamer
from headstock.errors import UserError, WorkError
from headstock.inference.embed import embed, resolve_pooling
from headstock.inference.inputs import describe_value, iter_rows, iter_texts, list_texts
from headstock.inference.predict import prepare_ahead
from headstock.inference.score import LikelihoodKind, TextScore, score_minimal_pairs, token_log_probabilities
from headstock.inference.translate import Alignment, align_translation, prepare_texts, translate_texts
from headstock.kernels.int8 import quantize_int8
from headstock.logs import muted
from headstock.model.layer_features import check_layers, feature_width
from headstock.model.model import Model
from headstock.rng import derive_seed
from headstock.tasks.base import TASKS, Task
from headstock.tasks.labelled import LabelledTask, is_labelled
from headstock.tasks.special_tokens import special_tokens_for
from headstock.tasks.translate import Translate
from headstock.train.distributed import DistributedContext, choose_device
from headstock.train.evaluate import evaluate
from headstock.train.labelled_data import read_splits, require_labels
from headstock.train.loop import sequence_length
from headstock.train.metrics import metrics_with_intervals
from headstock.train.outputs import ensemble_mean, model_outputs
from headstock.train.prefetch import FIRST_CHUNK, MAX_CHUNK, growing_chunks, prefetch_map
from headstock.train.pretrain import load_run_model, reopen_stores
from headstock.train.run_folder import RunFolder, check_tokenizers, open_run
from headstock.train.settings import LabelledSettings, RunConfig, make_config

ROWS = 16  # texts read at once


def load(run: str | Path, *, device: str = "auto", int8: bool = False) -> "Pipeline":
    """Open a finished run; everything it can do is a method of what comes back.

    With `int8` large products are made in 8 bits, on a CPU: nearly the same answers in about half the time.
    """
    found = open_run(run)
    chosen = make_config(found.config())
    tokenizer = found.tokenizer()
    check_tokenizers(found, tokenizer)
    where = choose_device(device)
    models = []
    for part in member_runs(found, chosen):
        model, task = load_run_model(part, chosen, tokenizer)
        models.append(model.to(where).eval())
        if int8:
            quantize_int8(model)
    return Pipeline(found, chosen, tokenizer, models, task)


def member_runs(run: RunFolder, chosen: RunConfig) -> list[RunFolder]:
    """The runs whose weights make up a run: itself, or the models of an ensemble."""
    count = chosen.transfer.ensemble if chosen.transfer else 1
    return [run] if count == 1 else [run.member(number) for number in range(count)]


@dataclass(frozen=True)
class Generated:
    text: str  # the prompt and what was made of it
    ended: str  # "length", "end" or "stop"
    slid: bool  # it outgrew the model's context, so that the model no longer saw its beginning


class Pipeline:
    """What a run can do: generate, fill and score as a language model, predict as what it was fine-tuned for, embed."""

    def __init__(self, run: RunFolder, config: RunConfig, tokenizer: Tokenizer, models: list[Model], task: Task):
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
        beams: int | None = None,
        length_penalty: float = 1.0,
        no_repeat: int = 0,
    ) -> list[Generated]:
        """Continue each prompt, `samples` times. `stream` hears the first one's text as it grows.

        With `beams` it is the likeliest text that so many rows side by side find, its log-probability divided by its
        length to the power of `length_penalty`, in which no `no_repeat` tokens come twice in the same order.
        """
        self.require("generates", "generate text")
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        if max_tokens < 0 or samples < 1:
            raise UserError(f"max_tokens must be 0 or more and samples 1 or more, not {max_tokens} and {samples}")
        texts = [prompt for prompt in list_texts(prompts, "prompts") for _ in range(samples)]
        prompted = self.tokenizer.encode_batch(texts)
        special = special_tokens_for(self.task, self.tokenizer, left_to_right=True)
        writers = [
            TextStreamer(self.tokenizer, ids, stop, stream if i == 0 else None) for i, ids in enumerate(prompted)
        ]
        rows = [special.wrap(ids) for ids in prompted]
        if beams is not None:
            check_beams(sampling, samples=samples, stream=stream, cache=cache)
            found = self.beam_search(
                rows, beams=beams, max_tokens=max_tokens, length_penalty=length_penalty, no_repeat=no_repeat
            )
            return [
                Generated(
                    text + writer.finish(best.tokens), "stop" if writer.has_stop(best.tokens) else best.ended, False
                )
                for text, writer, best in zip(texts, writers, found, strict=True)
            ]
        if length_penalty != 1.0 or no_repeat:
            raise UserError("length_penalty and no_repeat are for a search with beams; say how many beams")
        made = generate(
            self.model,
            rows,
            max_tokens=max_tokens,
            sampling=sampling,
            end=self.tokenizer.eos,
            seeds=[derive_seed(seed, i % samples, "sample") for i in range(len(texts))],
            forbidden=self.suppressed_tokens(),
            stop=(lambda row, tokens: writers[row].update(tokens)) if stop or stream else None,
            cache=cache,
        )
        return [
            Generated(text + writer.finish(row.tokens), row.ended, row.slid)
            for text, writer, row in zip(texts, writers, made, strict=True)
        ]

    def beam_search(self, rows: Sequence[Sequence[int]], **options: Any) -> list[Hypothesis]:
        """The best continuation that beam search finds for each row."""
        end, forbidden, parts = self.tokenizer.eos, self.suppressed_tokens(), range(0, len(rows), ROWS)
        return [
            found[0]
            for at in parts
            for found in beam_search(self.model, rows[at : at + ROWS], end=end, forbidden=forbidden, **options)
        ]

    def suppressed_tokens(self) -> list[int]:
        """Entries that are never part of a text: special ones, and those the tokenizer does not have."""
        t = self.tokenizer
        special = {t.bos, t.pad, t.unk, t.cls, t.sep, t.mask} - {None, t.eos}
        return [*(i for i in special if i is not None), *range(t.vocabulary, self.config.model.vocabulary)]

    def score(self, texts: str | Sequence[str], *, pseudo: bool | None = None) -> list[TextScore]:
        """How likely each text is, and each of its tokens: see `likelihood_kind` for what that means."""
        wanted = list_texts(texts)
        found = self.check_finite(self.token_log_probabilities(self.tokenizer.encode_batch(wanted), pseudo=pseudo))
        return [
            TextScore(text, float(values.sum()), list(zip(self.tokenizer.tokenize(text), values.tolist(), strict=True)))
            for text, values in zip(wanted, found, strict=True)
        ]

    def likelihood_kind(self, pseudo: bool | None = None) -> LikelihoodKind:
        """How this run scores text: left to right where it can; `pseudo` asks for each token given all others."""
        if pseudo:
            self.require("fills_masks", "tell a token from both its sides, which --pseudo asks for")
        elif pseudo is False:
            self.require("generates", "score text from left to right")
        elif not (self.task.generates or self.task.fills_masks):
            if not is_labelled(self.task):
                self.require("generates", "score text from left to right")
            raise UserError(f"{self.run}: is no language model, so it cannot score text; name the run it was made from")
        return "pseudo-log-likelihood" if pseudo or not self.task.generates else "log-likelihood"

    def token_log_probabilities(
        self,
        rows: Sequence[Sequence[int]],
        *,
        pseudo: bool | None = None,
        watch: Callable[[float], None] | None = None,
    ) -> list[np.ndarray]:
        """The log-probability of every token of every row; `watch` hears the share that is done."""
        ahead = self.likelihood_kind(pseudo) == "pseudo-log-likelihood"
        return token_log_probabilities(
            self.model,
            rows,
            special=special_tokens_for(self.task, self.tokenizer, left_to_right=not ahead),
            length=sequence_length(self.model, self.config.train),
            mask=self.tokenizer.mask if ahead else None,
            shift=self.task.mask_shift,
            watch=watch,
        )

    def fill(
        self, texts: str | Sequence[str], *, top: int = 5, pieces: int = 3, among: Sequence[str] = ()
    ) -> list[FilledText]:
        """Words for every [MASK]: the `top` likeliest of up to `pieces` tokens each, or those given as `among`."""
        self.require("fills_masks", "fill in words")
        if top < 1 or pieces < 1:
            raise UserError(f"top and pieces must be 1 or more, not {top} and {pieces}")
        special, length = special_tokens_for(self.task, self.tokenizer), sequence_length(self.model, self.config.train)
        filler = MaskFiller(self.model, self.tokenizer, special=special, length=length, shift=self.task.mask_shift)
        return [filler.fill(text, top=top, pieces=pieces, among=among) for text in list_texts(texts)]

    def embed(
        self, texts: str | Sequence[str], *, layers: str = "last", pool: str | None = None
    ) -> np.ndarray | list[np.ndarray]:
        """(N, D) one vector a text; with pool "none" a list that has (T, D) for each text, one vector a token.

        Without `pool` it is the mean where the model looks both ways, the last token where it looks back only.
        """
        found = list(self.iter_embeddings(texts, layers=layers, pool=pool))
        if resolve_pooling(pool, self.model.backbone) == "none":
            return found
        width = feature_width(self.model.backbone.width, layers)
        return np.stack(found) if found else np.zeros((0, width), dtype=np.float32)

    def iter_embeddings(
        self, texts: str | Iterable[str], *, layers: str = "last", pool: str | None = None
    ) -> Iterator[np.ndarray]:
        """The same one by one, in the order of the texts, however many come."""
        if len(self.models) > 1:
            raise UserError(f"{self.run}: is several models; name one of them, such as {self.run.member(0)}")
        if self.model.backbone.is_encoder_decoder:
            raise UserError(f"{self.run}: is an encoder-decoder; texts become vectors with a run of another family")
        how, most = resolve_pooling(pool, self.model.backbone), MAX_CHUNK if pool != "none" else FIRST_CHUNK
        check_layers(layers, self.model.backbone.depth)
        special, length = special_tokens_for(self.task, self.tokenizer), sequence_length(self.model, self.config.train)
        cut, threads = self.tokenizer.encode_batch, tokenizer_threads(self.model.device)
        for rows in prefetch_map(cut, growing_chunks(iter_texts(texts), most=most), threads=threads):
            yield from self.check_finite(
                embed(self.model, rows, special=special, length=length, layers=layers, pool=how)
            )

    def predict(self, rows: str | Iterable[Any]) -> list[dict[str, Any]]:
        """What the run's task says of each row: the class of a text, the tags of its words, the answer to a question.

        A row is a text, for pairs `(text, text_b)`, for tags a list of words or a text, for answers
        `{"question": ..., "context": ...}`.
        """
        return list(self.iter_predictions(rows))

    def iter_predictions(self, rows: str | Iterable[Any] | Records) -> Iterator[dict[str, Any]]:
        """The same one by one, in the order of the rows, however many come: a few thousand are read at a time.

        While the model reads some, the next ones are cut into tokens.
        """
        return self.predict_with(self.labelled_task(), rows)

    def predict_with(self, task: LabelledTask, rows: str | Iterable[Any] | Records) -> Iterator[dict[str, Any]]:
        """The same as a task of the run's kind says it, whose settings may be others."""
        rows = rows if isinstance(rows, Records) else iter_rows(rows, task)
        for data in prepare_ahead(rows, task, self.model.device):
            yield from task.predictions(data, self.outputs(data))

    def read_rows(self, file: str | Path, *, columns: dict[str, str] | None = None) -> Iterable[Any] | Records:
        """What `predictions` takes, from a file such as the run was trained on or from standard input (`-`)."""
        rows = self.read_numbered_rows(file, columns=columns)
        return rows if isinstance(rows, Records) else (text for _, text in rows)

    def read_numbered_rows(
        self, file: str | Path, *, columns: dict[str, str] | None = None, skipped: list[int] | None = None
    ) -> Iterator[tuple[int, str]] | Records:
        """The rows of a file as texts with their lines, or as records where a row is more than a text.

        Where `skipped` is a list, blank rows are left out; of texts, their lines are added to it.
        """
        task, named = self.labelled_task(), self.resolve_columns(file, columns)
        if task.row_is_text or str(file) == "-":
            known = {name: column for name, column in (named or {}).items() if name != LABEL}
            return stream_texts(file, columns=known, skipped=skipped)
        skip = skipped is not None
        return task.read_file(file, config=task.config, columns=named, insist=False, skip_blank=skip)

    def resolve_columns(self, file: str | Path, columns: dict[str, str] | None = None) -> dict[str, str] | None:
        """What a file calls the run's columns: as `columns` says, and else as the training file called them.

        The run's own names hold for files of the same kind, and in a table where it has such a column.
        """
        own = self.config.data.columns if isinstance(self.config.data, LabelledSettings) else ()
        if not own or str(file) == "-":
            return columns
        of_table, trained_on_table = (is_table(path) for path in (file, self.config.data.train))
        if of_table != trained_on_table:
            return columns
        known = parse_columns(",".join(own))
        if of_table:
            source = detect_format(*find_file(file))
            there = formats.column_names(source) if source else None
            known = {ours: theirs for ours, theirs in known.items() if theirs.isdigit() or theirs in (there or ())}
        return known | (columns or {}) or None

    def answer(
        self, questions: str | Sequence[str], *, context: str, threshold: float | None = None
    ) -> list[dict[str, Any]]:
        """The words of the context that answer each question: `answer`, its characters `start` to `end`, `score`.

        Where the run was trained on questions without an answer too, "" with no characters says that there is none:
        where that is likelier than the best answer by more than `threshold`, the run's own unless given.
        """
        if not self.task.answers_questions:
            hint = "to answer, make one with headstock finetune --task answer"
            raise UserError(f"{self.run}: is a {self.task.title}; {hint}")
        task = self.labelled_task()
        if threshold is not None:
            if not task.config.unanswerable:
                raise UserError(f"{self.run}: all its training questions had an answer, so a threshold has no meaning")
            task = task.with_settings(threshold=threshold)  # for this call only
        if not isinstance(context, str):
            raise UserError(f"context is {describe_value(context)}, wanted a text (str)")
        asked = [{"question": question, "context": context} for question in list_texts(questions, "questions")]
        found = self.predict_with(task, asked)
        return [{name: value for name, value in row.items() if name != "id"} for row in found]

    def translate(self, texts: str | Sequence[str], **options: Any) -> list[str]:
        """The translation of each text; options are `beams`, `length_penalty`, `no_repeat`, `max_tokens`, `long`."""
        task, wanted = self.translation_task(**options), list_texts(texts)
        length = sequence_length(self.model, self.config.train)
        return translate_texts(self.model, task, wanted, length=length, dtype=self.config.train.dtype)

    def translation_notes(self, texts: Sequence[str]) -> list[str]:
        """What should be known of how texts to be translated are read, such as that some are cut."""
        task = self.translation_task()
        return task.reading_warnings(prepare_texts(task, texts), length=sequence_length(self.model, self.config.train))

    def align(self, text: str, **options: Any) -> Alignment:
        """What each token of a text's translation looked at."""
        return align_translation(
            self.model, self.translation_task(**options), text, length=sequence_length(self.model, self.config.train)
        )

    def translation_task(self, **options: Any) -> Translate:
        """The run's task, if it translates, with other options than its own."""
        if not self.task.translates:
            hint = "to translate, make a run with headstock finetune --task translate"
            raise UserError(f"{self.run}: is a {self.task.title}; {hint}")
        given = {name: value for name, value in options.items() if value is not None}
        return cast(Translate, self.task).with_settings(**given)

    def outputs(self, data: Any) -> list[np.ndarray]:
        """What the predictions of prepared rows are made from, averaged over the models of an ensemble."""
        length, dtype = sequence_length(self.model, self.config.train), self.config.train.dtype
        found = [model_outputs(model, self.labelled_task(), data, length=length, dtype=dtype) for model in self.models]
        return self.check_finite(ensemble_mean(found))

    def check_finite(self, found: Iterable[np.ndarray]) -> list[np.ndarray]:
        """The same, without NaN and infinity, which are refused; minus infinity is the score of what is ruled out."""
        rows = list(found)
        if not all((row < np.inf).all() for row in rows):
            raise WorkError(f"{self.run}: its model gives values that are not finite numbers")
        return rows

    def probabilities(self, texts: Iterable[Any] | Records) -> np.ndarray:
        """(N, C) the probability of every class."""
        task = self.classification_task()
        if isinstance(texts, Records):
            rows = texts
        else:
            given = list(iter_rows(texts, task))
            rows = Records("text", list(range(len(given))), task.columns_of(given))
        return np.stack(self.outputs(task.prepare(rows, labelled=False)))

    def classification_task(self) -> LabelledTask:
        """The run's task, if it predicts one class for each row."""
        if not is_labelled(self.task) or not self.task.predicts_classes:
            raise UserError(f"{self.run}: has no head to classify with; make one with headstock finetune")
        return self.task

    def labelled_task(self) -> LabelledTask:
        """The run's task, if it was learned from labels."""
        if not is_labelled(self.task):
            raise UserError(f"{self.run}: has no head to predict with; make one with headstock finetune")
        return self.task

    def evaluate(
        self,
        corpus: str | Path | Sequence[str | Path] = (),
        *,
        documents: str = "auto",
        columns: dict[str, str] | None = None,
        skip_blank: bool = False,
    ) -> dict[str, Any]:
        """The task's metrics on given text or rows, or on what was held out when the run was made.

        `columns` are the run's own unless given; of text, {"text": ...} names the column of a table.
        """
        if is_labelled(self.task):
            files = [corpus] if isinstance(corpus, str | Path) else list(corpus)
            return self.evaluate_rows(files, columns, skip_blank=skip_blank)
        return self.evaluate_text(corpus, documents, column=(columns or {}).get("text"))

    def evaluate_rows(
        self, files: Sequence[str | Path], columns: dict[str, str] | None, *, skip_blank: bool = False
    ) -> dict[str, Any]:
        """The metrics with their intervals."""
        task = self.labelled_task()
        if len(files) > 1:
            raise UserError(f"a {task.title} is measured on one labelled file at a time, {len(files)} came")
        if files:
            named = self.resolve_columns(files[0], columns)
            rows = task.read_file(files[0], config=task.config, columns=named, skip_blank=skip_blank)
            records = require_labels(rows, task.target, "to measure by")
        else:
            records = self.held_out()
        task.check(records)
        data = task.prepare(records)
        left_out = {"skipped_rows": records.skipped} if records.skipped else {}
        return metrics_with_intervals(task, data, self.outputs(data)) | left_out | {"file": records.source}

    def held_out(self) -> Records:
        """The labelled rows the run was not trained on: its test rows, or else those it was validated on."""
        task, settings = self.labelled_task(), self.config.data
        with muted():
            splits = read_splits(settings, type(task), task.config, seed=self.config.train.seed)
        if splits.fingerprint() != self.run.data()["fingerprint"]:
            changed = "its labelled files are not what they were when it was made"
            raise UserError(f"{self.run}: {changed}; name the file to measure it on")
        return splits.test if splits.test is not None and splits.test.has_labels else splits.valid

    def evaluate_text(
        self, corpus: str | Path | Sequence[str | Path], documents: str, *, column: str | None = None
    ) -> dict[str, Any]:
        length = sequence_length(self.model, self.config.train)
        if corpus:
            column = column or self.config.data.column
            text = read_corpus(corpus, documents=documents, column=column)  # type: ignore[arg-type]
            store = build_store(text, self.tokenizer, sentences=self.task.needs_sentences)
        else:
            with muted():
                store = reopen_stores(self.run, self.config).valid
        examples = self.task.examples(store, length=length)
        distributed = DistributedContext(self.model.device)
        metrics = evaluate(
            self.model,
            self.task,
            examples,
            distributed=distributed,
            rows=ROWS,
            size=store.bytes,
            dtype=self.config.train.dtype,
            unknown=store.unknown,
        )
        self.check_finite([np.array([metrics["loss"]])])
        sizes = {"tokens": store.tokens, "documents": store.documents, "bytes": store.bytes}
        if store.unknown is not None and store.unknown.tokens:
            sizes |= {"unknown_tokens": store.unknown.tokens, "unknown_bytes": store.unknown.bytes}
        return metrics | sizes

    def minimal_pairs(
        self,
        files: Sequence[str | Path],
        *,
        rows: int | None = None,
        pseudo: bool | None = None,
        watch: Callable[[float], None] | None = None,
    ) -> dict[str, Any]:
        """In how many minimal pairs the right text is the likelier one."""
        kind = self.likelihood_kind(pseudo)
        metrics = score_minimal_pairs(
            read_minimal_pairs(files, rows=rows),
            self.tokenizer.encode_batch,
            self.tokenizer.offsets,
            lambda texts: self.token_log_probabilities(texts, pseudo=pseudo, watch=watch),
        )
        return metrics | {"kind": kind}

    def require(self, ability: str, what: str) -> None:
        """Refuse what the run's objective did not teach it, and say which ones do."""
        if not getattr(self.task, ability):
            able = ", ".join(name for name in TASKS.names() if getattr(TASKS.get(name), ability))
            kind = {"generates": "left-to-right", "fills_masks": "masked"}[ability]
            lacking = f"is no {kind} language model, so it cannot {what}"
            raise UserError(f"{self.run}: {lacking} (objectives that can: {able})")
