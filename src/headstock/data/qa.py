"""Reads extractive question answering data: SQuAD's JSON, and tables with the same columns."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headstock.data.formats import TABLES, DataFile, text_chunks, unknown_format
from headstock.data.records import (
    Blank,
    RecordBuilder,
    Records,
    Unusable,
    find_file,
    parse_text,
    preview,
    read_table,
    resolve_columns,
)
from headstock.errors import UserError

logger = logging.getLogger(__name__)

CONTEXT, QUESTION, ANSWERS, ID = "context", "question", "answers", "id"
JSON = ".json"
SQUAD = '{"data": [{"paragraphs": [{"context": "...", "qas": [{"question": "...", "answers": [...]}]}]}]}'
ANSWER_FORMS = '{"text": [...], "answer_start": [...]} or a list of {"text": ..., "answer_start": ...}'
MISSING_HINT = "; a question without an answer has an empty list"


def read_questions(
    path: str | Path, *, columns: Mapping[str, str] | None = None, strict: bool = True, skip_blank: bool = False
) -> Records:
    """Read the columns "context", "question", "id" and, if present, "answers".

    The answers to a question are a list of {"text": str, "start": int}, empty if the context has no answer. An answer
    that is not at its offset is moved to the nearest occurrence, which is logged; one without an offset is placed at
    its first occurrence. `columns` maps our names to the file's; answers that it names must exist if `strict`. With
    `skip_blank`, questions with a blank text or context are left out.
    """
    parsers = {CONTEXT: parse_text, QUESTION: parse_text, ID: _parse_id, ANSWERS: _parse_answers}
    file = find_file(path)
    if file.is_table:
        records = read_table(
            file,
            parsers,
            columns=columns,
            optional=(ANSWERS, ID),
            strict=strict,
            skip_blank=skip_blank,
            prepare=_parse_text_cells if file.format in (".csv", ".tsv") else _prepare,
            missing_hint=MISSING_HINT,
        )
    elif file.format == JSON:
        builder = RecordBuilder(file, parsers, (ANSWERS,), skip_blank, missing_hint=MISSING_HINT)
        records = _read_squad(builder, resolve_columns(columns, list(parsers)))
    else:
        raise unknown_format(file, f"{JSON} in SQuAD's layout, or {' '.join(TABLES)}")
    _report_moved_answers(records)
    records.columns[ID] = [own_id or str(number) for number, own_id in enumerate(records.columns[ID], 1)]
    return records


def _prepare(row: dict[str, Any]) -> dict[str, Any]:
    """Give the row an id, and drop answers that are null."""
    row = {ID: None} | row
    return row if row.get(ANSWERS) is not None else {name: value for name, value in row.items() if name != ANSWERS}


def _parse_text_cells(row: dict[str, Any]) -> dict[str, Any]:
    """Parse the answers of a .csv or .tsv: JSON, or one answer as written in the context; blank means none."""
    text = (row.get(ANSWERS) or "").strip()
    answers: Any = text or None
    if text.startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            answers = json.loads(text)
    return _prepare(row | {ANSWERS: answers})


def _parse_id(value: Any, row: Any) -> str:
    return "" if value is None else str(value)


def _report_moved_answers(records: Records) -> None:
    moved = [
        f"{records.location(i)}: {preview(answer['text'])} from {offset} to {answer['start']}"
        for i, answers in enumerate(records.columns.get(ANSWERS, []))
        for answer in answers
        if (offset := answer.pop("moved_from", None)) is not None
    ]
    if moved:
        count = "1 answer" if len(moved) == 1 else f"{len(moved)} answers"
        logger.info(f"moved {count} to the nearest occurrence, as the offset was wrong; first {moved[0]}")


# Answers


def _parse_answers(value: Any, row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Answers in any of the usual forms, each at its position in the context."""
    if isinstance(value, str):
        pairs = [(value.strip(), None)]
    elif isinstance(value, list):
        pairs = [(answer, None) if isinstance(answer, str) else _text_and_offset(answer) for answer in value]
    else:
        texts, starts = _text_and_offset(value)
        if isinstance(texts, str):
            texts, starts = [texts], [starts]
        if not isinstance(texts, list) or not (starts is None or isinstance(starts, list)):
            raise Unusable(f"is {preview(value)}, expected {ANSWER_FORMS}")
        if starts is not None and len(starts) != len(texts):
            raise Unusable(f"has {len(texts)} texts but {len(starts)} offsets")
        pairs = list(zip(texts, starts or [None] * len(texts), strict=True))
    for text, start in pairs:
        _check_answer(text, start)
    return [_find_answer(row[CONTEXT], text, start) for text, start in pairs] if CONTEXT in row else None


def _text_and_offset(answer: Any) -> tuple[Any, Any]:
    """The text (or texts) and the offset (or offsets) of an object; None where there is no offset."""
    if not isinstance(answer, dict) or "text" not in answer:
        raise Unusable(f"is or contains {preview(answer)}, expected {ANSWER_FORMS}")
    return answer["text"], answer.get("answer_start", answer.get("start"))


def _check_answer(text: Any, start: Any) -> None:
    try:
        parse_text(text)
    except Unusable as error:
        raise Unusable(f"contains a text that {error}") from None
    if start is not None and (isinstance(start, bool) or not isinstance(start, int)):
        raise Unusable(f"{preview(text)} has the offset {preview(start)}, expected an integer")


def _find_answer(context: str, text: str, offset: int | None) -> dict[str, Any]:
    """The answer with its position: at its offset, or else at the nearest occurrence."""
    if offset is None:
        if text not in context:
            raise Unusable(f"{preview(text)} does not occur in the context")
        return {"text": text, "start": context.index(text)}
    if offset >= 0 and context.startswith(text, offset):
        return {"text": text, "start": offset}
    begin = max(offset, 0)
    occurrences = [context.rfind(text, 0, begin + len(text)), context.find(text, begin)]
    occurrences = [start for start in occurrences if start >= 0]
    if not occurrences:
        actual = preview(context[begin : begin + len(text)])
        raise Unusable(f"{preview(text)} is not at offset {offset} (found {actual}) nor elsewhere in the context")
    return {"text": text, "start": min(occurrences, key=lambda start: abs(start - offset)), "moved_from": offset}


# SQuAD


def _read_squad(builder: RecordBuilder, resolved: Mapping[str, str]) -> Records:
    for where, paragraph in _paragraphs(builder.file):
        context = _get(paragraph, resolved[CONTEXT], str, where)
        try:
            parse_text(context)
        except Unusable as error:
            if builder.skip_blank and isinstance(error, Blank):
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
            builder.add(number, _prepare(row), f"question {number}{identity}")
    if not (builder.lines or builder.problems or builder.skipped):
        raise UserError(f"{builder.file.name}: no questions")
    return builder.build()


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
