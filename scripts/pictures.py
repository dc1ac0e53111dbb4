"""Makes the pictures of README and docs from real runs, with headless Chromium (`make pictures`).

    python scripts/pictures.py [NAME...]

Runs are kept in build/pictures, so that a second call only takes the screenshots; most of their commands are those of
the how-to pages. About ten minutes on two cores. scripts/diagrams.py draws the diagrams.
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[1]
WORK, FIGURES = ROOT / "build" / "pictures", ROOT / "docs" / "figures"
HEADSTOCK = [sys.executable, "-m", "headstock"]
MAX_BYTES = 150_000
SCALE = 1.5  # device pixels per CSS pixel
WIDTH = 1120
ANSWER_MS = 120_000  # of a server on a busy machine
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FEW = "--train few.csv --valid data/quotes/valid.csv --test data/quotes/test.csv"
TINY = "--preset modern-nano --set vocabulary=1000 --set depth=2 --set width=64 --set context=64"
CARS = "my sister buys two small red cars."
DULL = "A dull film with a great ending."

Picture = Callable[["Studio"], None]
PICTURES: dict[str, Picture] = {}


def picture(make: Picture) -> Picture:
    PICTURES[make.__name__.replace("_", "-")] = make
    return make


def main() -> None:
    names = sys.argv[1:] or list(PICTURES)
    if unknown := [name for name in names if name not in PICTURES]:
        sys.exit(f"unknown pictures {', '.join(unknown)} (there are {', '.join(PICTURES)})")
    WORK.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(WORK), sync_playwright() as play:
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        studio = Studio(browser)
        for name in names:
            print(name, flush=True)
            PICTURES[name](studio)
        browser.close()


class Studio:
    """Runs commands once, opens pages and writes screenshots of a fixed size."""

    def __init__(self, browser: Browser):
        self.browser = browser

    def run(self, command: str, *, makes: str | None = None) -> str:
        """Run a command of Headstock, unless what it makes is there; returns what it printed."""
        if makes and Path(makes).exists():
            return ""
        print(f"  headstock {command}", flush=True)
        environment = os.environ | {"COLUMNS": "100"}
        result = subprocess.run(
            [*HEADSTOCK, *shlex.split(command)], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return result.stdout

    def quotes(self) -> None:
        self.run("data get rotten-tomatoes --to data/quotes", makes="data/quotes")

    def classifier(self, name: str, options: str = "") -> None:
        """A classifier of 400 quotes, from the bundled model."""
        self.quotes()
        if not Path("few.csv").exists():
            import pandas as pd

            pd.read_csv("data/quotes/train.csv").sample(400, random_state=0).to_csv("few.csv", index=False)
        self.run(f"finetune reviews-en {FEW} {options} --out runs/{name}", makes=f"runs/{name}/results.json")

    def bard(self) -> None:
        """The language model of the how-to on pretraining."""
        self.run("data get tiny-shakespeare --to data/plays", makes="data/plays")
        self.run(f"pretrain data/plays/corpus.txt {TINY} --steps 100 --out runs/bard", makes="runs/bard/results.json")

    def few_labels(self) -> None:
        """The classifier of the tutorial on few labels: SetFit on 32 suggested rows."""
        self.quotes()
        pool = "--pool data/quotes/train.csv --count 32 --with label"
        self.run(f"suggest reviews-en {pool} --out first.csv", makes="first.csv")
        if not Path("labelled.csv").exists():
            import pandas as pd

            rows = pd.read_csv("first.csv").assign(label=lambda rows: rows["input.label"])
            rows[["text", "label"]].to_csv("labelled.csv", index=False)
        files = "--train labelled.csv --valid data/quotes/valid.csv --test data/quotes/test.csv"
        self.run(f"finetune reviews-en {files} --method setfit --out runs/first", makes="runs/first/results.json")

    @contextlib.contextmanager
    def tab(self, address: str, *, height: int, dark: bool = False, width: int = WIDTH) -> Iterator[Page]:
        context = self.browser.new_context(
            viewport={"width": width, "height": height},
            device_scale_factor=SCALE,
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
        )
        page = context.new_page()
        page.goto(address if "://" in address else Path(address).resolve().as_uri())
        yield page
        context.close()

    def shoot(self, name: str, file: str, *, height: int, dark: bool = False, section: str | None = None) -> None:
        """A screenshot of the top of a page, or from one of its sections on."""
        with self.tab(file, height=height, dark=dark) as page:
            save(name, page, top=(page.locator(section).bounding_box() or {"y": 0})["y"] if section else 0)

    @contextlib.contextmanager
    def server(self, *runs: str) -> Iterator[str]:
        """The URL of a server of these runs."""
        process = subprocess.Popen(
            [*HEADSTOCK, "serve", *runs, "--port", "0", "--quiet"], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait()


def save(name: str, page: Page, *, top: float = 0) -> None:
    """Write a screenshot, of one viewport from `top` on, as a PNG with as many colours as fit the limit."""
    size = page.viewport_size or {"width": WIDTH, "height": WIDTH}
    content = page.screenshot(full_page=True, clip={"x": 0, "y": top, **size})
    image = Image.open(io.BytesIO(content)).convert("RGB")
    for colours in (256, 128, 64, 32):
        file = io.BytesIO()
        image.quantize(colours, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
            file, "PNG", optimize=True
        )
        if file.tell() <= MAX_BYTES:
            (FIGURES / f"{name}.png").write_bytes(file.getvalue())
            return
    sys.exit(f"{name}: more than {MAX_BYTES:,} bytes with 32 colours")


def ask(page: Page, button: str, **fields: str) -> None:
    """Fill in the form of a view and wait for its answer."""
    page.wait_for_selector("body[data-ready]")
    for label, text in fields.items():
        page.get_by_label(label).first.fill(text)
    with page.expect_response(lambda response: response.request.method == "POST", timeout=ANSWER_MS):
        page.get_by_role("button", name=button).first.click()
    page.wait_for_selector("body:not(:has(.waiting))", timeout=ANSWER_MS)
    page.wait_for_timeout(500)


# Reports


@picture
def report_compare(studio: Studio) -> None:
    """The comparison of the README, from its committed results."""
    folder = Path("runs/quotes")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "recipes/results/quotes/results.json", folder)
    studio.run("report runs/quotes")
    studio.shoot("report-compare", "runs/quotes/report.html", height=880)
    studio.shoot("report-errors", "runs/quotes/report.html", height=780, section="#inside")


@picture
def report_pretrain(studio: Studio) -> None:
    studio.bard()
    studio.shoot("report-pretrain", "runs/bard/report.html", height=736)


@picture
def report_finetune(studio: Studio) -> None:
    studio.few_labels()
    studio.shoot("report-finetune", "runs/first/report.html", height=590)


@picture
def report_sweep(studio: Studio) -> None:
    """The learning rate and dropout of a small model, from committed results."""
    folder = Path("runs/sweep")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "recipes/results/ablation-norm/results.json", folder)
    studio.run("report runs/sweep")
    studio.shoot("report-sweep", "runs/sweep/report.html", height=900)


@picture
def report_ensemble(studio: Studio) -> None:
    studio.classifier("full")
    studio.classifier("frozen", "--freeze")
    members = "runs/full runs/frozen --tfidf"
    studio.run(f"ensemble {members} {FEW} --out ensembles/quotes", makes="ensembles/quotes/results.json")
    studio.shoot("report-ensemble", "ensembles/quotes/report.html", height=628)


@picture
def quality(studio: Studio) -> None:
    """Three measures of generated text and of controls, from committed results."""
    from matplotlib.figure import Figure

    from headstock.report.render import standalone_svg
    from headstock.report.theme import ARMS, SOFT, Gallery, make_figure

    sets = json.loads((ROOT / "recipes/results/text-quality/results.json").read_text(encoding="utf-8"))["sets"]
    measures = {"rep_4": "rep-4: repetition", "perplexity": "perplexity of a judge", "mauve": "MAUVE: likeness"}

    def paint(figure: Figure) -> None:
        for axes, (key, title) in zip(figure.subplots(1, 3, sharey=True), measures.items(), strict=True):
            values = [part["measures"][key] for part in sets]
            spans = [[v["value"] - v["low"] for v in values], [v["high"] - v["value"] for v in values]]
            x, colour = [v["value"] for v in values], ARMS["pretrained"][1][0][0]
            axes.errorbar(x, range(len(sets)), xerr=spans, fmt="o", color=colour)
            axes.axvline(values[0]["value"], color=SOFT, linestyle=(0, (4, 3)), linewidth=1.2)
            axes.set_title(title, loc="left", fontsize=11)
            axes.set_yticks(range(len(sets)), [part["name"] for part in sets])
            axes.grid(axis="y")
            if key == "perplexity":
                axes.set_xscale("log")
                axes.minorticks_off()
                axes.set_xticks([30, 100, 300, 1000], ["30", "100", "300", "1,000"])
        axes.invert_yaxis()

    text = "repetition, perplexity and MAUVE of human text, five ways of decoding and four controls"
    svg = standalone_svg(Gallery().embed("quality", make_figure(paint, 760, 330), text, save=False))
    (FIGURES / "quality.svg").write_text(svg, encoding="utf-8")


@picture
def lr_find(studio: Studio) -> None:
    studio.run("data get tiny-shakespeare --to data/plays", makes="data/plays")
    studio.run(f"lr-find data/plays/corpus.txt {TINY} --out lr.html", makes="lr.html")
    studio.shoot("lr-find", "lr.html", height=690)


# Explanations


@picture
def explain_attention(studio: Studio) -> None:
    studio.run('explain attention reviews-en "The film was [MASK]." --out attention.html', makes="attention.html")
    studio.shoot("explain-attention", "attention.html", height=900)


@picture
def explain_layer(studio: Studio) -> None:
    studio.run('explain layer reviews-en "I liked this film." --word film --out layer.html', makes="layer.html")
    studio.shoot("explain-layer", "layer.html", height=900)


@picture
def explain_prediction(studio: Studio) -> None:
    studio.few_labels()
    studio.run(f'explain prediction runs/first "{DULL}" --out why.html', makes="why.html")
    studio.shoot("explain-prediction", "why.html", height=760)


@picture
def explain_model(studio: Studio) -> None:
    """Diagrams that a command writes as SVG."""
    for preset in ("classic", "elmo-nano"):
        studio.run(f"explain model --preset {preset} --out {preset}.svg", makes=f"{preset}.svg")
        shutil.copy(f"{preset}.svg", FIGURES / f"model-{preset}.svg")


@picture
def alignment(studio: Studio) -> None:
    """Cross-attention of a translation, with the pairs that the how-to makes."""
    page = (ROOT / "docs" / "howto" / "translate.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert code, "the page has a script that makes its pairs"
    subprocess.run([sys.executable, "-c", code[1]], check=True)
    small = "--set depth=2 --set width=64 --set vocabulary=1000 --set batch_tokens=512"
    pairs = "--task translate --train train --valid valid --columns source=en,target=fr"
    studio.run(
        f"finetune --preset seq2seq-nano {small} {pairs} --epochs 4 --out runs/en-fr", makes="runs/en-fr/results.json"
    )
    studio.run(f'translate runs/en-fr "{CARS}" --alignment alignment.svg', makes="alignment.svg")
    shutil.copy("alignment.svg", FIGURES / "alignment.svg")


# The web page


@picture
def serve_compare(studio: Studio) -> None:
    studio.classifier("full")
    studio.classifier("scratch", "--init scratch --set steps=60")
    view = "#/scratch/classify/full"
    with studio.server("runs/scratch", "runs/full") as url, studio.tab(f"{url}/{view}", height=860) as page:
        ask(page, "Predict", Text="A waste of a great cast.")
        for _ in range(2):
            ask(page, "Which words decide?")
        save("serve-compare", page)


@picture
def serve_fill(studio: Studio) -> None:
    with studio.server("reviews-en") as url, studio.tab(f"{url}/#/reviews-en/fill", height=760, dark=True) as page:
        ask(page, "Fill", Text="The [MASK] was superb, but the [MASK] was dull.")
        save("serve-fill", page)


@picture
def serve_embed(studio: Studio) -> None:
    with studio.server("reviews-en") as url, studio.tab(f"{url}/#/reviews-en/embed", height=860) as page:
        ask(page, "Embed")
        save("serve-embed", page)


# Pages of other programs


@picture
def tensorboard(studio: Studio) -> None:
    """The curves of the language models of the how-to pages on pretraining and on recurrent models."""
    studio.bard()
    small = "--preset lstm-nano --set depth=1 --set width=64 --set context=64 --tokenizer runs/bard/tokenizer.json"
    studio.run(f"pretrain data/plays/corpus.txt {small} --steps 100 --out runs/lstm", makes="runs/lstm/results.json")
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", "runs", "--port", "6106"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        next(line for line in process.stderr if "http://" in line)
        address = "http://localhost:6106/?tagFilter=loss#timeseries"
        with studio.tab(address, height=560) as page:
            page.get_by_role("button", name="Settings").last.click(timeout=ANSWER_MS)  # closes them
            page.wait_for_selector("line-chart canvas", timeout=ANSWER_MS)
            page.wait_for_timeout(5000)
            save("tensorboard", page)
    finally:
        process.terminate()
        process.wait()


@picture
def pipeline(studio: Studio) -> None:
    """A pipeline of scikit-learn, as a notebook shows it, with the parameters of its first step."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    from headstock.sklearn import TextEmbedder

    html = make_pipeline(TextEmbedder("reviews-en"), LogisticRegression(max_iter=1000))._repr_html_()
    Path("pipeline.html").write_text(f"<!doctype html><meta charset=utf-8><body>{html}", encoding="utf-8")
    with studio.tab("pipeline.html", height=262, width=272) as page:
        page.get_by_text("TextEmbedder", exact=True).first.click()
        page.locator("summary:visible").filter(has_text="Parameters").first.click()
        page.wait_for_timeout(500)
        save("pipeline", page)


