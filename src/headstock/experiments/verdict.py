"""Says in one sentence whether pretraining pays at a number of labels, and whether TF-IDF would have been enough.

The words follow the numbers as they are shown (points with one decimal), so that the two never disagree.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SLIGHT = 2.0  # points: when a model can be better by no more than this, TF-IDF is called enough


@dataclass(frozen=True)
class Difference:
    """How far one arm is above another, in points as shown; low and high are None without an interval."""

    points: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, pair: Mapping[str, Any]) -> "Difference":
        """A pair's difference and interval, as exact as they are shown: an edge that reads 0.0 is zero."""
        return cls(_points(pair["difference"]), _edge(pair["low"]), _edge(pair["high"]))

    @property
    def above(self) -> bool:
        """True where the whole interval is above zero."""
        return self.low is not None and self.low > 0

    @property
    def below(self) -> bool:
        """True where the whole interval is below zero."""
        return self.high is not None and self.high < 0

    def reversed(self) -> "Difference":
        """The same gap seen from the other arm."""
        low, high = (None if edge is None else 0.0 - edge for edge in (self.high, self.low))
        return Difference(0.0 - self.points, low, high)

    def size(self) -> str:
        """`6.1 points (4.2 to 7.9)`, for a gap that is above zero."""
        return f"{self.points:.1f} points ({self.low:.1f} to {self.high:.1f})"

    def signed(self) -> str:
        """`+0.4 points, -1.1 to 1.9`."""
        return f"{self.points:+.1f} points, {self.low:.1f} to {self.high:.1f}"

    def seen(self, other: str) -> str:
        """`scores 6.1 points more than scratch`: what was seen, without a claim that it would be seen again."""
        if self.points == 0:
            return f"scores the same as {other}"
        return f"scores {abs(self.points):.1f} points {'more' if self.points > 0 else 'less'} than {other}"


class Results:
    """The accuracies and paired differences at one number of labels, by arm."""

    def __init__(
        self,
        labels: int,
        summary: Iterable[Mapping[str, Any]],
        pairs: Iterable[Mapping[str, Any]],
        arms: Sequence[Mapping[str, Any]],
    ):
        self.scores = {row["arm"]: row for row in summary if row["labels"] == labels}
        self.pairs = {(row["a"], row["b"]): row for row in pairs if row["labels"] == labels}
        self.arms = [arm for arm in arms if arm["name"] in self.scores]

    def of_kind(self, kind: str) -> list[str]:
        """The arms of a kind, the most accurate first."""
        names = [arm["name"] for arm in self.arms if arm["kind"] == kind]
        return sorted(names, key=lambda name: -self.scores[name]["score"])

    def scratch_beside(self, name: str) -> str | None:
        """The scratch arm to measure `name` against: the one made like its run where each run has its own."""
        runs = {arm["name"]: arm.get("run") for arm in self.arms}
        every = self.of_kind("scratch")
        return next((arm for arm in every if runs[arm] == runs[name]), every[0] if every else None)

    def gap(self, a: str, b: str) -> Difference:
        if (a, b) in self.pairs:
            return Difference.of(self.pairs[a, b])
        if (b, a) in self.pairs:
            return self.gap(b, a).reversed()
        return Difference(_points(self.scores[a]["score"] - self.scores[b]["score"]), None, None)

    def reaches(self, name: str) -> str:
        """`reaches 71.0% (68.9 to 73.2)`, or of other metrics `reaches F1 71.0% (...)`, `reaches BLEU 21.0 (...)`."""
        row = self.scores[name]
        called, unit = {"accuracy": ("", "%"), "f1": ("F1 ", "%"), "bleu": ("BLEU ", "")}[row.get("metric", "accuracy")]
        reached = f"reaches {called}{_points(row['score']):.1f}{unit}"
        return reached if row["low"] is None else f"{reached} ({_points(row['low']):.1f} to {_points(row['high']):.1f})"


def verdict(
    labels: int,
    summary: Iterable[Mapping[str, Any]],
    pairs: Iterable[Mapping[str, Any]],
    arms: Sequence[Mapping[str, Any]],
    *,
    unit: str = "label",
) -> str:
    """The verdict at `labels` labels (or other units): does pretraining pay, and is TF-IDF enough?

    `summary` and `pairs` may hold other numbers of labels too; `arms` are `{name, kind}` with kind scratch,
    pretrained, frozen or tfidf. A pair may stand either way round.
    """
    results = Results(labels, summary, pairs, arms)
    pretrained, frozen, scratch = results.of_kind("pretrained"), results.of_kind("frozen"), results.of_kind("scratch")
    opening = f"With {labels:,} {unit if labels == 1 else f'{unit}s'} "
    if pretrained or frozen:
        text = _pretraining(results, pretrained or frozen, frozen=not pretrained)
    elif scratch:
        text = f"nothing pretrained was compared; the model from scratch {results.reaches(scratch[0])}"
    else:
        text = "no model of ours was compared"
    text += _tfidf(results, (pretrained or frozen) + scratch + (frozen if pretrained else []))
    if pretrained and frozen:
        which = "the frozen backbone alone" if len(frozen) == 1 else f"the best frozen backbone alone ({frozen[0]})"
        text += f"; {which} {results.reaches(frozen[0])}"
    if results.scores and all(row["low"] is None for row in results.scores.values()):
        text += "; one seed only, so no interval"
    return f"{opening}{text}."


