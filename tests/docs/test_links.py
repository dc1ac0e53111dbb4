"""Links and anchors of the Markdown pages resolve, and every page has its place in the navigation."""

import re
import tomllib

import pytest

from tests.benchmarks import load_script

links = load_script("links")
site = load_script("build_site")


def test_all_links_and_anchors_resolve():
    pages = links.markdown_pages()
    assert len(pages) > 60
    assert links.broken_links(pages) == []


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `title` (here)\n\nA [good](#a-title-here), a [bad](#a-title) one and [none](other.md).\n"
        "![picture](picture.png) `[code](skipped.md)` [web](https://example.org/x.md)\n\n"
        '```text\n# no heading\n[fenced](skipped.md)\n```\n\n    [indented](skipped.md)\n\n<img src="logo.svg">\n'
    )
    found = [line.split(": ")[1] for line in links.broken_links([page])]
    assert found == ["#a-title", "other.md", "picture.png", "logo.svg"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("## Same\n\n## Same\n", {"same", "same-1"}),
        ("# What's `[x]`, y?\n", {"whats-x-y"}),
        ('<a id="old"></a>\n', {"old"}),
    ],
)
def test_anchors_are_those_of_github(text, names):
    assert links.anchors(text) == names


def test_every_page_is_in_the_navigation():
    config = (links.ROOT / "zensical.toml").read_text(encoding="utf-8")
    assert tomllib.loads(config)["project"]["docs_dir"] == "build/docs"
    in_nav = set(re.findall(r'"([\w/.-]+\.md)"', config))
    sources = [*(links.ROOT / "docs").rglob("*.md"), *(links.ROOT / "docs").rglob("*.ipynb"), *site.ROOT_PAGES]
    staged = {site.staged_path(page).relative_to(site.STAGED).as_posix() for page in sources}
    assert in_nav == staged


def test_a_page_is_staged_with_its_links(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "STAGED", tmp_path)
    before = (
        "[a](../start/install.md#check) [b](../../recipes/stsb.toml) [c](../../README.md) [d](../notebooks/x.ipynb)"
    )
    after = "[a](../start/install.md#check) [b](../files/recipes/stsb.toml) [c](../index.md) [d](../notebooks/x.md)"
    site.write(site.DOCS / "howto" / "page.md", f"{before} `[code](../../README.md)`\n")
    assert (tmp_path / "howto/page.md").read_text() == f"{after} `[code](../../README.md)`\n"
    assert (tmp_path / "files/recipes/stsb.toml").exists()


def test_commands_become_highlighted_blocks():
    text = "Run:\n\n    $ headstock presets\n    a table\n\nthen\n\n- a list\n\n    continued\n\nEnd.\n"
    assert site.fence_blocks(text) == (
        "Run:\n\n```console\n$ headstock presets\na table\n```\n\nthen\n\n- a list\n\n    continued\n\nEnd.\n"
    )


def test_a_notebook_becomes_a_page(tmp_path, monkeypatch):
    pytest.importorskip("nbconvert")
    import nbformat

    monkeypatch.setattr(site, "STAGED", tmp_path)
    notebook = nbformat.v4.new_notebook(metadata={"language_info": {"name": "python"}})
    cell = nbformat.v4.new_code_cell("print(1 + 1)")
    cell.outputs = [
        nbformat.v4.new_output("stream", text="2\n"),
        nbformat.v4.new_output("display_data", data={"image/png": "iVBORw0KGgo="}),
    ]
    notebook.cells = [nbformat.v4.new_markdown_cell("# Sums"), cell]
    path = site.NOTEBOOKS / "sums.ipynb"
    text = site.notebook_text(notebook, path)
    assert text.startswith("# Sums") and "```python\nprint(1 + 1)\n```" in text and "2\n" in text
    assert [file.suffix for file in (tmp_path / "notebooks/sums_files").iterdir()] == [".png"]


def test_a_notebook_page_offers_the_notebook(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "STAGED", tmp_path)
    path = site.NOTEBOOKS / "first-model.ipynb"
    site.write(path, "# Title\n\nText.\n")
    site.offer_download(path)
    page = (tmp_path / "notebooks/first-model.md").read_text()
    assert page.startswith("# Title\n\n[Download this notebook](first-model.ipynb)") and page.endswith("Text.\n")
    assert (tmp_path / "notebooks/first-model.ipynb").read_bytes() == path.read_bytes()


def test_html_outputs_are_one_block():
    frame = '<iframe sandbox="allow-scripts"\n\n\n srcdoc=""></iframe><svg><use href="#mark"/></svg>'
    html = site.html_output(frame)
    assert "\n\n" not in html and "allow-same-origin" in html and 'xlink:href="#mark"' in html


def test_pictures_are_small_and_used():
    pictures = [path for path in (links.ROOT / "docs" / "figures").iterdir() if path.suffix in (".png", ".svg")]
    text = "".join(page.read_text(encoding="utf-8") for page in links.markdown_pages())
    assert len(pictures) > 10
    assert [path.name for path in pictures if path.stat().st_size > 150_000 or f"figures/{path.name}" not in text] == []
