"""Weights and left-out words are those of plain tensor code, and the answer is the run's own."""

import json

import pytest
import torch

from headstock.errors import UserError
from headstock.explain.prediction import explain_prediction, log_odds, prediction_document, without
from headstock.explain.render_document import page
from headstock.model.batch import Batch
from tests.explain.opened import classifier, learned, opened

TEXT = "Anne likes Paris. Ben finds the sea."


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return learned(corpus)


def test_without_a_word():
    assert without("a b c", 2, 3) == "a c" and without("a b", 0, 1) == "b" and without("a b", 2, 3) == "a"
    assert without("it's", 2, 4) == "it" and without("a, b", 1, 2) == "a b"
    assert log_odds(0.5) == 0 and log_odds(0.9) == pytest.approx(-log_odds(0.1)) and log_odds(1.0) < 20


# Classes


@torch.no_grad()
def test_a_class_is_explained_by_what_is_said_without_each_word(tokenizer):
    run = classifier(tokenizer)
    found = explain_prediction(run, [TEXT])
    (said,) = run.predict(TEXT)
    assert found.kind == "class" and found.answer == said["label"]
    assert dict(found.answers) == pytest.approx(said["probabilities"], abs=1e-5)
    assert [word.word for word in found.words] == ["Anne", "likes", "Paris", ".", "Ben", "finds", "the", "sea", "."]
    for word in found.words:
        assert TEXT[word.begin : word.end] == word.word
        (bare,) = run.predict(without(TEXT, word.begin, word.end))
        assert word.probability == pytest.approx(bare["probabilities"][found.answer], abs=1e-5)
        assert word.says == bare["label"]
        assert word.change == pytest.approx(log_odds(found.probability) - log_odds(word.probability), abs=1e-5)
    assert max(abs(word.change) for word in found.words) > 0.01
    assert sum(word.weight for word in found.words) == pytest.approx(
        sum(token.weight for token in found.tokens), abs=1e-5
    )


def test_the_plain_product_is_the_gradient_by_the_embedding(tokenizer):
    run = classifier(tokenizer)
    found = explain_prediction(run, [TEXT], label="bad")
    assert found.answer == "bad"
    model, ids = run.model, torch.tensor([[tokenizer.bos, *tokenizer.encode(TEXT)]])
    embedded = model.backbone.tokens(ids).detach().requires_grad_()
    hook = model.backbone.tokens.register_forward_hook(lambda module, given, output: embedded)
    scores = model.heads["label"](model(Batch(ids)).hidden.mean(1))[0]
    hook.remove()
    (gradient,) = torch.autograd.grad(scores[0] - scores.mean(), embedded)
    wanted = (gradient * embedded).sum(-1)[0, 1:].tolist()
    assert [token.plain for token in found.tokens] == pytest.approx(wanted, abs=1e-5)
    assert [token.weight for token in found.tokens] != pytest.approx(wanted, abs=1e-3)  # the way makes a difference


def test_pairs_are_explained_in_both_texts(tokenizer):
    settings = {"task_classes": ("no", "yes"), "task_pool": "mean", "causal": False, "segments": 2}
    run = opened(tokenizer, "pair", **settings)
    found = explain_prediction(run, ["Anne sees Ben.", "Ben finds home."])
    assert [word.text for word in found.words] == [0] * 4 + [1] * 4
    (bare,) = run.predict([("Anne Ben.", "Ben finds home.")])
    assert found.words[1].probability == pytest.approx(bare["probabilities"][found.answer], abs=1e-5)
    with pytest.raises(UserError, match="wanted two texts, 1 came"):
        explain_prediction(run, ["Anne sees Ben."])


# Tokens


@torch.no_grad()
def test_the_next_token(tokenizer):
    run = opened(tokenizer)
    found = explain_prediction(run, ["Anne likes the"])
    logits = run.model.heads["token"](
        run.model(Batch(torch.tensor([[tokenizer.bos, *tokenizer.encode("Anne likes the")]]))).hidden
    )
    chances = logits[0, -1].softmax(-1)
    chances[run.suppressed_tokens()] = 0
    assert found.kind == "next token" and found.probability == pytest.approx(float(chances.max()), abs=1e-6)
    assert len(found.tokens) == len(tokenizer.encode("Anne likes the"))
    bare = run.model(Batch(torch.tensor([[tokenizer.bos, *tokenizer.encode("Anne the")]]))).hidden[:, -1]
    chance = run.model.heads["token"](bare).softmax(-1)[0, int(chances.argmax())]
    assert found.words[1].word == "likes" and found.words[1].probability == pytest.approx(float(chance), abs=1e-6)
    asked = explain_prediction(run, ["Anne likes the"], label="sea")
    assert asked.answer == "sea" or "explained is the first" in asked.notes[0]