def features_verdict(
    labels: int,
    summary: Iterable[Mapping[str, Any]],
    pairs: Iterable[Mapping[str, Any]],
    arms: Sequence[Mapping[str, Any]],
    *,
    unit: str = "label",
) -> str:
    """The verdict on frozen arms that differ in their layers: which is best, and is that clear?"""
    results = Results(labels, summary, pairs, arms)
    best, *others = results.of_kind("frozen")
    text = f"As features with {labels:,} {unit}s, {_layers(best)} {results.reaches(best)}"
    gaps = {name: results.gap(best, name) for name in others}
    clear = [name for name, gap in gaps.items() if gap.above]
    close = [name for name in others if name not in clear]
    said = [f"{gaps[name].size()} over {_layers(name)}" for name in clear]
    if said:
        text += f": {', '.join(said)}"
    if close:
        shown = (
            f"{_layers(name)} ({gaps[name].signed()})"
            if gaps[name].low is not None
            else f"{_layers(name)} ({gaps[name].points:+.1f} points, no interval)"
            for name in close
        )
        text += f"; not clearly better than {', '.join(shown)}"
    return f"{text}."


def _layers(name: str) -> str:
    """What a frozen arm reads, in words."""
    layers = name.removeprefix("frozen ")
    return f"layer {layers}" if layers[:1].isdecimal() else layers


def _pretraining(results: Results, names: list[str], *, frozen: bool) -> str:
    """The clause on the most accurate of the pretrained arms against scratch."""
    best, subject = names[0], "pretraining"
    if len(names) > 1:
        subject += f" ({best}, the most accurate of {len(names)})"
    elif frozen:
        subject += " (frozen)"
    scratch = results.scratch_beside(best)
    if scratch is None:
        return f"{_model(results, best)} {results.reaches(best)}; there is no scratch arm to say what pretraining adds"
    gap = results.gap(best, scratch)
    if gap.low is None:
        return f"{subject} {gap.seen('scratch')}"
    if gap.above:
        return f"{subject} adds {gap.size()} over scratch"
    if gap.below:
        return f"{subject} costs {gap.reversed().size()} against scratch"
    return f"{subject} makes no clear difference against scratch ({gap.signed()})"


def _tfidf(results: Results, rivals: list[str]) -> str:
    """The clause on TF-IDF against the arms that learn, the first of them the one the sentence is about."""
    if not (tfidf := results.of_kind("tfidf")):
        return ""
    if not rivals:
        return f"; TF-IDF {results.reaches(tfidf[0])}"
    first, gaps = rivals[0], {name: results.gap(name, tfidf[0]) for name in rivals}
    gap = gaps[first]
    if gap.low is None:
        return f"; {_model(results, first)} {gap.seen('TF-IDF')}"
    if gap.above:
        scratch = results.scratch_beside(first)
        if scratch not in (None, first) and results.gap(first, scratch).above:
            return f", and {gap.size()} over TF-IDF"
        return f"; {_model(results, first)} is {gap.size()} better than TF-IDF"
    if ahead := [name for name in rivals if gaps[name].above]:
        beaten = f"{_model(results, ahead[0])} ({gaps[ahead[0]].signed()})"
        return f"; TF-IDF is clearly beaten by {beaten}, not by {_model(results, first)} ({gap.signed()})"
    bounded = all(one.high is not None and one.high <= SLIGHT for one in gaps.values())
    start = "; TF-IDF is enough here: " if bounded else "; TF-IDF may be enough: "
    behind = [name for name in rivals if gaps[name].below]
    if first not in behind:
        return f"{start}{_model(results, first)} is not clearly better ({gap.signed()})"
    scratch = results.scratch_beside(first)
    if scratch in behind and scratch != first:
        both = f"{_model(results, first)} by {gap.reversed().size()} and scratch by {gaps[scratch].reversed().size()}"
        return f"{start}it beats {both}"
    return f"{start}it is {gap.reversed().size()} better than {_model(results, first)}"


def _model(results: Results, name: str) -> str:
    """What an arm is, with its name where several arms are of its kind."""
    kind = next(arm["kind"] for arm in results.arms if arm["name"] == name)
    what = {"pretrained": "the pretrained model", "frozen": "the frozen backbone"}.get(kind, "the model from scratch")
    return f"{what} ({name})" if len(results.of_kind(kind)) > 1 else what


def _points(share: float) -> float:
    """A share of one in points as they are shown; never -0.0."""
    return round(100 * share, 1) + 0.0


def _edge(share: float | None) -> float | None:
    return None if share is None else _points(share)
