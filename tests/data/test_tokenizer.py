"""Round trips, special tokens, offsets, saving and loading, and imported tokenizers."""

import hashlib
import io
import json
import pickle
import unicodedata
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from headstock.data.tokenizer import TokenizerSettings, open_tokenizer, tokenizer_statistics, train_tokenizer
from headstock.data.tokenizer_backends import SPECIAL_TOKENS
from headstock.errors import ConfigError, UserError

KINDS = ("bpe", "unigram", "wordpiece", "word", "char")
TEXTS = [
    "The cat sat on the mat, and the other cat sat on the well-known rug.",
    "L'été, c'est là… un livre très utile (ou non) pour améliorer la santé.",
    "Der Fluß läuft über die Wiese; die Straße führt über den Fluß.",
    "Кошка сидит на ковре, а собака спит на полу.",
    "一只猫坐在垫子上。 猫 和 狗",
    "First line\n\n\tsecond line <eos> [MASK] <0x41> don't stop!",
] * 4
HARD = [
    "  leading spaces\tand a tab\n\n\nlines\r\n ",
    "emoji 😀👩‍👩‍👧 and ﷺ, zero\u200bwidth",
    "<sos><pad><eos><unk>[CLS][SEP][MASK] <s></s> <0x41>",
    "L'été est là. Кошка! 猫",
    "x",
    " ",
    "",
]


@pytest.fixture(scope="module")
def trained():
    sizes = {"bpe": 400, "unigram": 600, "wordpiece": 400, "word": 200, "char": 300}
    return {kind: train_tokenizer(iter(TEXTS), TokenizerSettings(kind, sizes[kind], min_frequency=1)) for kind in KINDS}


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    """A small SentencePiece model trained by the library, with its default <unk> <s> </s>."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        vocab_size=200,
        hard_vocab_limit=False,
        minloglevel=3,
    )
    path = tmp_path_factory.mktemp("sentencepiece") / "small.model"
    path.write_bytes(model.getvalue())
    return path


def lab_folder(folder: Path, model_file: Path, leave_out: int = 0) -> Path:
    """A dict.txt in the lab's format for the pieces of a model, with the model beside it."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    pieces = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size() - leave_out)]
    (folder / "dict.txt").write_text("".join(f"{piece} 1\n" for piece in pieces), encoding="utf-8")
    (folder / "french.model").write_bytes(model_file.read_bytes())
    return folder


# Round trips


