"""Search ranks by exact cosine similarity, finds related texts, and reuses its index while nothing has changed."""

import json

import numpy as np
import pytest
import torch

import headstock
from headstock.errors import UserError
from headstock.inference import search as module
from headstock.inference.search import exact_nearest, fit_transform, unit_vectors

CPU = torch.device("cpu")
PAIRS = [
    ("The music was loud and the songs were terrible.", "Awful songs, and the soundtrack is far too loud."),
    ("Great acting by the whole cast.", "The actors are excellent, every performance is great."),
    ("A scary ghost story in an old house.", "A haunted house, a ghost, and real horror."),
    ("The special effects looked cheap.", "Cheap effects and bad computer graphics."),
    ("My children loved this cartoon.", "An animated film for kids and the whole family."),
    ("The plot made no sense at all.", "The story is confusing and the script makes no sense."),
    ("A touching love story.", "A romance about two people who fall in love."),
    ("War scenes with soldiers and battles.", "Soldiers fight a long battle in the war."),
    ("I laughed from start to finish.", "Very funny, this comedy made me laugh."),
    ("The police chase the murderer.", "A detective follows a killer in this crime film."),
]
QUERIES, DOCUMENTS = map(list, zip(*PAIRS, strict=True))


@pytest.fixture(scope="module")
def pipeline():
    return headstock.load("reviews-en", device="cpu")


