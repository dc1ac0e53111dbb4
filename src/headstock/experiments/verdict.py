"""States results in sentences: whether pretraining helps, whether TF-IDF is sufficient, which settings are best."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headstock.experiments.arms.base import ARM_KINDS
from headstock.report.format import Difference
from headstock.report.sweep_points import (
    format_difference,
    format_difference_range,
    format_interval,
    format_metric,
    format_value,
    point_label,
    value_spreads,
)
from headstock.tasks.text_metrics import is_score, metric_name

NEGLIGIBLE = 2.0  # points, or percent of an error: if a model can be better by at most this, TF-IDF is sufficient

USUAL_KINDS = ("pretrained", "frozen", "scratch", "tfidf")

Rows = Iterable[Mapping[str, Any]]


class ArmScores:
    """The scores and paired differences of all arms at one number of labels."""

    def __init__(self, labels: int, summary: Rows, pairs: Rows, arms: Sequence[Mapping[str, Any]]):
        self.scores = {row["arm"]: row for row in summary if row["labels"] == labels}
        self.pairs = {(row["a"], row["b"]): row for row in pairs if row["labels"] == labels}
        self.arms = [arm for arm in arms if arm["name"] in self.scores]

    @property
    def metric(self) -> str:
        return next(iter(self.scores.values())).get("metric", "accuracy")

    @property
    def has_intervals(self) -> bool:
        return any(row["low"] is not None for row in self.scores.values())

    def of_kind(self, kind: str) -> list[str]:
        """The arms of a kind, the best first."""
        return self.ranked(arm["name"] for arm in self.arms if arm["kind"] == kind)

    def other_kinds(self) -> list[str]:
        """The arms of further kinds, which verdicts only name, the best first."""
        return self.ranked(arm["name"] for arm in self.arms if arm["kind"] not in USUAL_KINDS)

    def ranked(self, names: Iterable[str]) -> list[str]:
        sign = -1 if is_score(self.metric) else 1
        return sorted(names, key=lambda name: sign * self.scores[name]["score"])

    def matching_scratch(self, name: str) -> str | None:
        """The scratch arm to compare with: that of the same run, otherwise the best one."""
        runs = {arm["name"]: arm.get("run") for arm in self.arms}
        scratch = self.of_kind("scratch")
        return next((arm for arm in scratch if runs[arm] == runs[name]), scratch[0] if scratch else None)

    def difference(self, a: str, b: str) -> Difference:
        if (a, b) in self.pairs:
            return Difference.of(self.pairs[a, b], self.metric)
        if (b, a) in self.pairs:
            return self.difference(b, a).reversed()
        gap = self.scores[a]["score"] - self.scores[b]["score"]
        return Difference.of({"difference": gap, "low": None, "high": None}, self.metric)

    def reaches(self, name: str) -> str:
        """`reaches 71.0% (68.9 to 73.2)`, `reaches F1 71.0% (...)` or `reaches BLEU 21.0 (...)`."""
        row = self.scores[name]
        prefix = "" if self.metric == "accuracy" else f"{metric_name(self.metric)} "
        return f"reaches {prefix}{format_metric(self.metric, row['score'])}{format_interval(self.metric, row)}"

    @property
    def negligible(self) -> float:
        """The largest difference that is called negligible, in the units of `difference`."""
        if is_score(self.metric):
            return NEGLIGIBLE
        return NEGLIGIBLE / 100 * max(row["score"] for row in self.scores.values())

    def describe(self, name: str) -> str:
        """`the pretrained model`, with the arm's name if there are several of its kind."""
        kind = next(arm["kind"] for arm in self.arms if arm["name"] == name)
        noun = ARM_KINDS.get(kind).title
        return f"{noun} ({name})" if len(self.of_kind(kind)) > 1 else noun


