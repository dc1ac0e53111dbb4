"""The theme of all charts: palette, matplotlib style, SVG that follows the page's colours, and saved figures."""

import io
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headstock.io import write_bytes, write_text
from headstock.tasks.text_metrics import NOT_PERCENT, is_score

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

INK, SOFT, PAPER, GRID = "#1c2128", "#62676f", "#fdfcfa", "#8a8f98"
RIGHT, WRONG = "#64748b", "#b8325a"
WIDE, NARROW, SMALL = 600, 350, 340  # pixels: the width of a page, of a phone, and of small multiples
PNG_DPI = 200  # of saved figures
LAYOUT: Literal["constrained"] | None = "constrained"  # keeps labels and legends inside a figure

# Each kind of arm has one hue (Okabe-Ito palette, distinguishable by colour-blind readers) and one marker in all
# charts; a second and third arm of a kind get other shades. Pairs are (light mode, dark mode).
ARMS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "pretrained": ("o", [("#0072b2", "#5cb8ec"), ("#003c66", "#a9d8f5"), ("#3d9ad1", "#2b8ac6")]),
    "scratch": ("s", [("#d55e00", "#ff8f43"), ("#8a3c00", "#ffc59c"), ("#f08332", "#d9691a")]),
    "lora": ("p", [("#6b4fb8", "#b6a4f2"), ("#3f2b7d", "#d9cffa"), ("#8f76d6", "#9780dd")]),
    "frozen": ("^", [("#00876a", "#34cfa3"), ("#00503f", "#9be8d1"), ("#27b08e", "#179c79")]),
    "setfit": ("P", [("#8c6d1f", "#e3c567"), ("#57430f", "#f1dfa3"), ("#b08f3a", "#c4a544")]),
    "prompt": ("X", [("#4b5b6b", "#b9c7d6"), ("#27323d", "#dbe4ee"), ("#7a8b9c", "#93a5b8")]),
    "tfidf": ("D", [("#a8488a", "#e79bcb"), ("#6b2557", "#f3c9e4"), ("#c96faf", "#c4679f")]),
}
OTHER = ("v", [("#6d6a2c", "#c9c26a")])
LABELS = {"tfidf": "TF-IDF", "lora": "LoRA", "setfit": "SetFit"}  # display names that differ from --arms and JSON

# replacements in inline charts, so that they follow the page's colour scheme
PAGE_COLOURS = {INK: "currentColor", SOFT: "var(--soft)", PAPER: "var(--paper)"}
PAGE_COLOURS |= {RIGHT: "var(--right)", WRONG: "var(--wrong)"}


@dataclass(frozen=True)
class ArmStyle:
    """The colour and marker of an arm in all charts."""

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
    def line(self) -> dict[str, Any]:
        """Its matplotlib options."""
        face = PAPER if self.hollow else self.colour
        return {"color": self.colour, "marker": self.marker, "markerfacecolor": face}


def arm_label(name: str) -> str:
    """The display name of an arm."""
    return LABELS.get(name, name)


def arm_styles(arms: list[dict[str, Any]]) -> dict[str, ArmStyle]:
    """The style of each arm by name."""
    counts: dict[str, int] = {}
    styles = {}
    for arm in arms:
        kind = arm.get("kind") or "other"
        number = counts.get(kind, 0)
        counts[kind] = number + 1
        marker, shades = ARMS.get(kind, OTHER)
        shade = number % len(shades)
        variable = f"--{kind if kind in ARMS else 'other'}-{shade}"
        name, colour = arm["name"], shades[shade][0]
        styles[name] = ArmStyle(name, kind, colour, variable, marker, hollow=number % 2 == 1)
    return styles


def colour_variables() -> tuple[dict[str, str], dict[str, str]]:
    """CSS variables of the arms' colours, in light and in dark mode."""
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
        "text.parse_math": False,  # class names may contain $
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
        # labels may contain letters that the font lacks; in the SVG the reader's font shows them
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support")
        yield