# The terminal


def terminal(name: str, command: str, studio: Studio, *, part: str = "") -> None:
    """The output of a command, up to a blank line and from `part` on, as an SVG that looks like a terminal."""
    from rich.console import Console
    from rich.text import Text

    output = studio.run(f"{command} --quiet").strip("\n")
    output = output[output.index(part) :].partition("\n\n")[0]
    console = Console(record=True, width=104, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ headstock {command}", style="bold"))
    console.print(Text.from_ansi(output), end="\n\n")  # the last line is cut off
    svg = console.export_svg(title="", unique_id=name, code_format=TERMINAL)
    (FIGURES / f"{name}.svg").write_text(re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE), encoding="utf-8")


# rich's own format loads a font from another host
TERMINAL = """\
<svg viewBox="0 0 {terminal_width} {terminal_height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font: {char_height}px/{line_height}px Menlo, Consolas, "DejaVu Sans Mono", monospace;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{width}" height="{height}"/></clipPath>{lines}
</defs>
<rect fill="#1b1f24" x="0" y="0" width="{terminal_width}" height="{terminal_height}" rx="8"/>
<g transform="translate({terminal_x}, 16)" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


@picture
def plan(studio: Studio) -> None:
    studio.run("data get tiny-shakespeare --to data/plays", makes="data/plays")
    terminal("plan", "plan data/plays/corpus.txt --minutes 5", studio)


@picture
def suggest(studio: Studio) -> None:
    studio.few_labels()
    terminal("suggest", "suggest runs/first --pool data/quotes/valid.csv --count 4", studio)


@picture
def score(studio: Studio) -> None:
    schema = "The trophy does not fit in the suitcase because [it] is too big. | *the trophy | the suitcase"
    terminal("score", f'score reviews-en --schema "{schema}"', studio)


@picture
def params(studio: Studio) -> None:
    terminal("params", "explain params reviews-en", studio, part="Ways to fine-tune")


if __name__ == "__main__":
    main()