def verdict(labels: int, summary: Rows, pairs: Rows, arms: Sequence[Mapping[str, Any]], *, unit: str = "label") -> str:
    """Does pretraining help with `labels` labels, and is TF-IDF sufficient?

    The best fully fine-tuned arm stands for pretraining; without one, the best of the other arms that use a run.
    `summary` and `pairs` may include other numbers of labels; `arms` are `{name, kind}`. A pair may be stored in
    either order.
    """
    scores = ArmScores(labels, summary, pairs, arms)
    pretrained, frozen, scratch = scores.of_kind("pretrained"), scores.of_kind("frozen"), scores.of_kind("scratch")
    others = scores.other_kinds()
    if main := pretrained or scores.ranked(frozen + others):
        text = _pretraining(scores, main, frozen=main == frozen)
    elif scratch:
        text = f"no pretrained model was compared; the model trained from scratch {scores.reaches(scratch[0])}"
    else:
        text = "only TF-IDF was evaluated"
    text += _tfidf(scores, main + scratch + [name for name in frozen + others if name not in main])
    if frozen and frozen[0] not in main[:1]:
        noun = "the frozen backbone" if len(frozen) == 1 else f"the best frozen backbone ({frozen[0]})"
        text += f"; {noun} {scores.reaches(frozen[0])}"
    for name in (name for name in others if name not in main[:1]):
        text += f"; {scores.describe(name)} {scores.reaches(name)}{_full_finetuning(scores, name, pretrained)}"
    if scores.scores and not scores.has_intervals:
        text += "; one seed only, so there are no intervals"
    return f"With {labels:,} {unit if labels == 1 else f'{unit}s'}, {text}."


def features_verdict(
    labels: int, summary: Rows, pairs: Rows, arms: Sequence[Mapping[str, Any]], *, unit: str = "label"
) -> str:
    """Which layers of a frozen backbone are the best features, and is the difference clear?"""
    scores = ArmScores(labels, summary, pairs, arms)
    best, *others = scores.of_kind("frozen")
    text = f"As features with {labels:,} {unit}s, {_layers(best)} {scores.reaches(best)}"
    differences = {name: scores.difference(best, name) for name in others}
    clear = [f"{_layers(name)} ({gap.signed})" for name, gap in differences.items() if gap.above]
    unclear = [f"{_layers(name)} ({gap.signed})" for name, gap in differences.items() if not gap.above]
    if clear:
        text += f"; clearly better than {', '.join(clear)}"
    if unclear:
        text += f"; not clearly better than {', '.join(unclear)}"
    return f"{text}."


def _layers(name: str) -> str:
    """The layers of a frozen arm as text."""
    layers = name.removeprefix("frozen ")
    return f"layer {layers}" if layers[:1].isdecimal() else layers


def _full_finetuning(scores: ArmScores, name: str, pretrained: list[str]) -> str:
    """How an arm that fine-tunes in another way compares with full fine-tuning, if there is an interval."""
    kind = next(arm["kind"] for arm in scores.arms if arm["name"] == name)
    if not pretrained or not ARM_KINDS.get(kind).is_finetuned:
        return ""
    gap = scores.difference(name, pretrained[0])
    if gap.low is None:
        return ""
    relation = "not clearly different from"
    if gap.above or gap.below:
        relation = f"clearly {'better' if gap.above else 'worse'} than"
    return f", {relation} full fine-tuning ({gap.signed})"


def _pretraining(scores: ArmScores, names: list[str], *, frozen: bool) -> str:
    """The best pretrained arm compared with training from scratch."""
    best, subject = names[0], "pretraining"
    if len(names) > 1:
        subject += f" ({best}, the best of {len(names)})"
    elif frozen:
        subject += " (frozen)"
    scratch = scores.matching_scratch(best)
    if scratch is None:
        return f"{scores.describe(best)} {scores.reaches(best)}; without a scratch arm the gain is unknown"
    gap, metric = scores.difference(best, scratch), metric_name(scores.metric)
    if gap.low is None:
        return f"{subject} {_observed(gap)} scratch"
    if gap.above:
        return f"{subject} improves {metric} by {gap.amount} over scratch ({gap.interval})"
    if gap.below:
        verb, loss = "lowers" if is_score(scores.metric) else "raises", gap.reversed()
        return f"{subject} {verb} {metric} by {loss.amount} compared with scratch ({loss.interval})"
    return f"{subject} makes no clear difference compared with scratch ({gap.signed})"


def _observed(gap: Difference) -> str:
    """`scores 6.1 points more than`: an observation of one seed, not a claim."""
    if gap.points == 0:
        return "scores the same as"
    if not gap.unit:  # an error, of which less is better
        return f"is {gap.amount} {'better' if gap.points > 0 else 'worse'} than"
    return f"scores {gap.amount} {'more' if gap.points > 0 else 'less'} than"


