"""How likely texts are, against loops that do one token at a time."""

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
def told(model, row, place, token, *, causal):
    """The log-probability of one token, from the vector at one place of one row."""
    hidden = model(Batch(torch.tensor([row]), causal=causal)).hidden[0, place]
    return float(model.heads["token"](hidden).log_softmax(-1)[token])


@pytest.mark.parametrize("backbone_is_causal", [True, False])
def test_left_to_right_is_the_chain_of_next_tokens(backbone_is_causal):
    model = small_model(causal=backbone_is_causal)  # one that looks both ways can be asked to look back only
    found = token_log_probabilities(model, TEXTS, special=SpecialTokens((1,), (), 0), length=16)
    for text, values in zip(TEXTS, found, strict=True):
        slow = [told(model, [1, *text[:at]], at, token, causal=True) for at, token in enumerate(text)]
        assert values.tolist() == pytest.approx(slow, abs=1e-5)


@pytest.mark.parametrize(("after", "shift"), [((), 0), ((3,), 0), ((), 1)])
def test_pseudo_likelihood_hides_each_token_alone(after, shift):
    model = small_model(causal=False)
    found = token_log_probabilities(
        model, TEXTS, special=SpecialTokens((1,), after, 0), length=16, mask=MASK, shift=shift
    )
    for text, values in zip(TEXTS, found, strict=True):
        slow = [
            told(model, [1, *text[:at], MASK, *text[at + 1 :], *after], at + 1 - shift, token, causal=False)
            for at, token in enumerate(text)
        ]
        assert values.tolist() == pytest.approx(slow, abs=1e-5)


@pytest.mark.parametrize("mask", [None, MASK])
def test_order_and_company_change_nothing(mask):
    model = small_model(causal=False)
    settings = {"special": SpecialTokens((1,), (), 0), "length": 16, "mask": mask}
    together = token_log_probabilities(model, [*TEXTS, LONG], **settings)
    backwards = token_log_probabilities(model, [LONG, *TEXTS[::-1]], **settings)
    for one, other in zip(together, [*backwards[:0:-1], backwards[0]], strict=True):
        assert one.tolist() == pytest.approx(other.tolist(), abs=1e-5)
    alone = [token_log_probabilities(model, [text], **settings)[0] for text in [*TEXTS, LONG]]
    for one, other in zip(together, alone, strict=True):
        assert one.tolist() == pytest.approx(other.tolist(), abs=1e-5)


def test_a_long_text_is_read_in_windows():
    model = small_model(causal=False)
    (values,) = token_log_probabilities(model, [LONG], special=SpecialTokens((1,), (), 0), length=16, mask=MASK)
    for part in windows(len(LONG), 15, centered=True):
        for at in range(part.keep_start, part.keep_end):
            row = [1, *LONG[part.start : at], MASK, *LONG[at + 1 : part.end]]
            assert values[at] == pytest.approx(told(model, row, at - part.start + 1, LONG[at], causal=False), abs=1e-5)
    (values,) = token_log_probabilities(model, [LONG], special=SpecialTokens((1,), (), 0), length=16)
    for at in (0, 15, 16, 40):
        begin = 0 if at < 16 else 8 * ((at - 16) // 8 + 1)
        row = [1, *LONG][begin : at + 1]
        assert values[at] == pytest.approx(told(model, row, len(row) - 1, LONG[at], causal=True), abs=1e-5)


def test_what_a_run_can_score(corpus, tmp_path, tiny):
    def run(objective, **more):
        headstock.pretrain(corpus, out=tmp_path / objective, objective=objective, settings=tiny | {"steps": 2} | more)
        return headstock.load(tmp_path / objective)

    causal, masked, hybrid = run("causal"), run("masked"), run("hybrid")
    assert causal.likelihood_kind() == hybrid.likelihood_kind() == "log-likelihood"
    assert masked.likelihood_kind() == hybrid.likelihood_kind(True) == "pseudo-log-likelihood"
    with pytest.raises(UserError, match=r"--pseudo .*: hybrid, masked\)"):
        causal.score("Anne", pseudo=True)
    with pytest.raises(UserError, match=r"from left to right .*: causal, hybrid\)"):
        masked.score("Anne", pseudo=False)
    for loaded, pseudo, shift in ((masked, None, 0), (hybrid, True, 1)):
        (score,) = loaded.score("Anne likes Paris.", pseudo=pseudo)
        ids, tokenizer = loaded.tokenizer.encode("Anne likes Paris."), loaded.tokenizer
        row = [tokenizer.cls, *ids]
        slow = [
            told(loaded.model, [*row[:at], tokenizer.mask, *row[at + 1 :]], at - shift, row[at], causal=False)
            for at in range(1, len(row))
        ]
        assert [value for _, value in score.tokens] == pytest.approx(slow, abs=1e-4)
        assert score.log_likelihood == pytest.approx(sum(slow), abs=1e-3)
    (score,) = hybrid.score("Anne likes Paris.")
    row = [hybrid.tokenizer.bos, *hybrid.tokenizer.encode("Anne likes Paris.")]
    slow = [told(hybrid.model, row[:at], at - 1, row[at], causal=True) for at in range(1, len(row))]
    assert [value for _, value in score.tokens] == pytest.approx(slow, abs=1e-4)
