"""`headstock pretrain`, `tokenizer` and `data`: results, files and checkpoints."""

import json
import shlex
import shutil

from headstock.train.model_card import render_card
from headstock.train.run_folder import open_run
from tests.commands import REVIEWS, SHORT_FINETUNING, run_verb, set_options, verb_result, write_rows


def test_pretrain_returns_all_documented_keys_and_files(pretrained):
    out, results = pretrained
    keys = "run steps tokens seconds tokens_per_second train_loss valid_loss perplexity bits_per_byte metrics"
    assert set(keys.split()) <= set(results)
    assert results["run"] == str(out)
    assert results["steps"] == 40
    files = {path.name for path in out.iterdir()}
    names = "config.json tokenizer.json model.safetensors metrics.jsonl results.json README.md checkpoints"
    assert set(names.split()) <= files
    assert json.loads((out / "config.json").read_text())["train"]["seed"] == 3
    assert str(results["steps"]) in (out / "README.md").read_text()


def test_tokenizer_train_and_show(corpus, tmp_path, call, result):
    file = tmp_path / "tokenizer.json"
    output = result("tokenizer", "train", corpus, "--out", file, "--kind", "word", "--vocab", 40)
    assert output["vocabulary"] <= 40
    out, _ = call("tokenizer", "show", file, "Anne likes le café.")
    assert "Anne | likes | le | café | ." in out
    _, err = call("tokenizer", "train", corpus, "--out", file, code=2)
    assert "--overwrite" in err


def test_tokenizer_show_splits_the_whole_text(pretrained, call):
    def show(text, code=0):
        return call("tokenizer", "show", pretrained[0], text, "--json", code=code)

    spaced, long = "Anne    sees\n\nParis.", "Ben " * 50
    for text in (spaced, long):
        facts = json.loads(show(text)[0])
        assert "".join(facts["sample"]) == text
        assert len(facts["ids"]) == facts["tokens"]
    for empty in ("", "  \n"):
        assert f"the text {empty!r} is empty" in show(empty, code=2)[1]


def test_pretrain_uses_an_existing_tokenizer(corpus, tmp_path, tiny, call):
    file = tmp_path / "tokenizer.json"
    call("tokenizer", "train", corpus, "--out", file, "--kind", "char", "--vocab", 200)
    del tiny["vocabulary"]
    call("pretrain", corpus, "--out", tmp_path / "a", "--tokenizer", file, *set_options(tiny | {"steps": 2}))
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == file.read_bytes()
    model = json.loads((tmp_path / "a" / "config.json").read_text())["model"]
    assert model["vocabulary"] == len(json.loads(file.read_text())["model"]["vocab"])


def test_pretrain_reads_standard_input(corpus, tmp_path, tiny, call, result):
    settings = set_options(tiny | {"steps": 2})
    results = verb_result("pretrain", "-", "--out", tmp_path / "a", *settings, stdin=corpus.read_bytes())
    assert results["valid_loss"] == result("pretrain", corpus, "--out", tmp_path / "b", *settings)["valid_loss"]
    call("evaluate", tmp_path / "a")  # the text can still be found
    assert verb_result("pretrain", "-", "--out", tmp_path / "a", "--resume", stdin=corpus.read_bytes())["steps"] == 2


def test_data_list_states_source_licence_size_and_hash(result):
    entries = result("data", "list")["entries"]
    assert {entry["name"] for entry in entries} >= {
        "tiny-shakespeare",
        "shakespeare",
        "imdb",
        "rotten-tomatoes",
        "cls-books",
    }
    assert all(entry["source"] and entry["licence"] and entry["bytes"] and entry["sha256"] for entry in entries)


def test_quiet_prints_nothing_to_stderr(corpus, tmp_path, tiny):
    out, err = run_verb(
        "pretrain", corpus, "--out", tmp_path / "a", "--quiet", "--json", *set_options(tiny | {"steps": 2})
    )
    assert err == ""
    assert len(out.splitlines()) == 1


