"""The comparison report in a browser, in both colour schemes, on a phone, with unusual results."""

import html
import io
import json
import math
import random
import re
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from headstock.cli.command import Common
from headstock.cli.experiments import report
from headstock.data.words import word_spans
from headstock.errors import UserError
from headstock.experiments.terminal_tables import comparison_table
from headstock.report.compare_page import describe_pairs
from headstock.report.format import interval, minus, points
from headstock.report.highlighted_text import (
    align_weights,
    decode_tokens,
    make_passage,
    merge_into_words,
    split_preview,
    top_words,
)
from headstock.report.pages import write_report
from tests.report.browsing import Outline, check_sound, follows_colour_scheme, open_tab, view_page

pytestmark = pytest.mark.usefixtures("chart_layout")
STORY = "the film was a slow but honest story with good actors , no plot and bad jokes ; I liked it anyway"
WORDS = STORY.split()
ACCURACY = {"tfidf": (0.70, 0.045), "frozen": (0.72, 0.05), "scratch": (0.56, 0.10), "pretrained": (0.78, 0.05)}
LEVELS = (100, 1600)


def review(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def bpe_tokens(text: str, rng: random.Random) -> list:
    """Weighted tokens of a byte-level tokenizer."""
    return [[("Ġ" if i else "") + word, rng.gauss(0, 0.2)] for i, word in enumerate(text.split(" "))]


def make_arms(kinds) -> list[dict]:
    counted = {"total": 4_213_762, "trainable": 4_213_762, "frozen": 0}
    return [
        {
            "name": kind if kind == "tfidf" else f"{kind} (reviews)",
            "kind": kind,
            "run": None if kind == "tfidf" else "runs/reviews",
            "parameters": None
            if kind == "tfidf"
            else counted
            if kind != "frozen"
            else counted | {"trainable": 514, "frozen": 4_213_248},
            "settings": {"lr": 3e-4, "epochs": 12, "pool": "mean"} if kind != "tfidf" else {"ngrams": [1, 2]},
        }
        for kind in kinds
    ]


def make_details(rng: random.Random, classes: list[str], accuracy: float, rows: int) -> dict:
    size = len(classes)
    confusion = [[0] * size for _ in classes]
    for _ in range(rows):
        label = rng.randrange(size)
        confusion[label][label if rng.random() < accuracy else rng.randrange(size)] += 1
    right = [int(rng.lognormvariate(5, 0.7)) + 3 for _ in range(int(rows * accuracy))]
    wrong = [int(rng.lognormvariate(5.3, 0.7)) + 3 for _ in range(rows - len(right))]
    bins = [{"low": i / 10, "high": (i + 1) / 10, "count": 0, "confidence": None, "accuracy": None} for i in range(5)]
    for i in range(5, 10):
        confidence = i / 10 + 0.05
        bins.append({"low": i / 10, "high": (i + 1) / 10, "count": 20 + 9 * i * i, "confidence": confidence})
        bins[-1]["accuracy"] = min(1.0, confidence - 0.06 + rng.gauss(0, 0.02))
    mistakes = []
    for i in range(8):
        text = review(rng, rng.randint(15, 220))
        answer = {"label": classes[i % size], "predicted": classes[(i + 1) % size], "confidence": 0.99 - i / 100}
        mistakes.append({"place": f"test.csv:{17 * i + 3}", "text": text, **answer, "tokens": bpe_tokens(text, rng)})
    text = "Yes: wrong predictions are on longer texts (median 200 words against 148, p = 0.0004)."
    statistic = {"p": 0.0004, "probability": 0.61, "matters": True, "text": text}
    return {
        "seed": 0,
        "confusion": confusion,
        "lengths": {"right": right, "wrong": wrong, "unit": "words", "statistic": statistic},
        "calibration": {"bins": bins, "ece": 0.047},
        "risk_coverage": {"aurc": 0.1, "curve": [{"coverage": i / 4, "accuracy": 1 - i / 20} for i in range(1, 5)]},
        "mistakes": mistakes,
    }


def make_cell(rng: random.Random, arm: dict, labels: int, seed: int) -> dict:
    start, slope = ACCURACY[arm["kind"]]
    accuracy = min(0.97, start + slope * math.log(labels / 100) / math.log(4) + rng.gauss(0, 0.008))
    epochs = []
    for epoch in range(1, 0 if arm["kind"] == "tfidf" else 9):
        progress = 1 - 0.6**epoch
        accuracies = {"train_accuracy": 0.5 + 0.49 * progress, "valid_accuracy": 0.5 + (accuracy - 0.5) * progress}
        losses = {"train_loss": 0.7 * 0.7**epoch, "valid_loss": 0.7 * 0.9**epoch} if labels > LEVELS[0] else {}
        epochs.append({"epoch": epoch, **accuracies, **losses})
    return {
        "arm": arm["name"],
        "labels": labels,
        "seed": seed,
        "accuracy": accuracy,
        "macro_f1": accuracy - 0.004,
        "loss": 0.4,
        "ece": 0.05,
        "valid_accuracy": accuracy + 0.01,
        "best_epoch": 6 if epochs else None,
        "seconds": 3 + labels / 20,
        "tokens_per_second": 24_000.0 if epochs else None,
        "chosen": None if epochs else "logistic regression",
        "epochs": epochs,
    }


def make_results(kinds=("pretrained", "frozen", "tfidf"), labels=LEVELS, seeds=3, classes=None):
    """A results.json of `headstock compare` with synthetic numbers."""
    rng = random.Random(7)
    classes = classes or ["negative", "positive"]
    arms = make_arms(kinds)
    cells = [make_cell(rng, arm, count, seed) for arm in arms for count in labels for seed in range(seeds)]
    summary, pairs, verdicts = [], [], []
    for count in labels:
        for arm in arms:
            trials = [cell for cell in cells if cell["arm"] == arm["name"] and cell["labels"] == count]
            mean = sum(cell["accuracy"] for cell in trials) / seeds
            low, high = (mean - 0.016, mean + 0.016) if seeds > 1 else (None, None)
            row = {"arm": arm["name"], "labels": count, "seeds": seeds, "accuracy": mean, "low": low, "high": high}
            row |= {"macro_f1": mean - 0.004, "macro_f1_low": low, "macro_f1_high": high}
            summary.append(row | {key: trials[0][key] for key in ("seconds", "tokens_per_second")})
        rows = summary[-len(arms) :]
        for i, a in enumerate(rows):
            for b in rows[i + 1 :]:
                gap = a["accuracy"] - b["accuracy"]
                low, high = (gap - 0.03, gap + 0.03) if seeds > 1 else (None, None)
                pairs.append({"labels": count, "a": a["arm"], "b": b["arm"], "difference": gap, "low": low})
                pairs[-1]["high"] = high
        best, *others = sorted(rows, key=lambda row: -row["accuracy"])
        verdict = f"With {count:,} labels, {best['arm']} is best at {100 * best['accuracy']:.1f}%"
        if others:
            gap = 100 * (best["accuracy"] - others[0]["accuracy"])
            verdict += f", {gap:.1f} points ahead of {others[0]['arm']}"
        verdicts.append(f"{verdict}.")
    share = {name: 2000 // len(classes) for name in classes}
    example = {"place": "test.csv:17", "text": review(rng, 60), "found": "reviews.txt:90210", "share": 0.94}
    return {
        "kind": "compare",
        "task": "classify",
        "title": "Film reviews: does pretraining on 50,000 unlabelled reviews pay?",
        "versions": {"headstock": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "device": "cpu",
        "seconds": 1234.5,
        "seed": 0,
        "settings": {
            "compare": {"labels": list(labels), "arms": list(kinds)},
            "finetune": {"lr": 3e-4, "freeze": False},
        },
        "data": {part: {"file": f"{part}.csv", "rows": 2000, "classes": share} for part in ("train", "valid", "test")},
        "classes": classes,
        "measured_on": "test",
        "measured_rows": 1994,
        "leakage": [
            {"run": "runs/reviews", "checked": True, "why": None, "corpus": ["reviews.txt"], "documents": 50_000}
            | {"tested": 2000, "exact": 4, "near": 2, "excluded": True, "examples": [example]},
            {"run": "runs/other", "checked": False, "why": "its corpus is no longer there", "corpus": []}
            | {"documents": 0, "tested": 0, "exact": 0, "near": 0, "excluded": False, "examples": []},
        ],
        "train_overlap": 3,
        "arms": arms,
        "labels": list(labels),
        "seeds": list(range(seeds)),
        "cells": cells,
        "summary": summary,
        "pairs": pairs,
        "slices": [
            {
                "slice": "contains:mais",
                "groups": [
                    {
                        "value": value,
                        "rows": 500,
                        "arms": [{"arm": arm["name"], "score": 0.7, "low": 0.6, "high": 0.8} for arm in arms],
                        "pairs": [{key: pair[key] for key in pair if key != "labels"} for pair in pairs[:1]],
                    }
                    for value in ("with", "without")
                ],
            }
        ],
        "verdicts": verdicts,
        "notes": ["6 test texts were found in the pretraining text of runs/reviews and left out."],
        "details": {
            "labels": max(labels),
            "arms": {arm["name"]: make_details(rng, classes, ACCURACY[arm["kind"]][0] + 0.1, 900) for arm in arms},
            "label_errors": [
                {"place": f"train.csv:{31 * i}", "text": review(rng, 40), "label": "negative", "suggested": "positive"}
                | {"confidence": 0.97, "agree": 3, "of": 4}
                for i in range(7)
            ],
        },
    }


HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)> & "quotes" {{ 7 * 7 }} $\\alpha$ 😀 '
ARABIC = "هذا الفيلم جميل جدا لكن النهاية سيئة"


def unusual_results() -> dict[str, dict]:
    """Valid but unusual results."""
    single = make_results(kinds=("tfidf",), labels=(50,), seeds=1)
    single["notes"], single["leakage"], single["pairs"] = [], [], []
    single |= {"measured_on": "valid", "train_overlap": 0}
    single["data"]["test"]["classes"] = None
    del single["details"]["label_errors"]

    bare = make_results(kinds=("pretrained", "scratch"), labels=(200, 400), seeds=1)
    del bare["details"]
    for key in ("leakage", "notes", "verdicts", "versions", "settings", "data", "train_overlap", "pairs"):
        del bare[key]
    for cell in bare["cells"]:
        cell["epochs"] = [{"epoch": 1, "valid_accuracy": 0.5}]

    many = make_results(
        kinds=("pretrained", "tfidf"), labels=(1600,), seeds=5, classes=[f"topic {i}" for i in range(12)]
    )
    many["details"] |= {"label_errors": [], "arms": {"tfidf": many["details"]["arms"]["tfidf"]}}
    for cell in many["cells"]:
        cell["epochs"] = []
    crowd = make_results(kinds=("tfidf",), labels=(100,), seeds=2, classes=[f"intent {i}" for i in range(77)])

    hostile = make_results(kinds=("pretrained", "pretrained", "scratch"), labels=(100, 1600), seeds=2)
    hostile = json.loads(json.dumps(hostile).replace("scratch (reviews)", "تدريب من الصفر"))
    hostile["title"] = hostile["verdicts"][0] = HOSTILE
    hostile["classes"] = ["$5 or $10 <b>", ARABIC]
    names = ["pretrained (a-run-with-a-very-long-name-that-somebody-chose-late-at-night)", HOSTILE[:40]]
    for row in [*hostile["cells"], *hostile["summary"]]:
        row["arm"] = row["arm"].replace("pretrained (reviews)", names[0])
    hostile["pairs"] = hostile["slices"] = []
    for arm, name in zip(hostile["arms"], names, strict=False):
        arm["name"] = name
    detail = hostile["details"]["arms"].pop("pretrained (reviews)")
    texts = [HOSTILE * 200, ARABIC * 30, "a" * 20_000, "", "😀" * 5000]
    for mistake, text in zip(detail["mistakes"], texts, strict=False):
        mistake |= {"text": text, "tokens": [], "label": HOSTILE, "predicted": ARABIC}
    detail["lengths"] = {"right": [5, 6, 7], "wrong": [], "unit": "words"}
    hostile["details"]["arms"] = {names[0]: detail, names[1]: {"seed": 0, "mistakes": []}}
    return {"single": single, "bare": bare, "many": many, "crowd": crowd, "hostile": hostile}


def write_results(folder: Path, results: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return folder


def write_run(folder: Path, results: dict, rows: list[dict]) -> Path:
    write_results(folder, results)
    (folder / "config.json").write_text(json.dumps({"model": {"depth": 2}, "train": {"lr": 0.001, "seed": 0}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def pages(chart_layout, tmp_path_factory) -> dict[str, Path]:
    """Every kind of report, written once."""
    home = tmp_path_factory.mktemp("reports")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written = {
            name: write_report(write_results(home / name, results))
            for name, results in {"full": make_results(), **unusual_results()}.items()
        }
    detail = make_details(random.Random(1), ["no", "yes"], 0.8, 300)
    tuned = {"kind": "finetune", "task": "classify", "seconds": 12.5, "classes": ["no", "yes"], "details": detail}
    tuned["test"] = {"accuracy": 0.813, "macro_f1": 0.8, "loss": 0.4, "intervals": {"accuracy": [0.791, 0.834]}}
    tuned |= {"metrics": tuned["test"], "valid": {"accuracy": 0.82, "rows": 500}, "from": "runs/reviews"}
    rows: list[dict] = [{"step": 5 * i, "epoch": i, "loss": 0.7 / i, "train_accuracy": 1 - 0.5 / i} for i in (1, 2, 3)]
    rows += [{"step": 5 * i, "epoch": i, "valid_loss": 0.8 / i, "valid_accuracy": 0.8 - 0.2 / i} for i in (1, 2, 3)]
    written["tuned"] = write_report(write_run(home / "tuned", tuned, rows))
    written["thin"] = write_report(write_results(home / "thin", {"kind": "finetune", "metrics": {}}))
    pretrained = {
        "steps": 9,
        "tokens": 900,
        "seconds": 2.0,
        "valid_loss": 3.2,
        "perplexity": 24.5,
        "bits_per_byte": 1.9,
    }
    curve = [{"step": i, "loss": 7 / i} for i in range(1, 10)] + [{"step": 9, "valid_loss": 3.2}]
    pretrained["samples"] = [
        {"kind": "continued", "given": "Anne sees", "output": " <i>home</i>.", "true": " Paris."},
        {"kind": "filled", "given": "[MASK] sees [MASK].", "output": "Ben sees home.", "true": "Anne sees Paris."},
        {"kind": "denoised", "given": "Anne [MASK].", "output": "", "true": "Anne sees Paris."},
    ]
    folder = write_run(home / "pretrained", pretrained, curve)
    return written | {"pretrained": write_report(folder, ["ROMEO:\nAnd <b>so</b> on & on."])}


NAMES = ("full", "single", "bare", "many", "crowd", "hostile", "tuned", "thin", "pretrained")


@pytest.mark.parametrize("name", NAMES)
def test_pages_are_valid_accessible_and_open_on_a_phone(pages, browser, name):
    check_sound(Outline(pages[name]))
    assert view_page(browser, pages[name], width=390, scheme="dark").is_sound()
    assert pages[name].stat().st_size < 3_000_000


FADES = """() => [...document.querySelectorAll('.scroll')].filter(e => e.offsetParent).map(e => {
    const look = getComputedStyle(e);
    return [e.scrollWidth > e.clientWidth + 1, parseFloat(look.getPropertyValue('--fade-start')),
            parseFloat(look.getPropertyValue('--fade-end')), look.maskImage !== 'none'] })"""
NEXT_FRAME = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def test_clipped_tables_fade_at_the_edge(pages, browser):
    """A table fades at the side where it is clipped; one that fits does not."""
    view_page(browser, pages["full"], width=390, scheme="dark")
    tab = open_tab(browser, width=390, scheme="dark")
    tab.evaluate(NEXT_FRAME)
    before = tab.evaluate(FADES)
    assert {clipped for clipped, *_ in before} == {True, False}
    assert all((start, end > 0, masked) == (0, clipped, True) for clipped, start, end, masked in before)
    tab.evaluate("document.querySelectorAll('.scroll').forEach(e => { e.scrollLeft = e.scrollWidth })")
    tab.evaluate(NEXT_FRAME)
    assert all((start > 0, end) == (clipped, 0) for clipped, start, end, _ in tab.evaluate(FADES))


def test_every_chart_is_visible_and_follows_the_colour_scheme(pages, browser):
    light, dark = (view_page(browser, pages["full"], width=1280, scheme=scheme) for scheme in ("light", "dark"))
    slugs = [f"{kind}-reviews" for kind in ("pretrained", "frozen")]
    expected = {"accuracy", *(f"training-{count}-{slug}" for count in LEVELS for slug in slugs)}
    expected |= {f"loss-{LEVELS[1]}-{slug}" for slug in slugs}  # the smaller number has no losses
    expected |= {f"{part}-{slug}" for part in ("lengths", "reliability") for slug in [*slugs, "tfidf"]}
    assert expected <= light.charts and "accuracy-narrow" not in light.charts
    assert light.charts == dark.charts and follows_colour_scheme(light, dark)
    by_arm = [{name for name in charts if name.startswith("lengths-")} for charts in light.charts_by_tab]
    assert [len(names) for names in by_arm] == [1, 1, 1], "one arm is visible at a time"
    assert len(set.union(*by_arm)) == 3


def test_charts_are_saved_as_files(pages):
    files = {path.name for path in (pages["full"].parent / "figures").iterdir()}
    by_arm = ("confusion-tfidf", "lengths-tfidf", "reliability-tfidf", "coverage-tfidf")
    for name in ("accuracy", "training-1600", "loss-1600", *by_arm):
        assert {f"{name}.svg", f"{name}.png"} <= files
    svg = (pages["full"].parent / "figures" / "accuracy.svg").read_text()
    assert "var(" not in svg  # a file has no page with CSS variables
    assert "frozen (reviews)" in svg  # text is not converted to paths


def test_rendering_is_deterministic(tmp_path):
    results = make_results(kinds=("tfidf",), labels=(50,), seeds=2)
    results["details"]["arms"] = {}
    folders = [write_results(tmp_path / name, results) for name in ("a", "b")]
    first, second = (write_report(folder).read_bytes() for folder in folders)
    assert first == second
    pictures = [(folder / "figures" / "accuracy.svg").read_bytes() for folder in folders]
    assert pictures[0] == pictures[1]


def test_the_page_contains_the_results(pages):
    text = Outline(pages["full"]).text
    results = make_results()
    for text_part in (
        *map(minus, results["verdicts"]),
        *map(minus, results["notes"]),
        "its corpus is no longer there",
        "contains:mais",
        "reviews.txt:90210",
    ):
        assert text_part in text
    for row in results["summary"]:
        assert f"{100 * row['accuracy']:.1f}" in text
    detail = results["details"]["arms"]["tfidf"]
    assert detail["lengths"]["statistic"]["text"] in text
    assert all(mistake["text"][:500] in text for mistake in detail["mistakes"])
    assert "4.7%" in text  # the calibration error
    clear = [pair for pair in results["pairs"] if round(100 * pair["low"], 1) > 0 or round(100 * pair["high"], 1) < 0]
    assert text.count("● ") == len(clear) + 1 < len(results["pairs"]) + 1  # and once in the caption
    assert "scores are optimistic" not in text
    assert "scores are optimistic" in Outline(pages["single"]).text


def test_foreign_text_is_escaped(pages):
    source = pages["hostile"].read_text(encoding="utf-8")
    assert "<script" not in source
    assert "<img" not in source
    assert "{{ 7 * 7 }}" in source
    assert source.count(html.escape("<script>alert(")) > 5
    assert len(re.findall("a{1000}", source)) >= 1
    assert "more characters in the file" in source


def test_the_page_of_a_run_shows_its_loss_and_samples(pages):
    text = Outline(pages["pretrained"]).text
    assert "1.900" in text
    assert "And <b>so</b> on & on." in text
    assert 'data-chart="loss"' in pages["pretrained"].read_text()


def test_the_samples_of_pretraining_are_shown(pages):
    page = Outline(pages["pretrained"])
    for text in ("Anne sees <i>home</i>.", "[MASK] sees [MASK].", "Ben sees home.", "Anne [MASK].", "Anne sees Paris."):
        assert text in page.text
    source = pages["pretrained"].read_text(encoding="utf-8")
    assert '<mark class="said">Ben</mark> sees <mark class="said">home</mark>.' in source


def test_tfidf_has_one_spelling(pages):
    results = make_results()
    assert "tfidf" in {arm["name"] for arm in results["arms"]}
    source = pages["full"].read_text(encoding="utf-8")
    assert "TF-IDF" in source
    for text in re.findall(r">([^<>]*tfidf[^<>]*)<", source):
        assert text == ", ".join(results["settings"]["compare"]["arms"]), text  # a setting as typed
    console = Console(width=120, file=io.StringIO())
    scored = [row | {"score": row["accuracy"]} for row in results["summary"]]
    console.print(
        comparison_table(results | {"summary": scored, "measured_rows": 9, "measured_on": "test", "metric": "accuracy"})
    )
    assert "TF-IDF" in console.file.getvalue() and "tfidf" not in console.file.getvalue()


def test_ranges_and_signs_have_one_format(pages):
    assert interval(0.008, 0.167) == "0.8 to 16.7"
    assert interval(-0.201, -0.127) == "−20.1 to −12.7"
    assert points(-0.031) == "−3.1"
    assert minus("-2.8 points, -12.3 to 7.1 of gpt-2, 1e-05") == "−2.8 points, −12.3 to 7.1 of gpt-2, 1e-05"
    for name in ("full", "tuned"):
        assert not re.search(r"\d–\d|[^\w.]-\d+\.\d", Outline(pages[name]).text)


def test_attributions_are_merged_into_words():
    def joined(text, pieces):
        return merge_into_words(text, decode_tokens(pieces), word_spans(text))

    text = "A Conveniently dull film, it's fine."
    pieces = [["ĠA", 0.1], ["Ġconven", 1.0], ["iently", -0.25], ["Ġ", 0.5], ["dull", 0.5], ["Ġfilm", 1.0], [",", 0.0]]
    assert joined(text, pieces) == [("A", 0.1), ("Conveniently", 0.75), ("dull", 1.0), ("film", 1.0), (",", 0.0)]
    assert joined("un mot", [["▁m", 1.0], ["ot", 1.0]]) == [("mot", 2.0)]
    assert joined("play plays", [["play", 1], ["play", 1], ["##s", 1]]) == [("play", 1), ("plays", 2)]
    assert joined("a rare word", [["a", 1.0], ["<unk>", 0.5], ["word", 1.0]])[1] == ("<unk>", 0.5)
    assert joined("很好看", [["很", 1.0], ["好看", 2.0]]) == [("很", 1.0), ("好看", 2.0)]  # no spaces between words


def test_the_page_of_a_fine_tuned_run_shows_its_errors(pages):
    page = pages["tuned"].read_text()
    for name in ("accuracy-wide", "lengths-tuned", "reliability-tuned"):
        assert f'data-chart="{name}"' in page
    assert "81.3%" in page
    assert "79.1 to 83.4" in page
    assert "Most confident errors" in page


def test_the_command_prints_the_path_of_the_page(tmp_path, capsys):
    folder = write_results(tmp_path / "answer", unusual_results()["bare"])
    output = report(Common(), folder)
    assert output == {"report": str(folder / "report.html")}
    assert capsys.readouterr().out.strip() == output["report"]
    assert (folder / "report.html").is_file()


def test_folders_without_results_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"no results\.json.*compare"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(UserError, match="'survey'"):
        write_report(write_results(tmp_path / "sweep", {"kind": "survey"}))
    with pytest.raises(UserError, match="lacks labels, cells, summary"):
        write_report(write_results(tmp_path / "half", {"kind": "compare", "arms": [{"name": "a", "kind": "tfidf"}]}))


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word", "char"])
@pytest.mark.parametrize("text", ["Le café, c'est bon ! It isn't good 😀 (at all).", "日本 is  far\n\naway…"])
def test_tokens_of_every_tokenizer_align_with_the_text(kind, text):
    from headstock.data.tokenizer import train_tokenizer
    from headstock.data.tokenizer_training import TokenizerSettings

    tokenizer = train_tokenizer([text, "other words"] * 20, TokenizerSettings(kind=kind, vocabulary=400))
    spans = align_weights(text, decode_tokens([[piece, 0.5] for piece in tokenizer.tokenize(text)]))
    assert "".join(span.text for span in spans) == text
    unweighted = "".join(span.text for span in spans if span.weight is None)
    assert unweighted.strip() == ""  # every letter is covered by a token


def test_tokens_are_decoded_to_plain_text():
    assert [word for word, _ in decode_tokens([["Ġgood", 1], ["ĠcafÃ", 1], ["©", 0.5]])] == [" good", " café"]
    assert decode_tokens([["Ġ", 1.0], ["Ã", 0.5], ["©", 0.25]])[1] == ("é", 0.75)
    assert [word for word, _ in decode_tokens([["▁bon", 1], ["<0xC3>", 1], ["<0xA9>", 1]])] == [" bon", "é"]
    assert [word for word, _ in decode_tokens([["play", 1], ["##ing", 1]])] == ["play", "ing"]
    unknown = align_weights("a rare word", decode_tokens([["a", 1.0], ["<unk>", 0.4], ["word", -1.0]]))
    assert [(span.text, span.weight) for span in unknown] == [("a", 1.0), (" rare ", None), ("word", -1.0)]


def test_top_words_are_summed_and_highlighted():
    pieces = [("good", 0.4), (" good", 0.3), (" bad", -0.9), (" the", 0.0)]
    assert [(word, round(weight, 6), times) for word, weight, times in top_words(pieces)] == [
        ("bad", -0.9, 1),
        ("good", 0.7, 2),
    ]
    html = make_passage("good good bad the <end>", pieces).shown
    assert re.findall(r'<mark class="(\w\d)"', html) == ["t3", "t2", "a5"]
    assert "&lt;end&gt;" in html


@settings(max_examples=40, deadline=None)
@given(
    st.text(max_size=80),
    st.lists(st.tuples(st.text(max_size=6), st.floats(-1, 1)), max_size=12),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_highlighting_preserves_and_escapes_text(text, pieces, first, extra):
    spans = align_weights(text, pieces)
    covered = "".join(span.text for span in spans if span.weight is None)
    assert len(covered) <= len(text)
    joined = "".join(span.text for span in spans)
    first_spans, rest, left_out = split_preview(spans, first, first + extra)
    assert "".join(span.text for span in first_spans + rest) == joined[: first + extra]
    assert left_out == max(0, len(joined) - first - extra)
    passage = make_passage(text, pieces, preview=first, max_length=first + extra)
    assert not re.search(r"<(?!/?mark\b)", passage.shown + passage.rest)


@pytest.mark.parametrize(("low", "decided"), [(0.0004, False), (0.0006, True), (-0.01, False)])
def test_a_difference_is_clear_as_displayed(low, decided):
    """A bound displayed as 0.0 counts as zero, as in the verdict."""
    (pair,) = describe_pairs([{"a": "x", "b": "y", "labels": 1, "difference": 0.1, "low": low, "high": 0.2}])
    assert pair["decided"] is decided
