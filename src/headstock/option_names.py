"""Errors that name what the caller can change: the options of the command line, or in Python the keywords.

Messages are written with options (`--skip-blank`). Public functions are decorated with `names_keywords`, which
rewrites those of the errors that leave them (`skip_blank=True`), unless a command is running.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

from headstock.errors import HeadstockError

P = ParamSpec("P")
T = TypeVar("T")

IN_COMMAND = ContextVar("in_command", default=False)  # True while a verb of the command line runs

OPTION = r"(?<![\w-])--(?P<name>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)"
COLUMNS = re.compile(r"(?<![\w-])--columns (?P<pairs>[a-z_]+=[^\s,;)]+(?:,[a-z_]+=[^\s,;)]+)*)")
SETTING = re.compile(r"(?<![\w-])--set (?P<name>[a-z_]+(?:\.[a-z_]+)?)")
SUBJECT = re.compile(rf"^{OPTION} (?P<value>[^:]+):")  # `--labels 50: FILE has only 20 rows`
CHOICE = re.compile(r"(?<![\w-])--(?P<name>arms|by|device|init|leakage|method|on) (?P<value>[a-z][\w-]*)")
FLAGS = {
    "cpu-offload",
    "dry-run",
    "embedding",
    "equal-weights",
    "freeze",
    "int8",
    "keep",
    "nsp",
    "overwrite",
    "private",
}
FLAGS |= {"pseudo", "resume", "skip-blank", "tfidf"}
COMMAND = re.compile(r"(\bheadstock [a-z]+ [^;)\n]*)")  # a hint to run a command, which keeps its options
RENAMED = {"config": "config_file", "slice": "slices", "teacher": "teachers"}  # options whose keyword differs
COMMAND_ONLY = {"debug", "from", "json", "quiet"}  # options without a keyword


def python_spelling(message: str) -> str:
    """A message with keywords in place of options.

    >>> python_spelling("train.csv: exists; use --resume to continue it, or --set micro_batch=4")
    'train.csv: exists; use resume=True to continue it, or micro_batch=4'
    >>> python_spelling("run headstock plan text.txt --probe; not --device cpu")
    'run headstock plan text.txt --probe; not device="cpu"'
    >>> python_spelling("--task clasify: no such task; name the column with --columns text=NAME")
    'task=clasify: no such task; name the column with columns={"text": "NAME"}'
    """
    message = SUBJECT.sub(lambda match: f"{_keyword(match['name'])}={match['value']}:", message)
    parts = COMMAND.split(message)
    parts[::2] = map(_without_options, parts[::2])
    return "".join(parts)


def _without_options(text: str) -> str:
    text = COLUMNS.sub(lambda match: f"columns={{{_pairs(match['pairs'])}}}", text)
    text = SETTING.sub(lambda match: match["name"], text)
    text = CHOICE.sub(lambda match: f'{_keyword(match["name"])}="{match["value"]}"', text)
    return re.sub(OPTION, lambda match: _flag_or_keyword(match["name"]), text)


def _pairs(text: str) -> str:
    pairs = (pair.partition("=") for pair in text.split(","))
    return ", ".join(f'"{name}": "{column}"' for name, _, column in pairs)


def _keyword(option: str) -> str:
    return RENAMED.get(option, option.replace("-", "_"))


def _flag_or_keyword(option: str) -> str:
    if option in COMMAND_ONLY:
        return f"--{option}"
    return f"{_keyword(option)}=True" if option in FLAGS else _keyword(option)


def names_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a public function: the errors that leave it name keywords, unless a command is running."""

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        try:
            return function(*arguments, **keywords)
        except HeadstockError as error:
            if not IN_COMMAND.get():
                error.args = (python_spelling(str(error)),)
            raise

    return call


def methods_name_keywords(cls: type[T]) -> type[T]:
    """Decorates a public class: `names_keywords` for its public methods."""
    for name, method in vars(cls).copy().items():
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, names_keywords(method))
    return cls


@contextmanager
def in_command() -> Iterator[None]:
    """While a verb runs, errors name options."""
    token = IN_COMMAND.set(True)
    try:
        yield
    finally:
        IN_COMMAND.reset(token)
