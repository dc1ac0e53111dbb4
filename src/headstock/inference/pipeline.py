"""`headstock.load`: a finished run, ready to generate, fill, score, embed, predict, translate and evaluate."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from headstock.data.corpus import DocumentUnit
from headstock.data.in_memory import (
    CorpusData,
    Dataset,
    Frame,
    LabelledData,
    column_names,
    corpus_paths,
    is_frame,
    labelled_files,
)
from headstock.data.minimal_pairs import read_minimal_pairs
from headstock.data.records import Records
from headstock.data.slices import make_slices
from headstock.data.tokenizer import Tokenizer
from headstock.data.winograd import Schema
from headstock.decoding.batching import tokenizer_threads
from headstock.decoding.beam_search import check_beams
from headstock.decoding.fill_mask import FilledText, MaskFiller
from headstock.decoding.sampling import Sampling, suppressed_tokens
from headstock.errors import UserError, WorkError, shell_quote
from headstock.inference.embed import embed, resolve_pooling
from headstock.inference.evaluation import (
    Evaluation,
    evaluate_store,
    evaluation_store,
    held_out_records,
    labelled_records,
    uncalibrated_metrics,
)
from headstock.inference.generate import Generation, sample_texts, search_texts
from headstock.inference.inputs import (
    describe_value,
    displayed_inputs,
    iter_rows,
    iter_texts,
    list_texts,
    own_columns,
    prepare_ahead,
    read_numbered_rows,
    refuse_file_name,
    resolve_columns,
    rows_in_memory,
)
from headstock.inference.prompt import PromptClassifier, PromptSettings, PromptTask
from headstock.inference.schemas import SchemaScore, score_schemas
from headstock.inference.score import LikelihoodKind, TextScore, score_minimal_pairs, token_log_probabilities
from headstock.inference.search import (
    Dtype,
    Hit,
    IndexKind,
    SearchIndex,
    SearchSettings,
    Transform,
    open_documents,
    open_index,
)
from headstock.inference.suggest import Suggestion, suggest
from headstock.inference.translate import Alignment, align_translation, prepare_texts, translate_texts
from headstock.kernels.backends import paused_gc
from headstock.kernels.int8 import quantize_int8
from headstock.model.layer_features import check_layers, feature_width
from headstock.model.model import Model
from headstock.option_names import methods_name_keywords, names_keywords
from headstock.results import ResultList
from headstock.tasks.answer import AnswerPrediction
from headstock.tasks.base import TASKS, Task
from headstock.tasks.calibration import Calibration, decision_scores, risk_coverage
from headstock.tasks.error_analysis import reliability
from headstock.tasks.labelled import LabelledTask, is_labelled
from headstock.tasks.predictions import Prediction
from headstock.tasks.slice_scores import slice_scores
from headstock.tasks.special_tokens import special_tokens_for
from headstock.tasks.translate import Translate
from headstock.train.distributed import choose_device
from headstock.train.evaluate import ensemble_mean, model_outputs
from headstock.train.loop import sequence_length
from headstock.train.metrics import metrics_with_intervals
from headstock.train.models import build_task, load_run_model
from headstock.train.prefetch import FIRST_CHUNK, MAX_CHUNK, growing_chunks, prefetch_map
from headstock.train.run_folder import RunFolder, check_tokenizers, open_run
from headstock.train.settings import RunConfig, make_config

logger = logging.getLogger(__name__)


@names_keywords
def load(run: str | Path, *, device: str = "auto", int8: bool = False, calibrated: bool = False) -> "Pipeline":
    """Load a finished run for inference.

    With `int8` linear layers run in 8 bits on the CPU: about twice as fast, with slightly different outputs. With
    `calibrated` class probabilities are scaled and decided as the run's calibration says.
    """
    folder = open_run(run)
    config, tokenizer = make_config(folder.config()), folder.tokenizer()
    check_tokenizers(folder, tokenizer)
    target = choose_device(device)
    if folder.step is not None:
        logger.info("%s: the weights of step %d", folder, folder.step)
    models = []
    task = build_task(config, tokenizer)
    for member in folder.model_runs():
        model = load_run_model(member, config, task)
        models.append(model.to(target).eval())
        if int8:
            quantize_int8(model)
    return Pipeline(folder, config, tokenizer, models, task, require_calibration(folder) if calibrated else None)


def require_calibration(run: RunFolder) -> Calibration:
    if (calibration := run.calibration()) is None:
        raise UserError(f"{run}: is not calibrated; fit it with headstock calibrate {shell_quote(run.path)}")
    return calibration


@methods_name_keywords
class Pipeline:
    """A model with its tokenizer and task. What it can do depends on what it was trained for."""

    def __init__(
        self,
        run: RunFolder,
        config: RunConfig,
        tokenizer: Tokenizer,
        models: list[Model],
        task: Task,
        calibration: Calibration | None = None,
    ):
        self.run, self.config, self.tokenizer, self.task = run, config, tokenizer, task
        self.calibration = calibration
        if calibration is not None:
            self.classification_task().thresholds = calibration.thresholds
        self.models, self.model = models, models[0]  # several for an ensemble

    @property
    def length(self) -> int:
        """The number of tokens, special tokens included, that the model reads at once."""
        return sequence_length(self.model, self.config.train)

    # Language models

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
    ) -> ResultList[Generation]:
        """Continue each prompt `samples` times. `stream` receives the first continuation as it grows.

        With `beams` the continuation is found by beam search: hypotheses are ranked by log-probability divided by
        length to the power of `length_penalty`, and no n-gram of `no_repeat` tokens occurs twice.
        """
        self.require("generates", "generate text")
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        texts = list_texts(prompts, "prompts")
        special = special_tokens_for(self.task, self.tokenizer, left_to_right=True)
        options: dict[str, Any] = {"special": special, "max_tokens": max_tokens, "stop": stop}
        if beams is None:
            if length_penalty != 1.0 or no_repeat:
                raise UserError("length_penalty and no_repeat require beams")
            options |= {"sampling": sampling, "samples": samples, "seed": seed, "stream": stream, "cache": cache}
            return ResultList(sample_texts(self.model, self.tokenizer, texts, **options))
        check_beams(sampling, samples=samples, stream=stream, cache=cache)
        options |= {"beams": beams, "length_penalty": length_penalty, "no_repeat": no_repeat}
        return ResultList(search_texts(self.model, self.tokenizer, texts, **options))

    def suppressed_tokens(self) -> list[int]:
        """Ids that are never generated."""
        return suppressed_tokens(self.tokenizer, self.config.model.vocabulary)

    def score(self, texts: str | Sequence[str], *, pseudo: bool | None = None) -> ResultList[TextScore]:
        """The log-likelihood of each text and of its tokens, of the kind given by `likelihood_kind`."""
        inputs = list_texts(texts)
        scores = self.check_finite(self.token_log_probabilities(self.tokenizer.encode_batch(inputs), pseudo=pseudo))
        return ResultList(
            TextScore(text, float(values.sum()), list(zip(self.tokenizer.tokenize(text), values.tolist(), strict=True)))
            for text, values in zip(inputs, scores, strict=True)
        )

    def likelihood_kind(self, pseudo: bool | None = None) -> LikelihoodKind:
        """Left to right if the model can; with `pseudo` each token given all others."""
        if pseudo:
            self.require("fills_masks", "predict a masked token, which --pseudo requires")
        elif pseudo is False:
            self.require("generates", "score text from left to right")
        elif not (self.task.generates or self.task.fills_masks):
            if not is_labelled(self.task):
                self.require("generates", "score text from left to right")
            raise UserError(f"{self.run}: is no language model; score texts with the run it was fine-tuned from")
        return "pseudo-log-likelihood" if pseudo or not self.task.generates else "log-likelihood"

    def token_log_probabilities(
        self,
        rows: Sequence[Sequence[int]],
        *,
        pseudo: bool | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> list[np.ndarray]:
        """The log-probability of every token of every row; `progress` is called with the fraction done."""
        masked = self.likelihood_kind(pseudo) == "pseudo-log-likelihood"
        return token_log_probabilities(
            self.model,
            rows,
            special=special_tokens_for(self.task, self.tokenizer, left_to_right=not masked),
            length=self.length,
            mask=self.tokenizer.mask if masked else None,
            shift=self.task.mask_shift,
            progress=progress,
        )

    def fill(
        self,
        texts: str | Sequence[str],
        *,
        top: int = 5,
        pieces: int = 3,
        among: Sequence[str] = (),
        normalize: bool = False,
    ) -> ResultList[FilledText]:
        """Candidates for every [MASK]: the `top` likeliest words of up to `pieces` tokens, or the words in `among`.

        With `normalize`, the words in `among` are compared by their mean log-probability per token.
        """
        self.require("fills_masks", "fill masks")
        if top < 1 or pieces < 1:
            raise UserError(f"top and pieces must be 1 or more, not {top} and {pieces}")
        special, length = special_tokens_for(self.task, self.tokenizer), self.length
        filler = MaskFiller(self.model, self.tokenizer, special=special, length=length, shift=self.task.mask_shift)
        options: dict[str, Any] = {"top": top, "pieces": pieces, "among": among, "normalize": normalize}
        return ResultList(filler.fill(text, **options) for text in list_texts(texts))

    def embed(
        self, texts: str | Sequence[str], *, layers: str = "last", pool: str | None = None
    ) -> np.ndarray | list[np.ndarray]:
        """(N, D) one vector per text; with pool "none" a list of (T, D), one vector per token.

        The default pooling is the mean for bidirectional models and the last token for causal ones.
        """
        if resolve_pooling(pool, self.model.backbone) == "none":
            return list(self.iter_embeddings(texts, layers=layers, pool=pool))
        chunks = [np.asarray(chunk) for chunk in self.embedding_chunks(texts, layers=layers, pool=pool)]
        width = feature_width(self.model.backbone.width, layers)
        return np.concatenate(chunks) if chunks else np.zeros((0, width), dtype=np.float32)

    def iter_embeddings(
        self, texts: str | Iterable[str], *, layers: str = "last", pool: str | None = None
    ) -> Iterator[np.ndarray]:
        """The vectors of `embed` one by one, for any number of texts."""
        for vectors in self.embedding_chunks(texts, layers=layers, pool=pool):
            yield from vectors

    def embedding_chunks(
        self, texts: str | Iterable[str], *, layers: str = "last", pool: str | None = None
    ) -> Iterator[np.ndarray | list[np.ndarray]]:
        """The vectors of `embed` for a few thousand texts at a time; the next ones are tokenized meanwhile."""
        if len(self.models) > 1:
            raise UserError(f"{self.run}: is an ensemble; use one of its models, such as {self.run.member(0)}")
        if self.model.backbone.is_encoder_decoder:
            raise UserError(f"{self.run}: encoder-decoders have no text embeddings; use a run of another family")
        check_layers(layers, self.model.backbone.depth)
        chunks = growing_chunks(iter_texts(texts), max_size=MAX_CHUNK if pool != "none" else FIRST_CHUNK)
        for rows in prefetch_map(self.tokenizer.encode_batch, chunks, threads=tokenizer_threads(self.model.device)):
            yield self.embed_tokens(rows, layers=layers, pool=pool)

    def embed_tokens(
        self, rows: Sequence[Sequence[int]], *, layers: str = "last", pool: str | None = None
    ) -> np.ndarray | list[np.ndarray]:
        """The vectors of `embed` for texts that are token ids, without special tokens."""
        check_layers(layers, self.model.backbone.depth)
        options: dict[str, Any] = {"special": special_tokens_for(self.task, self.tokenizer), "length": self.length}
        options |= {"layers": layers, "pool": resolve_pooling(pool, self.model.backbone)}
        vectors = embed(self.model, rows, **options)
        self.check_finite([vectors] if isinstance(vectors, np.ndarray) else vectors)
        return vectors

    def search(
        self,
        queries: str | Iterable[str],
        corpus: str | Path | Iterable[Any],
        *,
        top: int = 5,
        index: IndexKind = "exact",
        documents: DocumentUnit = "auto",
        column: str = "text",
        layers: str = "last",
        pool: str | None = None,
        transform: Transform = "center",
        dtype: Dtype = "float32",
    ) -> ResultList[ResultList[Hit]]:
        """The `top` documents of a corpus whose embeddings are the most similar to each query's, the best first.

        The corpus is a file, folder or glob, a list of `Path`s, or an iterable of texts; see `search_index`.
        """
        searchable = self.search_index(
            corpus, documents=documents, column=column, layers=layers, pool=pool, transform=transform, dtype=dtype
        )
        return searchable.search(queries, top=top, kind=index)

    def search_index(
        self,
        corpus: str | Path | Iterable[Any],
        *,
        documents: DocumentUnit = "auto",
        column: str = "text",
        layers: str = "last",
        pool: str | None = None,
        transform: Transform = "center",
        dtype: Dtype = "float32",
    ) -> SearchIndex:
        """The embeddings of a corpus, computed once and kept in the cache.

        Vectors are pooled by the mean unless `pool` is "cls" or "last". `transform` is applied to all of them: "none",
        "center" (minus the mean) or "whiten". `dtype` is that of the stored vectors.
        """
        settings = SearchSettings(layers, pool, transform, dtype)
        return open_index(self, open_documents(corpus, documents=documents, column=column), settings)

    # Labelled tasks

    def predict(
        self,
        rows: str | Path | Frame | Dataset | Iterable[Any],
        *,
        columns: Mapping[str, str] | None = None,
        abstain_below: float | None = None,
    ) -> ResultList[Prediction]:
        """The task's prediction for each row: a class, the tags of words, the answer to a question.

        A row is a text; for pairs `(text, text_b)`, for tags a list of words or a text, for answers
        `{"question": ..., "context": ...}`. A data frame, a dataset, dicts, or a file named by a `Path` have a row for
        each of theirs; `columns` names their columns, such as {"text": "review"}. A `str` is a text; one that names a
        file is refused. A class that is less probable than `abstain_below` is left empty. Rows are batched by length,
        as many at once as fit, so there is no batch size. `to_frame()` has the inputs beside the predictions, and the
        index of a pandas frame.
        """
        task, names, index = self.labelled_task(), None if columns is None else dict(columns), None
        inputs: Records | list[Any]
        if isinstance(rows, Path):
            read = self.read_rows(rows, columns=names)
            inputs = read if isinstance(read, Records) else list(read)
        elif isinstance(rows, str):
            refuse_file_name(rows)
            inputs = [rows]
        else:
            inputs = list(rows_in_memory(rows, task, self.config, columns))
            names = own_columns(self.config, columns, column_names(rows))
            index = getattr(rows, "index", None) if is_frame(rows) else None
        make = task.prediction_class.from_dict
        predictions = [make(values) for values in self.iter_predictions(inputs, abstain_below=abstain_below)]
        return ResultList(predictions, inputs=displayed_inputs(inputs, task, names), index=index)

    def predict_values(self, rows: Iterable[Any]) -> list[dict[str, Any]]:
        """The predictions of `predict` as JSON has them."""
        return list(self.iter_predictions(rows))

    def iter_predictions(
        self, rows: str | Iterable[Any] | Records, *, abstain_below: float | None = None
    ) -> Iterator[dict[str, Any]]:
        """The predictions one by one, for any number of rows; later rows are tokenized while the model runs."""
        if abstain_below is None:
            return self.predict_with(self.labelled_task(), rows)
        return self.predict_with(self.abstention_task(), rows, abstain_below=abstain_below)

    def predict_with(
        self, task: LabelledTask, rows: str | Iterable[Any] | Records, *, abstain_below: float | None = None
    ) -> Iterator[dict[str, Any]]:
        """Predictions of the run's task with other settings."""
        rows = rows if isinstance(rows, Records) else iter_rows(rows, task)
        for data in prepare_ahead(rows, task, self.model.device):
            yield from self.predictions_of(task, data, abstain_below)

    def predictions_of(self, task: LabelledTask, data: Any, abstain_below: float | None) -> list[dict[str, Any]]:
        """The predictions for prepared rows; `abstained` says from which the model abstains, if it may."""
        outputs = self.outputs(data, task)
        with paused_gc():
            predictions = task.predictions(data, outputs)
        if abstain_below is None or not predictions:
            return predictions
        confidence = decision_scores(np.stack(outputs), task.thresholds).max(1)
        return [
            prediction | ({task.target: ""} if abstained else {}) | {"abstained": abstained}
            for prediction, abstained in zip(predictions, (confidence < abstain_below).tolist(), strict=True)
        ]

    def abstention_task(self) -> LabelledTask:
        """The run's task, if it predicts one class for each row and so has one confidence."""
        if (task := self.classification_task()).multilabel:
            raise UserError(f"{self.run}: predicts any number of classes for a row, so it cannot abstain from a row")
        return task

    def confidence_at(self, coverage: float) -> float:
        """The confidence that this share of the calibration rows reaches, for `abstain_below`."""
        if not 0 < coverage <= 1:
            raise UserError(f"coverage {coverage}: must be above 0 and at most 1")
        self.abstention_task()
        calibration = self.calibration or require_calibration(self.run)
        return calibration.confidence_at(coverage, calibrated=self.calibration is not None)

    def read_rows(self, file: str | Path, *, columns: dict[str, str] | None = None) -> Iterable[Any] | Records:
        """The input of `iter_predictions` from a file, or from standard input (`-`)."""
        rows = self.read_numbered_rows(file, columns=columns)
        return rows if isinstance(rows, Records) else (text for _, text in rows)

    def read_numbered_rows(
        self, file: str | Path, *, columns: dict[str, str] | None = None, skipped: list[int] | None = None
    ) -> Iterator[tuple[int, str]] | Records:
        """The rows of a file with their line numbers; see `inputs.read_numbered_rows`."""
        names = self.resolve_columns(file, columns)
        return read_numbered_rows(self.labelled_task(), file, columns=names, skipped=skipped)

    def resolve_columns(self, file: str | Path, columns: dict[str, str] | None = None) -> dict[str, str] | None:
        """The names of the run's columns in a file."""
        return resolve_columns(self.config, file, columns)

    def answer(
        self, questions: str | Sequence[str], *, context: str, threshold: float | None = None
    ) -> ResultList[AnswerPrediction]:
        """The span of the context that answers each question: `answer`, its characters `start` to `end`, `score`.

        A run trained with unanswerable questions returns "" if no answer is likelier than the best one by more than
        `threshold` (default: the run's own).
        """
        if not self.task.answers_questions:
            hint = "train a run for questions with headstock finetune --task answer"
            raise UserError(f"{self.run}: is a {self.task.title}; {hint}")
        task = self.labelled_task()
        if threshold is not None:
            if not task.config.unanswerable:
                raise UserError(f"{self.run}: was trained on answerable questions only, so it has no threshold")
            task = task.with_settings(threshold=threshold)
        if not isinstance(context, str):
            raise UserError(f"context is {describe_value(context)}, expected a text (str)")
        rows = [{"question": question, "context": context} for question in list_texts(questions, "questions")]
        predictions = self.predict_with(task, rows)
        return ResultList(AnswerPrediction(**(row | {"id": None})) for row in predictions)

    def translate(
        self,
        texts: str | Sequence[str],
        *,
        beams: int | None = None,
        length_penalty: float | None = None,
        no_repeat: int | None = None,
        max_tokens: int | None = None,
        long: Literal["cut", "refuse"] | None = None,
    ) -> list[str]:
        """The translation of each text by beam search.

        `long` says what happens to a text that is longer than the model's context: its end is cut off, or it is
        refused. None stands for the run's own setting.
        """
        task = self.translation_task(
            beams=beams, length_penalty=length_penalty, no_repeat=no_repeat, max_tokens=max_tokens, long=long
        )
        return translate_texts(self.model, task, list_texts(texts), length=self.length, dtype=self.config.train.dtype)

    def translation_notes(self, texts: Sequence[str]) -> list[str]:
        """Warnings about how texts to be translated are read, such as truncation."""
        task = self.translation_task()
        return task.reading_warnings(prepare_texts(task, texts), length=self.length)

    def align(
        self,
        text: str,
        *,
        beams: int | None = None,
        length_penalty: float | None = None,
        no_repeat: int | None = None,
        max_tokens: int | None = None,
        long: Literal["cut", "refuse"] | None = None,
    ) -> Alignment:
        """Translate a text as `translate` does and return the cross-attention weights."""
        task = self.translation_task(
            beams=beams, length_penalty=length_penalty, no_repeat=no_repeat, max_tokens=max_tokens, long=long
        )
        return align_translation(self.model, task, text, length=self.length)

    def translation_task(self, **options: int | float | str | None) -> Translate:
        """The run's translation task, with the options of `translate`."""
        if not self.task.translates:
            hint = "train a run for translation with headstock finetune --task translate"
            raise UserError(f"{self.run}: is a {self.task.title}; {hint}")
        settings: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        return cast(Translate, self.task).with_settings(**settings)

    def suggest(
        self, rows: Iterable[str | tuple[int, str]], *, count: int = 20, method: str | None = None, seed: int = 0
    ) -> ResultList[Suggestion]:
        """The rows of an unlabelled pool to label next, the most useful first.

        `method` is margin (default), entropy, uncertainty, diversity, or badge (uncertain and diverse).
        """
        return ResultList(suggest(self, rows, count=count, method=method, seed=seed))

    def with_model(self, index: int) -> "Pipeline":
        """A pipeline of one model of an ensemble."""
        return Pipeline(self.run, self.config, self.tokenizer, [self.models[index]], self.task)

    def prompted(
        self, settings: PromptSettings, classes: Sequence[str] | None = None, examples: Sequence[tuple[str, str]] = ()
    ) -> "PromptedPipeline":
        """This language model as a classifier that is prompted rather than trained.

        `classes` are by default the labels of `settings.label_words`; `examples` are texts with their classes.
        """
        if not (self.task.generates or self.task.fills_masks):
            raise UserError(f"{self.run}: is no language model; prompt the run it was fine-tuned from")
        names = list(settings.words_by_label()) if classes is None else list(classes)
        if len(names) < 2:
            raise UserError("label_words: name two labels or more, such as negative=bad,positive=good")
        return PromptedPipeline(self, settings, names, examples)

    def outputs(self, data: Any, task: LabelledTask | None = None) -> list[np.ndarray]:
        """The task's outputs for prepared rows, averaged over the models of an ensemble, and calibrated if they are.

        `task` is the run's own, possibly with other settings.
        """
        return self.calibrated(self.raw_outputs(data, task))

    def raw_outputs(self, data: Any, task: LabelledTask | None = None) -> list[np.ndarray]:
        task, dtype = task or self.labelled_task(), self.config.train.dtype
        outputs = [model_outputs(model, task, data, length=self.length, dtype=dtype) for model in self.models]
        return self.check_finite(ensemble_mean(outputs))

    def calibrated(self, outputs: list[np.ndarray]) -> list[np.ndarray]:
        return outputs if self.calibration is None or not outputs else list(self.calibration.scaled(np.stack(outputs)))

    def check_finite(self, values: Iterable[np.ndarray]) -> list[np.ndarray]:
        """Raise for NaN and infinity; minus infinity is valid, as the score of what is excluded."""
        rows = list(values)
        if rows and not (np.concatenate([row.ravel() for row in rows]) < np.inf).all():
            raise WorkError(f"{self.run}: the model's outputs are not finite")
        return rows

    def probabilities(self, texts: Iterable[Any] | Records) -> np.ndarray:
        """(N, C) the probability of every class."""
        task = self.classification_task()
        if isinstance(texts, Records):
            rows = texts
        else:
            inputs = list(iter_rows(texts, task))
            rows = Records("text", list(range(len(inputs))), task.columns_of(inputs))
        return np.stack(self.outputs(task.prepare(rows, labelled=False)))

    def classification_task(self) -> LabelledTask:
        """The run's task, if it predicts one class for each row."""
        if not is_labelled(self.task) or not self.task.predicts_classes:
            raise UserError(f"{self.run}: has no classification head; train one with headstock finetune")
        return self.task

    def labelled_task(self) -> LabelledTask:
        """The run's task, if it was trained on labels."""
        if not is_labelled(self.task):
            raise UserError(f"{self.run}: has no head for predictions; train one with headstock finetune")
        return self.task

    # Evaluation

    def evaluate(
        self,
        data: LabelledData | None = None,
        *,
        documents: DocumentUnit = "auto",
        columns: Mapping[str, str] | None = None,
        skip_blank: bool = False,
        details: bool = False,
        slices: Sequence[str] = (),
    ) -> Evaluation:
        """The task's metrics on text or labelled rows; by default on the run's held-out data.

        The data is a path, or rows in memory: a list, a data frame or a dataset.
        `columns` are by default the run's own; for a corpus {"text": ...} names the column of a table. With `details`
        the reliability diagram and the risk-coverage curve of a classifier are included. `slices` name groups of rows
        that are also scored on their own: a column, `contains:mais`, `regex:...`, `contrast`, `negation` or `length`.
        """
        names = None if columns is None else dict(columns)
        if data is None:
            files: list[str] = []
        elif is_labelled(self.task):
            files = self.labelled_files(data, names, skip_blank=skip_blank)
        else:
            column = (names or {}).get("text", self.config.data.column)
            files = corpus_paths(cast(CorpusData, data), name="data", column=column)
        metrics = self.evaluate_files(
            files, documents=documents, columns=names, skip_blank=skip_blank, details=details, slices=slices
        )
        metric = self.task.primary_metric if is_labelled(self.task) else "loss"
        return Evaluation(self.task.name, metric, metrics)

    def evaluate_files(
        self,
        files: Sequence[str | Path] = (),
        *,
        documents: str = "auto",
        columns: dict[str, str] | None = None,
        skip_blank: bool = False,
        details: bool = False,
        slices: Sequence[str] = (),
    ) -> dict[str, Any]:
        """The metrics of `evaluate` for files, by default the run's held-out data."""
        if is_labelled(self.task):
            return self.evaluate_rows(files, columns, skip_blank=skip_blank, details=details, slices=slices)
        column = (columns or {}).get("text")
        store = evaluation_store(self.run, self.config, self.task, files, documents=documents, column=column)
        metrics = evaluate_store(self.model, self.task, store, length=self.length, dtype=self.config.train.dtype)
        self.check_finite([np.array([metrics["loss"]])])
        return metrics

    def labelled_files(
        self, data: LabelledData, columns: Mapping[str, str] | None, *, skip_blank: bool = False
    ) -> list[str]:
        """The paths of labelled data; rows in memory are saved to a file."""
        task, names = self.labelled_task(), own_columns(self.config, columns, column_names(data))
        inputs = task.input_columns
        return labelled_files(
            data, inputs=inputs, target=task.target, columns=names, labelled=True, skip_blank=skip_blank
        )

    def evaluate_rows(
        self,
        files: Sequence[str | Path],
        columns: dict[str, str] | None,
        *,
        skip_blank: bool = False,
        details: bool = False,
        slices: Sequence[str] = (),
    ) -> dict[str, Any]:
        """The metrics of a labelled task with their confidence intervals."""
        task = self.labelled_task()
        records = (
            labelled_records(self.config, task, files, columns, skip_blank=skip_blank) if files else self.held_out()
        )
        task.check(records)
        sliced = make_slices(slices, records, task.input_texts(records))
        data = task.prepare(records)
        raw = self.raw_outputs(data)
        outputs = self.calibrated(raw)
        metrics = metrics_with_intervals(task, data, outputs)
        if self.calibration is not None:
            fitted_here = self.calibration.fitted_on(records)
            metrics |= uncalibrated_metrics(task, data, raw, outputs, fitted_here=fitted_here)
        metrics |= {"skipped_rows": records.skipped} if records.skipped else {}
        if details and (confidences := task.confidences(data, outputs)) is not None:
            metrics |= {"reliability": reliability(*confidences), "risk_coverage": risk_coverage(*confidences)}
        if sliced:
            scored = task.row_metrics(data, outputs)[task.primary_metric]
            metrics |= {"slice_metric": task.primary_metric, "slices": slice_scores(scored, sliced)}
        return metrics | {"file": records.source}

    def held_out(self) -> Records:
        """The run's test rows, or if it has none its validation rows."""
        return held_out_records(self.run, self.config, self.labelled_task())

    def minimal_pairs(
        self,
        files: Sequence[str | Path],
        *,
        rows: int | None = None,
        pseudo: bool | None = None,
        progress: Callable[[float], None] | None = None,
        write: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """The accuracy on minimal pairs: how often the good text is likelier than the bad one.

        `write` is called with each pair and its two log-likelihoods.
        """
        kind = self.likelihood_kind(pseudo)
        metrics = score_minimal_pairs(
            read_minimal_pairs(files, rows=rows),
            self.tokenizer.encode_batch,
            self.tokenizer.offsets,
            lambda texts: self.token_log_probabilities(texts, pseudo=pseudo, progress=progress),
            write=write,
        )
        return metrics | {"kind": kind}

    def score_schemas(
        self, schemas: Sequence[Schema], *, pseudo: bool | None = None, normalize: bool = False
    ) -> ResultList[SchemaScore]:
        """Winograd schemas with each candidate in place of the pronoun; `normalize` takes means per token."""
        scores = score_schemas(
            schemas,
            self.tokenizer.encode_batch,
            self.tokenizer.offsets,
            lambda texts: self.check_finite(self.token_log_probabilities(texts, pseudo=pseudo)),
            normalize=normalize,
        )
        return ResultList(scores)

    def require(self, ability: str, action: str) -> None:
        """Raise if the run's task lacks an ability, naming the tasks that have it."""
        if not getattr(self.task, ability):
            able = ", ".join(name for name in TASKS.names() if getattr(TASKS.get(name), ability))
            kind = {"generates": "left-to-right", "fills_masks": "masked"}[ability]
            raise UserError(
                f"{self.run}: is no {kind} language model, so it cannot {action} (objectives that can: {able})"
            )


@methods_name_keywords
class PromptedPipeline(Pipeline):
    """A language model that predicts classes by scoring their label words in a template."""

    def __init__(
        self,
        pipeline: Pipeline,
        settings: PromptSettings,
        classes: Sequence[str],
        examples: Sequence[tuple[str, str]] = (),
    ):
        task = PromptTask(PromptTask.Config(classes=tuple(classes)), pipeline.tokenizer)
        super().__init__(pipeline.run, pipeline.config, pipeline.tokenizer, pipeline.models, task)
        self.classifier = PromptClassifier(
            self.model, self.tokenizer, pipeline.task, settings, classes, length=self.length, examples=examples
        )

    def raw_outputs(self, data: Any, task: LabelledTask | None = None) -> list[np.ndarray]:
        return self.check_finite(list(self.classifier.probabilities(data.tokens)))

    def predict_with(
        self, task: LabelledTask, rows: str | Iterable[Any] | Records, *, abstain_below: float | None = None
    ) -> Iterator[dict[str, Any]]:
        if self.classifier.prior == "batch" and not isinstance(rows, Records):  # the batch is all texts
            texts = list(iter_rows(rows, task))
            rows = Records("row", list(range(1, len(texts) + 1)), task.columns_of(texts))
        if self.classifier.prior == "batch" and isinstance(rows, Records):
            data = task.prepare(rows, labelled=False)
            return iter(self.predictions_of(task, data, abstain_below))
        return super().predict_with(task, rows, abstain_below=abstain_below)
