"""Renders Jinja templates as self-contained pages; all values are escaped."""

import functools
from typing import TYPE_CHECKING, Any

from headstock.report import format as formats
from headstock.report.theme import arm_label, colour_variables

if TYPE_CHECKING:
    import jinja2

FILTERS = ("percent", "points", "signed", "minus", "weight", "whole", "decimal", "duration", "setting", "capitalized")


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
    env.globals |= {"interval": formats.interval, "pluralize": formats.pluralize, "NONE": formats.NONE}
    return env


def render(package: str, template: str, **values: Any) -> str:
    """A template from the `templates` folder of a package, as a page without external resources."""
    light, dark = colour_variables()
    return environment(package).get_template(template).render(light=light, dark=dark, **values)
