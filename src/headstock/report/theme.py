"""The look of every chart: one palette for page and paper, SVG that follows the page's colours, files beside it."""

import io
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstock.io import write_bytes, write_text

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

INK, SOFT, PAPER, GRID = "#1c2128", "#62676f", "#fdfcfa", "#8a8f98"
RIGHT, WRONG = "#64748b", "#b8325a"
WIDE, NARROW, SMALL = 600, 350, 340  # pixels: a page's column, a telephone, one of several in a row

# Each kind of arm keeps its hue (Okabe and Ito's, told apart by colour-blind readers) and its marker in every chart;
# a second and third arm of one kind, such as another run's, gets another shade. Light page first, then dark.
ARMS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "pretrained": ("o", [("#0072b2", "#5cb8ec"), ("#003c66", "#a9d8f5"), ("#3d9ad1", "#2b8ac6")]),
    "scratch": ("s", [("#d55e00", "#ff8f43"), ("#8a3c00", "#ffc59c"), ("#f08332", "#d9691a")]),
    "frozen": ("^", [("#00876a", "#34cfa3"), ("#00503f", "#9be8d1"), ("#27b08e", "#179c79")]),
    "tfidf": ("D", [("#a8488a", "#e79bcb"), ("#6b2557", "#f3c9e4"), ("#c96faf", "#c4679f")]),
}
OTHER = ("v", [("#6d6a2c", "#c9c26a")])
LABELS = {"tfidf": "TF-IDF"}  # arms that people write in another way than `--arms` and JSON do

# what the inline charts use instead of the colours of the files, so that they follow the page
PAGE_COLOURS = {INK: "currentColor", SOFT: "var(--soft)", PAPER: "var(--paper)"}
PAGE_COLOURS |= {RIGHT: "var(--right)", WRONG: "var(--wrong)"}


@dataclass(frozen=True)
class ArmStyle:
    """How one arm looks wherever it appears."""

    name: str
    kind: str
    colour: str
    variable: str
    marker: str
    hollow: bool

    @property
    def label(self) -> str:
        return arm_label(self.name)

    @property
    def face(self) -> str:
        return PAPER if self.hollow else self.colour


def arm_label(name: str) -> str:
    """An arm's name as readers see it on pages, in charts and on the terminal."""
    return LABELS.get(name, name)


def styles(arms: list[dict[str, Any]]) -> dict[str, ArmStyle]:
    """The look of each arm by its name."""
    seen: dict[str, int] = {}
    made = {}
    for arm in arms:
        kind = arm.get("kind") or "other"
        place = seen.get(kind, 0)
        seen[kind] = place + 1
        marker, shades = ARMS.get(kind, OTHER)
        shade = place % len(shades)
        variable = f"--{kind if kind in ARMS else 'other'}-{shade}"
        made[arm["name"]] = ArmStyle(arm["name"], kind, shades[shade][0], variable, marker, hollow=place % 2 == 1)
    return made


def colour_variables() -> tuple[dict[str, str], dict[str, str]]:
    """CSS variables of the arms' colours on a light and on a dark page."""
    both = {
        f"--{kind}-{i}": pair
        for kind, (_, shades) in (ARMS | {"other": OTHER}).items()
        for i, pair in enumerate(shades)
    }
    return {name: light for name, (light, _) in both.items()}, {name: dark for name, (_, dark) in both.items()}


@contextmanager
def chart_style() -> Iterator[None]:
    import matplotlib

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "headstock",
        "text.parse_math": False,  # a class may be named $5
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
        "font.size": 11,
        "axes.titlesize": 12,
        "axes.labelsize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.8,
        "axes.axisbelow": True,
        "axes.unicode_minus": True,
        "grid.color": GRID,
        "grid.alpha": 0.28,
        "grid.linewidth": 0.7,
        "legend.frameon": False,
        "lines.linewidth": 2.0,
        "lines.markersize": 6.5,
        "figure.constrained_layout.h_pad": 0.06,
        "figure.constrained_layout.w_pad": 0.06,
    }
    ink = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    settings |= dict.fromkeys(ink, INK) | {"figure.facecolor": "none", "axes.facecolor": "none"}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # a label may hold letters the drawing font lacks; in the SVG the reader's own font shows them
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support")
        yield


def make_figure(paint: Callable[["Figure"], None], width: float, height: float) -> "Figure":
    """A figure of so many pixels at the size of the page's text; no state is shared with other figures."""
    from matplotlib.figure import Figure

    with chart_style():
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        paint(figure)
    return figure


def percent_axis(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}%" if -0.001 <= value <= 1.001 else ""))


def svg_of(figure: "Figure") -> str:
    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with chart_style():
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    figure.set_layout_engine("none")  # everything has its place now; finding it again for the PNG would take as long
    return out.getvalue()


def inline(svg: str, name: str, label: str, variables: dict[str, str]) -> "Markup":
    """A chart as part of the page: its own ids, no fixed size, the page's font and colours."""
    from markupsafe import Markup, escape

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]+"', head)
    assert box, "matplotlib writes a viewBox"
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', rest))
    rest = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", rest)
    rest = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", rest).replace("xlink:href", "href")
    rest = re.sub(r"font: (?:(\d+) )?([\d.]+)px [^;\"]+", font_size, rest)
    for colour, instead in (PAGE_COLOURS | variables).items():
        rest = rest.replace(colour, instead)
    rest = re.sub(r">\s+<", "><", rest)
    return Markup(f'<svg {box[0]} role="img" aria-label="{escape(label)}" data-chart="{escape(name)}">{rest}')


def font_size(found: re.Match[str]) -> str:
    weight = f"font-weight: {found[1]}; " if found[1] else ""
    return f"{weight}font-size: {found[2]}px"


@dataclass
class Gallery:
    """The charts of one page; where there is a folder, each is kept in it for papers, as SVG and PNG."""

    folder: Path | None = None

    def __post_init__(self) -> None:
        light, _ = colour_variables()
        self.variables = {colour: f"var({name})" for name, colour in light.items()}
        self.names: set[str] = set()

    def embed(self, name: str, figure: "Figure", label: str, *, keep: bool = True) -> "Markup":
        name = self.unique_name(name)
        svg = svg_of(figure)
        if keep:
            self.save(name, figure, svg)
        return inline(svg, name, label, self.variables)

    def unique_name(self, name: str) -> str:
        """A name no other chart has: arms in other scripts may all come down to the same plain letters."""
        free = next(n for i in itertools.count(1) if (n := name if i == 1 else f"{name}-{i}") not in self.names)
        self.names.add(free)
        return free

    def save(self, name: str, figure: "Figure", svg: str | None = None) -> None:
        if self.folder is None:
            return
        write_text(self.folder / f"{name}.svg", svg or svg_of(figure))
        out = io.BytesIO()
        with chart_style():
            figure.savefig(out, format="png", dpi=200, facecolor="white", metadata={"Software": None})
        write_bytes(self.folder / f"{name}.png", out.getvalue())


def file_name(*words: object) -> str:
    """A name for a file and an id: letters, digits and dashes only."""
    return "-".join(re.sub(r"[^A-Za-z0-9]+", "-", str(word)).strip("-").lower() or "x" for word in words)
