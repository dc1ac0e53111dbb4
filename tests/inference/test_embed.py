"""Texts as vectors: the same as one text alone gives, whatever its company."""

import itertools
import json

import numpy as np
import pytest
import torch

import headstock
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.data.windowing import SpecialTokens, windows
from headstock.errors import UserError
from headstock.inference.embed import align_tokens, embed, layer_vectors, resolve_pooling, word_vectors
from headstock.inference.output_files import write_vectors
from headstock.model.batch import Batch
from headstock.model.heads import ClassificationHead
from headstock.model.layer_features import ScalarMix
from tests.model.small import small_backbone, small_model

TEXTS = [[5, 6, 7, 5], [9], [], [4, 8, 12, 3, 3, 10, 11], [6, 6, 9]]
LONG = [3 + (7 * i + i // 5) % 10 for i in range(41)]
MARKS = SpecialTokens((1,), (), 0)


@torch.inference_mode()
def vectors(model, row, layer=-1):
    """(T, D) of one row by itself, as a layer's vectors leave the backbone."""
    return model.backbone.output_norm(model(Batch(torch.tensor([row])), keep_layers=True).layers[layer][0]).numpy()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pool", ["mean", "last", "cls"])
def test_pooled_vectors_are_those_of_each_text_alone(causal, pool):
    model = small_model(causal=causal)
    found = embed(model, TEXTS, special=MARKS, length=16, layers="last", pool=pool)
    for text, vector in zip(TEXTS, found, strict=True):
        alone = vectors(model, [1, *text])
        wanted = {"mean": alone.mean(0), "last": alone[-1], "cls": alone[0]}[pool]
        np.testing.assert_allclose(vector, wanted, atol=1e-5)


@pytest.mark.parametrize(("causal", "pool"), [(True, "last"), (False, "last"), (False, "cls")])
def test_what_nobody_reads_changes_nothing(causal, pool):
    model, given = small_model(causal=causal, positions="rotary"), [*TEXTS, LONG]  # a long one is read in rows
    less = embed(model, given, special=MARKS, length=16, layers="last", pool=pool)
    hook = model.backbone.blocks[-1].register_forward_hook(lambda *_: None)  # who listens is told of all places
    whole = embed(model, given, special=MARKS, length=16, layers="last", pool=pool)
    hook.remove()
    np.testing.assert_allclose(less, whole, rtol=1e-6, atol=1e-6)
    by_number = embed(model, given, special=MARKS, length=16, layers="2", pool=pool)  # of layers that are kept
    np.testing.assert_allclose(less, by_number, rtol=1e-6, atol=1e-6)
    shifted = embed(model, [text[:-1] for text in given], special=MARKS, length=16, layers="last", pool=pool)
    assert np.abs(np.array(less[3]) - shifted[3]).max() > 1e-3


@pytest.mark.parametrize(
    ("layers", "width"), [("last", 8), ("0", 8), ("2", 8), ("sum4", 8), ("concat4", 32), ("mix", 8)]
)
def test_layers_have_the_sizes_and_values_they_should(layers, width):
    model = small_model(depth=5, causal=False)
    every = [vectors(model, [1, *TEXTS[3]], layer)[1:] for layer in range(6)]
    wanted = {
        "last": every[5],
        "0": every[0],
        "2": every[2],
        "sum4": sum(every[2:]),
        "concat4": np.concatenate(every[2:], -1),
        "mix": np.mean(every, 0),
    }[layers]
    found = embed(model, TEXTS, special=MARKS, length=16, layers=layers, pool="none")
    assert [one.shape for one in found] == [(len(text), width) for text in TEXTS]
    np.testing.assert_allclose(found[3], wanted, atol=1e-5)
    assert embed(model, TEXTS, special=MARKS, length=16, layers=layers, pool="mean")[0].shape == (width,)


@pytest.mark.parametrize("causal", [True, False])
def test_a_long_text_is_read_in_overlapping_rows(causal):
    model = small_model(causal=causal)
    (found,) = embed(model, [LONG], special=MARKS, length=16, layers="last", pool="none")
    cut = windows(len(LONG), 15, centered=not causal)
    rows = [vectors(model, [1, *LONG[part.start : part.end]]) for part in cut]
    for part, row in zip(cut, rows, strict=True):
        for place in range(part.keep_start, part.keep_end):
            np.testing.assert_allclose(found[place], row[1 + place - part.start], atol=1e-5)
    (pooled,) = embed(model, [LONG], special=MARKS, length=16, layers="last", pool="mean")
    np.testing.assert_allclose(pooled, np.mean([row.mean(0) for row in rows], 0), atol=1e-5)


def test_a_mix_that_was_learned_is_used():
    backbone = small_backbone(depth=3, causal=False)
    head = ClassificationHead(8, 2, mixed=4)
    assert isinstance(head.mix, ScalarMix)
    with torch.no_grad():
        head.mix.weights[1] = 60.0
    from headstock.model.model import Model

    model, batch = Model(backbone, {"label": head}).eval(), Batch(torch.tensor([[1, 5, 6]]))
    np.testing.assert_allclose(layer_vectors(model, batch, "mix")[0].numpy(), vectors(model, [1, 5, 6], 1), atol=1e-5)
    plain = Model(backbone, {}).eval()
    assert not torch.allclose(layer_vectors(plain, batch, "mix"), layer_vectors(model, batch, "mix"), atol=1e-3)


def test_how_texts_can_be_pooled():
    causal, both = small_backbone(causal=True), small_backbone(causal=False)
    assert (resolve_pooling(None, causal), resolve_pooling(None, both)) == ("last", "mean")
    assert resolve_pooling("cls", both) == "cls"
    with pytest.raises(UserError, match="use last or mean"):
        resolve_pooling("cls", causal)
    with pytest.raises(UserError, match="must be one of none, mean, cls, last, not 'maen'; did you mean 'mean'"):
        resolve_pooling("maen", both)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word", "char"])
def test_every_token_knows_its_word_and_its_characters(kind):
    text = "Anne's café isn't far:  2 well-known streets (really)."
    settings = TokenizerSettings(kind=kind, vocabulary=320, min_frequency=1)
    tokenizer = train_tokenizer([text, "Ben likes le café."] * 9, settings)
    found = align_tokens(tokenizer, text)
    assert len(found.tokens) == len(found.words) == len(found.offsets) == len(tokenizer.encode(text))
    words = ["Anne's", "café", "isn't", "far", ":", "2", "well-known", "streets", "(", "really", ")."]
    for (begin, end), word in zip(found.offsets, found.words, strict=True):
        piece = text[begin:end].strip()
        assert (word is None) == (piece == "")
        assert word is None or piece in words[word]
    grid = np.arange(2.0 * len(found.tokens)).reshape(-1, 2).astype(np.float32)
    whose, means = word_vectors(found, grid)
    assert whose.tokens == [text[slice(*span)] for span in whose.offsets] == words
    assert len(means) == len(words)
    for word, mean in enumerate(means):
        np.testing.assert_allclose(mean, grid[[w == word for w in found.words]].mean(0))


def rows_of(several: bool):
    shapes = [(3, 4), (0, 4), (2, 4)] if several else [(4,)] * 3
    return [
        ({"text": name}, np.full(shape, i + 0.123456789, np.float32))
        for i, (name, shape) in enumerate(zip("abc", shapes, strict=True))
    ]


@pytest.mark.parametrize("several", [True, False])
def test_vectors_on_disk_are_the_vectors(tmp_path, several):
    rows = rows_of(several)
    told = write_vectors(tmp_path / "v.npy", iter(rows))
    array = np.load(tmp_path / "v.npy", allow_pickle=False)
    assert told == {"texts": 3, "shape": list(array.shape)}
    if several:
        whose = [json.loads(line) for line in (tmp_path / "v.tokens.jsonl").read_text().splitlines()]
        assert [row["rows"] for row in whose] == [[0, 3], [3, 3], [3, 5]]
        for (_, vector), row in zip(rows, whose, strict=True):
            np.testing.assert_array_equal(array[slice(*row["rows"])], vector)
    else:
        np.testing.assert_array_equal(array, np.stack([vector for _, vector in rows]))
        assert not (tmp_path / "v.tokens.jsonl").exists()
    assert write_vectors(tmp_path / "v.jsonl", iter(rows)) == told
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    for (_, vector), line in zip(rows, lines, strict=True):
        np.testing.assert_allclose(
            np.array(line["vectors" if several else "vector"]).reshape(vector.shape), vector, atol=1e-6
        )


@pytest.mark.parametrize("suffix", [".npy", ".jsonl"])
def test_what_fails_midway_leaves_nothing(tmp_path, suffix):
    def broken():
        yield from rows_of(True)
        raise UserError("row 4: blank")

    with pytest.raises(UserError):
        write_vectors(tmp_path / f"v{suffix}", broken())
    assert list(tmp_path.iterdir()) == []


def test_any_run_embeds(corpus, tmp_path, tiny):
    headstock.pretrain(corpus, out=tmp_path / "causal", settings=tiny | {"steps": 2})
    headstock.pretrain(corpus, out=tmp_path / "hybrid", objective="hybrid", settings=tiny | {"steps": 2})
    texts = ["Anne sees Paris.", "", "Ben " * 60]
    for name, mark, pool in (("causal", "bos", "last"), ("hybrid", "cls", "mean")):
        model = headstock.load(tmp_path / name)
        found = model.embed(texts)
        assert found.shape == (3, 16)
        np.testing.assert_allclose(model.embed(texts[2])[0], found[2], atol=1e-5)
        row = [getattr(model.tokenizer, mark), *model.tokenizer.encode(texts[0])]
        alone = vectors(model.model, row)
        np.testing.assert_allclose(found[0], alone[-1] if pool == "last" else alone.mean(0), atol=1e-5)
        endless = model.iter_embeddings(itertools.cycle(texts))  # vectors do not wait for the last text
        np.testing.assert_allclose(np.stack(list(itertools.islice(endless, 600))), np.tile(found, (200, 1)), atol=1e-5)
        tokens = model.embed(texts, pool="none")
        assert [len(rows) for rows in tokens] == [len(ids) for ids in model.tokenizer.encode_batch(texts)]
    assert model.embed([]).shape == (0, 16)
    with pytest.raises(UserError, match="this model has 2"):
        model.embed(texts, layers="sum4")
