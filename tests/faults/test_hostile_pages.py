"""Markup in names, labels, texts, settings and tokens is shown by every page as text; nothing in it runs or loads."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headstock.data.tokenizer import train_tokenizer
from headstock.data.tokenizer_training import TokenizerSettings
from headstock.explain.attention import explain_attention
from headstock.explain.attention_document import attention_document
from headstock.explain.inputs import EncodedInput
from headstock.explain.prediction import explain_prediction, prediction_document
from headstock.explain.render_document import page as render_page
from headstock.explain.residual import explain_residual
from headstock.explain.residual_document import residual_document
from headstock.model.batch import Batch
from headstock.report.pages import write_report
from tests.explain.pipelines import make_classifier, make_pipeline
from tests.faults.harness import amount
from tests.faults.targets import RUNS
from tests.model.small import small_model, some_tokens
from tests.report.browsing import Outline

VECTORS = [
    "<script>window.hit=1;alert(1)</script>",
    '"><img src=x onerror="window.hit=1">',
    "'><svg onload=window.hit=1><circle r=9></svg>",
    "</title></style></textarea></script><script>window.hit=1</script>",
    '<a href="javascript:window.hit=1" autofocus onfocus=window.hit=1>link</a>',
    "<iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    "<img src=http://127.0.0.1:9/leak.png><link rel=stylesheet href=http://127.0.0.1:9/leak.css>",
    "<style>@import url(http://127.0.0.1:9/leak.css); * { background: url(http://127.0.0.1:9/leak.png) }</style>",
    "}</style><body onload=window.hit=1>",
    "{{ 7*7 }}{% for x in range(9) %}{{ x }}{% endfor %}${window.hit=1}<%= 1 %>",
    "&lt;script&gt;window.hit=1&lt;/script&gt;&#60;b&#62;",
    "<!-- --><![CDATA[<script>window.hit=1</script>]]>",
    "<meta http-equiv=refresh content='0;url=http://127.0.0.1:9/leak'>",
    "<base href=http://127.0.0.1:9/><form action=javascript:window.hit=1><button>x</button></form>",
    "\u202etxet desrever\u2066 $\\alpha$ `code` *bold* [x](javascript:window.hit=1)",
]
# strings that say how a page is made, not what it shows
STRUCTURE = {"kind", "task", "metric", "better", "of", "followed", "headline", "measured_on", "method", "points_are"}
STRUCTURE |= {"unit", "family", "objective", "arm", "a", "b", "name", "classes"}
OWN_SCRIPTS = {"attention": 2}  # pages with scripts of ours: data, and what enlarges a head


def spoil(tree: Any, key: str = "", count: list[int] | None = None) -> Any:
    """The tree with a vector added to every string that a page may show."""
    count = [0] if count is None else count
    if isinstance(tree, dict):
        return {name: spoil(value, name, count) for name, value in tree.items()}
    if isinstance(tree, list):
        return [spoil(value, key, count) for value in tree]
    if isinstance(tree, str) and key not in STRUCTURE:
        count[0] += 1
        return f"{tree} {VECTORS[count[0] % len(VECTORS)]}"
    return tree


def spoil_names(text: str, tree: dict[str, Any]) -> str:
    """The same for names of arms, classes and settings, which are also keys."""
    names = [arm["name"] for arm in tree.get("arms", [])] + [str(name) for name in tree.get("classes") or []]
    names += [str(name) for name in (tree.get("settings") or {}).get("grid", {})]
    for number, name in enumerate(dict.fromkeys(names)):
        vector = VECTORS[number % len(VECTORS)]
        text = text.replace(json.dumps(name), json.dumps(f"{name} {vector}"))
    return text


def spoiled_report(name: str, home: Path) -> Path:
    folder = home / name
    skipped = shutil.ignore_patterns("checkpoints", "cells", "claims", "leakage", "*.safetensors", "manifest.json")
    shutil.copytree(RUNS / name, folder, ignore=skipped)
    for file in ("results.json", "config.json", "data.json"):
        if (folder / file).is_file():
            tree = json.loads((folder / file).read_text(encoding="utf-8"))
            (folder / file).write_text(spoil_names(json.dumps(spoil(tree)), tree), encoding="utf-8")
    return write_report(folder, VECTORS)


def explain_pages(home: Path) -> list[Path]:
    """Pages of tokens, some of which are markup."""
    texts = [vector for vector in VECTORS if len(vector) < 80]
    tokenizer = train_tokenizer(texts * 20, TokenizerSettings(kind="bpe", vocabulary=400, min_frequency=1))
    causal, classifier = make_pipeline(tokenizer), make_classifier(tokenizer)
    short, tokens = texts[0][:40], EncodedInput(Batch(some_tokens(1, 6)), VECTORS[:6])
    documents = {
        "residual": residual_document(explain_residual(causal, [short]), VECTORS[1], VECTORS[0]),
        "prediction": prediction_document(explain_prediction(classifier, [short]), VECTORS[4]),
        "attention": attention_document(explain_attention(small_model(), tokens, VECTORS[2]), VECTORS[3]),
    }
    pages = []
    for name, document in documents.items():
        pages.append(home / f"{name}.html")
        pages[-1].write_text(render_page(document), encoding="utf-8")
    return pages


def visit(browser: Any, page: Path) -> dict[str, Any]:
    """Open a page, click what can be clicked, and return everything that ran, loaded or was asked."""
    tab, seen = browser.new_page(), {"dialogs": [], "errors": [], "requests": []}
    tab.on("dialog", lambda dialog: (seen["dialogs"].append(dialog.message), dialog.dismiss()))
    tab.on("pageerror", lambda error: seen["errors"].append(str(error)))
    tab.on("request", lambda request: seen["requests"].append(request.url))
    tab.goto(page.as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true })")
    tab.evaluate("document.querySelectorAll('a, button, label').forEach(e => e.click())")
    seen["hit"] = tab.evaluate("typeof window.hit !== 'undefined'")
    foreign = "script, iframe, object, embed, base, form, meta[http-equiv]"
    foreign += ", :is(link, img):not([href^='data:'], [src^='data:'])"
    seen["scripts"] = tab.evaluate(f'document.querySelectorAll("{foreign}").length') - OWN_SCRIPTS.get(page.stem, 0)
    seen["handlers"] = tab.evaluate(
        "[...document.querySelectorAll('*')].filter(e => [...e.attributes].some(a => a.name.startsWith('on')"
        " || /^\\s*javascript:/i.test(a.value))).length"
    )
    seen["text"] = tab.evaluate("document.body.innerText")
    tab.close()
    own = page.as_uri()
    seen["requests"] = [url for url in seen["requests"] if not url.startswith((own, "data:"))]
    return seen


def is_harmless(seen: dict[str, Any]) -> bool:
    return not any(seen[name] for name in ("dialogs", "errors", "requests", "hit", "scripts", "handlers"))


REPORTS = ("sweep", "classify", "compare", "causal", "tag", "answer", "translate")


def test_fault_29_pages_run_nothing(tmp_path, browser, record):
    pages = [spoiled_report(name, tmp_path) for name in REPORTS[: amount(2, len(REPORTS))]] + explain_pages(tmp_path)
    shown = 0
    for page in pages:
        seen = visit(browser, page)
        assert is_harmless(seen), (page, {name: value for name, value in seen.items() if name != "text"})
        count = sum(
            page.read_text(encoding="utf-8").count(word) for word in ("&lt;script", "&lt;img", "&lt;svg", "&lt;a ")
        )
        assert count, page  # the vectors are on the page, as text
        shown += count
        assert all(tag != "iframe" for tag, _ in Outline(page).tags)
    what = "markup in names, labels, texts, settings and tokens of pages in Chromium"
    figures = {"vectors": len(VECTORS), "shown_as_text": shown}
    record(29, what, pages=len(pages), **figures, scripts_run=0, dialogs=0, requests=0)


@pytest.mark.parametrize("vector", [VECTORS[0], VECTORS[1], VECTORS[2], VECTORS[6]])
def test_fault_29_the_same_markup_runs_where_it_is_not_escaped(tmp_path, browser, vector):
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><title>x</title><p>{vector}</p>", encoding="utf-8")
    assert not is_harmless(visit(browser, page))
