"""Helpers to inspect a page in a browser or by parsing it."""

from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

SIZES = """() => [...document.querySelectorAll('svg[data-chart]')]
    .map(e => [e.dataset.chart, e.getBoundingClientRect()]).map(([name, box]) => [name, box.width, box.height])"""
COLOURS = """() => ['body', 'svg[data-chart] text', 'svg[data-chart] path[style*=var]'].map(name => {
    const look = getComputedStyle(document.querySelector(name));
    return [look.color, look.backgroundColor, look.fill, look.stroke].join(' ') })"""


def look_at(browser, page: Path, *, width: int, scheme: str, javascript: bool = True) -> dict:
    """Open a page with all details expanded."""
    with screen(browser, width=width, scheme=scheme, javascript=javascript) as tab:
        return look(tab, page)


@contextmanager
def screen(browser, *, width: int, scheme: str, javascript: bool = True) -> Iterator[Any]:
    """A browser tab, reused for several pages because opening one is slow."""
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme, java_script_enabled=javascript
    )
    yield context.new_page()
    context.close()


def look(tab, page: Path) -> dict:
    """Requests, errors and dimensions of a page; the tab stays open."""
    wrong, asked = [], []
    hear = {
        "console": lambda message: wrong.append(message.text),
        "pageerror": lambda error: wrong.append(str(error)),
        "dialog": lambda dialog: wrong.append(dialog.message),
        "request": lambda request: asked.append(request.url),
    }
    for event, keep in hear.items():
        tab.on(event, keep)
    tab.goto(page.as_uri())
    for folded in tab.locator("details").all():
        folded.evaluate("node => { node.open = true }")
    arms = []
    for choice in tab.locator(".tabs > label").all():
        choice.click()
        arms.append({name for name, wide, high in tab.evaluate(SIZES) if wide > 50 and high > 50})
    seen = {name for name, wide, high in tab.evaluate(SIZES) if wide > 50 and high > 50}.union(*arms)
    colours = tab.evaluate(COLOURS) if seen else []
    overflow = tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    for event, keep in hear.items():
        tab.remove_listener(event, keep)
    return {"wrong": wrong, "asked": asked, "seen": seen, "arms": arms, "colours": colours, "overflow": overflow}


class Outline(HTMLParser):
    """The tags, attributes, ids and text of a page, and whether all tags are closed."""

    VOID = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self, page: Path):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        self.text += data


def check_sound(page: Outline) -> None:
    """Check that all link targets and labels exist and that the page has no scripts."""
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    inside = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert all(link.startswith("#") and link[1:] in ids for link in inside)
    named = {attributes[key] for _, attributes in page.tags for key in ("aria-labelledby", "for") if key in attributes}
    assert named <= set(ids)
    for tag, attributes in page.tags:
        assert tag not in ("script", "img", "iframe")
        assert not any(key.startswith("on") for key in attributes)
        if tag == "svg":
            assert attributes.get("aria-label") or attributes.get("aria-hidden") == "true"
    count = [tag for tag, _ in page.tags]
    assert count.count("table") == count.count("caption")
