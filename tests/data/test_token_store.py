"""No validation text is trained on, no token is lost, and any window reads back exactly."""

import json
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headstock.data import token_store
from headstock.data.corpus import read_corpus
from headstock.data.token_shards import UnknownTokens
from headstock.data.token_store import build_split_stores, open_split_stores
from headstock.data.tokenizer import train_tokenizer
from headstock.data.tokenizer_training import TokenizerSettings
from headstock.errors import UserError, WorkError

DRAW = random.Random(3)
WORDS = ["".join(DRAW.choices("abcdefghijéàç", k=DRAW.randint(1, 7))) for _ in range(300)]
LINES = [f"{i} " + " ".join(DRAW.choices(WORDS, k=DRAW.randint(1, 30))) for i in range(400)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(LINES, TokenizerSettings(kind="bpe", vocabulary=500))


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def texts(store, tokenizer) -> list[str]:
    return [tokenizer.decode(store.document(i)) for i in range(store.documents)]


def build(tmp_path, lines, tokenizer, **settings):
    corpus = read_corpus(write(tmp_path / "corpus.txt", lines), documents="line")
    return build_split_stores(corpus, tokenizer, cache=tmp_path / "cache", **settings)


def test_every_document_is_in_exactly_one_split_and_reads_back(tmp_path, tokenizer):
    stores = build(tmp_path, LINES, tokenizer, valid_fraction=0.1)
    train, valid = texts(stores.train, tokenizer), texts(stores.valid, tokenizer)
    assert (len(train), len(valid)) == (360, 40)
    assert sorted(train + valid) == sorted(LINES)
    assert [line for line in LINES if line in set(train)] == train  # in the order of the corpus
    assert stores.train.bytes + stores.valid.bytes == sum(len(line.encode()) for line in LINES)


def test_split_depends_on_content_not_on_order(tmp_path, tokenizer):
    shuffled = random.Random(1).sample(LINES, len(LINES))
    held_out = set(texts(build(tmp_path, LINES, tokenizer).valid, tokenizer))
    assert set(texts(build(tmp_path, shuffled, tokenizer).valid, tokenizer)) == held_out
    other = set(texts(build(tmp_path, LINES, tokenizer, seed=1).valid, tokenizer))
    assert len(other) == len(held_out) == 20
    assert len(other & held_out) < 10


def test_duplicates_are_dropped_and_counted(tmp_path, tokenizer):
    twice = LINES[:50] + LINES
    stores = build(tmp_path, twice, tokenizer, valid_fraction=0.2)
    assert sorted(texts(stores.train, tokenizer) + texts(stores.valid, tokenizer)) == sorted(LINES)
    assert (stores.summary["documents"], stores.summary["duplicates"]) == (450, 50)
    assert stores.valid.documents == 80


def test_kept_duplicates_share_a_split(tmp_path, tokenizer):
    stores = build(tmp_path, LINES * 3, tokenizer, valid_fraction=0.2, deduplicate=False)
    train, valid = texts(stores.train, tokenizer), texts(stores.valid, tokenizer)
    assert sorted(train + valid) == sorted(LINES * 3)
    assert not set(train) & set(valid)
    assert len(valid) == 240


def test_a_validation_corpus_is_complete_and_not_trained_on(tmp_path, tokenizer):
    held_out = [*LINES[:30], "something else", "something else"]
    valid = read_corpus(write(tmp_path / "valid.txt", held_out), documents="line")
    stores = build(tmp_path, [*LINES, LINES[100]], tokenizer, valid=valid)
    assert texts(stores.valid, tokenizer) == held_out
    assert texts(stores.train, tokenizer) == LINES[30:]
    assert (stores.summary["in_validation"], stores.summary["duplicates"]) == (30, 1)
    assert stores.valid.location(3) == f"{tmp_path}/valid.txt:4"
    assert stores.train.location(0) == f"{tmp_path}/corpus.txt:31"
    with pytest.raises(UserError, match="every training document is also in the validation corpus"):
        build(tmp_path, LINES[:30], tokenizer, valid=valid)


@pytest.mark.parametrize("shard_tokens", [1 << 26, 300, 40, 7])
def test_any_window_reads_back_exactly_across_shards(tmp_path, tokenizer, shard_tokens):
    store = build(tmp_path, LINES[:60], tokenizer, shard_tokens=shard_tokens).train
    documents = texts(store, tokenizer)
    stream = np.concatenate([[*ids, tokenizer.eos] for ids in tokenizer.encode_batch(documents)])
    assert store.tokens == len(stream) == store.lengths.sum()
    for width in (1, 5, 64):
        starts = np.arange(-3, store.tokens + 2)
        padded = np.concatenate([np.full(3, tokenizer.eos), stream, np.full(width + 2, tokenizer.eos)])
        rows = store.windows(np.random.default_rng(0).permutation(starts), width)
        expected = np.lib.stride_tricks.sliding_window_view(padded, width)[: len(starts)]
        assert (rows == np.random.default_rng(0).permutation(expected)).all()
    assert store.windows(np.array([], dtype=int), 4).shape == (0, 4)
    assert store.windows(np.array([-50, store.tokens]), 4).tolist() == [[tokenizer.eos] * 4] * 2


def test_a_document_stays_in_one_shard_if_it_fits_one(tmp_path, tokenizer):
    store = build(tmp_path, LINES[:100], tokenizer, shard_tokens=40).train
    sizes = [path.stat().st_size // 2 for path in sorted(store.folder.glob("train-0*.bin"))]
    assert max(sizes) <= 40
    assert sum(sizes) == store.tokens
    shard_of = np.repeat(np.arange(len(sizes)), sizes)
    first, last = shard_of[store.offsets[:-1]], shard_of[store.offsets[1:] - 1]
    small = store.lengths <= 40
    assert 0 < small.sum() < len(small)
    assert (first == last)[small].all()
    shard_starts = np.cumsum([0, *sizes[:-1]])
    assert np.isin(store.offsets[:-1][~small], shard_starts).all()  # a longer document begins a new shard


def test_positions_and_locations(tmp_path, tokenizer):
    store = build(tmp_path, LINES, tokenizer).train
    for i in (0, 1, 200, store.documents - 1):
        begin, end = store.offsets[i], store.offsets[i + 1]
        assert store.document_at(begin) == store.document_at(end - 1) == i
        assert store.windows(np.array([end - 1]), 1)[0, 0] == tokenizer.eos
        line = int(store.location(i).rpartition(":")[2])
        assert tokenizer.decode(store.document(i)) == LINES[line - 1]
    with pytest.raises(IndexError):
        store.document_at(store.tokens)
    with pytest.raises(IndexError):
        store.document(-1)


def test_a_store_is_reused_until_its_inputs_change(tmp_path, tokenizer, caplog):
    caplog.set_level("INFO", logger="headstock")
    first = build(tmp_path, LINES, tokenizer)
    assert "training: 380 documents" in caplog.messages[-1]
    again = build(tmp_path, LINES, tokenizer)
    assert again.reused
    assert caplog.messages[-1].startswith("reusing")
    assert again.folder == first.folder
    (tmp_path / "moved").mkdir()
    moved = read_corpus(write(tmp_path / "moved" / "renamed.txt", LINES), documents="line")
    elsewhere = build_split_stores(moved, tokenizer, cache=tmp_path / "cache")
    assert elsewhere.reused
    assert elsewhere.train.location(0).startswith(f"{tmp_path}/moved/renamed.txt:")
    assert not build(tmp_path, LINES, tokenizer, seed=5).reused
    assert not build(tmp_path, LINES[1:], tokenizer).reused
    other = train_tokenizer(LINES, TokenizerSettings(kind="bpe", vocabulary=400))
    assert not build(tmp_path, LINES, other).reused


def test_a_store_is_pickled_as_its_path(tmp_path, tokenizer):
    stores = build(tmp_path, LINES, tokenizer)
    opened = open_split_stores(stores.folder)
    assert texts(opened.valid, tokenizer) == texts(stores.valid, tokenizer)
    assert opened.summary == stores.summary
    sent = pickle.dumps(stores.train)
    assert len(sent) < 1000
    assert texts(pickle.loads(sent), tokenizer) == texts(stores.train, tokenizer)
    with pytest.raises(UserError, match="not a token store"):
        open_split_stores(tmp_path)


def test_a_damaged_store_is_refused_and_rebuilt(tmp_path, tokenizer, caplog):
    caplog.set_level("INFO", logger="headstock")
    folder = build(tmp_path, LINES, tokenizer).folder
    shard = folder / "train-00000.bin"
    data = shard.read_bytes()
    shard.write_bytes(data[:-2])
    with pytest.raises(UserError, match=f"{shard.name} has {len(data) - 2} bytes, expected {len(data)}"):
        open_split_stores(folder)
    caplog.clear()
    assert not build(tmp_path, LINES, tokenizer).reused
    assert "rebuilding" in caplog.messages[0]
    assert shard.read_bytes() == data


def test_a_flipped_bit_in_any_file_is_detected(tmp_path, tokenizer):
    stores = build(tmp_path, LINES, tokenizer, shard_tokens=4000)
    folder = stores.folder
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(before) >= 8  # shards, offsets, locations and the index
    for name, data in before.items():
        for position in (0, len(data) // 2, len(data) - 3):
            damaged = bytearray(data)
            damaged[position] ^= 1 << (position % 7)
            (folder / name).write_bytes(damaged)
            with pytest.raises(UserError, match=name):
                open_split_stores(folder)
        (folder / name).write_bytes(data)
    assert build(tmp_path, LINES, tokenizer, shard_tokens=4000).reused
    (folder / "train-00001.bin").write_bytes(before["train-00001.bin"][:-1] + b"\xff")
    assert not build(tmp_path, LINES, tokenizer, shard_tokens=4000).reused
    assert {path.name: path.read_bytes() for path in folder.glob("*.bin")} == {
        name: data for name, data in before.items() if name.endswith(".bin")
    }


def test_a_store_of_an_earlier_version_opens_but_is_not_reused(tmp_path, tokenizer):
    folder = build(tmp_path, LINES, tokenizer).folder
    index = json.loads((folder / "index.json").read_text())
    old = {name: value for name, value in index.items() if name not in ("files", "digest")}
    (folder / "index.json").write_text(json.dumps(old))
    assert open_split_stores(folder).train.tokens == index["train"]["tokens"]
    assert not build(tmp_path, LINES, tokenizer).reused
    assert build(tmp_path, LINES, tokenizer).reused


def test_validation_counts_the_bytes_of_unknown_tokens(tmp_path, tokenizer):
    word_tokenizer = train_tokenizer(LINES[:20], TokenizerSettings(kind="word", vocabulary=60))
    stores = build(tmp_path, LINES, word_tokenizer, valid_fraction=0.1)
    data = build(tmp_path, LINES, tokenizer, valid_fraction=0.1)
    held_out = texts(data.valid, tokenizer)  # the split depends on the text, not on the tokenizer
    unknown_words = [word for line in held_out for word in line.split() if word_tokenizer.token_to_id(word) is None]
    assert stores.valid.unknown == UnknownTokens(len(unknown_words), sum(len(word.encode()) for word in unknown_words))
    assert stores.valid.unknown.bits == 8 * (stores.valid.unknown.bytes + len(unknown_words))
    assert data.valid.unknown == UnknownTokens(), "byte-level tokens have no unk"


def test_a_store_without_unknown_counts_is_rebuilt(tmp_path):
    word_tokenizer = train_tokenizer(LINES[:20], TokenizerSettings(kind="word", vocabulary=60))
    stores = build(tmp_path, LINES, word_tokenizer)
    index = json.loads((stores.folder / "index.json").read_text(encoding="utf-8"))
    del index["valid"]["unknown"]
    (stores.folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
    again = build(tmp_path, LINES, word_tokenizer)
    assert (again.folder, again.reused, again.valid.unknown) == (stores.folder, False, stores.valid.unknown)
    assert build(tmp_path, LINES, word_tokenizer).reused


def test_a_build_that_fails_leaves_nothing(tmp_path, tokenizer):
    corpus = write(tmp_path / "corpus.txt", LINES)
    corpus.write_bytes(corpus.read_bytes() * 400 + b"\xff\n")  # invalid beyond the part that is checked first
    with pytest.raises(UserError, match="not UTF-8"):
        build_split_stores(read_corpus(corpus), tokenizer, cache=tmp_path / "cache")
    assert list((tmp_path / "cache" / "stores").iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits exist on Unix only")
def test_a_full_disk_is_an_error_in_one_line(tmp_path, tokenizer):
    tokenizer.save(tmp_path / "tokenizer.json")
    write(tmp_path / "corpus.txt", LINES)
    program = """
import resource, signal, sys
from pathlib import Path
from headstock.errors import WorkError
from headstock.data import token_store
from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores
from headstock.data.tokenizer import open_tokenizer
folder = Path(sys.argv[1])
tokenizer, corpus = open_tokenizer(folder / "tokenizer.json"), read_corpus(folder / "corpus.txt")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    build_split_stores(corpus, tokenizer, cache=folder / "cache")
except WorkError as wrong:
    print(wrong)
"""
    process = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "the token store could not be written (File too large)" in process.stdout
    assert list((tmp_path / "cache" / "stores").iterdir()) == []


def test_a_single_long_document_is_split_at_a_line(tmp_path, tokenizer, caplog):
    caplog.set_level("INFO", logger="headstock")
    corpus = read_corpus(write(tmp_path / "book.txt", LINES), documents="file")
    stores = build_split_stores(corpus, tokenizer, valid_fraction=0.1, cache=tmp_path / "cache")
    (train,), (valid,) = texts(stores.train, tokenizer), texts(stores.valid, tokenizer)
    assert f"{train}\n{valid}" == "\n".join(LINES)
    assert 0.05 < len(valid) / len(train) < 0.25
    assert any("single document" in message for message in caplog.messages)
    line = int(stores.valid.location(0).rpartition(":")[2])
    assert valid.startswith(LINES[line - 1])
    short = read_corpus(write(tmp_path / "note.txt", ["only this"]))
    with pytest.raises(UserError, match="too small to split"):
        build_split_stores(short, tokenizer, cache=tmp_path / "cache")


def test_two_documents_are_enough(tmp_path, tokenizer):
    stores = build(tmp_path, ["un", "deux"], tokenizer, valid_fraction=0.9)
    assert (stores.train.documents, stores.valid.documents) == (1, 1)


def test_documents_without_tokens_are_dropped_and_counted(tmp_path):
    words = train_tokenizer(["a b c"], TokenizerSettings(kind="bpe", vocabulary=300))
    held_out = read_corpus(write(tmp_path / "valid.txt", ["a"]), documents="line")
    real = words.encode_batch
    words.encode_batch = lambda batch: [
        [] if text == "b" else ids for text, ids in zip(batch, real(batch), strict=True)
    ]
    stores = build(tmp_path, ["b", "c", "a b"], words, valid=held_out)
    assert texts(stores.train, words) == ["c", "a b"]
    assert [stores.train.location(i)[-1] for i in range(2)] == ["2", "3"]
    assert stores.summary["empty"] == 1


def test_large_vocabularies_use_32_bit_ids(tmp_path, tokenizer):
    wide = train_tokenizer(LINES, TokenizerSettings(kind="bpe", vocabulary=500))
    wide.vocabulary = 70_000
    end = wide.eos = 69_999
    store = build(tmp_path, LINES, wide).train
    assert store.dtype.itemsize == 4
    assert store.windows(store.offsets[1:2] - 1, 1).tolist() == [[end]]
    assert build(tmp_path, LINES, tokenizer).train.dtype.itemsize == 2


def test_invalid_settings(tmp_path, tokenizer):
    with pytest.raises(UserError, match="between 0 and 1"):
        build(tmp_path, LINES, tokenizer, valid_fraction=5)
    without = train_tokenizer(LINES, TokenizerSettings(kind="bpe", vocabulary=500))
    without.eos = None
    with pytest.raises(UserError, match="no eos"):
        build(tmp_path, LINES, without)


def test_a_corpus_that_changes_between_the_two_passes_is_an_error(tmp_path, tokenizer, monkeypatch):
    make_plans = token_store.make_plans

    def change_after_planning(*arguments, **options):
        plans = make_plans(*arguments, **options)
        write(tmp_path / "corpus.txt", LINES[:10])
        return plans

    monkeypatch.setattr(token_store, "make_plans", change_after_planning)
    with pytest.raises(WorkError, match="changed while it was being read"):
        build(tmp_path, LINES, tokenizer)
