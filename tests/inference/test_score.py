"""Log-likelihoods of texts, compared with a loop over single tokens."""

import pytest
import torch

import headstock
from headstock.data.windowing import SpecialTokens, windows
from headstock.errors import UserError
from headstock.inference.score import token_log_probabilities
from headstock.model.batch import Batch
from tests.model.small import small_model

MASK = 2
TEXTS = [[5, 6, 7, 5], [9], [], [4, 8, 12, 3, 3, 10, 11], [6, 6, 9]]
LONG = [3 + (7 * i + i // 5) % 10 for i in range(41)]


@torch.inference_mode()
def log_probability(model, row, position, token, *, causal):
    """The log-probability of one token from the hidden state position one position of one row."""
    hidden = model(Batch(torch.tensor([row]), causal=causal)).hidden[0, position]
    return float(model.heads["token"](hidden).log_softmax(-1)[token])


@pytest.mark.parametrize("backbone_is_causal", [True, False])
def test_log_likelihood_is_the_chain_of_next_tokens(backbone_is_causal):
    model = small_model(causal=backbone_is_causal)  # a bidirectional one can use a causal mask
    scores = token_log_probabilities(model, TEXTS, special=SpecialTokens((1,), (), 0), length=16)
    for text, values in zip(TEXTS, scores, strict=True):
        expected = [
            log_probability(model, [1, *text[:position]], position, token, causal=True)
            for position, token in enumerate(text)
        ]
        assert values.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("suffix", "shift"), [((), 0), ((3,), 0), ((), 1)])
def test_pseudo_log_likelihood_masks_each_token_alone(suffix, shift):
    model = small_model(causal=False)
    scores = token_log_probabilities(
        model, TEXTS, special=SpecialTokens((1,), suffix, 0), length=16, mask=MASK, shift=shift
    )
    for text, values in zip(TEXTS, scores, strict=True):
        expected = [
            log_probability(
                model,
                [1, *text[:position], MASK, *text[position + 1 :], *suffix],
                position + 1 - shift,
                token,
                causal=False,
            )
            for position, token in enumerate(text)
        ]
        assert values.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("mask", [None, MASK])
def test_scores_are_independent_of_the_batch(mask):
    model = small_model(causal=False)
    settings = {"special": SpecialTokens((1,), (), 0), "length": 16, "mask": mask}
    together = token_log_probabilities(model, [*TEXTS, LONG], **settings)
    reversed_order = token_log_probabilities(model, [LONG, *TEXTS[::-1]], **settings)
    for first, second in zip(together, [*reversed_order[:0:-1], reversed_order[0]], strict=True):
        assert first.tolist() == pytest.approx(second.tolist(), abs=1e-5)
    alone = [token_log_probabilities(model, [text], **settings)[0] for text in [*TEXTS, LONG]]
    for first, second in zip(together, alone, strict=True):
        assert first.tolist() == pytest.approx(second.tolist(), abs=1e-5)


def test_a_long_text_is_read_in_windows():
    model = small_model(causal=False)
    (values,) = token_log_probabilities(model, [LONG], special=SpecialTokens((1,), (), 0), length=16, mask=MASK)
    for part in windows(len(LONG), 15, centered=True):
        for position in range(part.keep_start, part.keep_end):
            row = [1, *LONG[part.start : position], MASK, *LONG[position + 1 : part.end]]
            assert values[position] == pytest.approx(
                log_probability(model, row, position - part.start + 1, LONG[position], causal=False), abs=1e-5
            )
    (values,) = token_log_probabilities(model, [LONG], special=SpecialTokens((1,), (), 0), length=16)
    for position in (0, 15, 16, 40):
        begin = 0 if position < 16 else 8 * ((position - 16) // 8 + 1)
        row = [1, *LONG][begin : position + 1]
        assert values[position] == pytest.approx(
            log_probability(model, row, len(row) - 1, LONG[position], causal=True), abs=1e-5
        )


def test_runs_score_by_their_objective(corpus, tmp_path, tiny):
    def run(objective):
        headstock.pretrain(corpus, out=tmp_path / objective, objective=objective, settings=tiny | {"steps": 2})
        return headstock.load(tmp_path / objective)

    causal, masked, hybrid = run("causal"), run("masked"), run("hybrid")
    assert causal.likelihood_kind() == hybrid.likelihood_kind() == "log-likelihood"
    assert masked.likelihood_kind() == hybrid.likelihood_kind(True) == "pseudo-log-likelihood"
    with pytest.raises(UserError, match=r"pseudo=True .*: hybrid, masked\)"):
        causal.score("Anne", pseudo=True)
    with pytest.raises(UserError, match=r"from left to right .*: causal, hybrid\)"):
        masked.score("Anne", pseudo=False)
    for pipeline, pseudo, shift in ((masked, None, 0), (hybrid, True, 1)):
        (score,) = pipeline.score("Anne likes Paris.", pseudo=pseudo)
        ids, tokenizer = pipeline.tokenizer.encode("Anne likes Paris."), pipeline.tokenizer
        row = [tokenizer.cls, *ids]
        expected = [
            log_probability(
                pipeline.model,
                [*row[:position], tokenizer.mask, *row[position + 1 :]],
                position - shift,
                row[position],
                causal=False,
            )
            for position in range(1, len(row))
        ]
        assert [value for _, value in score.tokens] == pytest.approx(expected, abs=1e-4)
        assert score.log_likelihood == pytest.approx(sum(expected), abs=1e-3)
    (score,) = hybrid.score("Anne likes Paris.")
    row = [hybrid.tokenizer.bos, *hybrid.tokenizer.encode("Anne likes Paris.")]
    expected = [
        log_probability(hybrid.model, row[:position], position - 1, row[position], causal=True)
        for position in range(1, len(row))
    ]
    assert [value for _, value in score.tokens] == pytest.approx(expected, abs=1e-4)