@pytest.mark.parametrize("text", [*TEXTS[:6], *HARD])
def test_bpe_round_trips_every_text(trained, text):
    bpe = trained["bpe"]
    assert bpe.decode(bpe.encode(text)) == text


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs", "Cn"))))
def test_bpe_round_trips_random_unicode(trained, text):
    text = unicodedata.normalize("NFC", text)
    assert trained["bpe"].decode(trained["bpe"].encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs", "Cn"), exclude_characters="▁")))
def test_unigram_falls_back_to_bytes(trained, text):
    text = unicodedata.normalize("NFC", text)
    unigram = trained["unigram"]
    ids = unigram.encode(text)
    assert unigram.decode(ids) == text
    assert unigram.unk not in ids


def test_char_round_trips_and_new_characters_are_unk(trained):
    char = trained["char"]
    assert char.tokenize("tat\n sat") == ["t", "a", "t", "\n", " ", "s", "a", "t"]
    assert char.decode(char.encode("L'été\n\test")) == "L'été\n\test"
    assert char.encode("😀") == [char.unk]
    characters = set("".join(TEXTS))
    assert char.vocabulary == len(characters) + len(SPECIAL_TOKENS)


@pytest.mark.parametrize("kind", ["word", "wordpiece"])
@pytest.mark.parametrize("text", ["The cat, the other cat!", "L'été, c'est là… (ou non)", "First line\n\nsecond line"])
def test_decoded_words_have_natural_spacing(trained, kind, text):
    assert trained[kind].decode(trained[kind].encode(text)) == text


def test_word_splits_at_punctuation_and_rare_words_are_unk(trained):
    assert trained["word"].tokenize("the well-known cat, don't") == ["the", "well-known", "cat", ",", "don", "'", "t"]
    rare = train_tokenizer(["often often once"], TokenizerSettings("word", 100, min_frequency=2))
    assert rare.tokenize("often once") == ["often", "<unk>"]


def test_wordpiece_continuations_begin_with_hashes(trained):
    pieces = trained["wordpiece"].tokenize("catmat")
    assert len(pieces) > 1
    assert not pieces[0].startswith("##")
    assert all(piece.startswith("##") for piece in pieces[1:])
    assert "".join(piece.removeprefix("##") for piece in pieces) == "catmat"


# Special tokens


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_the_ids_of_the_lab(trained, kind):
    tokenizer = trained[kind]
    assert [tokenizer.id_to_token(i) for i in range(7)] == [
        "<sos>",
        "<pad>",
        "<eos>",
        "<unk>",
        "[CLS]",
        "[SEP]",
        "[MASK]",
    ]
    assert [getattr(tokenizer, role) for role in SPECIAL_TOKENS] == list(range(7))


@pytest.mark.parametrize("kind", KINDS)
def test_plain_text_never_produces_special_tokens(trained, kind, tmp_path):
    """Also after loading and unpickling: the library saves that setting in neither."""
    trained[kind].save(tmp_path / "tokenizer.json")
    for tokenizer in (
        trained[kind],
        open_tokenizer(tmp_path / "tokenizer.json"),
        pickle.loads(pickle.dumps(trained[kind])),
    ):
        for name in SPECIAL_TOKENS.values():
            for text in (name, f"a{name}b", f"a {name} b", f"{name}{name}"):
                special = set(tokenizer.encode(text)) & set(range(7)) - {tokenizer.unk}
                assert not special, (text, tokenizer.tokenize(text))
    control = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert control.encode("<eos>").ids == [2], "the library alone reads <eos> as the special token"


def test_decoding_skips_special_tokens_by_default(trained):
    bpe = trained["bpe"]
    ids = [bpe.bos, *bpe.encode("the cat"), bpe.eos, bpe.pad]
    assert bpe.decode(ids) == "the cat"
    assert bpe.decode(ids, skip_special=False) == "<sos>the cat<eos><pad>"


# Ids, spans and files


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_is_the_same(trained, kind, tmp_path):
    tokenizer, path = trained[kind], tmp_path / "new" / "tokenizer.json"
    tokenizer.save(path)
    again = open_tokenizer(path.parent)
    assert (again.kind, again.vocabulary, again.fingerprint) == (kind, tokenizer.vocabulary, tokenizer.fingerprint)
    assert again.encode_batch(TEXTS + HARD) == tokenizer.encode_batch(TEXTS + HARD)
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    theirs = tokenizers.Tokenizer.from_file(str(path))
    assert theirs.get_vocab_size() == tokenizer.vocabulary, "the file must stay one the library itself opens"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=("Cs",))), max_size=4))
def test_any_text_can_be_encoded_alone_or_in_a_batch(trained, texts):
    for tokenizer in trained.values():
        rows = tokenizer.encode_batch(texts)
        assert rows == [tokenizer.encode(text) for text in texts]
        assert all(0 <= i < tokenizer.vocabulary for ids in rows for i in ids)


PIECES = [
    "the cat ",
    "L’été… ",
    "Œuvre\t",
    "ſtraße\n",
    "<eos>",
    "[MASK]",
    "cafe\u0301",
    "e\u0323\u0302",
    "猫犬 ",
    "Å",
    "한",
]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3))).map("".join), min_size=1, max_size=5))
def test_bypassing_the_normalizer_gives_the_same_ids(trained, texts):
    texts = [text.encode(errors="ignore").decode() for text in texts]
    for kind in ("bpe", "wordpiece", "word", "char"):
        backend = trained[kind].backend
        encodings = backend._library.encode_batch_fast(texts, add_special_tokens=False)
        assert backend.encode_batch(texts) == [encoding.ids for encoding in encodings]


