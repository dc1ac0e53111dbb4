"""Reads questions on contexts that hold their answers: SQuAD's JSON, and tables with the same columns."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstock.data.formats import PLAIN, TABLES, DataFile, detect_format, table_rows, text_chunks
from headstock.data.records import (
    Layout,
    Records,
    Unusable,
    all_blank,
    bare_name,
    find_file,
    refused,
    shown,
    table_names,
    usable_text,
)
from headstock.errors import UserError

CONTEXT, QUESTION, ANSWERS, ID = "context", "question", "answers", "id"
JSON = ".json"
SQUAD = '{"data": [{"paragraphs": [{"context": "...", "qas": [{"question": "...", "answers": [...]}]}]}]}'
FORMS = '{"text": [...], "answer_start": [...]} or a list of {"text": ..., "answer_start": ...}'


def read_questions(
    path: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    strict: bool = True,
    skip_blank: bool = False,
    say: Callable[[str], None] | None = None,
) -> Records:
    """The questions of a file: columns "context", "question", "id" and, where there are any, "answers".

    The answers to a question are a list of {"text": str, "start": int}, which is empty where the context holds none.
    An answer that does not stand at its offset is moved to the nearest place where it does, and `say` tells how many
    were; one without an offset is taken where it first stands. `columns` says what the file calls our columns, and
    answers that it names must be there if we `insist`. With `skip_blank`, blank questions and contexts are left out.
    """
    called = table_names(columns, [CONTEXT, QUESTION, ANSWERS, ID])
    where, name = find_file(path)
    source = detect_format(where, name)
    bare, packing = bare_name(where.name)
    reading = _Reading(name, skip_blank)
    if source and source.format in TABLES:
        named = [column for column in (ANSWERS, ID) if strict and column in (columns or {})]
        _read_table(reading, source, called, named)
    elif bare.lower().endswith(JSON):
        _read_squad(reading, DataFile(where, name, PLAIN, packing), called)
    else:
        wanted = f"{JSON} in SQuAD's layout, or {' '.join(TABLES)}"
        raise UserError(f"{name}: cannot tell what is in a {Path(bare).suffix or 'nameless'} file (wanted {wanted})")
    return reading.records(say or (lambda line: None))


@dataclass
class _Reading:
    """What was read so far, and what was wrong with it."""

    source: str
    skip_blank: bool = False
    skipped: int = 0
    lines: list[int] = field(default_factory=list)
    words: list[str] = field(default_factory=list)  # where each question is, in a file whose lines say nothing
    contexts: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    answers: list[list[dict[str, Any]] | None] = field(default_factory=list)  # None: nobody has said
    ids: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)  # the places of answers that did not stand at their offsets

    def skips(self, *texts: Any) -> bool:
        """Whether a row with these texts is left out because one of them is blank."""
        blank = any(text is None or (isinstance(text, str) and not text.strip()) for text in texts)
        self.skipped += self.skip_blank and blank
        return self.skip_blank and blank

    def add(self, line: int, context: str, question: Any, answers: Any, identity: Any) -> None:
        place = self.place(len(self.lines), line)
        self.lines.append(line)
        self.contexts.append(context)
        self.ids.append(str(len(self.lines)) if identity is None or identity == "" else str(identity))
        try:
            self.questions.append(usable_text(question))
        except Unusable as wrong:
            self.problems.append(f"{place}: {QUESTION} {wrong}")
        try:
            pairs = None if answers is None else _pairs(answers)
            self.answers.append(None if pairs is None else [self._placed(place, context, *pair) for pair in pairs])
        except Unusable as wrong:
            self.problems.append(f"{place}: {ANSWERS} {wrong}")

    def place(self, index: int, line: int) -> str:
        return f"{self.source}: {self.words[index]}" if self.words else f"{self.source}:{line}"

    def _placed(self, place: str, context: str, text: str, start: int | None) -> dict[str, Any]:
        """The answer where it stands in its context, which is not always where its offset says."""
        if start is None:
            start = context.find(text)
            if start < 0:
                raise Unusable(f"{shown(text)} does not occur in the context")
        elif start < 0 or not context.startswith(text, start):
            given, near = start, max(start, 0)
            found = (context.rfind(text, 0, near + len(text)), context.find(text, near))
            if found == (-1, -1):
                there = f"there is {shown(context[near : near + len(text)])}"
                raise Unusable(f"{shown(text)} is not at offset {given} ({there}) nor elsewhere in the context")
            start = min((at for at in found if at >= 0), key=lambda at: abs(at - given))
            self.moved.append(f"{place}: {shown(text)} from {given} to {start}")
        return {"text": text, "start": start}

    def records(self, say: Callable[[str], None]) -> Records:
        if not self.problems and any(answers is not None for answers in self.answers):
            without = [i for i, answers in enumerate(self.answers) if answers is None]
            what = f"{ANSWERS} is not there, but other questions have it (one that has none has an empty list)"
            self.problems = [f"{self.place(i, self.lines[i])}: {what}" for i in without]
        if self.problems:
            raise refused(self.source, self.problems)
        if not self.lines:
            raise all_blank(self.source, self.skipped) if self.skipped else UserError(f"{self.source}: no questions")
        if self.moved:
            answers = "1 answer" if len(self.moved) == 1 else f"{len(self.moved)} answers"
            say(f"moved {answers} to where they stand, away from the offset given; first {self.moved[0]}")
        columns: dict[str, list[Any]] = {CONTEXT: self.contexts, QUESTION: self.questions, ID: self.ids}
        if self.answers[0] is not None:
            columns[ANSWERS] = self.answers
        return Records(self.source, self.lines, columns, self.words or None, self.skipped)


# Tables


def _read_table(reading: _Reading, source: DataFile, called: Mapping[str, str], named: list[str]) -> None:
    layout = Layout(source)
    layout.check(called, [CONTEXT, QUESTION], named)
    is_text = source.format in (".csv", ".tsv")
    for line, row in table_rows(source, list(called.values())):
        values = {name: row.get(column) for name, column in called.items()}
        if reading.skips(values[CONTEXT], values[QUESTION]):
            continue
        try:
            context = usable_text(values[CONTEXT])
        except Unusable as wrong:
            reading.problems.append(layout.problem(CONTEXT, called[CONTEXT], line, wrong))
            continue
        answers = _cell(values[ANSWERS]) if is_text else values[ANSWERS]
        reading.add(line, context, values[QUESTION], answers, values[ID])
    if not reading.lines and not reading.problems and not reading.skipped:
        raise layout.no_rows()


def _cell(text: str | None) -> Any:
    """The answers in a cell that is text: JSON, or one answer as it stands in the context; None where it is blank."""
    if text is None or not text.strip():
        return None
    if text.lstrip()[0] in "[{":
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text


# SQuAD


def _read_squad(reading: _Reading, source: DataFile, called: Mapping[str, str]) -> None:
    for where, paragraph in _paragraphs(source):
        context = _of(paragraph, called[CONTEXT], str, where)
        if reading.skips(context):
            continue
        try:
            usable_text(context)
        except Unusable as wrong:
            reading.problems.append(f"{where}.{called[CONTEXT]} {wrong}")
            continue
        for at, entry in enumerate(_of(paragraph, "qas", list, where)):
            number = len(reading.lines) + 1
            if not isinstance(entry, dict):
                raise _wrong_layout(f"{where}.qas[{at}]", "an object", entry)
            if reading.skips(entry.get(called[QUESTION])):
                continue
            identity = entry.get(called[ID])
            reading.words.append(f"question {number}" + (f" (id {identity})" if identity is not None else ""))
            answers = [] if entry.get("is_impossible") is True else entry.get(called[ANSWERS])
            reading.add(number, context, entry.get(called[QUESTION]), answers, identity)


def _paragraphs(source: DataFile) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each paragraph with its place, such as `train.json: data[3].paragraphs[0]`."""
    top = _json(source)
    if not isinstance(top, dict):
        raise _wrong_layout(f"{source.name}", "an object", top)
    for i, article in enumerate(_of(top, "data", list, f"{source.name}: top")):
        where = f"{source.name}: data[{i}]"
        if not isinstance(article, dict):
            raise _wrong_layout(where, "an object", article)
        for j, paragraph in enumerate(_of(article, "paragraphs", list, where)):
            if not isinstance(paragraph, dict):
                raise _wrong_layout(f"{where}.paragraphs[{j}]", "an object", paragraph)
            yield f"{where}.paragraphs[{j}]", paragraph


