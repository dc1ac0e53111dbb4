"""Settings are validated strictly, and all problems are reported together."""

from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Literal

import pytest

from headstock import config
from headstock.errors import ConfigError, UserError


@dataclass(frozen=True)
class Inner:
    width: int = 8
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    size: int
    rate: float = 0.5
    kind: Literal["one", "two"] = "one"
    maybe: int | None = None
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self):
        if self.size < 0:
            raise ConfigError([("size", "must not be negative")])


def test_valid_settings_round_trip():
    settings = config.from_dict(Outer, {"size": 3, "rate": 1, "inner": {"names": ["a", "b"]}})
    assert settings == Outer(3, 1.0, inner=Inner(names=("a", "b")))
    assert isinstance(settings.rate, float)
    assert config.from_dict(Outer, config.to_dict(settings)) == settings


def test_all_problems_are_reported_with_hints():
    with pytest.raises(ConfigError) as caught:
        config.from_dict(Outer, {"rat": 1, "kind": "tow", "inner": {"widht": 3, "names": [True]}, "maybe": "x"})
    problems = dict(caught.value.problems)
    assert "did you mean 'rate'?" in problems["rat"]
    assert "did you mean 'two'?" in problems["kind"]
    assert "did you mean 'width'?" in problems["inner.widht"]
    assert "must be str" in problems["inner.names[0]"]
    assert problems["size"] == "missing"
    assert "must be int or nothing" in problems["maybe"]
    assert "6 invalid settings" in str(caught.value)


def test_a_whole_number_can_be_a_name():
    settings = config.from_dict(Outer, {"size": 3, "inner": {"names": ["a", 1]}})
    assert settings.inner.names == ("a", "1")
    with pytest.raises(ConfigError, match=r"must be str, not 1\.5"):
        config.from_dict(Outer, {"size": 3, "inner": {"names": [1.5]}})


def test_a_bool_is_not_a_number():
    with pytest.raises(ConfigError, match="size: must be int, not True"):
        config.from_dict(Outer, {"size": True})


def test_errors_of_the_dataclass_have_their_path():
    with pytest.raises(ConfigError, match=r"model\.size: must not be negative"):
        config.from_dict(Outer, {"size": -1}, prefix="model")


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("depth=4", ("depth", 4)),
        ("lr=3e-4", ("lr", 3e-4)),
        ("tied=false", ("tied", False)),
        ("norm=pre", ("norm", "pre")),
        ('name="a b"', ("name", "a b")),
        ("train.steps = 5", ("train.steps", 5)),
        ("corpus=['a', 'b']", ("corpus", ["a", "b"])),
    ],
)
def test_set_values_are_toml(text, pair):
    assert config.parse_setting(text) == pair


def test_set_without_a_value_is_refused():
    with pytest.raises(UserError, match="expected key=value"):
        config.parse_setting("depth")


def test_a_broken_file_names_its_line(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("[model]\ndepth = \n")
    with pytest.raises(UserError, match=r"a\.toml.*line 2"):
        config.read_settings(file)
    with pytest.raises(UserError, match="no such settings file"):
        config.read_settings(tmp_path / "b.toml")


def test_later_layers_win_key_by_key():
    assert config.merge({"a": {"x": 1, "y": 2}, "b": 1}, {"a": {"y": 3}}) == {"a": {"x": 1, "y": 3}, "b": 1}


@pytest.mark.parametrize("rate", [float("nan"), float("inf")])
def test_non_finite_numbers_are_refused(rate):
    with pytest.raises(ConfigError, match="rate: must be a finite number"):
        config.from_dict(Outer, {"size": 1, "rate": rate})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("deep.json", '{"model": ' + "[" * 100_000),
        ("deep.toml", "model = " + "[" * 100_000),
        ("list.json", "[1, 2]"),
        ("table.toml", "model = 3"),
        ("table.json", '{"train": [1]}'),
    ],
)
def test_files_without_settings_are_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=name):
        config.read_settings(tmp_path / name, tables=config.SECTIONS)


def test_an_option_that_is_nested_too_deeply_is_refused():
    with pytest.raises(UserError, match="--set depth"):
        config.parse_setting("depth=" + "[" * 100_000)


@pytest.mark.parametrize("key", ["size", "rate", "maybe"])
def test_integers_beyond_64_bits_are_refused(key):
    with pytest.raises(ConfigError, match=f"{key}: must be a number of at most 18 digits"):
        config.from_dict(Outer, {"size": 1, key: 10**400})


@pytest.mark.parametrize("error", [ConfigError([("a", "b"), ("c", "d")]), UserError("file.csv:3: blank")])
def test_errors_can_be_sent_to_another_process(error):
    copy = ForkingPickler.loads(ForkingPickler.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and vars(copy) == vars(error)


def test_a_problem_without_a_place_is_reported_alone():
    assert str(ConfigError([("", "runs/a: is a folder")])) == "runs/a: is a folder"
    assert str(ConfigError([("", "first"), ("model.depth", "second")])).splitlines()[1:] == [
        "  first",
        "  model.depth: second",
    ]
