"""Embeddings of texts, tokens and words, independent of the batch, and the files they are written to."""

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
SPECIAL = SpecialTokens((1,), (), 0)


@torch.inference_mode()
def vectors(model, row, layer=-1):
    """(T, D) of a single row, after the backbone's output norm."""
    return model.backbone.output_norm(model(Batch(torch.tensor([row])), keep_layers=True).layers[layer][0]).numpy()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pool", ["mean", "last", "cls"])
def test_pooled_vectors_are_independent_of_the_batch(causal, pool):
    model = small_model(causal=causal)
    embeddings = embed(model, TEXTS, special=SPECIAL, length=16, layers="last", pool=pool)
    for text, vector in zip(TEXTS, embeddings, strict=True):
        alone = vectors(model, [1, *text])
        expected = {"mean": alone.mean(0), "last": alone[-1], "cls": alone[0]}[pool]
        np.testing.assert_allclose(vector, expected, atol=1e-5)


@pytest.mark.parametrize(("causal", "pool"), [(True, "last"), (False, "last"), (False, "cls")])
def test_computing_only_the_pooled_position_gives_the_same_vectors(causal, pool):
    model, texts = small_model(causal=causal, positions="rotary"), [*TEXTS, LONG]  # the long one in windows
    pooled_only = embed(model, texts, special=SPECIAL, length=16, layers="last", pool=pool)
    hook = model.backbone.blocks[-1].register_forward_hook(
        lambda *_: None
    )  # a hook makes the block compute all positions
    all_positions = embed(model, texts, special=SPECIAL, length=16, layers="last", pool=pool)
    hook.remove()
    np.testing.assert_allclose(pooled_only, all_positions, rtol=1e-6, atol=1e-6)
    by_number = embed(model, texts, special=SPECIAL, length=16, layers="2", pool=pool)  # which keeps all layers
    np.testing.assert_allclose(pooled_only, by_number, rtol=1e-6, atol=1e-6)
    shifted = embed(model, [text[:-1] for text in texts], special=SPECIAL, length=16, layers="last", pool=pool)
    assert np.abs(np.array(pooled_only[3]) - shifted[3]).max() > 1e-3


@pytest.mark.parametrize(
    ("layers", "width"), [("last", 8), ("0", 8), ("2", 8), ("sum4", 8), ("concat4", 32), ("mix", 8)]
)
def test_selected_layers(layers, width):
    model = small_model(depth=5, causal=False)
    layer_values = [vectors(model, [1, *TEXTS[3]], layer)[1:] for layer in range(6)]
    expected = {
        "last": layer_values[5],
        "0": layer_values[0],
        "2": layer_values[2],
        "sum4": sum(layer_values[2:]),
        "concat4": np.concatenate(layer_values[2:], -1),
        "mix": np.mean(layer_values, 0),
    }[layers]
    embeddings = embed(model, TEXTS, special=SPECIAL, length=16, layers=layers, pool="none")
    assert [array.shape for array in embeddings] == [(len(text), width) for text in TEXTS]
    np.testing.assert_allclose(embeddings[3], expected, atol=1e-5)
    assert embed(model, TEXTS, special=SPECIAL, length=16, layers=layers, pool="mean")[0].shape == (width,)


@pytest.mark.parametrize("causal", [True, False])
def test_long_texts_are_read_in_overlapping_windows(causal):
    model = small_model(causal=causal)
    (embedding,) = embed(model, [LONG], special=SPECIAL, length=16, layers="last", pool="none")
    parts = windows(len(LONG), 15, centered=not causal)
    rows = [vectors(model, [1, *LONG[part.start : part.end]]) for part in parts]
    for part, row in zip(parts, rows, strict=True):
        for position in range(part.keep_start, part.keep_end):
            np.testing.assert_allclose(embedding[position], row[1 + position - part.start], atol=1e-5)
    (pooled,) = embed(model, [LONG], special=SPECIAL, length=16, layers="last", pool="mean")
    np.testing.assert_allclose(pooled, np.mean([row.mean(0) for row in rows], 0), atol=1e-5)


def test_a_learned_layer_mix_is_used():
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


def test_default_and_invalid_pooling():
    causal, bidirectional = small_backbone(causal=True), small_backbone(causal=False)
    assert (resolve_pooling(None, causal), resolve_pooling(None, bidirectional)) == ("last", "mean")
    assert resolve_pooling("cls", bidirectional) == "cls"
    with pytest.raises(UserError, match="use last or mean"):
        resolve_pooling("cls", causal)
    with pytest.raises(UserError, match="must be one of none, mean, cls, last, not 'maen'; did you mean 'mean'"):
        resolve_pooling("maen", bidirectional)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word", "char"])
