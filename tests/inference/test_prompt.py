"""Prompting: scores agree with fill and score, priors cancel, and bad templates and words are refused."""

import numpy as np
import pytest

import headstock
from headstock.errors import ConfigError, UserError
from headstock.inference.prompt import PromptSettings
from tests.conftest import TINY

TEXTS = ["Anne sees Paris.", "Ben finds the sea and home.", "Zoë likes le café."]
WORDS = ("good=likes|sees", "bad=finds")


@pytest.fixture(scope="module")
def causal(stock):
    return headstock.load(stock)


@pytest.fixture(scope="module")
def masked(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("masked") / "tiny"
    headstock.pretrain(corpus, out=out, preset="bert-nano", settings=TINY | {"steps": 10})
    return headstock.load(out)


def probabilities(pipeline, *, texts=TEXTS, examples=(), **settings):
    values = {"template": "{text} Anne [MASK] home.", "label_words": WORDS, "prior": "none"} | settings
    return pipeline.prompted(PromptSettings(**values), examples=examples).probabilities(texts)


def shares(scores):
    """(N, W) log-probabilities of likes, sees, finds -> (N, 2) of good and bad."""
    both = np.stack([np.logaddexp(scores[:, 0], scores[:, 1]), scores[:, 2]], 1)
    return np.exp(both) / np.exp(both).sum(1, keepdims=True)


def test_a_masked_model_fills_in_the_label_words(masked):
    filled = masked.fill([f"{text} Anne [MASK] home." for text in TEXTS], among=["likes", "sees", "finds"])
    by_word = [{fill.token: fill.log_probability for fill in row.fills[0]} for row in filled]
    expected = shares(np.array([[row[word] for word in ("likes", "sees", "finds")] for row in by_word]))
    assert np.allclose(probabilities(masked), expected, atol=1e-5)


def test_a_causal_model_scores_the_label_words_and_what_follows(causal):
    scores = [
        [causal.score(f"{text} Anne {word} home.")[0].log_likelihood for word in ("likes", "sees", "finds")]
        for text in TEXTS
    ]
    assert np.allclose(probabilities(causal), shares(np.array(scores)), atol=1e-5)
    words_alone = probabilities(causal, template="{text} Anne [MASK]")
    assert not np.allclose(words_alone, probabilities(causal), atol=1e-5)


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_swapped_words_swap_the_classes(kind, causal, masked):
    pipeline = {"causal": causal, "masked": masked}[kind]
    swapped = probabilities(pipeline, label_words=("good=finds", "bad=likes|sees"))
    assert np.allclose(swapped, probabilities(pipeline)[:, ::-1])


def test_priors_cancel_what_the_words_are_worth_without_a_text(masked):
    plain, empty = probabilities(masked), probabilities(masked, texts=[""])
    content_free = probabilities(masked, prior="content-free")
    expected = plain / empty
    assert np.allclose(content_free, expected / expected.sum(1, keepdims=True))
    assert np.allclose(probabilities(masked, texts=[""], prior="content-free"), 0.5)
    assert not np.allclose(empty, 0.5, atol=1e-3)  # without a prior, a word can win before any text is read
    batch = plain / plain.mean(0)
    assert np.allclose(probabilities(masked, prior="batch"), batch / batch.sum(1, keepdims=True))


def test_examples_come_before_the_text(causal):
    settings = PromptSettings("{text} [MASK].", ("good=likes", "bad=finds"), shots=2)
    examples = [("Ben", "bad"), ("Zoë", "good"), ("never shown", "good")]
    prompted = causal.prompted(settings, examples=examples)
    assert prompted.classifier.template.render("Anne") == "Ben finds. Zoë likes. Anne [MASK]."
    assert not np.allclose(prompted.probabilities(TEXTS), causal.prompted(settings).probabilities(TEXTS), atol=1e-6)


def test_long_texts_are_shortened_and_masks_in_them_ignored(masked):
    long = "Anne sees Paris. " * 40
    assert np.isfinite(probabilities(masked, texts=[long])).all()
    template = masked.prompted(PromptSettings("{text} It [MASK].", WORDS)).classifier.template
    prompt = template.render(long)
    assert len(masked.tokenizer.encode(prompt)) <= template.capacity and prompt.endswith("It [MASK].")
    assert np.allclose(probabilities(masked, texts=["Anne [MASK]"]), probabilities(masked, texts=["Anne"]))
    with pytest.raises(UserError, match="template with 8 examples: leaves no room"):
        probabilities(masked, shots=8, examples=[("Anne", "good")] * 8)


def test_predictions_and_metrics_are_those_of_a_classifier(masked, tmp_path):
    prompted = masked.prompted(PromptSettings("{text} Anne [MASK].", WORDS, prior="batch"))
    labels = [row["label"] for row in prompted.predict(TEXTS)]
    assert [max(row, key=row.get) for row in (r["probabilities"] for r in prompted.predict(TEXTS))] == labels
    file = tmp_path / "rows.csv"
    file.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in zip(TEXTS, labels, strict=True)))
    assert prompted.evaluate(file)["accuracy"] == 1.0
    wrong = {"good": "bad", "bad": "good"}
    file.write_text("text,label\n" + "".join(f"{t},{wrong[label]}\n" for t, label in zip(TEXTS, labels, strict=True)))
    assert prompted.evaluate(file)["accuracy"] == 0.0


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"template": "It was [MASK]."}, ConfigError, r"must contain \{text\} once"),
        ({"template": "{text} [MASK] [MASK]"}, ConfigError, r"must contain \[MASK\] once"),
        ({"shots": -1}, ConfigError, "must be 0 or more"),
        ({"label_words": ("good=",)}, ConfigError, "must be LABEL=WORD"),
        ({"label_words": ("good=likes",)}, UserError, "name two labels or more"),
        ({"label_words": ("good=likes", "good=sees")}, UserError, "good is given twice"),
        ({"label_words": ("good=likes", "bad=likes")}, UserError, "'likes' stands for both"),
    ],
)
def test_bad_templates_and_words_are_refused(causal, settings, error, message):
    with pytest.raises(error, match=message):
        probabilities(causal, **settings)