def _json(source: DataFile) -> Any:
    text = "".join(chunk for _, chunk in text_chunks(source))
    try:
        return json.loads(text)
    except json.JSONDecodeError as wrong:
        hint = "" if wrong.msg != "Extra data" else "; if it has one object a line, call it .jsonl"
        place = f"{source.name}:{wrong.lineno}"
        raise UserError(f"{place}: not JSON: {wrong.msg} at column {wrong.colno} (wanted {SQUAD}){hint}") from None
    except (ValueError, RecursionError) as wrong:
        raise UserError(f"{source.name}: not JSON that can be read ({wrong})") from None


def _of(value: dict[str, Any], name: str, kind: type, where: str) -> Any:
    if name not in value:
        have = ", ".join(map(repr, value)) or "nothing"
        raise UserError(f"{where}: no {name!r} (has: {have}); wanted SQuAD's layout, {SQUAD}")
    if not isinstance(value[name], kind):
        raise _wrong_layout(f"{where}.{name}", "a list" if kind is list else "text", value[name])
    return value[name]


def _wrong_layout(where: str, wanted: str, got: Any) -> UserError:
    return UserError(f"{where}: wanted {wanted}, got {shown(got)}; the layout is SQuAD's, {SQUAD}")


# Answers


def _pairs(answers: Any) -> list[tuple[str, int | None]]:
    """Answers in any of the usual forms as pairs of text and offset, None where there is no offset."""
    if isinstance(answers, str):
        return [_pair(answers.strip(), None)]
    if isinstance(answers, list):
        return [_pair(answer, None) if isinstance(answer, str) else _pair(*_sides(answer)) for answer in answers]
    texts, starts = _sides(answers)
    if isinstance(texts, str):
        return [_pair(texts, starts)]
    if not isinstance(texts, list) or not (starts is None or isinstance(starts, list)):
        raise Unusable(f"is {shown(answers)}, wanted {FORMS}")
    if starts is not None and len(starts) != len(texts):
        raise Unusable(f"has {len(texts)} texts but {len(starts)} offsets")
    return [_pair(text, start) for text, start in zip(texts, starts or [None] * len(texts), strict=True)]


def _sides(answer: Any) -> tuple[Any, Any]:
    """The text (or texts) and the offset (or offsets) of an object."""
    if not isinstance(answer, dict) or "text" not in answer:
        raise Unusable(f"is or holds {shown(answer)}, wanted {FORMS}")
    return answer["text"], answer.get("answer_start", answer.get("start"))


def _pair(text: Any, start: Any) -> tuple[str, int | None]:
    try:
        text = usable_text(text)
    except Unusable as wrong:
        raise Unusable(f"holds a text that {wrong}") from None
    if start is not None and (isinstance(start, bool) or not isinstance(start, int)):
        raise Unusable(f"{shown(text)} has the offset {shown(start)}, wanted a whole number")
    return text, start
