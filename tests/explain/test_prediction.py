"""Explained predictions against plain tensor code and the run's own predictions."""

import json

import pytest
import torch

from headstock.errors import UserError
from headstock.explain.prediction import explain_prediction, log_odds, prediction_document, without_word
from headstock.explain.render_document import page
from headstock.model.batch import Batch
from tests.explain.pipelines import make_classifier, make_pipeline

TEXT = "Anne likes Paris. Ben finds the sea."


def test_without_word_and_log_odds():
    assert (
        without_word("a b c", 2, 3) == "a c" and without_word("a b", 0, 1) == "b" and without_word("a b", 2, 3) == "a"
    )
    assert without_word("it's", 2, 4) == "it" and without_word("a, b", 1, 2) == "a b"
    assert log_odds(0.5) == 0 and log_odds(0.9) == pytest.approx(-log_odds(0.1)) and log_odds(1.0) < 20


# Classes


@torch.no_grad()
def test_class_matches_predictions_without_each_word(tokenizer):
    run = make_classifier(tokenizer)
    facts = explain_prediction(run, [TEXT])
    (result,) = run.predict(TEXT)
    assert facts.kind == "class" and facts.answer == result["label"]
    assert dict(facts.answers) == pytest.approx(result["probabilities"], abs=1e-5)
    assert [word.word for word in facts.words] == ["Anne", "likes", "Paris", ".", "Ben", "finds", "the", "sea", "."]
    for word in facts.words:
        assert TEXT[word.begin : word.end] == word.word
        (prediction,) = run.predict(without_word(TEXT, word.begin, word.end))
        assert word.probability == pytest.approx(prediction["probabilities"][facts.answer], abs=1e-5)
        assert word.says == prediction["label"]
        assert word.change == pytest.approx(log_odds(facts.probability) - log_odds(word.probability), abs=1e-5)
    assert max(abs(word.change) for word in facts.words) > 0.01
    assert sum(word.weight for word in facts.words) == pytest.approx(
        sum(token.weight for token in facts.tokens), abs=1e-5
    )


def test_plain_weights_are_gradient_times_embedding(tokenizer):
    run = make_classifier(tokenizer)
    facts = explain_prediction(run, [TEXT], label="bad")
    assert facts.answer == "bad"
    model, ids = run.model, torch.tensor([[tokenizer.bos, *tokenizer.encode(TEXT)]])
    embedded = model.backbone.tokens(ids).detach().requires_grad_()
    hook = model.backbone.tokens.register_forward_hook(lambda module, inputs, output: embedded)
    scores = model.heads["label"](model(Batch(ids)).hidden.mean(1))[0]
    hook.remove()
    (gradient,) = torch.autograd.grad(scores[0] - scores.mean(), embedded)
    expected = (gradient * embedded).sum(-1)[0, 1:].tolist()
    assert [token.plain for token in facts.tokens] == pytest.approx(expected, abs=1e-5)
    assert [token.weight for token in facts.tokens] != pytest.approx(expected, abs=1e-3)  # integrated gradients differ


def test_pairs_have_words_of_both_texts(tokenizer):
    settings = {"task_classes": ("no", "yes"), "task_pool": "mean", "causal": False, "segments": 2}
    run = make_pipeline(tokenizer, "pair", **settings)
    facts = explain_prediction(run, ["Anne sees Ben.", "Ben finds home."])
    assert [word.text for word in facts.words] == [0] * 4 + [1] * 4
    (prediction,) = run.predict([("Anne Ben.", "Ben finds home.")])
    assert facts.words[1].probability == pytest.approx(prediction["probabilities"][facts.answer], abs=1e-5)
    with pytest.raises(UserError, match="two texts, found 1"):
        explain_prediction(run, ["Anne sees Ben."])


# Tokens


@torch.no_grad()
def test_next_token(tokenizer):
    run = make_pipeline(tokenizer)
    facts = explain_prediction(run, ["Anne likes the"])
    logits = run.model.heads["token"](
        run.model(Batch(torch.tensor([[tokenizer.bos, *tokenizer.encode("Anne likes the")]]))).hidden
    )
    probabilities = logits[0, -1].softmax(-1)
    probabilities[run.suppressed_tokens()] = 0
    assert facts.kind == "next token" and facts.probability == pytest.approx(float(probabilities.max()), abs=1e-6)
    assert len(facts.tokens) == len(tokenizer.encode("Anne likes the"))
    hidden = run.model(Batch(torch.tensor([[tokenizer.bos, *tokenizer.encode("Anne the")]]))).hidden[:, -1]
    probability = run.model.heads["token"](hidden).softmax(-1)[0, int(probabilities.argmax())]
    assert facts.words[1].word == "likes" and facts.words[1].probability == pytest.approx(float(probability), abs=1e-6)
    target = explain_prediction(run, ["Anne likes the"], label="sea")
    assert target.answer == "sea" or "explained is the first" in target.notes[0]