def test_unreachable_words_and_unknown_classes_are_refused(corpus, causal, tmp_path):
    settings = TINY | {"kind": "word", "steps": 2, "min_frequency": 1}
    headstock.pretrain(corpus, out=tmp_path / "words", preset="bert-nano", settings=settings)
    with pytest.raises(UserError, match="label word 'wunderbar' of 'good': the run's tokenizer cannot represent it"):
        probabilities(headstock.load(tmp_path / "words"), label_words=("good=wunderbar", "bad=finds"))
    with pytest.raises(UserError, match="no class 'goood'; did you mean 'good'"):
        causal.prompted(PromptSettings(label_words=("goood=likes", "bad=finds")), ["good", "bad"])
    with pytest.raises(UserError, match="no words for 'mixed'"):
        causal.prompted(PromptSettings(label_words=WORDS), ["good", "bad", "mixed"])


def test_the_command_line_predicts_and_evaluates(call, causal, tmp_path):
    run, options = causal.run.path, ("--prompt", "{text} [MASK]", "--label-words", "good=likes|sees,bad=finds")
    out, _ = call("predict", run, *options, *TEXTS)
    assert len(out.splitlines()) == 3 and out.split("\t")[0] in ("good", "bad")
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\nAnne sees home,good\nBen finds home,bad\n")
    out, _ = call("evaluate", run, rows, *options, "--examples", rows, "--prior", "batch")
    assert "accuracy" in out
    _, err = call("predict", run, "--label-words", "a=b", "x", code=2)
    assert "--label-words is only for --prompt" in err
    _, err = call("predict", run, *options, "--prior", "btch", "x", code=2)
    assert "prompt.prior" in err and "'batch'" in err
