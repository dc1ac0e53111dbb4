"""Mask filling against exhaustive search."""

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
from tests.tasks.small import MEALS, write_meals

TEXTS = ["Ana sees the sea. Ben saw a bee.", "A bee sees Ben, the sea and Ana."] * 20
KINDS = ["bpe", "unigram", "wordpiece", "word", "char"]


def make_filler(kind: str = "wordpiece", *, shift: int = 0, length: int = 32, closed: bool = False) -> MaskFiller:
    """With an untrained model."""
    settings = TokenizerSettings(kind=kind, vocabulary=330, min_frequency=1)  # type: ignore[arg-type]
    tokenizer = train_tokenizer(TEXTS, settings)
    torch.manual_seed(0)
    sizes = {"context": 32, "depth": 2, "width": 16, "heads": 2, "hidden": 16, "causal": False}
    backbone = Transformer(TransformerConfig(vocabulary=tokenizer.vocabulary, **sizes))
    stir(backbone)
    special = SpecialTokens((tokenizer.cls,), (tokenizer.sep,) if closed else (), tokenizer.pad)
    return MaskFiller(
        Model(backbone, {"token": LMHead(backbone)}).eval(), tokenizer, special=special, length=length, shift=shift
    )


@torch.inference_mode()
def word_probability(filler: MaskFiller, prefix: list[int], pieces: list[int], suffix: list[int]) -> float:
    """The probability of a word's tokens between a prefix and a suffix, each given those before it."""
    product, mask = 1.0, filler.tokenizer.mask
    for step, piece in enumerate(pieces):
        masks = [mask] * (len(pieces) - step)
        row = [*filler.special.prefix, *prefix, *pieces[:step], *masks, *suffix, *filler.special.suffix]
        position = len(filler.special.prefix) + len(prefix) + step - filler.shift
        vectors = filler.model(Batch(torch.tensor([row]))).hidden[0, position]
        product *= float(filler.model.heads["token"](vectors).softmax(-1)[piece])
    return product


@pytest.mark.parametrize(("shift", "closed"), [(0, False), (0, True), (1, False)])
def test_probabilities_match_the_model(shift, closed):
    filler = make_filler(shift=shift, closed=closed)
    encode = filler.tokenizer.encode
    (fills,) = filler.fill("Ben saw [MASK].", top=400, pieces=1).fills
    assert len(fills) > 10
    assert [fill.probability for fill in fills] == sorted((fill.probability for fill in fills), reverse=True)
    for fill in fills:
        assert fill.probability == pytest.approx(
            word_probability(filler, encode("Ben saw"), encode(fill.token), encode(".")), rel=1e-4
        )


