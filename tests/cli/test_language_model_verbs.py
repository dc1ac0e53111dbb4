"""`headstock fill`, `embed`, `score` and minimal pairs."""

import io
import json
import re

import numpy as np
import pytest

import headstock
from tests.conftest import TINY


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """A barely trained run of each objective."""
    folder = tmp_path_factory.mktemp("runs")
    for objective in ("causal", "masked", "hybrid"):
        headstock.pretrain(corpus, out=folder / objective, objective=objective, settings=TINY | {"steps": 3})
    return folder


@pytest.mark.parametrize("objective", ["masked", "hybrid"])
def test_fill_gives_words_for_every_mask(runs, result, call, tmp_path, objective):
    run = runs / objective
    output = result("fill", run, "Anne [MASK] the [MASK].", "--top", 3)
    assert [len(fills) for fills in output["fills"]] == [3, 3]
    assert all({"token", "probability"} <= fill.keys() for fills in output["fills"] for fill in fills)
    assert output["texts"][0]["text"] == "Anne [MASK] the [MASK]."
    first, second = (fills[0]["token"] for fills in output["fills"])
    assert output["texts"][0]["filled"] == f"Anne {first} the {second}."
    (tmp_path / "texts.txt").write_text("[MASK] sees Paris.\n\nZoë [MASK] the [MASK].\n", encoding="utf-8")
    output = result("fill", run, "--file", tmp_path / "texts.txt", "--pieces", 1)
    assert [len(row["fills"]) for row in output["texts"]] == [1, 2]
    assert output["fills"] == [fills for row in output["texts"] for fills in row["fills"]]
    assert result("fill", run, "Zoë [MASK] the [MASK].", "--pieces", 1)["fills"] == output["fills"][1:]
    (fills,) = result("fill", run, "Anne likes [MASK].", "--among", "home, Paris,the-sea")["fills"]
    assert {fill["token"] for fill in fills} == {"home", "Paris", "the-sea"}
    assert sum(fill["share"] for fill in fills) == pytest.approx(1.0)
    out, _ = call("fill", run, "Anne likes [MASK].", "--among", "home,Paris")
    assert sum(float(share) for share in re.findall(r"([\d.]+)%", out)) == pytest.approx(100, abs=0.1)
    out, _ = call("fill", run, "Anne [MASK] Paris.")
    assert out.splitlines()[0].startswith("Anne ")
    assert len(out.splitlines()[1].split()) == 10  # five words, each with its probability


def test_wrong_calls_of_fill(runs, refused):
    assert "no [MASK] in 'Anne'" in refused("fill", runs / "masked", "Anne")
    assert "objectives that can: hybrid, masked" in refused("fill", runs / "causal", "Anne [MASK]")
    assert "--among: no word" in refused("fill", runs / "masked", "Anne [MASK]", "--among", " , ")
    assert "top and pieces must be 1 or more" in refused("fill", runs / "masked", "Anne [MASK]", "--top", 0)


def test_fill_refuses_more_words_than_it_can_find(runs, result, refused):
    call = ["fill", runs / "masked", "Anne [MASK] Paris.", "--top", 1_000_000]
    assert "55,924" in refused(*call)
    assert result(*call, "--pieces", 1)["fills"][0]
    assert len(result(*call, "--among", "sees,likes")["fills"][0]) == 2


def test_lone_surrogates_are_shown_escaped(runs, refused):
    line = refused("fill", runs / "masked", "Anne [MASK] \udcff")
    assert r"'Anne [MASK] \udcff': character 13 is half of a surrogate pair" in line
    assert r"'\udcff': character 1 is" in refused("fill", runs / "masked", "[MASK] [MASK]", "--among", "a,\udcff")


LINES = "\ufeffAnne\x0bsees\x0cParis\u2028.\r\n\r\nBen\x85\rle café\n".encode()


