"""A run as one self-contained HTML page: its curve, its numbers, its voice."""

import io
from importlib import resources
from typing import Any

from headstock.train.run import Run


def write_run_report(run: Run, samples: list[str]) -> None:
    """Make report.html from what the run folder holds; `samples` are texts it generated."""
    import jinja2

    template = (resources.files("headstock.study.report") / "run.html").read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True).from_string(template)
    settings = run.config()
    facts = {section: values for section, values in settings.items() if section in ("model", "train", "tokenizer")}
    run.write_report(
        page.render(
            name=run.path.name,
            results=run.results(),
            data=run.data(),
            settings=facts,
            curve=curve_svg(run.read_metrics()),
            samples=samples,
        )
    )


def curve_svg(rows: list[dict[str, Any]]) -> str:
    """Training and validation loss by step; text and axes take the page's colour, so it reads in light and dark."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "headstock"}):
        figure, axes = pyplot.subplots(figsize=(7, 3.6))
        train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
        valid = [(row["step"], row["valid_loss"]) for row in rows if "valid_loss" in row]
        axes.plot(*zip(*train, strict=True), linestyle="--", color="#888888", label="training")
        axes.plot(*zip(*valid, strict=True), marker="o", markersize=4, color="#d1495b", label="validation")
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per token)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.tight_layout()
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    return svg.replace("#000000", "currentColor").replace("stroke: #000", "stroke: currentColor")
