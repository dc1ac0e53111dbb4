"""The generated reference is current and covers every command, option, setting and public name."""

import dataclasses
import re

import pytest

import headstock
from headstock.api import keywords
from tests.benchmarks import load_script

reference = load_script("reference")


@pytest.fixture(scope="module")
def pages():
    return reference.pages()


def section(text: str, title: str) -> str:
    """The part of a page below a heading, up to the next of the same level."""
    match = re.search(rf"^(#+) {re.escape(title)}$(.*?)(?=^\1 |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, title
    return match[2]


def test_the_committed_pages_are_current(pages):
    outdated = [path.name for path, text in pages.items() if path.read_text(encoding="utf-8") != text]
    assert not outdated, "run `make reference`"


def test_every_command_and_option_is_documented(pages):
    import typer

    from headstock.cli.app import app, find_verbs

    find_verbs()
    text = "\n".join(page for path, page in pages.items() if path.parent.name == "cli")
    root = typer.main.get_command(app)
    verbs = [leaf for name, command in root.commands.items() for leaf in reference.leaves(name, command)]
    assert len(verbs) > 40
    common = {"--json", "--quiet", "--seed", "--device", "--debug"}
    assert all(f"`{name}`" in section(text, "Common options") for name in common)
    for path, command in verbs:
        body = section(text, f"headstock {path}")
        options = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
        assert options - common - {"--help"} == set(re.findall(r"^\| `(--[\w-]+)`", body, re.MULTILINE)), path
        rows = [line for line in body.splitlines() if line.startswith("| `")]
        assert all(len(line.rsplit("|", 2)[1].strip()) > 3 for line in rows), path


def test_the_json_keys_of_every_command_are_listed():
    import typer

    from headstock.cli.app import app, find_verbs

    find_verbs()
    text = (reference.REFERENCE / "json.md").read_text(encoding="utf-8")
    for name, command in typer.main.get_command(app).commands.items():
        for path, _ in reference.leaves(name, command):
            assert section(text, f"headstock {path}").strip(), "run `python scripts/json_keys.py`"


def test_every_setting_has_its_default_and_meaning(pages):
    from headstock.model.backbone import BACKBONES
    from headstock.tasks.base import TASKS
    from headstock.train import settings

    text = pages[reference.REFERENCE / "settings.md"]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]*) \| (.*) \|$", text, re.MULTILINE)
    assert [name for name, _, _, meaning in rows if not meaning.strip()] == []
    configs = [settings.TrainSettings, settings.DataSettings, settings.LabelledSettings, settings.TransferSettings]
    configs += [BACKBONES.get(name).Config for name in BACKBONES.names()]
    configs += [TASKS.get(name).Config for name in TASKS.names()]
    fields = {
        (field.name, reference.show_default(field.default))
        for config in configs
        for field in dataclasses.fields(config)
        if field.default is not dataclasses.MISSING
    }
    assert fields <= {(name, default.strip()) for name, _, default, _ in rows}


def test_comments_behind_and_above_a_field_are_its_meaning():
    lines = [
        "a: int = 1  # first",
        "# second,",
        "# longer",
        "b: int = 2",
        "# third",
        "c: int = 3  # and more",
        "d: int = 4",
    ]
    source = "class C:\n" + "".join(f"    {line}\n" for line in lines)
    assert reference.own_comments(source) == {"a": "first", "b": "second, longer", "c": "third and more", "d": ""}


def test_every_public_name_is_documented(pages):
    text = pages[reference.REFERENCE / "python.md"]
    for name in headstock.__all__:
        if not name.startswith("_"):
            assert section(text, f"headstock.{name}").strip(), name


def test_keywords_are_listed_with_their_defaults(pages):
    text = pages[reference.REFERENCE / "python.md"]
    assert "**keywords: Unpack[PretrainKeywords]," in text and "<class" not in text
    rows = dict(
        re.findall(r"^\| `(\w+)` \| [^|]+(?:\\\|[^|]+)* \| ([^|]*) \|$", section(text, "Keywords"), re.MULTILINE)
    )
    assert rows["schedule"] == '`"cosine"`' and rows["least_steps"] == "`100`" and rows["minutes"] == ""
    groups = [getattr(keywords, name) for name in dir(keywords) if name.endswith("Keywords")]
    assert rows.keys() == {key for group in groups for key in group.__annotations__}


def test_every_recipe_can_be_downloaded(pages):
    text = pages[reference.REFERENCE / "recipes.md"]
    files = [path.name for path in (reference.REFERENCE.parents[1] / "recipes").iterdir() if path.is_file()]
    listed = re.findall(r"^\| \[(.+)\]\(\.\./\.\./recipes/\1\) \| \S.*[.?] \|$", text, re.MULTILINE)
    assert sorted(listed) == sorted(files) and len(files) > 50
