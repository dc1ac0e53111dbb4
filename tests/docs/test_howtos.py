"""How-to pages show commands with their output and a picture; diagrams are those that the script draws."""

import itertools
import re

import pytest

from tests.benchmarks import load_script

diagrams = load_script("diagrams")
PAGES = sorted((diagrams.FIGURES.parent / "howto").glob("*.md"))
PICTURE = re.compile(r"!\[[^\]]+\]\(\.\./figures/[\w.-]+\)")


def outputs(text: str) -> list[str]:
    """The first line of output after each command of the indented blocks."""
    lines = [line[4:] for line in re.sub(r"\\\n *", "", text).splitlines() if line.startswith("    ")]
    pairs = itertools.pairwise(lines)
    return [line for command, line in pairs if command.startswith("$ ") and not line.startswith("$ ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_has_commands_with_output_and_a_picture(page):
    text = page.read_text(encoding="utf-8")
    assert outputs(text) or "```python" in text
    assert PICTURE.search(text)


def test_commands_without_output_are_found():
    assert outputs("    $ headstock presets\n\n    $ headstock fill RUN \\\n        --top 3\n\nno output\n") == []
    assert outputs("    $ headstock fill RUN \\\n        --top 3\n    a\n    b\n") == ["a"]


@pytest.mark.parametrize("name", diagrams.FLOWS)
def test_diagram_is_current(name):
    assert (diagrams.FIGURES / f"{name}.svg").read_text(encoding="utf-8") == diagrams.svg(diagrams.FLOWS[name])


def test_boxes_of_a_diagram_do_not_overlap():
    for name, flow in diagrams.FLOWS.items():
        for column in {node.column for node in flow.nodes.values()}:
            nodes = sorted((n for n in flow.nodes.values() if n.column == column), key=lambda node: node.row)
            for upper, lower in itertools.pairwise(nodes):
                gap = (lower.row - upper.row) * diagrams.ROW - (upper.box.height + lower.box.height) / 2
                assert gap >= 8, (name, upper.box.name, lower.box.name)