def test_tokens_are_aligned_with_words_and_characters(kind):
    text = "Anne's café isn't far:  2 well-known streets (really)."
    settings = TokenizerSettings(kind=kind, vocabulary=320, min_frequency=1)
    tokenizer = train_tokenizer([text, "Ben likes le café."] * 9, settings)
    aligned = align_tokens(tokenizer, text)
    assert len(aligned.tokens) == len(aligned.words) == len(aligned.offsets) == len(tokenizer.encode(text))
    words = ["Anne's", "café", "isn't", "far", ":", "2", "well-known", "streets", "(", "really", ")."]
    for (begin, end), word in zip(aligned.offsets, aligned.words, strict=True):
        piece = text[begin:end].strip()
        assert (word is None) == (piece == "")
        assert word is None or piece in words[word]
    grid = np.arange(2.0 * len(aligned.tokens)).reshape(-1, 2).astype(np.float32)
    by_word, means = word_vectors(aligned, grid)
    assert by_word.tokens == [text[slice(*span)] for span in by_word.offsets] == words
    assert len(means) == len(words)
    for word, mean in enumerate(means):
        np.testing.assert_allclose(mean, grid[[w == word for w in aligned.words]].mean(0))


def make_rows(per_token: bool):
    shapes = [(3, 4), (0, 4), (2, 4)] if per_token else [(4,)] * 3
    return [
        ({"text": name}, np.full(shape, i + 0.123456789, np.float32))
        for i, (name, shape) in enumerate(zip("abc", shapes, strict=True))
    ]


@pytest.mark.parametrize("per_token", [True, False])
def test_written_vectors_can_be_read_back(tmp_path, per_token):
    rows = make_rows(per_token)
    summary = write_vectors(tmp_path / "v.npy", iter(rows))
    array = np.load(tmp_path / "v.npy", allow_pickle=False)
    assert summary == {"texts": 3, "shape": list(array.shape)}
    if per_token:
        index = [json.loads(line) for line in (tmp_path / "v.tokens.jsonl").read_text().splitlines()]
        assert [row["rows"] for row in index] == [[0, 3], [3, 3], [3, 5]]
        for (_, vector), row in zip(rows, index, strict=True):
            np.testing.assert_array_equal(array[slice(*row["rows"])], vector)
    else:
        np.testing.assert_array_equal(array, np.stack([vector for _, vector in rows]))
        assert not (tmp_path / "v.tokens.jsonl").exists()
    assert write_vectors(tmp_path / "v.jsonl", iter(rows)) == summary
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    for (_, vector), line in zip(rows, lines, strict=True):
        np.testing.assert_allclose(
            np.array(line["vectors" if per_token else "vector"]).reshape(vector.shape), vector, atol=1e-6
        )


@pytest.mark.parametrize("suffix", [".npy", ".jsonl"])
def test_a_failed_write_leaves_no_file(tmp_path, suffix):
    def broken():
        yield from make_rows(True)
        raise UserError("row 4: blank")

    with pytest.raises(UserError):
        write_vectors(tmp_path / f"v{suffix}", broken())
    assert list(tmp_path.iterdir()) == []


def test_runs_embed_texts(corpus, tmp_path, tiny):
    headstock.pretrain(corpus, out=tmp_path / "causal", settings=tiny | {"steps": 2})
    headstock.pretrain(corpus, out=tmp_path / "hybrid", objective="hybrid", settings=tiny | {"steps": 2})
    texts = ["Anne sees Paris.", "", "Ben " * 60]
    for name, first_token, pool in (("causal", "bos", "last"), ("hybrid", "cls", "mean")):
        model = headstock.load(tmp_path / name)
        embeddings = model.embed(texts)
        assert embeddings.shape == (3, 16)
        np.testing.assert_allclose(model.embed(texts[2])[0], embeddings[2], atol=1e-5)
        row = [getattr(model.tokenizer, first_token), *model.tokenizer.encode(texts[0])]
        alone = vectors(model.model, row)
        np.testing.assert_allclose(embeddings[0], alone[-1] if pool == "last" else alone.mean(0), atol=1e-5)
        endless = model.iter_embeddings(itertools.cycle(texts))  # vectors are yielded before the last text is read
        np.testing.assert_allclose(
            np.stack(list(itertools.islice(endless, 600))), np.tile(embeddings, (200, 1)), atol=1e-5
        )
        tokens = model.embed(texts, pool="none")
        assert [len(rows) for rows in tokens] == [len(ids) for ids in model.tokenizer.encode_batch(texts)]
    assert model.embed([]).shape == (0, 16)
    with pytest.raises(UserError, match="this model has 2"):
        model.embed(texts, layers="sum4")