def _tfidf(scores: ArmScores, rivals: list[str]) -> str:
    """TF-IDF compared with the trained arms, of which the first is the subject of the sentence."""
    if not (tfidf := scores.of_kind("tfidf")):
        return ""
    if not rivals:
        return f": it {scores.reaches(tfidf[0])}"
    first, gaps = rivals[0], {name: scores.difference(name, tfidf[0]) for name in rivals}
    gap, scratch = gaps[first], scores.matching_scratch(first)
    if gap.low is None:
        return f"; {scores.describe(first)} {_observed(gap)} TF-IDF"
    if gap.above:
        if scratch not in (None, first) and scores.difference(first, scratch).above:
            return f" and by {gap.amount} over TF-IDF ({gap.interval})"
        return f"; {scores.describe(first)} is {gap.amount} better than TF-IDF ({gap.interval})"
    if better := [name for name in rivals if gaps[name].above]:
        return (
            f"; {scores.describe(better[0])} clearly outperforms TF-IDF ({gaps[better[0]].signed}), "
            f"but {scores.describe(first)} does not ({gap.signed})"
        )
    is_bounded = all(gap.high is not None and gap.high <= scores.negligible for gap in gaps.values())
    opening = "; TF-IDF is sufficient: " if is_bounded else "; TF-IDF may be sufficient: "
    if not gap.below:
        return f"{opening}{scores.describe(first)} is not clearly better ({gap.signed})"
    losers = [first, scratch] if scratch not in (None, first) and gaps[scratch].below else [first]
    beaten = (f"{scores.describe(name)} by {gaps[name].amount} ({gaps[name].reversed().interval})" for name in losers)
    return f"{opening}it outperforms {' and '.join(beaten)}"


# Sweeps


def sweep_verdict(results: dict[str, Any]) -> str:
    """Which point is best, whether the difference is clear, and which setting matters most."""
    metric, best = results["metric"], results["best"]
    if best is None:
        return "Every point failed: the training loss became infinite or NaN. Try lower learning rates."
    score = f"{format_metric(metric, best['mean'])}{format_interval(metric, best)}"
    opening = f"The best point is {point_label(best['settings'])} with {metric_name(metric)} {score}"
    return f"{opening}{_second_best(results)}.{_most_important(results)}"


def _second_best(results: dict[str, Any]) -> str:
    metric, second, unit = results["metric"], results["best"]["second"], results.get("unit", "seed")
    if second is None:
        return "; there is no other point to compare with"
    gap, name = format_difference(metric, abs(second["mean"])), point_label(second["settings"])
    if second["low"] is None and second["mean"] == 0:
        return f"; the second best, {name}, has the same score"
    if second["low"] is None:
        return f"; the second best, {name}, is {gap} behind, but one seed cannot show whether that is chance"
    low, high = sorted(abs(end) if second["clear"] else end for end in (second["low"], second["high"]))
    if second["clear"]:
        span = format_difference_range(metric, low, high)
        return f"; it is clearly better than the second best, {name}, by {gap} (95% CI {span}, paired by {unit})"
    if results["better"] == "higher":
        low, high = -high, -low
    span = format_difference_range(metric, low, high)
    return f"; it is not clearly better than the second best, {name}: {gap} ahead (95% CI {span}, paired by {unit})"


def _most_important(results: dict[str, Any]) -> str:
    """The setting whose values differ most in their mean score."""
    metric, spreads = results["metric"], value_spreads(results)
    if not spreads:
        return ""
    (key, spread), *others = spreads.items()
    hedge = "" if results["seeds"] > 1 else " (one seed only)"
    if len(results["marginals"]) == 1:
        return f" Across its values, {key} changes the score by {format_difference(metric, spread)}{hedge}."
    rows = [row for row in results["marginals"][key] if row["mean"] is not None]
    rows.sort(key=lambda row: row["mean"], reverse=results["better"] == "higher")
    text = f" The most important setting is {key}{hedge}: the means of its values differ by "
    text += f"{format_difference(metric, spread)} (best {_values_label(rows[0])}, worst {_values_label(rows[-1])})"
    compared = ", ".join(f"{format_difference(metric, value)} for {other}" for other, value in others)
    return f"{text}, compared with {compared}." if compared else f"{text}."


def _values_label(row: dict[str, Any]) -> str:
    if "from" in row:
        return f"{format_value(row['from'])} to {format_value(row['to'])}"
    return format_value(row["value"])
