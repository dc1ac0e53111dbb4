"""Reads extractive question answering data: SQuAD's JSON, and tables with the same columns."""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headstock.data.formats import (
    PLAIN,
    TABLES,
    DataFile,
    detect_format,
    split_compression,
    table_rows,
    text_chunks,
    unknown_format,
)
from headstock.data.labelled_texts import find_file
from headstock.data.records import (
    RecordBuilder,
    Records,
    Unusable,
    check_columns,
    describe_cell,
    no_rows,
    parse_text,
    preview,
    resolve_columns,
)
from headstock.errors import UserError

logger = logging.getLogger(__name__)

CONTEXT, QUESTION, ANSWERS, ID = "context", "question", "answers", "id"
JSON = ".json"
SQUAD = '{"data": [{"paragraphs": [{"context": "...", "qas": [{"question": "...", "answers": [...]}]}]}]}'
ANSWER_FORMS = '{"text": [...], "answer_start": [...]} or a list of {"text": ..., "answer_start": ...}'


def read_questions(
    path: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    strict: bool = True,
    skip_blank: bool = False,
) -> Records:
    """Read the columns "context", "question", "id" and, if present, "answers".

    The answers to a question are a list of {"text": str, "start": int}, empty if the context has no answer. An answer
    that is not at its offset is moved to the nearest occurrence, which is logged; one without an offset is placed at
    its first occurrence. `columns` maps our names to the file's; answers that it names must exist if `strict`. With
    `skip_blank`, questions with a blank text or context are left out.
    """
    resolved = resolve_columns(columns, [CONTEXT, QUESTION, ANSWERS, ID])
    file_path, name = find_file(path)
    file = detect_format(file_path, name)
    bare, compression = split_compression(file_path.name)
    if file and file.format in TABLES:
        named = [column for column in (ANSWERS, ID) if strict and column in (columns or {})]
        return _read_table(file, resolved, named, skip_blank)
    if bare.lower().endswith(JSON):
        return _read_squad(DataFile(file_path, name, PLAIN, compression), resolved, skip_blank)
    raise unknown_format(file_path, name, f"{JSON} in SQuAD's layout, or {' '.join(TABLES)}")


class _QuestionBuilder(RecordBuilder):
    """Numbers questions without an id, and moves answers to where they occur."""

    def __init__(self, file: DataFile, resolved: Mapping[str, str], skip_blank: bool):
        self.moved: list[str] = []
        describe = describe_cell(file, resolved)
        hint = "; a question without an answer has an empty list"
        required, optional = (CONTEXT, QUESTION, ID), (ANSWERS,)
        super().__init__(file.name, self.parse_value, required, optional, skip_blank, describe, hint)

    def add_question(self, line: int, row: dict[str, Any], location: str | None = None) -> None:
        """Add a question; `None` answers are missing ones."""
        self.current = f"{self.source}: {location}" if location else f"{self.source}:{line}"
        row[ID] = str(len(self.lines) + 1) if row.get(ID) in (None, "") else str(row[ID])
        if row.get(ANSWERS) is None:
            row.pop(ANSWERS, None)
        self.add(line, row, location)

    def parse_value(self, name: str, value: Any, row: dict[str, Any]) -> Any:
        if name == ID:
            return value
        if name != ANSWERS:
            return parse_text(value)
        pairs = _parse_answers(value)
        return [self._place(row[CONTEXT], *pair) for pair in pairs] if CONTEXT in row else None

    def _place(self, context: str, text: str, start: int | None) -> dict[str, Any]:
        """An answer at its actual position in the context."""
        if start is None:
            start = context.find(text)
            if start < 0:
                raise Unusable(f"{preview(text)} does not occur in the context")
        elif start < 0 or not context.startswith(text, start):
            offset, begin = start, max(start, 0)
            occurrences = [context.rfind(text, 0, begin + len(text)), context.find(text, begin)]
            occurrences = [at for at in occurrences if at >= 0]
            if not occurrences:
                actual = preview(context[begin : begin + len(text)])
                raise Unusable(
                    f"{preview(text)} is not at offset {offset} (found {actual}) nor elsewhere in the context"
                )
            start = min(occurrences, key=lambda at: abs(at - offset))
            self.moved.append(f"{self.current}: {preview(text)} from {offset} to {start}")
        return {"text": text, "start": start}

    def questions(self, file: DataFile, empty: UserError | None = None) -> Records:
        records = self.build(lambda: empty or no_rows(file))
        if self.moved:
            count = "1 answer" if len(self.moved) == 1 else f"{len(self.moved)} answers"
            logger.info(f"moved {count} to the nearest occurrence, as the offset was wrong; first {self.moved[0]}")
        return records


def _read_table(file: DataFile, resolved: Mapping[str, str], named: list[str], skip_blank: bool) -> Records:
    check_columns(file, resolved, [CONTEXT, QUESTION, *named])
    builder = _QuestionBuilder(file, resolved, skip_blank)
    is_text = file.format in (".csv", ".tsv")
    for line, cells in table_rows(file, list(resolved.values())):
        row = {name: cells.get(column) for name, column in resolved.items()}
        if is_text:
            row[ANSWERS] = _parse_cell(row[ANSWERS])
        builder.add_question(line, row)
    return builder.questions(file)


