"""The help and the list of presets: every verb in one group, every preset with its size."""

import json
import re

import typer

from headstock.cli.app import find_verbs
from headstock.cli.command import SECTIONS, app
from headstock.train.resolve import labelled_task_names
from headstock.train.run_folder import bundled_run_names
from headstock.train.settings import preset_names


def test_every_verb_is_in_one_section_of_the_help(call):
    find_verbs()
    verbs = list(typer.main.get_command(app).commands)
    grouped = [name for names in SECTIONS.values() for name in names]
    assert sorted(grouped) == sorted(verbs)
    for arguments in ([], ["--help"]):
        out, _ = call(*arguments, code=0 if arguments else 2)
        listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ") and line.split()[0] in verbs]
        assert listed == grouped
        assert all(f"\n{heading}:\n" in out for heading in SECTIONS)


def test_the_help_of_task_names_every_task_with_labels():
    find_verbs()
    commands = typer.main.get_command(app).commands
    for verb in ("finetune", "lr-find", "sweep"):
        text = next(option.help for option in commands[verb].params if option.name == "task")
        assert set(labelled_task_names()) <= set(re.findall(r"\w+", text)), verb


def test_presets_are_listed_with_their_sizes(call):
    rows = json.loads(call("presets", "--json")[0])["presets"]
    assert {row["preset"] for row in rows} == set(preset_names())
    mini = next(row for row in rows if row["preset"] == "gpt-mini")
    assert (mini["family"], mini["objective"], mini["context"]) == ("transformer", "causal", 256)
    assert mini["parameters"] == json.loads(call("explain", "params", "--preset", "gpt-mini", "--json")[0])["total"]
    out, _ = call("presets")
    assert all(name in out for name in preset_names())


def test_stocks_are_listed_with_text_and_licence(call):
    rows = json.loads(call("stocks", "--json")[0])["stocks"]
    assert [row["name"] for row in rows] == bundled_run_names()
    reviews = next(row for row in rows if row["name"] == "reviews-en")
    assert reviews["parameters"] == json.loads(call("explain", "params", "reviews-en", "--json")[0])["total"]
    assert reviews["text"] == ["catalog:imdb"] and reviews["licence"][0].startswith("not stated for the reviews")
    assert reviews["bytes"] < 20e6
    out, _ = call("stocks")
    assert all(row["name"] in out and row["licence"][0] in out for row in rows)
