"""Helpers to inspect a page in a browser or by parsing it."""

from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VISIBLE_CHARTS = """() => [...document.querySelectorAll('svg[data-chart]')]
    .filter(e => { const box = e.getBoundingClientRect(); return box.width > 50 && box.height > 50 })
    .map(e => e.dataset.chart)"""
COLOURS = """() => ['body', 'svg[data-chart] text', 'svg[data-chart] path[style*=var]'].map(name => {
    const style = getComputedStyle(document.querySelector(name));
    return [style.color, style.backgroundColor, style.fill, style.stroke].join(' ') })"""


@dataclass
class PageView:
    """A page as a browser shows it, with all details expanded."""

    errors: list[str] = field(default_factory=list)  # console messages, exceptions and dialogs
    requests: list[str] = field(default_factory=list)  # URLs, the page's own first; without data: URLs
    charts: set[str] = field(default_factory=set)  # visible ones, in any tab of the page
    charts_by_tab: list[set[str]] = field(default_factory=list)
    colours: list[str] = field(default_factory=list)
    overflow: int = 0  # pixels beyond the right edge of the screen

    def is_sound(self) -> bool:
        """No errors, no requests to others, and no horizontal scrolling."""
        return self.errors == [] and len(self.requests) == 1 and self.overflow <= 0


@cache
def open_tab(browser, *, width: int, scheme: str) -> Any:
    """A browser tab that is reused for all pages, because opening one is slow."""
    return browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()


def view_page(browser, page: Path, *, width: int, scheme: str) -> PageView:
    """Load a page in the tab of this width and colour scheme, where it stays open."""
    tab, view = open_tab(browser, width=width, scheme=scheme), PageView()
    listeners = {
        "console": lambda message: view.errors.append(message.text),
        "pageerror": lambda error: view.errors.append(str(error)),
        "dialog": lambda dialog: view.errors.append(dialog.message),
        "request": lambda request: view.requests.append(request.url),
    }
    for event, listener in listeners.items():
        tab.on(event, listener)
    tab.goto(page.as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true })")
    for label in tab.locator(".tabs > label").all():
        label.click()
        view.charts_by_tab.append(set(tab.evaluate(VISIBLE_CHARTS)))
    view.charts = set(tab.evaluate(VISIBLE_CHARTS)).union(*view.charts_by_tab)
    view.colours = tab.evaluate(COLOURS) if view.charts else []
    view.overflow = tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    for event, listener in listeners.items():
        tab.remove_listener(event, listener)
    view.requests = [url for url in view.requests if not url.startswith("data:")]
    return view


def follows_colour_scheme(light: PageView, dark: PageView) -> bool:
    """Whether background, text and lines have other colours in dark mode."""
    return len(light.colours) == 3 and all(a != b for a, b in zip(light.colours, dark.colours, strict=True))


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
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert all(link.startswith("#") and link[1:] in ids for link in links)
    targets = {
        attributes[key] for _, attributes in page.tags for key in ("aria-labelledby", "for") if key in attributes
    }
    assert targets <= set(ids)
    for tag, attributes in page.tags:
        assert tag not in ("script", "img", "iframe")
        assert not any(key.startswith("on") for key in attributes)
        if tag == "svg":
            assert attributes.get("aria-label") or attributes.get("aria-hidden") == "true"
    tags = [tag for tag, _ in page.tags]
    assert tags.count("table") == tags.count("caption")