def test_hints_can_be_copied_into_a_shell(tmp_path, corpus, tiny, call):
    out, _ = call("pretrain", corpus, "--out", tmp_path / "my stories", *set_options(tiny | {"steps": 1}), "--quiet")
    hint = next(line for line in out.splitlines() if line.startswith("try: ")).removeprefix("try: ")
    assert shlex.split(hint)[:3] == ["headstock", "generate", str(tmp_path / "my stories")]
    card = (tmp_path / "my stories" / "README.md").read_text()
    for line in card.splitlines():
        if line.startswith("    headstock "):
            assert any(word.startswith("my stories") for word in shlex.split(line, comments=True))


def test_a_checkpoint_can_be_used_as_a_run(pretrained, call, tmp_path):
    folder = pretrained[0] / "checkpoints"
    steps = sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())
    early, late = folder / f"step-{steps[0]}", folder / f"step-{steps[-1]}"

    def loss(run):
        return json.loads(call("evaluate", run, "--json")[0])["metrics"]["loss"]

    best = min(loss(early), loss(late))
    assert loss(pretrained[0]) == best and loss(early) != loss(late)
    assert call("generate", late, "Anne", "--max-tokens", 3)[0].startswith("Anne")
    assert "Anne" in call("tokenizer", "show", late, "Anne")[0]
    rows = write_rows(tmp_path / "rows.csv", REVIEWS)
    call("finetune", late, "--train", rows, "--valid", rows, "--out", tmp_path / "fine", *SHORT_FINETUNING)
    assert json.loads((tmp_path / "fine" / "config.json").read_text())["transfer"]["run"] == str(late)
    fine = sorted((tmp_path / "fine" / "checkpoints").iterdir())[-1]
    assert json.loads(call("predict", fine, "Anne sees Paris.", "--json")[0])["predictions"][0]["label"] in (
        "sea",
        "town",
    )
    call("export", late, tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    broken = tmp_path / "copy"
    shutil.copytree(pretrained[0], broken)
    with (broken / "checkpoints" / late.name / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\0" if file.read(1) else b"\1")
    assert "damaged" in call("generate", broken / "checkpoints" / late.name, "Anne", code=2)[1]
    (broken / "checkpoints" / early.name / "manifest.json").unlink()
    for path, problem in (
        (broken / "checkpoints" / early.name, f"is incomplete: it has no manifest.json ({broken} has {late.name})"),
        (broken / "checkpoints" / "step-99999", f"no such checkpoint ({broken} has {late.name})"),
        (broken / "checkpoints", f"name one of them: {late.name}"),
    ):
        _, error = call("generate", path, "Anne", code=2)
        assert problem in error and len(error.splitlines()) == 1


def test_a_checkpoint_is_found_from_inside_and_named_in_messages_and_cards(pretrained, call, tmp_path, monkeypatch):
    folder = max((pretrained[0] / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step-")))
    step = folder.name.removeprefix("step-")
    monkeypatch.chdir(folder)
    expected = call("score", folder, "Anne sees Paris.")[0]
    assert call("score", ".", "Anne sees Paris.")[0] == expected
    monkeypatch.chdir(folder.parent)
    out, error = call("score", folder.name, "Anne sees Paris.")
    assert out == expected and f"the weights of step {step}" in error
    call("export", folder, tmp_path / "hf")
    assert f"# {pretrained[0].name}, step {step}" in (tmp_path / "hf" / "README.md").read_text()
    assert f"step {step}" not in (pretrained[0] / "README.md").read_text()
    results, final = open_run(folder).results(), open_run(pretrained[0]).results()
    assert results["steps"] == int(step) and "intervals" not in results and results["parameters"] == final["parameters"]
    earlier = open_run(min(folder.parent.iterdir(), key=lambda path: int(path.name.removeprefix("step-")))).results()
    assert earlier["tokens"] < results["tokens"] and earlier["metrics"]["loss"] != results["metrics"]["loss"]
    assert f"weights and the validation of step {step}" in render_card(open_run(folder))