def test_only_nfc_normalizers_are_bypassed(trained):
    passed = {kind: trained[kind].backend._without_normalizer is not None for kind in KINDS}
    assert passed == {"bpe": True, "unigram": False, "wordpiece": True, "word": True, "char": True}
    for change in ("lowercase", "strip_accents"):
        settings = TokenizerSettings(kind="wordpiece", vocabulary=200, **{change: True})
        assert train_tokenizer(TEXTS, settings).backend._without_normalizer is None


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_deterministic(kind, tmp_path):
    contents = set()
    for attempt in range(3):
        path = tmp_path / f"{attempt}.json"
        train_tokenizer(iter(TEXTS), TokenizerSettings(kind, 500, min_frequency=1)).save(path)
        contents.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(contents) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["L'été est là. 😀 Кошка 猫!", "  the cat\n sat", "cafe\u0301 noir"])
def test_spans_point_into_the_text(trained, kind, text):
    tokenizer = trained[kind]
    spans = tokenizer.offsets(text)
    assert len(spans) == len(tokenizer.encode(text))
    assert all(0 <= begin <= end <= len(text) for begin, end in spans)
    assert [begin for begin, _ in spans] == sorted(begin for begin, _ in spans)
    covered = {position for begin, end in spans for position in range(begin, end)}
    # for a letter of two code points the library gives the first
    assert {i for i, c in enumerate(text) if not c.isspace() and not unicodedata.combining(c)} <= covered


def test_tokens_of_one_character_share_its_span(trained):
    assert trained["bpe"].offsets("a😀b") == [(0, 1), (1, 2), (1, 2), (1, 2), (1, 2), (2, 3)]


def test_lowercase_and_strip_accents():
    plain = train_tokenizer(TEXTS, TokenizerSettings("word", 200, min_frequency=1))
    folded = train_tokenizer(TEXTS, TokenizerSettings("word", 200, min_frequency=1, lowercase=True, strip_accents=True))
    assert plain.tokenize("été L") == ["été", "L"]
    assert folded.tokenize("ÉTÉ L") == ["ete", "l"]
    assert plain.fingerprint != folded.fingerprint
    for kind in ("bpe", "unigram"):
        folded = train_tokenizer(TEXTS, TokenizerSettings(kind, 500, lowercase=True, strip_accents=True))
        assert folded.decode(folded.encode("L'ÉTÉ")) == "l'ete"


def test_the_vocabulary_is_a_maximum(trained):
    for kind in KINDS:
        small = train_tokenizer(TEXTS, TokenizerSettings(kind, 5000, min_frequency=1))
        assert trained[kind].vocabulary <= {"unigram": 600, "word": 200, "char": 300}.get(kind, 400)
        assert trained[kind].vocabulary <= small.vocabulary < 5000


@pytest.mark.parametrize("kind", [*KINDS, "sentencepiece"])
def test_a_long_text_has_the_same_tokens_in_parts(trained, model_file, kind, monkeypatch):
    monkeypatch.setattr("headstock.data.tokenizer.LONG_TEXT", 1 << 14)
    tokenizer = open_tokenizer(model_file) if kind == "sentencepiece" else trained[kind]
    text = " ".join([*TEXTS, "  two  spaces ", *HARD[:2], "L'été"] * 30)
    text = text.replace("…", ".")  # SentencePiece has two tokenizations of it with the same probability
    spans = tokenizer.backend.spans(text)
    assert (tokenizer.all_special_ids - {tokenizer.unk}).isdisjoint(number for number, _, _ in spans)
    assert len(list(tokenizer.split_long_text(text))) > 1
    assert tokenizer.encode_batch(["x", text, "x"])[1] == [number for number, _, _ in spans]
    for (begin, end), (_, *span) in zip(tokenizer.offsets(text), spans, strict=True):
        token = text[slice(*span)].lstrip()
        assert text[begin:end].lstrip() == token or not token  # the space where a text is split has no span


def test_a_long_text_without_spaces_is_split(trained, monkeypatch):
    monkeypatch.setattr("headstock.data.tokenizer.LONG_TEXT", 1 << 14)
    text = "ab" * (1 << 14)
    assert trained["bpe"].decode(trained["bpe"].encode(text)) == text
    assert max(len(part) for part, _ in trained["bpe"].split_long_text(text)) <= 1 << 14


