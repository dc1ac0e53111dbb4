"""Words for [MASK], against loops that do it in the plainest way."""

import itertools
import math

import pytest
import torch

import headstock
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.data.windowing import SpecialTokens
from headstock.decoding.fill_mask import FillCandidate, MaskFiller, normalize_candidates
from headstock.errors import UserError
from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.batch import Batch
from headstock.model.heads import LMHead
from headstock.model.model import Model
from tests.model.small import stir

TEXTS = ["Ana sees the sea. Ben saw a bee.", "A bee sees Ben, the sea and Ana."] * 20
KINDS = ["bpe", "unigram", "wordpiece", "word", "char"]


def filler(kind: str = "wordpiece", *, shift: int = 0, length: int = 32, closing: bool = False) -> MaskFiller:
    """A model that has learned nothing, so that no answer comes by chance from what is usual."""
    settings = TokenizerSettings(kind=kind, vocabulary=330, min_frequency=1)  # type: ignore[arg-type]
    tokenizer = train_tokenizer(TEXTS, settings)
    torch.manual_seed(0)
    sizes = {"context": 32, "depth": 2, "width": 16, "heads": 2, "hidden": 16, "causal": False}
    backbone = Transformer(TransformerConfig(vocabulary=tokenizer.vocabulary, **sizes))
    stir(backbone)
    special = SpecialTokens((tokenizer.cls,), (tokenizer.sep,) if closing else (), tokenizer.pad)
    return MaskFiller(
        Model(backbone, {"token": LMHead(backbone)}).eval(), tokenizer, special=special, length=length, shift=shift
    )


@torch.inference_mode()
def chain(one: MaskFiller, left: list[int], pieces: list[int], right: list[int]) -> float:
    """The probability of some pieces between two stretches of tokens, each given those before it."""
    found, mask = 1.0, one.tokenizer.mask
    for step, piece in enumerate(pieces):
        hidden = [mask] * (len(pieces) - step)
        row = [*one.special.prefix, *left, *pieces[:step], *hidden, *right, *one.special.suffix]
        at = len(one.special.prefix) + len(left) + step - one.shift
        vectors = one.model(Batch(torch.tensor([row]))).hidden[0, at]
        found *= float(one.model.heads["token"](vectors).softmax(-1)[piece])
    return found


@pytest.mark.parametrize(("shift", "closing"), [(0, False), (0, True), (1, False)])
def test_probabilities_are_those_of_the_plain_way(shift, closing):
    one = filler(shift=shift, closing=closing)
    encode = one.tokenizer.encode
    (fills,) = one.fill("Ben saw [MASK].", top=400, pieces=1).fills
    assert len(fills) > 10
    assert [fill.probability for fill in fills] == sorted((fill.probability for fill in fills), reverse=True)
    for fill in fills:
        assert fill.probability == pytest.approx(
            chain(one, encode("Ben saw"), encode(fill.token), encode(".")), rel=1e-4
        )


