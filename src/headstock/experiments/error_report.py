"""What a report tells of one model: where it errs, how sure it is, whether length matters, what it looks at."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headstock.data.records import Records
from headstock.data.word_joining import join_words
from headstock.experiments import error_analysis as mistakes
from headstock.experiments.metric_names import nouns_of
from headstock.inference.attribution import token_attributions
from headstock.inference.pipeline import load
from headstock.model.model import Model
from headstock.tasks.answer import Answer, EncodedQuestions
from headstock.tasks.classify import Classify, EncodedTexts
from headstock.tasks.labelled import LabelledTask
from headstock.tasks.squad_metrics import exact_match, f1
from headstock.tasks.tag import EncodedSentences, Tag
from headstock.tasks.translate import EncodedPairs, Translate
from headstock.tasks.translation_metrics import chrf, chrf_counts
from headstock.train.loop import sequence_length
from headstock.train.run_folder import RunFolder

EXPLAINED = 12  # mistakes whose tokens are weighed
SHOWN = 20  # mistakes that are told
AROUND = 240  # characters of a context that are shown on either side of an answer
NOTHING = "(no answer)"


def analyze_errors(
    task: LabelledTask,
    rows: Records,
    data: Any,
    outputs: Sequence[np.ndarray],
    *,
    model: Model | None = None,
    length: int = 0,
) -> dict[str, Any]:
    """What a report tells of a model's predictions; nothing where several classes may be true of a text."""
    if isinstance(task, Tag):
        return tell_tags(task, data, outputs)
    if isinstance(task, Answer):
        return tell_answers(task, rows, data, outputs)
    if isinstance(task, Translate):
        return {"mistakes": worst_translations(task, rows, data, outputs)}
    assert isinstance(task, Classify)
    if task.multilabel:
        return {}
    found = np.stack(outputs).round(5)
    explained = {} if model is None else explain_mistakes(model, task, data, found, length=length)
    return tell_classes(task, rows, data.labels, found, explained)


def confidences(task: LabelledTask, data: Any, outputs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray] | None:
    """How sure the model is of each prediction, and whether it is right; None where that is no question of right."""
    if isinstance(task, Translate):
        return None
    if isinstance(task, Answer):
        said = task.predictions(data, outputs)
        right = [exact_match(row["answer"], gold) for row, gold in zip(said, data.labels, strict=True)]
        return np.array([row["score"] for row in said]), np.array(right) == 1
    if isinstance(task, Classify) and task.multilabel:
        return None
    tagged = isinstance(task, Tag)
    found = np.concatenate(outputs) if tagged else np.stack(outputs)
    truth = np.concatenate(data.labels) if tagged else data.labels
    return found.max(-1), found.argmax(-1) == truth


def shown_of(rows: Records, classes: Sequence[str]) -> dict[str, Any]:
    """The rows as a person looks at them."""
    return {"texts": rows.display_texts, "places": [rows.location(i) for i in range(len(rows))], "classes": classes}


def lengths_of(task: LabelledTask, lengths: np.ndarray, good: np.ndarray) -> dict[str, Any]:
    """How many words there are where the model is right and where it is not, and whether that makes a difference."""
    right, wrong = lengths[good].tolist(), lengths[~good].tolist()
    statistic = mistakes.length_effect(right, wrong, called=nouns_of(task.name).wrong)
    return {"right": right, "wrong": wrong, "unit": "words", "statistic": statistic}


# Classes


def tell_classes(
    task: Classify, rows: Records, truth: np.ndarray, found: np.ndarray, explained: Mapping[str, Any]
) -> dict[str, Any]:
    """Confusion, lengths, calibration and the surest mistakes, from the probabilities `found` (N, C) of the rows."""
    shown = shown_of(rows, task.config.classes)
    surest = mistakes.mistakes(found, truth, **shown, limit=SHOWN)
    for mistake, row in zip(surest, mistakes.surest_mistakes(found, truth, limit=SHOWN), strict=True):
        mistake["tokens"] = explained.get(str(row), [])
    words = np.array([len(text.split()) for text in shown["texts"]])
    return {
        **mistakes.confusions(truth, found.argmax(1), len(task.config.classes)),
        "lengths": lengths_of(task, words, found.argmax(1) == truth),
        "calibration": mistakes.calibration(found, truth),
        "mistakes": surest,
    }


def explain_mistakes(
    model: Model, task: Classify, data: EncodedTexts, found: np.ndarray, *, length: int
) -> dict[str, Any]:
    """The tokens that weighed most in the surest mistakes, by row."""
    assert data.labels is not None
    explained = {}
    for row in mistakes.surest_mistakes(found, data.labels, limit=EXPLAINED):
        weighed = token_attributions(model, task, data, row, target=int(found[row].argmax()), length=length)
        explained[str(row)] = [(token, round(weight, 5)) for token, weight in weighed]
    return explained


# Tags


def tell_tags(task: Tag, data: EncodedSentences, outputs: Sequence[np.ndarray]) -> dict[str, Any]:
    """The same of every word; a sentence is right if all its words are."""
    assert data.labels is not None
    found, truth = np.concatenate(outputs), np.concatenate(data.labels)  # (words, C), (words,)
    sizes = np.array([len(labels) for labels in data.labels])
    good = [bool((one.argmax(-1) == labels).all()) for one, labels in zip(outputs, data.labels, strict=True)]
    return {
        **mistakes.confusions(truth, found.argmax(1), len(task.config.classes)),
        "lengths": lengths_of(task, sizes, np.array(good)),
        "calibration": mistakes.calibration(found, truth),
        "mistakes": wrong_words(task, data, found, truth, sizes),
    }