def test_training_on_one_long_line_equals_training_on_its_parts(monkeypatch):
    monkeypatch.setattr("headstock.data.tokenizer_training.LONG_TEXT", 1 << 14)
    lines = [f" word{i % 300} and  other{i % 200}, again" for i in range(2000)]
    for kind in ("bpe", "wordpiece", "word", "char"):
        by_line, at_once = (
            train_tokenizer(texts, TokenizerSettings(kind, 1000)) for texts in (lines, ["".join(lines)])
        )
        assert by_line.fingerprint == at_once.fingerprint, kind


def test_training_reads_a_stream_once():
    def stream():
        yield from TEXTS
        read.append(True)

    read: list[bool] = []
    train_tokenizer(stream(), TokenizerSettings("bpe", 300))
    assert read == [True]


# Imported tokenizers


def save_imported(path: Path, model, special: list[str], pre_tokenizer=None) -> Path:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    return path


def test_bert_special_tokens_are_found_and_eos_is_added(tmp_path):
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat"]
    model = models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    bert = open_tokenizer(save_imported(tmp_path / "tokenizer.json", model, names[:5]))
    assert (bert.pad, bert.unk, bert.cls, bert.sep, bert.mask) == (0, 1, 2, 3, 4)
    assert (bert.bos, bert.eos, bert.vocabulary) == (None, 7, 8)
    assert "no end-of-text token" in bert.notes[0]
    assert "<eos> as 7" in bert.notes[0]
    assert bert.encode("the cat the cat") == [5, 6, 5, 6], "its own truncation and padding are off"
    bert.save(tmp_path / "saved.json")
    again = open_tokenizer(tmp_path / "saved.json")
    assert (again.eos, again.notes, again.fingerprint) == (7, (), bert.fingerprint)


def test_gpt2_has_one_token_for_bos_and_eos(tmp_path):
    model = models.BPE({"a": 0, "b": 1, "<|endoftext|>": 2}, [])
    gpt = open_tokenizer(save_imported(tmp_path / "tokenizer.json", model, ["<|endoftext|>"]))
    assert (gpt.bos, gpt.eos, gpt.pad, gpt.mask, gpt.vocabulary) == (2, 2, None, None, 3)


def test_imported_unigram_never_produces_special_tokens(tmp_path):
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "▁", "a", "b", "<", "s", ">", "/"]
    model = models.Unigram([(name, 0.0 if i < 5 else -float(i)) for i, name in enumerate(names)], 3)
    path = save_imported(tmp_path / "tokenizer.json", model, names[:5], pre_tokenizers.Metaspace())
    library = tokenizers.Tokenizer.from_file(str(path))
    library.encode_special_tokens = True
    assert 0 in library.encode("a<s>b").ids, "the library's own switch does not help here"
    roberta = open_tokenizer(path)
    assert (roberta.bos, roberta.eos, roberta.cls, roberta.sep, roberta.mask) == (0, 2, 0, 2, 4)
    assert "".join(roberta.tokenize("a<s>b")).replace("▁", "") == "a<s>b"
    text = "a<s>b</s>"
    placed = zip(roberta.tokenize(text), roberta.offsets(text), strict=True)
    assert [text[begin:end] for piece, (begin, end) in placed if piece != "▁"] == list(text)
    assert not set(roberta.encode("</s><mask><pad>")) & {0, 1, 2, 4}


def test_a_sentencepiece_model_is_used_exactly(model_file, tmp_path):
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    ours = open_tokenizer(model_file)
    size = theirs.get_piece_size()
    assert ours.encode_batch(TEXTS + HARD) == theirs.encode(TEXTS + HARD)
    assert (ours.unk, ours.bos, ours.eos) == (0, 1, 2)
    assert (ours.pad, ours.cls, ours.sep, ours.mask) == (size, size + 1, size + 2, size + 3)
    assert "<pad>" in ours.notes[0]
    assert ours.vocabulary == size + 4
    assert ours.decode([ours.bos, *ours.encode(TEXTS[0]), ours.eos, ours.mask]) == theirs.decode(
        theirs.encode(TEXTS[0])
    )
    ours.save(tmp_path / "tokenizer.json")
    again = open_tokenizer(tmp_path)
    assert again.encode_batch(TEXTS + HARD) == theirs.encode(TEXTS + HARD)
    assert (again.fingerprint, again.mask, again.kind) == (ours.fingerprint, ours.mask, "sentencepiece")


