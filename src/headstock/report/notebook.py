"""Results as HTML for notebooks: a table, a chart and the verdict, in light and dark, without external resources."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headstock.report.compare_page import fill_in_defaults, score_charts, score_grid
from headstock.report.format import score
from headstock.report.lr_finder_page import MEANINGS, lr_figure
from headstock.report.render import DARK, LIGHT, css_rules, render
from headstock.report.run_page import loss_charts, scores_by_split
from headstock.report.sweep_page import describe_point, line_charts
from headstock.report.theme import Gallery, arm_styles, colour_variables
from headstock.tasks.labelled import nouns_of
from headstock.tasks.text_metrics import NOT_PERCENT, is_score, metric_name
from headstock.train.lr_finder import LRFinderResult

if TYPE_CHECKING:
    from markupsafe import Markup

# how JupyterLab, VS Code, Colab and our site mark the theme of a notebook, which may differ from that of the system
LIGHT_THEMES = ('[data-jp-theme-light="true"]', ".vscode-light", "html[theme=light]", "[data-md-color-scheme=default]")
DARK_THEMES = ('[data-jp-theme-light="false"]', ".vscode-dark", "html[theme=dark]", "[data-md-color-scheme=slate]")
numbers = itertools.count(1)  # several results in a notebook share one page, in which ids are unique


class NotebookGallery(Gallery):
    """Charts whose names are unique in a notebook."""

    def unique_name(self, name: str) -> str:
        return super().unique_name(f"{name}-{next(numbers)}")


def comparison_html(results: dict[str, Any]) -> str:
    """The verdict, the chart and the table of a comparison."""
    results = results | {key: [dict(row) for row in results[key]] for key in ("summary", "cells")}
    fill_in_defaults(results)
    styles, metric = arm_styles(results["arms"]), results["metric"]
    return fragment(
        "notebook_comparison.html",
        results=results,
        styles=styles,
        grid=score_grid(results),
        unit=nouns_of(results.get("task")).unit,
        metric=metric_name(metric) + (" (%)" if is_score(metric) and metric not in NOT_PERCENT else ""),
        bare=lambda value: score(value, metric).removesuffix("%"),
        chart=score_charts(results, styles, NotebookGallery())["wide"],
    )


def sweep_html(results: dict[str, Any]) -> str:
    """The verdict and the ranking of a sweep, and a chart if one setting was varied."""
    style = arm_styles([{"name": "best", "kind": "pretrained"}])["best"]
    varied = list(results["marginals"])
    charts = line_charts(results, varied[0], style, NotebookGallery()) if len(varied) == 1 else None
    return fragment(
        "notebook_sweep.html",
        results=results,
        metric=metric_name(results["metric"]),
        keys=list(results["points"][0]["settings"]),
        rows=[describe_point(results, row) for row in results["points"]],
        chart=charts["wide"] if charts else None,
    )


def run_html(results: dict[str, Any], metrics: Sequence[dict[str, Any]]) -> str:
    """The scores of a run, and its losses by step as metrics.jsonl has them."""
    charts = loss_charts(list(metrics), NotebookGallery())
    return fragment(
        "notebook_run.html",
        results=results,
        measured=scores_by_split(results),
        chart=charts["wide"] if charts else None,
    )


def lr_html(result: LRFinderResult) -> str:
    """The curve of a learning-rate range test and its suggestions."""
    rates = ", ".join(f"{name} {lr:g}" for name, lr in result.suggestions.items()) or "none"
    alt_text = f"training loss by learning rate; suggestions: {rates}"
    chart = NotebookGallery().embed("lr", lr_figure(result, wide=True), alt_text)
    return fragment("notebook_lr.html", result=result, meanings=MEANINGS, chart=chart)


def fragment(template: str, *, chart: "Markup | None", **values: Any) -> str:
    """A template with the colours of a light and a dark notebook, as one element."""
    light, dark = colour_variables()
    plain, inverted = css_rules(LIGHT | light), css_rules(DARK | dark)
    rules = [
        f".headstock {{ {plain} }}",
        f"@media (prefers-color-scheme: dark) {{ .headstock {{ {inverted} }} }}",
        *(f"{theme} .headstock {{ {plain} }}" for theme in LIGHT_THEMES),
        *(f"{theme} .headstock {{ {inverted} }}" for theme in DARK_THEMES),
    ]
    return render(__package__, template, chart=chart, style="\n".join(rules), **values)
