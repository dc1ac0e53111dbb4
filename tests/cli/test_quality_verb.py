"""`headstock quality` on a run and on files."""

import json


def test_a_run_beside_human_text_and_controls(pretrained, result, call, tmp_path):
    run, out = pretrained[0], tmp_path / "texts.jsonl"
    size = ["--texts", 12, "--prompt-tokens", 2, "--max-tokens", 16]
    options = [run, "--judge", run, *size, "--decoding", "greedy", "--decoding", "top_p=0.9"]
    output = result("quality", *options, "--controls", "--out", out)
    sets = {part["name"]: {name: m["value"] for name, m in part["measures"].items()} for part in output["sets"]}
    assert list(sets)[:3] == ["human", "greedy", "top_p=0.9"]
    assert {part["texts"] for part in output["sets"]} == {output["sets"][0]["texts"]}
    human = sets["human"]
    assert sets["greedy"]["perplexity"] < human["perplexity"] < sets["shuffled words"]["perplexity"]
    assert sets["looped words"]["rep_4"] > human["rep_4"] and sets["one text"]["self_bleu"] > human["self_bleu"]
    assert sets["one text"]["mauve"] < human["mauve"]
    assert sets["training text"]["copied"] > human["copied"]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["set"] for row in rows} == set(sets)
    assert [row["prompt"] for row in rows if row["set"] == "human"] == [
        row["prompt"] for row in rows if row["set"] == "greedy"
    ]
    printed, _ = call("quality", *options, "--no-copies")
    assert "MAUVE" in printed and "longest copy" not in printed


def test_texts_from_files(pretrained, result, refused, tmp_path):
    human, copies = tmp_path / "human.txt", tmp_path / "copies.txt"
    human.write_text("\n".join(f"Anne sees Paris {i} and the sea." for i in range(12)))
    copies.write_text("Anne sees Paris.\n" * 12)
    output = result("quality", copies, "--reference", human, "--judge", pretrained[0])
    first, second = (part["measures"] for part in output["sets"])
    assert first["distinct_2"]["value"] > second["distinct_2"]["value"] and "copied" not in first
    assert second["mauve"]["value"] < first["mauve"]["value"]
    assert "--decoding is for a run" in refused("quality", human, "--decoding", "greedy")
    assert "at least 4" in refused("quality", pretrained[0], "--max-tokens", 4000)
    assert "left-to-right" in refused("quality", "reviews-en")