def test_sentencepiece_spans_are_characters(model_file):
    text = "L'été — là 猫 cat"
    tokenizer = open_tokenizer(model_file)
    spans = tokenizer.offsets(text)
    assert len(spans) == len(tokenizer.encode(text))
    assert "".join(text[begin:end] for begin, end in spans) == text


def test_lab_vocabulary_and_model(model_file, tmp_path):
    lab = open_tokenizer(lab_folder(tmp_path, model_file))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    text = "L'été, c'est là"
    assert lab.vocabulary == 4 + theirs.get_piece_size() - 3
    assert (lab.bos, lab.pad, lab.eos, lab.unk, lab.cls, lab.mask) == (0, 1, 2, 3, None, None)
    assert lab.id_to_token(3) == "<oov>"
    assert lab.encode(text) == [i + 1 for i in theirs.encode(text)], "the model has three special pieces, the lab four"
    pieces = " ".join(theirs.encode(text, out_type=str))
    assert "▁" in pieces
    assert lab.encode(pieces) == lab.encode(text)
    assert lab.decode(lab.encode(pieces)) == text
    assert [pieces[begin:end] for begin, end in lab.offsets(pieces)] == pieces.split()
    assert lab.encode("▁nosuchpiece <sos> <eos>") == [3, 3, 3]
    lab.save(tmp_path / "run" / "tokenizer.json")
    again = open_tokenizer(tmp_path / "run")
    assert (again.kind, again.fingerprint) == ("lab", lab.fingerprint)
    assert again.encode_batch([pieces, text]) == lab.encode_batch([pieces, text])


def test_pieces_outside_the_lab_vocabulary_are_unk(model_file, tmp_path):
    shorter = open_tokenizer(lab_folder(tmp_path, model_file, leave_out=20))
    last = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    piece = last.id_to_piece(last.get_piece_size() - 1)
    assert shorter.token_to_id(piece) is None
    assert shorter.encode(f"▁ {piece}")[-1] == shorter.unk


def test_a_vocabulary_without_a_model_accepts_only_pieces(tmp_path):
    (tmp_path / "dict.txt").write_text("▁le 3\n▁chat 1\n", encoding="utf-8")
    lab = open_tokenizer(tmp_path / "dict.txt")
    assert lab.encode("▁le ▁chat") == [4, 5]
    assert lab.decode([4, 5]) == "le chat"
    with pytest.raises(UserError, match=r"\.model"):
        lab.encode("le chat")


# Statistics


def test_tokenizer_statistics(trained):
    about = tokenizer_statistics(trained["word"], ["the cat", "the zebra"], "the cat")
    assert about["tokens"] == 4
    assert about["tokens_per_word"] == 1
    assert about["unknown_rate"] == 0.25
    assert about["bytes_per_token"] == 16 / 4
    assert about["sample"] == ["the", "cat"]
    assert tokenizer_statistics(trained["bpe"], [], "é")["bytes_per_token"] is None


# Errors


def test_mistakes_in_settings():
    with pytest.raises(ConfigError, match=r"vocabulary: 100 is too small .* at least 263"):
        TokenizerSettings("bpe", 100)
    with pytest.raises(ConfigError, match="min_frequency"):
        TokenizerSettings("word", 100, min_frequency=0)
    with pytest.raises(UserError, match=r"30 is too small for a wordpiece tokenizer, which needs at least \d+"):
        train_tokenizer(TEXTS, TokenizerSettings("wordpiece", 30))
    with pytest.raises(UserError, match=r"270 is too small for a unigram tokenizer, .* at least (\d+)") as error:
        train_tokenizer(TEXTS, TokenizerSettings("unigram", 270))
    least = int(str(error.value).split("at least ")[1].split()[0])
    assert train_tokenizer(TEXTS, TokenizerSettings("unigram", least)).vocabulary == least