def test_the_weights_of_a_token_add_up_to_what_the_text_says(tokenizer, monkeypatch):
    from headstock.inference import attribution

    run = opened(tokenizer, "masked")
    monkeypatch.setattr(attribution, "STEPS", 256)
    found = explain_prediction(run, ["Anne [MASK] Paris. Ben finds home."])
    text = "Anne [MASK] Paris. Ben finds home."
    ids = [tokenizer.cls, *tokenizer.encode("Anne"), tokenizer.mask, *tokenizer.encode(" Paris. Ben finds home.")]
    place, head = 1 + len(tokenizer.encode("Anne")), run.model.heads["token"]
    assert [token.token for token in found.tokens][place - 1] == "[MASK]" and found.tokens[place - 1].weight == 0

    @torch.no_grad()
    def score(row):
        logits = head(run.model(Batch(torch.tensor([row]))).hidden[0, place])
        return logits, logits - logits.mean()

    logits, whole = score(ids)
    logits[[*run.suppressed_tokens(), tokenizer.eos]] = -torch.inf
    target = int(logits.argmax())
    _, empty = score([tokenizer.cls] + [tokenizer.mask] * (len(ids) - 1))
    added = sum(token.weight for token in found.tokens)
    assert added == pytest.approx(float(whole[target] - empty[target]), abs=2e-3)
    assert abs(added) > 0.01
    assert [word.word for word in found.words] == [
        "Anne",
        "Paris",
        ".",
        "Ben",
        "finds",
        "home",
        ".",
    ]  # no mask among them
    assert text.count("[MASK]") == 1


def test_one_of_several_masks_is_chosen(tokenizer):
    run, text = opened(tokenizer, "masked"), "Anne [MASK] Paris. Ben [MASK] home."
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
def test_other_families_are_explained_too(tokenizer, task, settings):
    found = explain_prediction(opened(tokenizer, task, **settings), [TEXT])
    assert len(found.words) == 9 and any(token.weight for token in found.tokens)


def test_a_translation_is_explained_by_its_source(tokenizer):
    run = opened(tokenizer, "translate", family="seq2seq")
    found = explain_prediction(run, ["Anne likes Paris."], label="Ben finds home.")
    assert found.answer == "Ben finds home." and len(found.words) == 4
    assert len(found.tokens) == len(tokenizer.encode("Anne likes Paris."))

    @torch.no_grad()
    def chance(source):
        target = tokenizer.encode("Ben finds home.")
        batch = Batch(
            torch.tensor([[tokenizer.bos, *target]]),
            source=Batch(torch.tensor([[*tokenizer.encode(source), tokenizer.eos]])),
        )
        told = run.model.heads["token"](run.model(batch).hidden)[0].log_softmax(-1)
        return float(told[range(len(target) + 1), [*target, tokenizer.eos]].mean().exp())

    assert found.probability == pytest.approx(chance("Anne likes Paris."), rel=1e-4)
    assert found.words[1].probability == pytest.approx(chance("Anne Paris."), rel=1e-4)


# Bad input


def test_bad_input_is_refused_in_one_line(tokenizer):
    run = classifier(tokenizer)
    with pytest.raises(UserError, match=r"--label 'goood' is no class.*did you mean 'good'\?"):
        explain_prediction(run, [TEXT], label="goood")
    with pytest.raises(UserError, match="the text is empty"):
        explain_prediction(run, [" "])
    with pytest.raises(UserError, match="none to fill in"):
        explain_prediction(run, [TEXT], at=1)
    long = " ".join(["Anne likes Paris."] * 20)
    with pytest.raises(
        UserError, match=f"{len(tokenizer.encode(long)) + 1} tokens with its marks, and this run reads 24"
    ):
        explain_prediction(opened(tokenizer), [long])
    tagger = opened(tokenizer, "tag", task_classes=("A", "B"))
    with pytest.raises(UserError, match="is a tagger of words; predictions are explained of classifiers"):
        explain_prediction(tagger, [TEXT])
    with pytest.raises(UserError, match="no left-to-right language model"):
        explain_prediction(opened(tokenizer, "denoise", family="seq2seq"), [TEXT])


def test_facts_are_json_and_texts_do_not_break_a_page(tokenizer):
    found = explain_prediction(classifier(tokenizer), ["<script>x</script>"])
    told = json.loads(json.dumps(found.to_dict()))
    assert told["answers"][0].keys() == {"answer", "probability"} and len(told["tokens"]) == len(found.tokens)
    html = page(prediction_document(found, "a <b> run"))
    assert "<script" not in html and 'class="text"' in html