def test_words_of_two_tokens_match_exhaustive_search():
    filler = make_filler()
    spelling, mask = filler.spelling, filler.tokenizer.mask
    ids, (gap,) = spelling.tokenize("Ben saw [MASK].")
    assert ids == [*filler.tokenizer.encode("Ben saw"), mask, *filler.tokenizer.encode(".")]
    first_tokens = [i for i in range(filler.tokenizer.vocabulary) if spelling.has_space[i] and spelling.is_word_part[i]]
    next_tokens = [
        i for i in range(filler.tokenizer.vocabulary) if not spelling.has_space[i] and spelling.is_word_part[i]
    ]
    expected = {}
    for pieces in itertools.product(first_tokens, next_tokens):
        word = filler.tokenizer.decode(pieces)
        if tuple(filler.tokenizer.encode(word)) == pieces:  # as the tokenizer splits it
            expected[word] = word_probability(filler, ids[: gap.position], list(pieces), ids[gap.position + 1 :])
    assert len(expected) > 50
    actual = {word: math.exp(beam.score) for word, beam in filler.search_words(ids, gap, 2, beams=10**6)}
    assert actual == pytest.approx(expected, rel=1e-3)
    best = sorted(expected, key=expected.__getitem__)[-1]
    (fills,) = filler.fill("Ben saw [MASK].", top=10**4, pieces=2).fills
    assert {fill.token: fill.pieces for fill in fills}[best] == 2
    assert [fill.probability for fill in fills] == sorted((fill.probability for fill in fills), reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_given_words_are_ranked(kind):
    filler = make_filler(kind)
    words = ["sea", "Ben", "sees"] if kind == "word" else ["sea", "beesees", "Ana"]
    (fills,) = filler.fill("Ana saw [MASK].", top=1, pieces=1, among=words).fills
    assert {fill.token for fill in fills} == set(words)
    tokens = {word: filler.tokenizer.encode(f"Ana saw {word}.") for word in words}
    prefix, suffix = filler.tokenizer.encode("Ana saw"), filler.tokenizer.encode("Ana.")[-1:]
    if kind == "char":
        prefix = filler.tokenizer.encode("Ana saw ")
    for fill in fills:
        pieces = tokens[fill.token][len(prefix) : -1]
        assert fill.pieces == len(pieces)
        assert fill.probability == pytest.approx(word_probability(filler, prefix, pieces, suffix), rel=1e-3)
        assert fill.log_probability == pytest.approx(
            math.log(word_probability(filler, prefix, pieces, suffix)), rel=1e-3
        )
    total = sum(fill.probability for fill in fills)
    assert [fill.share for fill in fills] == pytest.approx([fill.probability / total for fill in fills])


def test_shares_survive_underflow():
    tiny = [
        FillCandidate(word, math.exp(score), 200, score)
        for word, score in (("a", -1000.0), ("b", -1000.0 - math.log(3)))
    ]
    assert [fill.probability for fill in tiny] == [0.0, 0.0]
    assert [fill.share for fill in normalize_candidates(tiny)] == pytest.approx([0.75, 0.25])


def test_candidate_longer_than_a_row_is_refused():
    with pytest.raises(UserError, match="rows of 31"):
        make_filler("char").fill("Ana saw [MASK].", top=1, pieces=1, among=["sea", "seabee" * 40])


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_are_readable_words(kind):
    filler = make_filler(kind)
    result = filler.fill("[MASK] sees [MASK], (the [MASK]sea", top=400, pieces=3)
    special = {filler.tokenizer.id_to_token(number) for number in filler.tokenizer.all_special_ids}
    for fills in result.fills:
        assert fills
        for fill in fills:
            assert fill.token == fill.token.strip() != ""
            assert not set("Ġ▁\ufffd") & set(fill.token)
            assert "##" not in fill.token
            assert fill.token not in special
        assert len({fill.token for fill in fills}) == len(fills)
    first, second, third = (fills[0].token for fills in result.fills)
    assert result.filled == f"{first} sees {second}, (the {third}sea"


def test_other_masks_stay_masked():
    filler = make_filler()
    both = filler.fill("Ana [MASK] the [MASK].", top=3, pieces=1).fills
    encode, mask = filler.tokenizer.encode, filler.tokenizer.mask
    for fill in both[0]:
        suffix = [*encode("the"), mask, *encode(".")]
        assert fill.probability == pytest.approx(
            word_probability(filler, encode("Ana"), encode(fill.token), suffix), rel=1e-4
        )


def test_long_text_is_read_around_its_mask():
    filler = make_filler(length=12)
    long = " ".join(["Ana sees the sea."] * 30)
    for text in (f"{long} Ben [MASK] a bee. {long}", f"[MASK] {long}", f"{long} [MASK]"):
        ids, (gap,) = filler.spelling.tokenize(text)
        row, position = filler.masked_row(ids, gap, [], 1)
        assert len(row) == 12
        assert row[position] == filler.tokenizer.mask
        assert filler.fill(text, top=2, pieces=2).fills[0]
    ids, (gap,) = filler.spelling.tokenize(f"{long} [MASK] {long}")
    assert 4 <= filler.masked_row(ids, gap, [], 1)[1] <= 8  # in the middle


def test_unknown_word_is_refused():
    with pytest.raises(UserError, match="'zzz'"):
        make_filler("word").fill("Ana [MASK]", top=1, pieces=1, among=["sees", "zzz"])


def test_trained_model_fills_masks(tmp_path, tiny):
    settings = {"steps": 130, "optimizer": "muon", "lr": 0.04, "fraction": 0.3, "width": 32, "batch": 16}
    settings |= {"validate_every": 65}
    headstock.pretrain(write_meals(tmp_path), out=tmp_path / "run", objective="masked", settings=tiny | settings)
    model = headstock.load(tmp_path / "run")
    for name, meal in MEALS.items():
        (result,) = model.fill(f"{name} eats [MASK] now.")
        assert result.filled == f"{name} eats {meal} now."
        assert result.fills[0][0].probability > 0.5
        (result,) = model.fill(f"{name} eats [MASK] now.", among=list(MEALS.values()))
        assert result.fills[0][0].token == meal


def test_model_trained_on_pairs_reads_a_closed_text(tmp_path, tiny):
    settings = {"steps": 2, "nsp": True, "valid_fraction": 0.05}
    headstock.pretrain(write_meals(tmp_path), out=tmp_path / "run", objective="masked", settings=tiny | settings)
    model = headstock.load(tmp_path / "run")
    tokenizer = model.tokenizer
    row = [tokenizer.cls, *tokenizer.encode("Ben eats"), tokenizer.mask, *tokenizer.encode("x.")[1:], tokenizer.sep]
    with torch.inference_mode():
        hidden = model.model(Batch(torch.tensor([row]))).hidden[0, row.index(tokenizer.mask)]
        expected = float(model.model.heads["token"](hidden).softmax(-1)[tokenizer.token_to_id("Ġcheese")])
    ((fill,),) = model.fill("Ben eats [MASK].", among=["cheese"])[0].fills
    assert fill.probability == pytest.approx(expected, rel=1e-4)


def test_causal_run_is_refused(corpus, tmp_path, tiny):
    headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"steps": 1})
    with pytest.raises(UserError, match=r"\(objectives that can: hybrid, masked\)"):
        headstock.load(tmp_path / "run").fill("Anne [MASK]")