@pytest.mark.parametrize("kind", KINDS)
def test_training_without_text_is_refused(kind):
    for nothing in ([], ["", "  \n"]):
        with pytest.raises(UserError, match="no text to train a tokenizer on"):
            train_tokenizer(nothing, TokenizerSettings(kind))


def test_half_surrogate_pairs_are_reported(trained, model_file):
    for tokenizer in (trained["bpe"], open_tokenizer(model_file)):
        with pytest.raises(UserError, match="character 3 is half"):
            tokenizer.encode("ab\udce9")
        with pytest.raises(UserError, match="half of"):
            tokenizer.offsets("ab\udce9")


def test_invalid_tokenizer_files_are_refused(tmp_path, model_file):
    def refuse(name: str, content: bytes | None, match: str):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=match) as error:
            open_tokenizer(tmp_path / name)
        assert "\n" not in str(error.value)

    refuse("tokenizer.json", b"{ not json", r"tokenizer\.json: invalid JSON")
    refuse("tokeniser.json", None, r"no such tokenizer file; did you mean 'tokenizer\.json'")
    refuse("list.json", b"[1]", "not a tokenizer")
    refuse("config.json", b'{"width": 4}', "the JSON has no `model`")
    refuse("odd.json", b'{"model": {"type": "BPE", "vocab": 3}}', "not a tokenizer")
    refuse("binary.json", b"\xff\xfe\x00", "cannot be read")
    refuse("damaged.model", model_file.read_bytes()[:500], "damaged")
    refuse("empty.model", b"", "damaged")
    refuse("dict.txt", "▁le 3\n▁chat\n".encode(), r"dict\.txt:2: expected `piece count`")
    refuse("dict.txt", "▁le 3\n\n▁a 1\n".encode(), r"dict\.txt:2: ")
    refuse("ours.json", json.dumps({"format": "headstock-sentencepiece-1"}).encode(), "damaged tokenizer")
    (tmp_path / "empty").mkdir()
    refuse("empty", None, "expected tokenizer.json, dict.txt or one .model")


STRIP = {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}
SPLIT = {"type": "Split", "pattern": {"Regex": "(a|a)*$"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
        ("pre_tokenizer", SPLIT),
        ("decoder", STRIP),
        ("model", {"type": "WordLevel", "vocab": {"a": 1}, "unk_token": "<unk>"}),
        ("model", {"type": "WordLevel", "vocab": {"a": 2**31}, "unk_token": "a"}),
        ("model", {"type": "BPE", "vocab": {"é": 0, "x": 1}, "merges": [["x", "é"]], "continuing_subword_prefix": "y"}),
        ("added_tokens", 3),
    ],
)
def test_library_failures_are_reported(trained, tmp_path, part, value):
    """Some of these panic inside the library; others would crash the process or exhaust its memory."""
    (tmp_path / "t.json").write_text(json.dumps(json.loads(trained["bpe"].backend.to_json()) | {part: value}))

    def use() -> None:
        opened = open_tokenizer(tmp_path / "t.json")
        opened.decode(opened.encode("a" * 50 + " b"))

    with pytest.raises(UserError):
        use()


def test_deeply_nested_json_is_refused(tmp_path):
    (tmp_path / "t.json").write_text('{"model": ' + "[" * 100_000)
    with pytest.raises(UserError, match=r"t\.json: invalid JSON"):
        open_tokenizer(tmp_path / "t.json")


def test_a_huge_vocabulary_is_refused():
    with pytest.raises(ConfigError, match=r"vocabulary: must be at most 4,194,304, not 1,000,000,000"):
        TokenizerSettings(vocabulary=10**9)


def test_two_models_beside_a_vocabulary_are_ambiguous(tmp_path, model_file):
    lab_folder(tmp_path, model_file)
    (tmp_path / "other.model").write_bytes(model_file.read_bytes())
    with pytest.raises(UserError, match=r"found french\.model, other\.model"):
        open_tokenizer(tmp_path)
