"""What a task declares about itself for the web page: its inputs, its sampling controls, and how a result is displayed.

The page knows the parts below and no task. A task that returns parts from `display` appears in the page as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

TAG_COLOURS = 12  # that the page distinguishes; further labels use them again


@dataclass(frozen=True)
class InputField:
    """One input of a widget."""

    name: str  # the column, and the key in a request
    label: str
    kind: Literal["line", "text"] = "text"  # one line, or several
    example: str = ""


@dataclass(frozen=True)
class WidgetOption:
    """A control beside the inputs; one that is left empty is not sent."""

    name: str
    label: str
    kind: Literal["integer", "number", "text"] = "number"
    default: float | str | None = None
    low: float | None = None
    high: float | None = None
    step: float | None = None
    help: str = ""


@dataclass(frozen=True)
class Widget:
    """A form of the page, the endpoint that answers it, and the view that shows the answer."""

    name: str
    title: str
    endpoint: str
    inputs: tuple[InputField, ...]
    options: tuple[WidgetOption, ...] = ()
    view: Literal["predict", "generate", "fill"] = "predict"
    action: str = "Run"  # the button
    explains: bool = False  # `explain prediction` gives the weight of each word
    aligned: bool = False  # the result has the weights of every source token for every target token

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


GENERATE = Widget(
    "generate",
    "Generate",
    "/v1/completions",
    (InputField("prompt", "Prompt", example="Once upon a time"),),
    (
        WidgetOption("max_tokens", "New tokens", "integer", 96, 1, 1024, 1),
        WidgetOption("temperature", "Temperature", "number", 0.8, 0, 2, 0.05, "0 always takes the likeliest token"),
        WidgetOption("top_p", "Top p", "number", 0.95, 0.01, 1, 0.01, "sample from the likeliest tokens of this mass"),
        WidgetOption("top_k", "Top k", "integer", None, 1, 100, 1, "sample from this many tokens"),
        WidgetOption("seed", "Seed", "integer", 0, 0, 2**31 - 1, 1),
        WidgetOption("stop", "Stop at", "text", None, help="a text at which to stop"),
    ),
    view="generate",
    action="Generate",
)
FILL = Widget(
    "fill",
    "Fill masks",
    "/v1/fill",
    (InputField("input", "Text with [MASK]", example="The [MASK] was superb, but the [MASK] was dull."),),
    (
        WidgetOption("top", "Words per mask", "integer", 8, 1, 100, 1),
        WidgetOption("pieces", "Tokens per word", "integer", 3, 1, 8, 1),
    ),
    view="fill",
    action="Fill",
)


# Parts of a result. `kind` names the function of the page that draws it.


class DisplayPart:
    kind: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind} | asdict(self)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Bars(DisplayPart):
    """The probability of each label; those in `selected` are predicted."""

    kind: ClassVar[str] = "bars"
    bars: list[tuple[str, float]]
    selected: list[str]


@dataclass(frozen=True)
class PlainText(DisplayPart):
    kind: ClassVar[str] = "text"
    text: str
    title: str = ""


@dataclass(frozen=True)
class LabelledSpan:
    start: int
    end: int
    label: str
    colour: int  # from 0; the same for labels that belong together
    probability: float | None = None


@dataclass(frozen=True)
class ColouredText(DisplayPart):
    """A text with labelled spans, which do not overlap, and a legend."""

    kind: ClassVar[str] = "spans"
    text: str
    spans: list[LabelledSpan]


@dataclass(frozen=True)
class Highlight(DisplayPart):
    """A span in its context; `start` is None where there is none."""

    kind: ClassVar[str] = "highlight"
    text: str
    start: int | None
    end: int | None
    answer: str
    probability: float | None = None


@dataclass(frozen=True)
class ScaleValue(DisplayPart):
    """A number on a scale; without limits only the number is shown."""

    kind: ClassVar[str] = "scale"
    value: float
    low: float | None = None
    high: float | None = None
    label: str = ""


@dataclass(frozen=True)
class KeyValues(DisplayPart):
    kind: ClassVar[str] = "table"
    rows: list[tuple[str, str]]


@dataclass(frozen=True)
class Heatmap(DisplayPart):
    """Weights of columns for each row, from 0 to 1."""

    kind: ClassVar[str] = "heatmap"
    title: str
    rows: list[str]
    columns: list[str]
    values: list[list[float]]


def prediction_table(prediction: Mapping[str, Any]) -> list[DisplayPart]:
    """The parts of a prediction about which nothing else is known: probabilities as bars, the rest as a table."""
    probabilities = prediction.get("probabilities")
    parts: list[DisplayPart] = []
    if isinstance(probabilities, Mapping):
        selected = [str(name) for name in prediction.get("labels") or [prediction.get("label")]]
        parts.append(Bars([(str(name), float(value)) for name, value in probabilities.items()], selected))
    rest = [(name, str(value)) for name, value in prediction.items() if not isinstance(value, Mapping | list)]
    return [*parts, KeyValues(rest)] if rest else parts


def coloured_words(
    text: str, spans: Sequence[tuple[int, int]], tags: Sequence[str], probabilities: Sequence[float]
) -> ColouredText:
    """The tags of words as spans; `O` is no span, and B-X, I-X ... of one entity become one span X.

    The probability of an entity is that of its least probable word.
    """
    names = [tag[2:] if tag[:2] in ("B-", "I-", "E-", "S-", "L-", "U-") else tag for tag in tags]
    labels = sorted({name for name in names if name != "O"})
    result: list[LabelledSpan] = []
    previous = "O"
    for (start, end), tag, name, probability in zip(spans, tags, names, probabilities, strict=True):
        if tag[:2] in ("I-", "E-", "L-") and previous == name and result:
            last = result[-1]
            least = min(last.probability or 0.0, probability)
            result[-1] = LabelledSpan(last.start, end, name, last.colour, least)
        elif name != "O":
            result.append(LabelledSpan(start, end, name, labels.index(name) % TAG_COLOURS, probability))
        previous = name
    return ColouredText(text, result)
