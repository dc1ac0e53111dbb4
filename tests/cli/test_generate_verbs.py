"""`headstock generate`, `score` and `evaluate` on a language model."""

import pytest

from tests.commands import verb_result


def test_generate_does_not_depend_on_cache_or_batch(pretrained, result):
    out, _ = pretrained
    greedy = [
        result("generate", out, "Anne", "--temperature", 0, "--max-tokens", 12, *arguments)
        for arguments in ([], ["--no-cache"])
    ]
    assert greedy[0]["texts"] == greedy[1]["texts"]
    assert greedy[0]["texts"][0].startswith("Anne")
    batch = result("generate", out, "Anne", "Story 1\nBen", "--max-tokens", 9, "--seed", 4)["texts"]
    alone = [
        result("generate", out, text, "--max-tokens", 9, "--seed", 4)["texts"][0] for text in ("Anne", "Story 1\nBen")
    ]
    assert batch == alone
    assert len(set(result("generate", out, "Anne", "--samples", 3)["texts"])) > 1


def test_generate_streams_the_text_it_returns(pretrained, call):
    out, _ = pretrained
    arguments = ["generate", out, "Zoë", "--max-tokens", 20, "--seed", 1]
    assert call(*arguments, "--stream")[0] == call(*arguments)[0]


def test_generate_stops_before_a_string(pretrained, result):
    out, _ = pretrained
    output = result("generate", out, "Ann", "--max-tokens", 40, "--stop", "e", "--samples", 4)
    assert not any("e" in text for text in output["texts"])
    assert "stop" in output["ended"]


def test_generate_warns_when_it_exceeds_the_context(pretrained, call):
    out, _ = pretrained
    prompt = " ".join(["Anne sees Paris."] * 12)
    text, err = call("generate", out, prompt, "--max-tokens", 5)
    assert text.startswith(prompt)
    assert "longer than the context of 32 tokens" in err


def test_score_prefers_learned_text(pretrained, result):
    out, _ = pretrained
    scores = result("score", out, "Anne likes Paris.", "siraP sekil ennA.")["scores"]
    assert scores[0]["log_likelihood"] > scores[1]["log_likelihood"]
    for score in scores:
        assert score["log_likelihood"] == pytest.approx(sum(t["log_likelihood"] for t in score["tokens"]), abs=1e-4)
    piped = verb_result("score", out, stdin="Anne likes Paris.\nsiraP sekil ennA.\n")["scores"]
    assert [s["log_likelihood"] for s in piped] == pytest.approx([s["log_likelihood"] for s in scores], abs=1e-4)


def test_score_covers_texts_longer_than_the_context(pretrained, result):
    out, _ = pretrained
    score = result("score", out, " ".join(["Ben finds the sea."] * 30))["scores"][0]
    assert len(score["tokens"]) > 64  # twice the context
    assert all(token["log_likelihood"] < 0 for token in score["tokens"])


def test_evaluate_agrees_with_training(pretrained, corpus, result):
    out, results = pretrained
    held_out = result("evaluate", out)["metrics"]
    assert held_out["loss"] == pytest.approx(results["valid_loss"], abs=1e-5)
    assert held_out["bits_per_byte"] == pytest.approx(results["bits_per_byte"], abs=1e-5)
    everything = result("evaluate", out, corpus)["metrics"]
    assert everything["documents"] == 300
    assert everything["loss"] < results["valid_loss"] + 1
