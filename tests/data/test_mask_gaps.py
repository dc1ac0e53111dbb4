"""Locating and filling [MASK] with every kind of tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from headstock.data.mask_gaps import SurfaceForms
from headstock.data.tokenizer import TokenizerSettings, open_tokenizer, train_tokenizer
from headstock.errors import UserError

KINDS = ["bpe", "unigram", "wordpiece", "word", "char"]
TEXTS = ["Anne sees the sea (and Paris). It was unhappy, very unkind!", "Ben likes le café. It was kind, happy."] * 30
READY: dict[str, SurfaceForms] = {}


def surface_forms(kind: str) -> SurfaceForms:
    if kind not in READY:
        settings = TokenizerSettings(kind=kind, vocabulary=420, min_frequency=1)  # type: ignore[arg-type]
        READY[kind] = SurfaceForms(train_tokenizer(TEXTS, settings))
    return READY[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It was [MASK].", ["happy"]),
        ("[MASK] was kind.", ["It"]),
        ("Anne [MASK] the [MASK]", ["likes", "sea"]),
        ("the sea ([MASK] Paris)", ["and"]),
        ("[MASK] [MASK]", ["le", "café"]),
        ("It was kind\n[MASK] was happy", ["It"]),
        ("[MASK]", ["Anne"]),
    ],
)
def test_context_is_tokenized_as_if_the_word_replaced_the_mask(kind, text, words):
    forms = surface_forms(kind)
    ids, gaps = forms.tokenize(text)
    assert [ids[gap.position] for gap in gaps] == [forms.mask] * len(words)
    assert ids.count(forms.mask) == len(words)
    filled, start = [], 0
    for gap, word in zip(gaps, words, strict=True):
        pieces = forms.tokens_at(gap, word)
        assert forms.word(pieces) == word
        assert forms.has_space[pieces[0]] == gap.expects_space  # the word is among the candidates
        filled += [*ids[start : gap.position], *pieces]
        start = gap.position + 1
    assert [*filled, *ids[start:]] == forms.tokenizer.encode(forms.fill(text, words))


def test_inside_a_word_only_what_continues_it_fits():
    for kind in ("bpe", "wordpiece", "unigram", "char"):
        forms = surface_forms(kind)
        _, (gap,) = forms.tokenize("Paris[MASK]")
        assert not gap.expects_space
        pieces = forms.tokens_at(gap, "kind")
        assert forms.tokenizer.encode("Paris") + pieces == forms.tokenizer.encode("Pariskind")
        assert not forms.has_space[pieces].any() and forms.is_word_part[pieces].all()


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_never_words(kind):
    forms = surface_forms(kind)
    for number in forms.tokenizer.all_special_ids:
        assert not forms.is_complete[number] and not forms.is_word_part[number]


@pytest.mark.parametrize("kind", KINDS)
@given(before=st.text("ab é.\n(X", max_size=12), after=st.text("ab é.\n)X", max_size=12))
def test_a_mask_is_found_in_any_text(kind, before, after):
    forms = surface_forms(kind)
    ids, gaps = forms.tokenize(f"{before}[MASK]{after}[MASK]")
    assert [position for position, token in enumerate(ids) if token == forms.mask] == [gap.position for gap in gaps]
    assert len(gaps) == 2
    assert gaps[0].before + gaps[0].space == before


def test_a_tokenizer_with_another_mask_token(tmp_path):
    """RoBERTa's <mask>, and BERT's splitting at punctuation."""
    byte_level = Library(models.BPE())
    byte_level.pre_tokenizer, byte_level.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=names, initial_alphabet=sorted(alphabet), show_progress=False
    )
    byte_level.train_from_iterator(TEXTS, trainer)
    byte_level.save(str(tmp_path / "roberta.json"))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "paris", "it", "was", "##kind", "kind", "."]
    bert = Library(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    bert.normalizer, bert.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    bert.decoder = decoders.WordPiece()
    bert.save(str(tmp_path / "bert.json"))
    for name, texts in (
        ("roberta", ["It was <mask>.", "It was [MASK]."]),
        ("bert", ["It was [MASK].", "Paris[MASK]."]),
    ):
        forms = SurfaceForms(open_tokenizer(tmp_path / f"{name}.json"))
        for text in texts:
            ids, (gap,) = forms.tokenize(text)
            filled = [*ids[: gap.position], *forms.tokens_at(gap, "kind"), *ids[gap.position + 1 :]]
            assert filled == forms.tokenizer.encode(forms.fill(text, ["kind"]))


def test_a_text_without_a_mask_is_refused():
    with pytest.raises(UserError, match=r"no \[MASK\] in 'It was good'"):
        surface_forms("bpe").tokenize("It was good")