def test_integrated_gradients_are_complete(tokenizer, monkeypatch):
    from headstock.inference import attribution

    run = make_pipeline(tokenizer, "masked")
    monkeypatch.setattr(attribution, "STEPS", 256)
    facts = explain_prediction(run, ["Anne [MASK] Paris. Ben finds home."])
    text = "Anne [MASK] Paris. Ben finds home."
    ids = [tokenizer.cls, *tokenizer.encode("Anne"), tokenizer.mask, *tokenizer.encode(" Paris. Ben finds home.")]
    position, head = 1 + len(tokenizer.encode("Anne")), run.model.heads["token"]
    assert [token.token for token in facts.tokens][position - 1] == "[MASK]" and facts.tokens[position - 1].weight == 0

    @torch.no_grad()
    def score(row):
        logits = head(run.model(Batch(torch.tensor([row]))).hidden[0, position])
        return logits, logits - logits.mean()

    logits, scores = score(ids)
    logits[[*run.suppressed_tokens(), tokenizer.eos]] = -torch.inf
    target = int(logits.argmax())
    _, baseline = score([tokenizer.cls] + [tokenizer.mask] * (len(ids) - 1))
    total = sum(token.weight for token in facts.tokens)
    assert total == pytest.approx(float(scores[target] - baseline[target]), abs=2e-3)
    assert abs(total) > 0.01
    assert [word.word for word in facts.words] == [
        "Anne",
        "Paris",
        ".",
        "Ben",
        "finds",
        "home",
        ".",
    ]  # without the mask
    assert text.count("[MASK]") == 1


def test_one_of_several_masks(tokenizer):
    run, text = make_pipeline(tokenizer, "masked"), "Anne [MASK] Paris. Ben [MASK] home."
    first, second = explain_prediction(run, [text]), explain_prediction(run, [text], at=2)
    assert "number 1 of 2" in first.notes[0] and "number 2 of 2" in second.notes[0]
    assert first.answers != second.answers
    with pytest.raises(UserError, match=r"--at 3: the text has 2 \[MASK\]"):
        explain_prediction(run, [text], at=3)
    with pytest.raises(UserError, match=r"write \[MASK\] for one"):
        explain_prediction(run, [TEXT])


@pytest.mark.parametrize(
    ("task", "settings"),
    [("hybrid", {}), ("causal", {"family": "recurrent"}), ("classify", {"family": "elmo", "task_classes": ("a", "b")})],
)
def test_other_families(tokenizer, task, settings):
    facts = explain_prediction(make_pipeline(tokenizer, task, **settings), [TEXT])
    assert len(facts.words) == 9 and any(token.weight for token in facts.tokens)


def test_translation_is_explained_by_its_source(tokenizer):
    run = make_pipeline(tokenizer, "translate", family="seq2seq")
    facts = explain_prediction(run, ["Anne likes Paris."], label="Ben finds home.")
    assert facts.answer == "Ben finds home." and len(facts.words) == 4
    assert len(facts.tokens) == len(tokenizer.encode("Anne likes Paris."))

    @torch.no_grad()
    def probability(source):
        target = tokenizer.encode("Ben finds home.")
        batch = Batch(
            torch.tensor([[tokenizer.bos, *target]]),
            source=Batch(torch.tensor([[*tokenizer.encode(source), tokenizer.eos]])),
        )
        output = run.model.heads["token"](run.model(batch).hidden)[0].log_softmax(-1)
        return float(output[range(len(target) + 1), [*target, tokenizer.eos]].mean().exp())

    assert facts.probability == pytest.approx(probability("Anne likes Paris."), rel=1e-4)
    assert facts.words[1].probability == pytest.approx(probability("Anne Paris."), rel=1e-4)


# Bad input


def test_invalid_input_is_refused(tokenizer):
    run = make_classifier(tokenizer)
    with pytest.raises(UserError, match=r"--label 'goood' is no class.*did you mean 'good'\?"):
        explain_prediction(run, [TEXT], label="goood")
    with pytest.raises(UserError, match="the text is empty"):
        explain_prediction(run, [" "])
    with pytest.raises(UserError, match="none to fill in"):
        explain_prediction(run, [TEXT], at=1)
    long = " ".join(["Anne likes Paris."] * 20)
    with pytest.raises(
        UserError, match=f"{len(tokenizer.encode(long)) + 1} tokens with special tokens, and this run reads 24"
    ):
        explain_prediction(make_pipeline(tokenizer), [long])
    tagger = make_pipeline(tokenizer, "tag", task_classes=("A", "B"))
    with pytest.raises(UserError, match="is a word tagger; predictions are explained for classifiers"):
        explain_prediction(tagger, [TEXT])
    with pytest.raises(UserError, match="no left-to-right language model"):
        explain_prediction(make_pipeline(tokenizer, "denoise", family="seq2seq"), [TEXT])


def test_json_and_escaping(tokenizer):
    facts = explain_prediction(make_classifier(tokenizer), ["<script>x</script>"])
    output = json.loads(json.dumps(facts.to_dict()))
    assert output["answers"][0].keys() == {"answer", "probability"} and len(output["tokens"]) == len(facts.tokens)
    html = page(prediction_document(facts, "a <b> run"))
    assert "<script" not in html and 'class="text"' in html
