"""The copy button of a terminal session copies its commands alone."""

import pytest

from tests.benchmarks import load_script

site = load_script("build_site")
ORIGIN = "https://docs.example"
SESSION = """\
$ headstock data get rotten-tomatoes --to data
data: SOURCE.json, corpus.txt, test.csv, train.csv, valid.csv
$ headstock compare reviews-en --train data/train.csv \\
      --labels 100,400 --out runs/quotes
costs $ 5
"""
COMMANDS = """\
headstock data get rotten-tomatoes --to data
headstock compare reviews-en --train data/train.csv \\
      --labels 100,400 --out runs/quotes"""
# the theme's button copies the whole block
BLOCK = """<div class="language-{kind} highlight"><nav><button><i>copy</i></button></nav>
<pre><code>{code}</code></pre></div>
<script>document.querySelector("button").onclick = () =>
  navigator.clipboard.writeText(document.querySelector("code").textContent)</script>"""


SCRIPT = """\
# with a comment
headstock presets
headstock plan text.txt \\
    --minutes 5
"""
LINES = """\
headstock presets
headstock plan text.txt \\
    --minutes 5"""


@pytest.mark.parametrize(
    ("kind", "code", "copied"),
    [("console", SESSION, COMMANDS), ("bash", SCRIPT, LINES), ("text", SESSION, SESSION)],
)
def test_commands_are_copied_without_prompts_output_and_comments(browser, kind, code, copied):
    script = (site.DOCS / "assets" / "console.js").read_text(encoding="utf-8")
    html = f"<script>{script}</script>{BLOCK.format(kind=kind, code=code)}"
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    try:
        page = context.new_page()
        page.route("**", lambda route: route.fulfill(body=html, content_type="text/html"))
        page.goto(ORIGIN)
        page.evaluate("navigator.clipboard.writeText('')")
        page.click("i")
        page.wait_for_function("async text => await navigator.clipboard.readText() === text", arg=copied, timeout=5000)
    finally:
        context.close()


def code_lines(text: str) -> list[tuple[int, str]]:
    """The numbered lines of indented blocks and of those marked as commands, without their indentation."""
    lines, fence = [], ""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fence = "" if fence else line.strip(" `") or "text"
        elif fence in ("bash", "console", "sh") or (not fence and line.startswith("    ")):
            lines.append((number, line.strip()))
    return lines


def test_comments_stand_above_their_command():
    """An interactive zsh takes a comment behind a command as its arguments."""
    assert code_lines("    $ ls  # all\n\n```bash\nls # all\n```\n") == [(1, "$ ls  # all"), (4, "ls # all")]
    behind = [
        f"{page.name}:{number}: {line}"
        for page in site.links.markdown_pages()
        for number, line in code_lines(page.read_text(encoding="utf-8"))
        if " # " in line and not line.startswith("#")
    ]
    assert not behind


def test_a_block_that_opens_with_a_comment_is_one_of_commands():
    assert site.fence_blocks("    # all\n    headstock presets\n").startswith("```bash\n")