def make_figure(paint: Callable[["Figure"], None], width: float, height: float) -> "Figure":
    """A figure of the given size in pixels, drawn by `paint`; independent of pyplot's global state."""
    from matplotlib.figure import Figure

    with chart_style():
        figure = Figure(figsize=(width / 72, height / 72), layout=LAYOUT)
        paint(figure)
    return figure


def percent_axis(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}%" if -0.001 <= value <= 1.001 else ""))


def score_axis(axis: Any, metric: str) -> None:
    """In percent, or for a score that is none, such as BLEU or a correlation, times 100; an error as it is."""
    from matplotlib.ticker import FuncFormatter

    if not is_score(metric):
        return
    percent_axis(axis)
    if metric in NOT_PERCENT:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}" if value <= 1.001 else ""))


def svg_of(figure: "Figure") -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = io.StringIO()
    with chart_style():  # Figure.savefig would draw the figure twice
        FigureCanvasSVG(figure).print_svg(out, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    figure.set_layout_engine("none")  # saves computing the layout again for the PNG
    return out.getvalue()


def png_of(figure: "Figure") -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    out = io.BytesIO()
    figure.set_dpi(PNG_DPI)
    figure.set_facecolor("white")
    with chart_style():
        FigureCanvasAgg(figure).print_png(out, metadata={"Software": None})
    return out.getvalue()


def inline(svg: str, name: str, alt_text: str, variables: dict[str, str]) -> "Markup":
    """An SVG to embed in a page: unique ids, no fixed size, the page's font and colours."""
    from markupsafe import Markup, escape

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    head, body = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]+"', head)
    assert box, "matplotlib writes a viewBox"
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', body))
    body = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", body).replace("xlink:href", "href")
    body = re.sub(r"font: (?:(\d+) )?([\d.]+)px [^;\"]+", font_size, body)
    for colour, variable in (PAGE_COLOURS | variables).items():
        body = body.replace(colour, variable)
    body = re.sub(r">\s+<", "><", body)
    return Markup(f'<svg {box[0]} role="img" aria-label="{escape(alt_text)}" data-chart="{escape(name)}">{body}')


def font_size(font: re.Match[str]) -> str:
    weight = f"font-weight: {font[1]}; " if font[1] else ""
    return f"{weight}font-size: {font[2]}px"


@dataclass
class Gallery:
    """Embeds the charts of one page and, given a folder, saves each as SVG and PNG."""

    folder: Path | None = None

    def __post_init__(self) -> None:
        light, _ = colour_variables()
        self.variables = {colour: f"var({name})" for name, colour in light.items()}
        self.names: set[str] = set()

    def embed(self, name: str, figure: "Figure", alt_text: str, *, save: bool = True) -> "Markup":
        name = self.unique_name(name)
        svg = svg_of(figure)
        if save:
            self.save(name, figure, svg)
        return inline(svg, name, alt_text, self.variables)

    def embed_both(
        self, names: tuple[str, str], draw: Callable[[bool], "Figure"], alt_text: str
    ) -> dict[str, "Markup"]:
        """A wide and a narrow version of a chart under two names; `draw` is called with whether it is wide."""
        return {
            "wide": self.embed(names[0], draw(True), alt_text),
            "narrow": self.embed(names[1], draw(False), alt_text, save=False),
        }

    def unique_name(self, name: str) -> str:
        """A name that no other chart has: names in other scripts may reduce to the same ASCII letters.

        It becomes a file name and part of the page, so a name with other characters is replaced.
        """
        name = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else file_name(name)
        free = next(n for i in itertools.count(1) if (n := name if i == 1 else f"{name}-{i}") not in self.names)
        self.names.add(free)
        return free

    def save(self, name: str, figure: "Figure", svg: str | None = None) -> None:
        if self.folder is None:
            return
        write_text(self.folder / f"{name}.svg", svg or svg_of(figure))
        write_bytes(self.folder / f"{name}.png", png_of(figure))


def file_name(*words: object) -> str:
    """A file name and HTML id: letters, digits and dashes only."""
    return "-".join(re.sub(r"[^A-Za-z0-9]+", "-", str(word)).strip("-").lower() or "x" for word in words)