@pytest.mark.parametrize("block", [3, 64, 1000])
def test_exact_search_agrees_with_sorting_all_similarities(block, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr(module, "QUERY_BLOCK", 7)
    random = np.random.default_rng(0)
    zero = np.zeros(16, np.float32)
    vectors, queries = (unit_vectors(random.normal(size=(n, 16)), zero, None) for n in (200, 20))
    expected = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")
    for top in (1, 5, 300):
        numbers, scores = exact_nearest(vectors, queries, top, CPU)
        assert numbers.tolist() == expected[:, :top].tolist()
        np.testing.assert_allclose(scores, np.take_along_axis(queries @ vectors.T, numbers, 1), atol=1e-6)
    first_block, _ = exact_nearest(vectors[:block], queries, 5, CPU)  # control: the search reads all blocks
    assert (first_block[:, :1].tolist() == expected[:, :1].tolist()) == (block >= len(vectors))
    halves, _ = exact_nearest(vectors.astype(np.float16), queries, 1, CPU)
    assert np.mean(halves == expected[:, :1]) >= 0.95


def test_whitened_vectors_are_uncorrelated():
    random = np.random.default_rng(1)
    vectors = (random.normal(size=(5000, 4)) @ random.normal(size=(4, 4)) + 3).astype(np.float32)
    for transform, off_diagonal in (("none", False), ("center", False), ("whiten", True)):
        mean, whitening = fit_transform(vectors, transform)
        transformed = (vectors - mean) @ (np.eye(4) if whitening is None else whitening)
        assert np.allclose(transformed.mean(0), 0, atol=1e-2) == (transform != "none")
        assert np.allclose(np.cov(transformed.T), np.eye(4), atol=1e-2) == off_diagonal


def test_related_texts_are_found_far_above_chance(pipeline):
    """Chance finds the partner of one query in ten; untrained weights hardly more."""
    index = pipeline.search_index(DOCUMENTS)
    found = [hits[0].text == document for hits, document in zip(index.search(QUERIES, top=1), DOCUMENTS, strict=True)]
    assert np.mean(found) >= 0.6
    assert index.search(DOCUMENTS[3], top=1)[0][0].document == 3
    shuffled = DOCUMENTS[1:] + DOCUMENTS[:1]  # control: the wrong partners are not found
    assert np.mean([hits[0].text == other for hits, other in zip(index.search(QUERIES), shuffled, strict=True)]) <= 0.2


def test_an_index_is_reused_until_corpus_or_options_change(pipeline, tmp_path):
    corpus = tmp_path / "films.txt"
    corpus.write_text("\n".join(DOCUMENTS), encoding="utf-8")
    first = pipeline.search_index(corpus)
    assert not first.reused and first.vectors.dtype == np.float32
    assert pipeline.search_index(corpus).reused
    moved = corpus.rename(tmp_path / "other.txt")
    again = pipeline.search_index(moved)
    assert again.reused and again.search("ghost")[0][0].source.endswith("other.txt")
    for changed in ({"layers": "2"}, {"pool": "cls"}, {"transform": "whiten"}, {"dtype": "float16"}):
        assert not pipeline.search_index(moved, **changed).reused
    assert pipeline.search_index(moved, dtype="float16").vectors.dtype == np.float16
    (again.folder / "vectors.npy").write_bytes(b"damaged")
    assert not pipeline.search_index(moved).reused
    moved.write_text("\n".join(DOCUMENTS[:-1]), encoding="utf-8")
    assert not pipeline.search_index(moved).reused


def test_int8_vectors_have_an_index_of_their_own(pipeline):
    assert pipeline.search_index(DOCUMENTS).folder == pipeline.search_index(DOCUMENTS).folder
    quantized = headstock.load("reviews-en", device="cpu", int8=True)
    if any(type(module).__name__ == "Int8Linear" for module in quantized.model.modules()):  # where the CPU supports it
        assert quantized.search_index(DOCUMENTS).folder != pipeline.search_index(DOCUMENTS).folder


def test_hits_are_documents_with_their_lines(pipeline, tmp_path):
    corpus = tmp_path / "films.txt"
    corpus.write_text("\n".join(DOCUMENTS), encoding="utf-8")
    (hits,) = pipeline.search(DOCUMENTS[2], corpus, top=3)
    assert [hit.rank for hit in hits] == [1, 2, 3]
    assert (hits[0].line, hits[0].text, hits[0].score) == (3, DOCUMENTS[2], pytest.approx(1.0, abs=1e-5))
    vectors = pipeline.embed(DOCUMENTS, pool="mean")
    vectors = vectors - vectors.mean(0)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert [hit.document for hit in hits] == np.argsort(-(vectors @ vectors[2]))[:3].tolist()
    assert len(pipeline.search("a", DOCUMENTS, top=100)[0]) == len(DOCUMENTS)


def test_faiss_finds_what_exact_search_finds(pipeline):
    pytest.importorskip("faiss")
    index = pipeline.search_index(DOCUMENTS)
    exact, approximate = index.search(QUERIES, top=3), index.search(QUERIES, top=3, kind="faiss")
    agreement = [{a.document for a in row} == {b.document for b in other} for row, other in zip(exact, approximate)]  # noqa: B905
    assert np.mean(agreement) >= 0.9
    assert json.loads((index.folder / "faiss.json").read_text())["recall"] >= 0.9


def test_documents_that_faiss_does_not_reach_are_left_out(pipeline, monkeypatch):
    """FAISS fills a row with -1 where the graph leads to fewer documents than asked for."""
    faiss = pytest.importorskip("faiss")
    index = pipeline.search_index(DOCUMENTS)
    graph = faiss.IndexHNSWFlat(index.vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    graph.add(np.asarray(index.vectors[:4]))
    monkeypatch.setattr(index, "faiss_index", lambda: graph)
    numbers, _ = index.nearest(index.embed(QUERIES), top=300, kind="faiss")
    assert numbers.shape == (len(QUERIES), len(DOCUMENTS)) and (numbers < 0).any(1).all()
    assert graph.hnsw.efSearch == 600
    for hits in index.search(QUERIES, top=300, kind="faiss"):
        assert sorted(hit.document for hit in hits) == [0, 1, 2, 3] and [hit.rank for hit in hits] == [1, 2, 3, 4]


def test_the_search_verb(call, tmp_path):
    corpus, queries = tmp_path / "films.csv", tmp_path / "queries.txt"
    corpus.write_text("review\n" + "\n".join(f'"{text}"' for text in DOCUMENTS), encoding="utf-8")
    queries.write_text("\n".join(QUERIES[:2]), encoding="utf-8")
    options = ["search", "reviews-en", "--corpus", corpus, "--column", "review"]
    result = json.loads(call(*options, "--file", queries, "--top", 2, "--json")[0])
    assert [row["query"] for row in result["results"]] == QUERIES[:2]
    assert all(len(row["hits"]) == 2 for row in result["results"])
    assert result["index"]["documents"] == len(DOCUMENTS) and result["queries_per_second"] > 0
    out, err = call(*options, "A ghost story")
    assert out.startswith("A ghost story\n") and "haunted house" in out.splitlines()[1] and "reusing" in err
    for wrong, message in (
        (["search", "reviews-en", "x"], "--corpus"),
        ([*options, "x", "--transform", "whitten"], "did you mean 'whiten'"),
        ([*options, "x", "--index", "annoy"], "exact, faiss"),
        ([*options, "x", "--top", "0"], "--top 0"),
        ([*options, " "], "blank"),
        (["search", "reviews-en", "--corpus", tmp_path / "none.txt", "x"], "none.txt"),
    ):
        assert message in call(*wrong, code=2)[1]


def test_settings_that_give_no_text_vector_are_refused(pipeline):
    with pytest.raises(UserError, match="one vector per text"):
        pipeline.search("a", DOCUMENTS, pool="none")
    with pytest.raises(UserError, match="no texts"):
        pipeline.search("a", [])