def test_texts_end_at_line_ends_only_and_have_no_byte_order_mark(runs, call, tmp_path, monkeypatch):
    (tmp_path / "texts.txt").write_bytes(LINES)
    for arguments in ([], ["--file", "-"], ["--file", tmp_path / "texts.txt"]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(LINES), encoding="utf-8"))
        scores = json.loads(call("score", runs / "causal", *arguments, "--json")[0])["scores"]
        assert [row["text"] for row in scores] == ["Anne\x0bsees\x0cParis\u2028.", "Ben\x85", "le café"]


def test_score_says_what_kind_of_score_it_is(runs, result, refused):
    kinds = {
        objective: result("score", runs / objective, "Anne")["kind"] for objective in ("causal", "masked", "hybrid")
    }
    pseudo, plain = "pseudo-log-likelihood", "log-likelihood"
    assert kinds == {"causal": plain, "masked": pseudo, "hybrid": plain}
    pseudo_result = result("score", runs / "hybrid", "Anne likes", "--pseudo")
    assert pseudo_result["kind"] == pseudo
    assert (
        pseudo_result["scores"][0]["log_likelihood"]
        != result("score", runs / "hybrid", "Anne likes")["scores"][0]["log_likelihood"]
    )
    assert "pseudo" in refused("score", runs / "causal", "Anne", "--pseudo")


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_schemas_are_scored_with_shares_that_sum_to_one(runs, result, call, refused, objective):
    run, line = runs / objective, "Anne sees Ben because [she] likes Paris. | *Anne | Ben"
    output = result("score", run, "--schema", line, "--schema", line.replace("*Anne | Ben", "Anne | *Ben"))
    first, second = output["schemas"]
    assert first["candidates"] == second["candidates"] and output["metrics"]["accuracy"] == 0.5
    assert sum(row["share"] for row in first["candidates"]) == pytest.approx(1)
    scores = result("score", run, *(row["text"] for row in first["candidates"]))["scores"]
    assert [row["log_likelihood"] for row in first["candidates"]] == pytest.approx(
        [row["log_likelihood"] for row in scores], abs=1e-4
    )
    assert "correct" in call("score", run, "--schema", line)[0]
    assert "not both" in refused("score", run, "Anne", "--schema", line)
    assert "no such file" in refused("score", run, "--schemas", "missing.txt")


def test_among_can_be_compared_per_token(runs, result, refused):
    words = ("fill", runs / "masked", "Anne likes [MASK].", "--among", "home,the sea and Paris")
    (sums,), (means,) = (result(*words, *more)["fills"] for more in ((), ("--normalize",)))
    scores = {fill["token"]: fill["log_probability"] / fill["pieces"] for fill in means}
    assert np.log(means[0]["share"] / means[1]["share"]) == pytest.approx(
        scores[means[0]["token"]] - scores[means[1]["token"]], abs=1e-6
    )
    long = "the sea and Paris"
    share = [{fill["token"]: fill["share"] for fill in fills}[long] for fills in (sums, means)]
    assert share[0] < share[1]  # a sum of many log-probabilities is low
    assert "--normalize is only for --among" in refused("fill", runs / "masked", "A [MASK].", "--normalize")


