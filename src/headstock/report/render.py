"""Renders Jinja templates as self-contained pages, and charts as SVG files; all values are escaped."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstock.errors import UserError
from headstock.io import write_text
from headstock.report import format as formats
from headstock.report.theme import INK, PAPER, RIGHT, SOFT, WRONG, arm_label, colour_variables

if TYPE_CHECKING:
    import jinja2

FILTERS = ["percent", "points", "signed", "minus", "weight", "whole", "decimal", "duration", "setting", "capitalized"]
FILTERS += ["score"]

# what a chart takes from the style sheet of its page
LIGHT = {"color": INK, "background": PAPER, "--paper": PAPER, "--soft": SOFT, "--right": RIGHT, "--wrong": WRONG}
DARK = {"color": "#e8e6e1", "background": "#15171b", "--paper": "#15171b", "--soft": "#a0a5ae"}
DARK |= {"--right": "#93a4bd", "--wrong": "#f2789b"}


@functools.cache
def environment(package: str) -> "jinja2.Environment":
    """The templates of a package, on top of the shared ones of headstock.report."""
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package), jinja2.PackageLoader("headstock.report")]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {name: getattr(formats, name) for name in FILTERS} | {"arm_label": arm_label}
    env.globals |= {"interval": formats.interval, "score_range": formats.score_range}
    env.globals |= {"pluralize": formats.pluralize, "NONE": formats.NONE}
    return env


def render(package: str, template: str, **values: Any) -> str:
    """A template from the `templates` folder of a package, as a page without external resources."""
    light, dark = colour_variables()
    return environment(package).get_template(template).render(light=light, dark=dark, **values)


def check_output_path(path: Path | None) -> None:
    """Refuse a file that is neither a page nor a picture, before any work is done."""
    if path is not None and path.suffix.lower() not in (".html", ".svg"):
        raise UserError(f"--out {path}: must end in .html (a page) or .svg (its picture)")


def write_page_or_svg(path: Path, page: Callable[[], str], picture: Callable[[], str]) -> None:
    """Write the page or only its picture, depending on the suffix."""
    check_output_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page() if path.suffix.lower() == ".html" else picture())


def standalone_svg(chart: str) -> str:
    """An embedded chart as an SVG file, with the styles it takes from its page."""
    chart = str(chart)  # not markup, which would escape what is inserted
    box = re.search(r'viewBox="[\d.]+ [\d.]+ ([\d.]+) ([\d.]+)"', chart)
    assert box, "charts have a viewBox"
    light, dark = colour_variables()
    style = f":root {{ {css_rules(LIGHT | light)}; font-family: system-ui, sans-serif }}"
    style += f" @media (prefers-color-scheme: dark) {{ :root {{ {css_rules(DARK | dark)} }} }}"
    size = f'xmlns="http://www.w3.org/2000/svg" width="{box[1]}" height="{box[2]}"'
    head, rest = chart.split(">", 1)
    return f"{head.replace('<svg', f'<svg {size}', 1)}><style>{style}</style>{rest}\n"


def css_rules(values: dict[str, str]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in values.items())