def wrong_words(
    task: Tag, data: EncodedSentences, found: np.ndarray, truth: np.ndarray, sizes: np.ndarray
) -> list[dict]:
    """The surest of them, each in its sentence, where `marks` says which it is."""
    told, begins = [], np.cumsum(sizes) - sizes
    for at in mistakes.surest_mistakes(found, truth, limit=SHOWN):
        row = int(np.searchsorted(begins, at, side="right")) - 1  # no sentence is empty
        word = int(at - begins[row])
        text, spans = join_words(data.words[row])
        told.append(
            {
                "place": f"{data.places[row]}, word {word + 1}",
                "text": text,
                "marks": [[*spans[word], "said"]],
                "subject": data.words[row][word],
                "label": task.config.classes[truth[at]],
                "predicted": task.config.classes[int(found[at].argmax())],
                "confidence": round(float(found[at].max()), 5),
                "tokens": [],
            }
        )
    return told


# Answers


def tell_answers(task: Answer, rows: Records, data: EncodedQuestions, outputs: Sequence[np.ndarray]) -> dict[str, Any]:
    """Calibration against exact matches, the contexts' lengths, and the surest wrong answers."""
    assert data.labels is not None
    sure, right = confidences(task, data, outputs)  # type: ignore[misc]
    words = np.array([len(passage.text.split()) for passage in data.passages])
    return {
        "lengths": lengths_of(task, words, right),
        "calibration": mistakes.reliability(sure, right),
        "mistakes": wrong_answers(task, rows, data, outputs, sure, right),
    }


def wrong_answers(
    task: Answer,
    rows: Records,
    data: EncodedQuestions,
    outputs: Sequence[np.ndarray],
    sure: np.ndarray,
    right: np.ndarray,
) -> list[dict]:
    """Each with its question, and the part of the context in which `marks` says what was answered and what was true."""
    assert data.labels is not None
    wrong = np.flatnonzero(~right)
    told = []
    for row in wrong[np.argsort(-sure[wrong], kind="stable")][:SHOWN].tolist():
        (said,) = task.predictions(data.select([row]), [outputs[row]])
        gold = rows.columns["answers"][row]
        text, marks = excerpt(data.passages[row].text, said, gold)
        told.append(
            {
                "place": data.places[row],
                "question": rows.columns["question"][row],
                "text": text,
                "marks": marks,
                "label": "; ".join(dict.fromkeys(data.labels[row])) or NOTHING,
                "predicted": said["answer"] or NOTHING,
                "confidence": round(said["score"], 5),
                "f1": round(f1(said["answer"], data.labels[row]), 5),
                "tokens": [],
            }
        )
    return told


def excerpt(text: str, said: Mapping[str, Any], gold: Sequence[Mapping[str, Any]]) -> tuple[str, list[list]]:
    """The context around the answer given, or else around the true one, and where in it both stand."""
    spans = [] if said["start"] is None else [(said["start"], said["end"], "said")]
    spans += [(answer["start"], answer["start"] + len(answer["text"]), "true") for answer in gold[:1]]
    if not spans:
        return text[: 2 * AROUND], []
    begin, end = max(0, spans[0][0] - AROUND), min(len(text), spans[0][1] + AROUND)
    if begin:  # words are not cut
        begin = min(spans[0][0], text.find(" ", begin) + 1 or begin)
    if end < len(text):
        end = max(spans[0][1], text.rfind(" ", 0, end))
    before, after = "… " if begin else "", " …" if end < len(text) else ""
    moved = len(before) - begin
    inside = [[first + moved, last + moved, kind] for first, last, kind in spans if begin <= first and last <= end]
    return f"{before}{text[begin:end]}{after}", inside


# Translations


def worst_translations(
    task: Translate, rows: Records, data: EncodedPairs, outputs: Sequence[np.ndarray]
) -> list[dict[str, Any]]:
    """The sentences that are furthest from what they should be, by the chrF of each alone."""
    assert data.labels is not None
    said = [row["text"] for row in task.predictions(data, outputs)]
    close = chrf(chrf_counts(said, data.labels))
    return [
        {
            "place": data.places[row],
            "text": rows.display_texts[row],
            "label": data.labels[row],
            "predicted": said[row],
            "confidence": None,
            "chrf": round(float(close[row]), 5),
            "tokens": [],
        }
        for row in np.argsort(close, kind="stable")[:SHOWN].tolist()
    ]


def add_error_analysis(run: RunFolder, *, device: str = "auto") -> None:
    """Add to a fine-tuned run's results what it gets wrong, on its test rows or else its validation rows."""
    loaded = load(run.path, device=device)
    task, rows = loaded.labelled_task(), loaded.held_out()
    data = task.prepare(rows)
    length = sequence_length(loaded.model, loaded.config.train)
    told = analyze_errors(task, rows, data, loaded.outputs(data), model=loaded.model, length=length)
    if told:
        run.write_results(run.results() | {"details": told})
