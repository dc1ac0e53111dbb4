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


@pytest.mark.parametrize(("kind", "copied"), [("console", COMMANDS), ("text", SESSION)])
def test_a_session_is_copied_without_prompts_and_output(browser, kind, copied):
    script = (site.DOCS / "assets" / "console.js").read_text(encoding="utf-8")
    html = f"<script>{script}</script>{BLOCK.format(kind=kind, code=SESSION)}"
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