def test_words_of_several_pieces_are_found_as_by_trying_all():
    one = filler()
    spelling, mask = one.spelling, one.tokenizer.mask
    ids, (gap,) = spelling.tokenize("Ben saw [MASK].")
    assert ids == [*one.tokenizer.encode("Ben saw"), mask, *one.tokenizer.encode(".")]
    begin = [i for i in range(one.tokenizer.vocabulary) if spelling.has_space[i] and spelling.is_word_part[i]]
    go_on = [i for i in range(one.tokenizer.vocabulary) if not spelling.has_space[i] and spelling.is_word_part[i]]
    every = {}
    for pieces in itertools.product(begin, go_on):
        word = one.tokenizer.decode(pieces)
        if tuple(one.tokenizer.encode(word)) == pieces:  # as the tokenizer itself would cut it
            every[word] = chain(one, ids[: gap.position], list(pieces), ids[gap.position + 1 :])
    assert len(every) > 50
    found = {word: math.exp(beam.score) for word, beam in one.search_words(ids, gap, 2, beams=10**6)}
    assert found == pytest.approx(every, rel=1e-3)
    best = sorted(every, key=every.__getitem__)[-1]
    (fills,) = one.fill("Ben saw [MASK].", top=10**4, pieces=2).fills
    assert {fill.token: fill.pieces for fill in fills}[best] == 2
    assert [fill.probability for fill in fills] == sorted((fill.probability for fill in fills), reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_given_words_are_ranked_whatever_their_pieces(kind):
    one = filler(kind)
    words = ["sea", "Ben", "sees"] if kind == "word" else ["sea", "beesees", "Ana"]
    (fills,) = one.fill("Ana saw [MASK].", top=1, pieces=1, among=words).fills
    assert {fill.token for fill in fills} == set(words)
    whole = {word: one.tokenizer.encode(f"Ana saw {word}.") for word in words}
    left, right = one.tokenizer.encode("Ana saw"), one.tokenizer.encode("Ana.")[-1:]
    if kind == "char":
        left = one.tokenizer.encode("Ana saw ")
    for fill in fills:
        pieces = whole[fill.token][len(left) : -1]
        assert fill.pieces == len(pieces)
        assert fill.probability == pytest.approx(chain(one, left, pieces, right), rel=1e-3)
        assert fill.log_probability == pytest.approx(math.log(chain(one, left, pieces, right)), rel=1e-3)
    total = sum(fill.probability for fill in fills)
    assert [fill.share for fill in fills] == pytest.approx([fill.probability / total for fill in fills])


def test_shares_of_candidates_survive_probabilities_that_underflow():
    tiny = [
        FillCandidate(word, math.exp(score), 200, score)
        for word, score in (("a", -1000.0), ("b", -1000.0 - math.log(3)))
    ]
    assert [fill.probability for fill in tiny] == [0.0, 0.0]
    assert [fill.share for fill in normalize_candidates(tiny)] == pytest.approx([0.75, 0.25])


def test_a_candidate_longer_than_a_row_is_refused():
    with pytest.raises(UserError, match="rows of 31"):
        filler("char").fill("Ana saw [MASK].", top=1, pieces=1, among=["sea", "seabee" * 40])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_proposed_is_a_word_a_person_can_read(kind):
    one = filler(kind)
    made = one.fill("[MASK] sees [MASK], (the [MASK]sea", top=400, pieces=3)
    special = {one.tokenizer.id_to_token(number) for number in one.tokenizer.all_special_ids}
    for fills in made.fills:
        assert fills
        for fill in fills:
            assert fill.token == fill.token.strip() != ""
            assert not set("Ġ▁\ufffd") & set(fill.token)
            assert "##" not in fill.token
            assert fill.token not in special
        assert len({fill.token for fill in fills}) == len(fills)
    first, second, third = (fills[0].token for fills in made.fills)
    assert made.filled == f"{first} sees {second}, (the {third}sea"


def test_a_mask_is_told_while_the_others_stay_hidden():
    one = filler()
    both = one.fill("Ana [MASK] the [MASK].", top=3, pieces=1).fills
    encode, mask = one.tokenizer.encode, one.tokenizer.mask
    for fill in both[0]:
        right = [*encode("the"), mask, *encode(".")]
        assert fill.probability == pytest.approx(chain(one, encode("Ana"), encode(fill.token), right), rel=1e-4)


def test_a_long_text_is_read_around_its_mask():
    one = filler(length=12)
    long = " ".join(["Ana sees the sea."] * 30)
    for text in (f"{long} Ben [MASK] a bee. {long}", f"[MASK] {long}", f"{long} [MASK]"):
        ids, (gap,) = one.spelling.tokenize(text)
        shown, place = one.masked_row(ids, gap, [], 1)
        assert len(shown) == 12
        assert shown[place] == one.tokenizer.mask
        assert one.fill(text, top=2, pieces=2).fills[0]
    ids, (gap,) = one.spelling.tokenize(f"{long} [MASK] {long}")
    assert 4 <= one.masked_row(ids, gap, [], 1)[1] <= 8  # in the middle


def test_a_word_that_cannot_be_written_is_refused():
    with pytest.raises(UserError, match="'zzz'"):
        filler("word").fill("Ana [MASK]", top=1, pieces=1, among=["sees", "zzz"])


MEALS = {"Anne": "bread", "Ben": "cheese", "Zoë": "apples"}


DAYS = "\n".join(f"{who} eats {MEALS[who]} now. It is day {day}." for day in range(100) for who in MEALS)


@pytest.mark.parametrize("objective", ["masked", "hybrid"])
def test_a_trained_model_fills_in_what_it_has_read(tmp_path, tiny, objective):
    (tmp_path / "meals.txt").write_text(DAYS, encoding="utf-8")
    quick = {"steps": 200, "optimizer": "muon", "lr": 0.03, "fraction": 0.3, "width": 32, "batch": 16}
    headstock.pretrain(tmp_path / "meals.txt", out=tmp_path / "run", objective=objective, settings=tiny | quick)
    model = headstock.load(tmp_path / "run")
    for who, best in MEALS.items():
        (made,) = model.fill(f"{who} eats [MASK] now.")
        assert made.filled == f"{who} eats {best} now."
        assert made.fills[0][0].probability > 0.5
        (made,) = model.fill(f"{who} eats [MASK] now.", among=list(MEALS.values()))
        assert made.fills[0][0].token == best


def test_a_model_of_pairs_reads_a_text_that_is_closed(tmp_path, tiny):
    (tmp_path / "meals.txt").write_text(DAYS, encoding="utf-8")
    quick = {"steps": 2, "nsp": True, "valid_fraction": 0.05}
    headstock.pretrain(tmp_path / "meals.txt", out=tmp_path / "run", objective="masked", settings=tiny | quick)
    model = headstock.load(tmp_path / "run")
    tokenizer = model.tokenizer
    row = [
        tokenizer.cls,
        *tokenizer.encode("Ben eats"),
        tokenizer.mask,
        *tokenizer.encode("x.")[1:],
        tokenizer.sep,
    ]
    with torch.inference_mode():
        hidden = model.model(Batch(torch.tensor([row]))).hidden[0, row.index(tokenizer.mask)]
        wanted = float(model.model.heads["token"](hidden).softmax(-1)[tokenizer.token_to_id("Ġcheese")])
    ((fill,),) = model.fill("Ben eats [MASK].", among=["cheese"])[0].fills
    assert fill.probability == pytest.approx(wanted, rel=1e-4)


def test_a_causal_run_is_refused(corpus, tmp_path, tiny):
    headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"steps": 1})
    with pytest.raises(UserError, match=r"\(objectives that can: hybrid, masked\)"):
        headstock.load(tmp_path / "run").fill("Anne [MASK]")
