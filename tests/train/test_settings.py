"""Presets, files and options become one checked whole."""

import pytest

from headstock.errors import ConfigError, UserError
from headstock.model.backbone import BACKBONES
from headstock.train.pretrain import gather_config
from headstock.train.settings import make_config, place_settings, preset_names, read_preset


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_makes_a_run(name):
    tree = read_preset(name)
    tree["model"]["vocabulary"] = 100
    chosen = make_config(tree)
    assert make_config(chosen.plain()) == chosen
    if name.endswith(("nano", "classic")):
        BACKBONES.get(chosen.family)(chosen.model)


def test_settings_find_their_section():
    placed = place_settings(
        {"depth": 3, "lr": 0.1, "vocabulary": 500, "model.vocabulary": 512, "documents": "line"}, {}
    )
    assert placed == {
        "model": {"depth": 3, "vocabulary": 512},
        "train": {"lr": 0.1},
        "tokenizer": {"vocabulary": 500},
        "data": {"documents": "line"},
    }


def test_unknown_settings_are_all_named_with_the_nearest():
    with pytest.raises(ConfigError) as caught:
        place_settings({"dept": 3, "train.lrr": 0.1}, {})
    problems = dict(caught.value.problems)
    assert "did you mean 'depth'?" in problems["dept"]
    assert "did you mean 'train.lr'?" in problems["train.lrr"]


def test_problems_of_all_sections_come_together():
    tree = {
        "model": {"vocabulary": 9, "width": 30, "heads": 4},
        "train": {"batch": 0, "schedule": "cosin"},
        "trian": {},
    }
    with pytest.raises(ConfigError) as caught:
        make_config(tree)
    text = str(caught.value)
    assert "model.width: 30 must be a multiple of heads 4" in text
    assert "train.schedule" in text
    assert "did you mean 'cosine'?" in text
    assert "trian: unknown section; did you mean 'train'?" in text


def test_a_run_has_one_length():
    with pytest.raises(ConfigError, match="epochs: cannot be set together with steps"):
        make_config({"model": {"vocabulary": 9}, "train": {"steps": 1, "epochs": 2.0}})


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'gpt-nano'"):
        read_preset("gpt-nanno")


def test_file_over_preset_and_option_over_file(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text('preset = "gpt-nano"\n[model]\ndepth = 7\nwidth = 64\n[data]\ncorpus = ["a.txt"]\n')
    chosen = gather_config(None, file, {"width": 32})
    assert (chosen.model.depth, chosen.model.width, chosen.model.heads) == (7, 32, 4)
    assert chosen.data.corpus == ("a.txt",)


def test_without_text_there_is_nothing_to_do():
    with pytest.raises(UserError, match="no text to train on"):
        gather_config("gpt-nano", None, {})
