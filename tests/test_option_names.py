"""Options in messages become keywords for callers in Python."""

import doctest

import pytest

from headstock import option_names
from headstock.errors import ConfigError, UserError
from headstock.option_names import in_command, names_keywords, python_spelling


def test_the_examples_of_the_module():
    assert doctest.testmod(option_names).failed == 0


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("x.csv: 3 rows are too few; name a --valid file", "x.csv: 3 rows are too few; name a valid file"),
        ("--equal-weights: an ensemble has weights", "equal_weights=True: an ensemble has weights"),
        ("no such teacher; use --teacher or --slice", "no such teacher; use teachers or slices"),
        ("a -- b --- c, well-known --", "a -- b --- c, well-known --"),
        ("get it with headstock data get x --to y", "get it with headstock data get x --to y"),
        ("could not download (give the archive with --from)", "could not download (give the archive with --from)"),
    ],
)
def test_options_become_keywords(message, expected):
    assert python_spelling(message) == expected


def test_only_errors_outside_of_a_command_are_rewritten():
    @names_keywords
    def work(error):
        raise error

    with pytest.raises(UserError, match=r"^leave out freeze=True$"):
        work(UserError("leave out --freeze"))
    with pytest.raises(ConfigError, match="method: needs sample N") as caught:
        work(ConfigError([("method", "needs --sample N")]))
    assert caught.value.problems == [("method", "needs --sample N")]
    with pytest.raises(ValueError, match="--freeze"):
        work(ValueError("--freeze"))
    with in_command(), pytest.raises(UserError, match="--freeze"):
        work(UserError("leave out --freeze"))