def _parse_cell(text: str | None) -> Any:
    """The answers in a text cell: JSON, or one answer as written in the context; None if it is blank."""
    if text is None or not text.strip():
        return None
    if text.lstrip()[0] in "[{":
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text


# SQuAD


def _read_squad(file: DataFile, resolved: Mapping[str, str], skip_blank: bool) -> Records:
    builder = _QuestionBuilder(file, resolved, skip_blank)
    for where, paragraph in _paragraphs(file):
        context = _get(paragraph, resolved[CONTEXT], str, where)
        try:
            parse_text(context)
        except Unusable as error:
            if skip_blank and not context.strip():
                builder.skipped += 1
            else:
                builder.problems.append(f"{where}.{resolved[CONTEXT]} {error}")
            continue
        for i, entry in enumerate(_get(paragraph, "qas", list, where)):
            if not isinstance(entry, dict):
                raise _wrong_layout(f"{where}.qas[{i}]", "an object", entry)
            row = {name: entry.get(column) for name, column in resolved.items()} | {CONTEXT: context}
            if entry.get("is_impossible") is True:
                row[ANSWERS] = []
            number = len(builder.lines) + 1
            identity = "" if row[ID] is None else f" (id {row[ID]})"
            builder.add_question(number, row, f"question {number}{identity}")
    return builder.questions(file, UserError(f"{file.name}: no questions"))


def _paragraphs(file: DataFile) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each paragraph with its location, such as `train.json: data[3].paragraphs[0]`."""
    top = _load_json(file)
    if not isinstance(top, dict):
        raise _wrong_layout(file.name, "an object", top)
    for i, article in enumerate(_get(top, "data", list, f"{file.name}: top")):
        where = f"{file.name}: data[{i}]"
        if not isinstance(article, dict):
            raise _wrong_layout(where, "an object", article)
        for j, paragraph in enumerate(_get(article, "paragraphs", list, where)):
            if not isinstance(paragraph, dict):
                raise _wrong_layout(f"{where}.paragraphs[{j}]", "an object", paragraph)
            yield f"{where}.paragraphs[{j}]", paragraph


def _load_json(file: DataFile) -> Any:
    text = "".join(chunk for _, chunk in text_chunks(file))
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = "" if error.msg != "Extra data" else "; if it has one object per line, name it .jsonl"
        location = f"{file.name}:{error.lineno}"
        raise UserError(
            f"{location}: invalid JSON: {error.msg} at column {error.colno} (expected {SQUAD}){hint}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file.name}: unreadable JSON ({error})") from None


def _get(value: dict[str, Any], name: str, kind: type, where: str) -> Any:
    if name not in value:
        keys = ", ".join(map(repr, value)) or "nothing"
        raise UserError(f"{where}: no {name!r} (found: {keys}); expected SQuAD's layout, {SQUAD}")
    if not isinstance(value[name], kind):
        raise _wrong_layout(f"{where}.{name}", "a list" if kind is list else "text", value[name])
    return value[name]


def _wrong_layout(where: str, expected: str, value: Any) -> UserError:
    return UserError(f"{where}: expected {expected}, found {preview(value)}; the layout is SQuAD's, {SQUAD}")


# Answers


def _parse_answers(answers: Any) -> list[tuple[str, int | None]]:
    """Answers in any of the usual forms as pairs of text and offset; None where there is no offset."""
    if isinstance(answers, str):
        return [_parse_answer(answers.strip(), None)]
    if isinstance(answers, list):
        return [
            _parse_answer(answer, None) if isinstance(answer, str) else _parse_answer(*_text_and_offset(answer))
            for answer in answers
        ]
    texts, starts = _text_and_offset(answers)
    if isinstance(texts, str):
        return [_parse_answer(texts, starts)]
    if not isinstance(texts, list) or not (starts is None or isinstance(starts, list)):
        raise Unusable(f"is {preview(answers)}, expected {ANSWER_FORMS}")
    if starts is not None and len(starts) != len(texts):
        raise Unusable(f"has {len(texts)} texts but {len(starts)} offsets")
    return [_parse_answer(text, start) for text, start in zip(texts, starts or [None] * len(texts), strict=True)]


def _text_and_offset(answer: Any) -> tuple[Any, Any]:
    """The text (or texts) and the offset (or offsets) of an object."""
    if not isinstance(answer, dict) or "text" not in answer:
        raise Unusable(f"is or contains {preview(answer)}, expected {ANSWER_FORMS}")
    return answer["text"], answer.get("answer_start", answer.get("start"))


def _parse_answer(text: Any, start: Any) -> tuple[str, int | None]:
    try:
        text = parse_text(text)
    except Unusable as error:
        raise Unusable(f"contains a text that {error}") from None
    if start is not None and (isinstance(start, bool) or not isinstance(start, int)):
        raise Unusable(f"{preview(text)} has the offset {preview(start)}, expected an integer")
    return text, start