def test_embed_writes_vectors(runs, result, call, tmp_path):
    texts = ["Anne sees Paris.", "le café", "Ben likes the sea. " * 20]
    vectors = result("embed", runs / "masked", *texts)["vectors"]
    assert np.array(vectors).shape == (3, 16)
    (tmp_path / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    output = result("embed", runs / "masked", "--file", tmp_path / "texts.txt", "--out", tmp_path / "v.npy")
    assert output["shape"] == [3, 16]
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), vectors, atol=1e-6)
    call("embed", runs / "causal", *texts, "--pool", "none", "--layers", 1, "--out", tmp_path / "t.jsonl")
    for text, line in zip(texts, (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines(), strict=True):
        row = json.loads(line)
        assert row.keys() == {"text", "tokens", "words", "offsets", "vectors"}
        assert row["text"] == text
        assert len(row["tokens"]) == len(row["words"]) == len(row["offsets"]) == len(row["vectors"])
    call("embed", runs / "hybrid", "Anne sees Paris.", "--words", "--out", tmp_path / "w.npy")
    (row,) = map(json.loads, (tmp_path / "w.tokens.jsonl").read_text(encoding="utf-8").splitlines())
    assert row["tokens"] == ["Anne", "sees", "Paris", "."]
    assert np.load(tmp_path / "w.npy").shape == (4, 16)
    (aligned,) = result("embed", runs / "hybrid", "Anne sees Paris.", "--words")["aligned"]
    assert aligned | {"rows": [0, 4]} == row
    out, _ = call("embed", runs / "hybrid", "Anne sees Paris.", "--words")
    assert out.split() == ["4", "x", "16", "Anne", "sees", "Paris."]


def test_wrong_calls_of_embed(runs, refused, tmp_path):
    assert "must end in .npy or .jsonl" in refused("embed", runs / "masked", "x", "--out", tmp_path / "v.txt")
    assert "use last or mean" in refused("embed", runs / "causal", "x", "--pool", "cls")
    assert "--words gives one vector per word" in refused("embed", runs / "masked", "x", "--words", "--pool", "mean")
    line = refused("embed", runs / "masked", "x", "--layers", "concat4", "--out", tmp_path / "v.npy")
    assert "concat4 needs 4 layers, this model has 2" in line


def test_evaluate_measures_minimal_pairs(runs, result, call, refused, tmp_path):
    rows = [
        {"sentence_good": f"Anne likes Paris {i}.", "sentence_bad": f"Anne Paris likes {i}.", "UID": f"order_{i % 2}"}
        for i in range(12)
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    for objective in ("causal", "masked"):
        metrics = result("evaluate", runs / objective, "--minimal-pairs", file)["metrics"]
        assert {"accuracy", "intervals", "rows", "by"} <= metrics.keys()
        assert metrics["rows"] == 12
        assert {name: group["rows"] for name, group in metrics["by"]["UID"].items()} == {"order_0": 6, "order_1": 6}
    out = tmp_path / "scores.jsonl"
    metrics = result("evaluate", runs / "causal", file, "--minimal-pairs", "--rows", 5, "--out", out)["metrics"]
    scores = [json.loads(line) for line in out.read_text().splitlines()]
    assert metrics["rows"] == len(scores) == 5
    assert metrics["accuracy"] == np.mean([row["log_likelihood_good"] > row["log_likelihood_bad"] for row in scores])
    out, err = call("evaluate", runs / "hybrid", "--minimal-pairs", file, "--pseudo")
    assert "by UID, worst first:" in out
    assert "95%" in out
    assert "100% scored" in err
    assert "--rows is only for --minimal-pairs" in refused("evaluate", runs / "causal", file, "--rows", 5)
    assert "--columns is for labelled rows" in refused(
        "evaluate", runs / "causal", file, "--minimal-pairs", "--columns", "text=x"
    )


def test_a_text_is_read_from_the_column_that_either_option_names(runs, result, refused, tmp_path):
    texts = ["Anne sees Paris.", "Ben likes the sea."] * 4
    table, plain = tmp_path / "t.csv", tmp_path / "t.txt"
    table.write_text("\n".join(["id,body", *(f"{number},{text}" for number, text in enumerate(texts))]) + "\n")
    plain.write_text("\n".join(texts) + "\n")
    expected = result("evaluate", runs / "causal", plain, "--documents", "line")["metrics"]
    scores = result("score", runs / "causal", "--file", plain)
    vectors = result("embed", runs / "causal", "--file", plain)
    for arguments in (["--column", "body"], ["--columns", "text=body"]):
        assert result("evaluate", runs / "causal", table, *arguments)["metrics"] == expected
        assert result("score", runs / "causal", "--file", table, *arguments) == scores
        assert result("embed", runs / "causal", "--file", table, *arguments) == vectors
    assert "label" in refused("evaluate", runs / "causal", table, "--columns", "label=id")
    assert "'body'" in refused("score", runs / "causal", "--file", table)
    assert "body" in refused("embed", runs / "causal", "--file", table, "--column", "id", "--columns", "text=body")
