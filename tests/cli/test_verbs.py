"""The command line as a user meets it: real commands, real files, exit codes and JSON."""

import csv
import json
import math
import os
import shlex
import shutil
import subprocess
import sys

import pytest

from headstock.cli.command import Common, attempt
from tests.commands import command


def headstock(*words, stdin: str | bytes | None = None, code: int = 0):
    """Run a real command; its stdout and stderr."""
    ended, out, err = command(*words, stdin=stdin.encode() if isinstance(stdin, str) else stdin or b"")
    assert ended == code, f"exit {ended}\n{out}\n{err}"
    return out, err


def result(*words, **more):
    out, _ = headstock(*words, "--json", **more)
    return json.loads(out.splitlines()[-1])


def options(settings):
    return [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    from tests.conftest import TINY

    out = tmp_path_factory.mktemp("runs") / "tiny"
    done = result(
        "pretrain", corpus, "--out", out, "--steps", 40, "--seed", 3, *options(TINY | {"lr": 0.01, "steps": 40})
    )
    return out, done


def test_pretrain_says_what_the_contract_promises(run):
    out, done = run
    promised = "run steps tokens seconds tokens_per_second train_loss valid_loss perplexity bits_per_byte metrics"
    assert set(promised.split()) <= set(done)
    assert done["run"] == str(out)
    assert done["steps"] == 40
    files = {path.name for path in out.iterdir()}
    promised = "config.json tokenizer.json model.safetensors metrics.jsonl results.json README.md checkpoints"
    assert set(promised.split()) <= files
    assert json.loads((out / "config.json").read_text())["train"]["seed"] == 3
    assert str(done["steps"]) in (out / "README.md").read_text()


def test_generate(run):
    out, _ = run
    greedy = [
        result("generate", out, "Anne", "--temperature", 0, "--max-tokens", 12, *more) for more in ([], ["--no-cache"])
    ]
    assert greedy[0]["texts"] == greedy[1]["texts"]
    assert greedy[0]["texts"][0].startswith("Anne")
    batch = result("generate", out, "Anne", "Story 1\nBen", "--max-tokens", 9, "--seed", 4)["texts"]
    alone = [
        result("generate", out, text, "--max-tokens", 9, "--seed", 4)["texts"][0] for text in ("Anne", "Story 1\nBen")
    ]
    assert batch == alone
    assert len(set(result("generate", out, "Anne", "--samples", 3)["texts"])) > 1


def test_generate_streams_what_it_returns(run):
    out, _ = run
    given = ["generate", out, "Zoë", "--max-tokens", 20, "--seed", 1]
    assert headstock(*given, "--stream")[0] == headstock(*given)[0]


def test_generate_stops_before_a_string(run):
    out, _ = run
    made = result("generate", out, "Ann", "--max-tokens", 40, "--stop", "e", "--samples", 4)
    assert not any("e" in text for text in made["texts"])
    assert "stop" in made["ended"]


def test_generate_slides_past_the_context_and_says_so(run):
    out, _ = run
    prompt = " ".join(["Anne sees Paris."] * 12)
    text, said = headstock("generate", out, prompt, "--max-tokens", 5)
    assert text.startswith(prompt)
    assert "longer than the context of 32 tokens" in said


def test_score_prefers_what_it_has_learned(run):
    out, _ = run
    scores = result("score", out, "Anne likes Paris.", "siraP sekil ennA.")["scores"]
    assert scores[0]["log_likelihood"] > scores[1]["log_likelihood"]
    for score in scores:
        assert score["log_likelihood"] == pytest.approx(sum(t["log_likelihood"] for t in score["tokens"]), abs=1e-4)
    piped = result("score", out, stdin="Anne likes Paris.\nsiraP sekil ennA.\n")["scores"]
    assert [s["log_likelihood"] for s in piped] == pytest.approx([s["log_likelihood"] for s in scores], abs=1e-4)


def test_a_long_text_is_scored_whole(run):
    out, _ = run
    score = result("score", out, " ".join(["Ben finds the sea."] * 30))["scores"][0]
    assert len(score["tokens"]) > 64  # twice the context
    assert all(token["log_likelihood"] < 0 for token in score["tokens"])


def test_evaluate_agrees_with_training(run, corpus):
    out, done = run
    held_out = result("evaluate", out)["metrics"]
    assert held_out["loss"] == pytest.approx(done["valid_loss"], abs=1e-5)
    assert held_out["bits_per_byte"] == pytest.approx(done["bits_per_byte"], abs=1e-5)
    everything = result("evaluate", out, corpus)["metrics"]
    assert everything["documents"] == 300
    assert everything["loss"] < done["valid_loss"] + 1


def test_tokenizer_train_and_show(corpus, tmp_path):
    file = tmp_path / "words.json"
    made = result("tokenizer", "train", corpus, "--out", file, "--kind", "word", "--vocab", 40)
    assert made["vocabulary"] <= 40
    out, _ = headstock("tokenizer", "show", file, "Anne likes le café.")
    assert "Anne | likes | le | café | ." in out
    _, said = headstock("tokenizer", "train", corpus, "--out", file, code=2)
    assert "--overwrite" in said


def test_tokenizer_show_is_about_the_text_itself(run, call):
    def shown(text, code=0):
        return call("tokenizer", "show", run[0], text, "--json", code=code)

    spaced, long = "Anne    sees\n\nParis.", "Ben " * 50
    for text in (spaced, long):
        facts = json.loads(shown(text)[0])
        assert "".join(facts["sample"]) == text
        assert len(facts["ids"]) == facts["tokens"]
    for empty in ("", "  \n"):
        assert f"the text {empty!r} is empty" in shown(empty, code=2)[1]


def test_pretrain_uses_a_given_tokenizer_and_its_run_can_be_repeated(corpus, tmp_path, tiny):
    file = tmp_path / "tokenizer.json"
    headstock("tokenizer", "train", corpus, "--out", file, "--kind", "char", "--vocab", 200)
    del tiny["vocabulary"]
    given = ["pretrain", corpus, "--out", tmp_path / "a", "--tokenizer", file, *options(tiny)]
    headstock(*given)
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == file.read_bytes()
    model = json.loads((tmp_path / "a" / "config.json").read_text())["model"]
    assert model["vocabulary"] == len(json.loads(file.read_text())["model"]["vocab"])


def test_pretrain_reads_standard_input(corpus, tmp_path, tiny):
    done = result("pretrain", "-", "--out", tmp_path / "a", *options(tiny), stdin=corpus.read_bytes())
    again = result("pretrain", corpus, "--out", tmp_path / "b", *options(tiny))
    assert done["valid_loss"] == again["valid_loss"]
    headstock("evaluate", tmp_path / "a")  # the text can still be found
    assert result("pretrain", "-", "--out", tmp_path / "a", "--resume", stdin=corpus.read_bytes())["steps"] == 12


def test_data_list_states_source_licence_size_and_hash():
    entries = result("data", "list")["entries"]
    assert {entry["name"] for entry in entries} >= {
        "tiny-shakespeare",
        "shakespeare",
        "imdb",
        "rotten-tomatoes",
        "cls-books",
    }
    assert all(entry["source"] and entry["licence"] and entry["bytes"] and entry["sha256"] for entry in entries)


def test_quiet_says_nothing(corpus, tmp_path, tiny):
    out, said = headstock("pretrain", corpus, "--out", tmp_path / "a", "--quiet", "--json", *options(tiny))
    assert said == ""
    assert len(out.splitlines()) == 1


def test_nobody_is_told_that_the_reader_of_json_left():
    ours, theirs = os.pipe()
    os.close(ours)
    words = [sys.executable, "-m", "headstock", "data", "list", "--json"]
    done = subprocess.run(words, stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, "")


def test_json_has_null_where_a_number_is_not_finite(capsys):
    result = {"loss": math.nan, "steps": 3, "rows": [{"low": -math.inf}, (1.5, math.inf), "NaN", None, True]}
    assert attempt(lambda: result, Common(json=True)) == 0
    rows = [{"low": None}, [1.5, None], "NaN", None, True]
    assert json.loads(capsys.readouterr().out) == {"loss": None, "steps": 3, "rows": rows}


def test_completion_works():
    environment = os.environ | {
        "_HEADSTOCK_COMPLETE": "complete_bash",
        "COMP_WORDS": "headstock pre",
        "COMP_CWORD": "1",
    }
    code = "import sys; sys.argv[0] = 'headstock'; from headstock.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "pretrain" in done.stdout


# What is wrong is said in one line, with exit code 2, and leaves nothing behind


def refused(tmp_path, *words, code: int = 2, **more) -> str:
    """The one line that a wrong call gets; nothing may have been made."""
    before = sorted(tmp_path.rglob("*"))
    out, said = headstock(*words, "--json", code=code, **more)
    assert sorted(tmp_path.rglob("*")) == before
    line = said.strip().splitlines()[-1]
    assert "Traceback" not in said
    error = json.loads(out.splitlines()[-1])["error"]
    assert error.splitlines()[-1].strip() in line
    return error


def test_wrong_files(tmp_path, corpus, tiny):
    def pretrain(path, *more):
        return refused(tmp_path, "pretrain", path, "--out", tmp_path / "run", *options(tiny), *more)

    shutil.copy(corpus, tmp_path / "stories.txt")
    assert "storis.txt" in (line := pretrain(tmp_path / "storis.txt"))
    assert "stories.txt" in line  # the nearest
    (tmp_path / "empty.txt").write_bytes(b"")
    assert "empty" in pretrain(tmp_path / "empty.txt")
    (tmp_path / "picture.txt").write_bytes(b"\x89PNG\x00\x00\x01\x00" * 50)
    assert "binary" in pretrain(tmp_path / "picture.txt")
    (tmp_path / "latin.txt").write_bytes("bon\ncaf\xe9 noir\n".encode("latin-1"))
    line = pretrain(tmp_path / "latin.txt")
    assert "UTF-8" in line
    assert "latin.txt:2" in line
    assert "offset 7" in line
    (tmp_path / "small.txt").write_text("one line only")
    assert "too small" in pretrain(tmp_path / "small.txt")
    (tmp_path / "table.csv").write_text("review,stars\ngood film,5\nbad film,1\n")
    line = pretrain(tmp_path / "table.csv")
    assert "'text'" in line
    assert "review" in line


def test_wrong_settings_are_all_named(tmp_path, corpus):
    line = refused(
        tmp_path,
        "pretrain",
        corpus,
        "--out",
        tmp_path / "run",
        "--set",
        "dept=3",
        "--set",
        "leraning=1",
        "--set",
        "hedas=2",
    )
    assert "did you mean 'depth'?" in line
    assert "did you mean 'heads'?" in line
    assert "3 invalid settings" in line
    line = refused(tmp_path, "pretrain", corpus, "--out", tmp_path / "run", "--set", "width=30", "--set", "heads=4")
    assert "width: 30 must be a multiple of heads 4" in line
    assert "did you mean 'gpt-nano'" in refused(
        tmp_path, "pretrain", corpus, "--out", tmp_path / "run", "--preset", "gpt-nan"
    )
    assert "did you mean 'causal'" in refused(
        tmp_path, "pretrain", corpus, "--out", tmp_path / "run", "--objective", "casual"
    )


def test_an_output_folder_that_exists(tmp_path, corpus, tiny):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    line = refused(tmp_path, "pretrain", corpus, "--out", tmp_path / "mine", *options(tiny))
    assert "exists already" in line
    for flag in ("--overwrite", "--resume"):
        line = refused(tmp_path, "pretrain", corpus, "--out", tmp_path / "mine", flag, *options(tiny))
        assert "left alone" in line
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_an_output_that_is_a_file(tmp_path, corpus, tiny):
    (tmp_path / "mine").write_text("precious")
    for flag in ("--overwrite", "--resume", "--quiet"):
        assert "is a file" in refused(tmp_path, "pretrain", corpus, "--out", tmp_path / "mine", flag, *options(tiny))


def test_a_tokenizer_of_another_run(tmp_path, corpus, run):
    other = tmp_path / "other"
    shutil.copytree(run[0], other)
    headstock("tokenizer", "train", corpus, "--out", other / "tokenizer.json", "--vocab", 299, "--overwrite")
    line = refused(tmp_path, "generate", other, "Anne")
    assert str(other / "tokenizer.json") in line and "manifest.json" in line
    (other / "manifest.json").unlink()  # runs of earlier versions have none
    assert "does not belong to this run" in refused(tmp_path, "generate", other, "Anne")


def test_wrong_runs_and_calls(tmp_path, run):
    shutil.copytree(run[0], tmp_path / "tiny")
    assert "did you mean 'tiny'" in refused(tmp_path, "generate", tmp_path / "tinny", "x")
    (tmp_path / "tiny" / "model.safetensors").unlink()
    assert "--resume" in refused(tmp_path, "generate", tmp_path / "tiny", "x")
    assert "--max-tokens" in refused(tmp_path, "generate", run[0], "x", "--max-tokns", 3)
    assert "temperature" in refused(tmp_path, "generate", run[0], "x", "--temperature", -1)
    assert "did you mean 'imdb'" in refused(tmp_path, "data", "get", "imbd")
    _, said = headstock("generat", code=2)
    assert "generate" in said


def test_a_read_only_place_fails_with_one_line(tmp_path, corpus, tiny):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a read-only file system is not allowed here")
    try:
        _, said = headstock("pretrain", corpus, "--out", disk / "run", *options(tiny), code=1)
        assert "Read-only file system" in said.splitlines()[-1]
    finally:
        subprocess.run(["umount", disk])


def test_nothing_to_resume_is_said_before_any_work(tmp_path, corpus, tiny, run, call):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "rows.csv", REVIEWS)
    for out in (tmp_path / "none", tmp_path / "empty"):
        for words in (["pretrain", corpus], ["finetune", run[0], "--train", tmp_path / "rows.csv"]):
            assert "nothing to resume" in call(*words, "--out", out, "--resume", code=2)[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "rows.csv"]


@pytest.mark.parametrize("wrong", [["--steps", 20], ["--set", "epochs=2"], ["--set", "lr=-1"], ["--out", "there"]])
def test_a_wrong_call_is_refused_before_a_plan_is_shown(wrong, corpus, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    _, said = call("pretrain", corpus, "--out", "new", "--minutes", 1, *wrong, code=2)
    assert len(said.splitlines()) == 1


def test_hints_can_be_copied_into_a_shell(tmp_path, corpus, tiny, call):
    out, _ = call("pretrain", corpus, "--out", tmp_path / "my stories", *options(tiny | {"steps": 1}), "--quiet")
    hint = next(line for line in out.splitlines() if line.startswith("try: ")).removeprefix("try: ")
    assert shlex.split(hint)[:3] == ["headstock", "generate", str(tmp_path / "my stories")]
    card = (tmp_path / "my stories" / "README.md").read_text()
    for line in card.splitlines():
        if line.startswith("    headstock "):
            assert any(word.startswith("my stories") for word in shlex.split(line, comments=True))


def test_a_folder_that_cannot_be_made_is_called_by_its_name(corpus, tiny, call, tmp_path):
    (tmp_path / "file").write_text("x")
    _, said = call("pretrain", corpus, "--out", tmp_path / "file" / "run", *options(tiny), code=2)
    assert str(tmp_path / "file" / "run") in said and "claim" not in said


def test_only_a_near_path_is_suggested(corpus, call, tmp_path):
    for name in ("notes.txt", "stories.txt"):
        (tmp_path / name).write_text("Anne sees Paris.")
    for given, near in (("corpus.txt", None), ("tests.txt", None), ("storys.txt", "stories.txt")):
        _, said = call("pretrain", tmp_path / given, "--out", tmp_path / "run", code=2)
        assert ("did you mean" in said) == (near is not None) and (near or given) in said


def test_a_checkpoint_is_used_as_a_run(run, call, tmp_path):
    folder = run[0] / "checkpoints"
    steps = sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())
    early, late = folder / f"step-{steps[0]}", folder / f"step-{steps[-1]}"

    def loss(of):
        return json.loads(call("evaluate", of, "--json")[0])["metrics"]["loss"]

    best = min(loss(early), loss(late))
    assert loss(run[0]) == best and loss(early) != loss(late)
    assert call("generate", late, "Anne", "--max-tokens", 3)[0].startswith("Anne")
    assert "Anne" in call("tokenizer", "show", late, "Anne")[0]
    rows = write(tmp_path / "rows.csv", REVIEWS)
    call("finetune", late, "--train", rows, "--valid", rows, "--out", tmp_path / "fine", *QUICK)
    assert json.loads((tmp_path / "fine" / "config.json").read_text())["transfer"]["run"] == str(late)
    fine = sorted((tmp_path / "fine" / "checkpoints").iterdir())[-1]
    assert json.loads(call("predict", fine, "Anne sees Paris.", "--json")[0])["predictions"][0]["label"] in (
        "sea",
        "town",
    )
    call("export", late, tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    broken = tmp_path / "copy"
    shutil.copytree(run[0], broken)
    with (broken / "checkpoints" / late.name / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\0" if file.read(1) else b"\1")
    assert "damaged" in call("generate", broken / "checkpoints" / late.name, "Anne", code=2)[1]


# Fine-tuning, predicting and measuring


REVIEWS = [("Anne sees Paris.", "town"), ("Ben likes the sea.", "sea"), ("Zoë finds Paris.", "town")] * 8
QUICK = ["--set", "least_steps=0", "--epochs", 2, "--lr", 0.01, "--quiet"]


def write(path, rows, header="text,label"):
    path.write_text("\n".join([header, *(",".join(row) for row in rows)]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def classifier(run, tmp_path_factory):
    """Made by a real command from a table with columns of other names, and test rows without labels."""
    folder = tmp_path_factory.mktemp("reviews")
    train = write(folder / "train.csv", REVIEWS, header="review,stars")
    test = write(folder / "test.csv", [(text,) for text, _ in REVIEWS[:5]], header="review")
    files = ["--train", train, "--valid", train, "--test", test, "--columns", "text=review,label=stars"]
    return folder, result("finetune", run[0], "--out", folder / "run", *files, *QUICK, "--pool", "mean", "--seed", 2)


def test_finetune_says_what_the_contract_promises(classifier):
    folder, done = classifier
    promised = "run steps tokens seconds tokens_per_second train_loss valid_loss perplexity bits_per_byte metrics"
    assert set(promised.split()) <= set(done)
    assert done["run"] == str(folder / "run")
    assert "test" not in done
    recorded = json.loads((folder / "run" / "config.json").read_text())
    assert recorded["task"]["pool"] == "mean"
    assert recorded["train"]["seed"] == 2
    assert recorded["data"]["columns"] == ["text=review", "label=stars"]
    promised = "config.json tokenizer.json model.safetensors metrics.jsonl results.json README.md predictions.jsonl"
    assert set(promised.split()) <= {path.name for path in (folder / "run").iterdir()}
    assert len((folder / "run" / "predictions.jsonl").read_text().splitlines()) == 5


def test_predict_reads_arguments_files_tables_and_standard_input(classifier, call, tmp_path):
    folder, _ = classifier
    texts = ["Anne sees Paris.", "", "le café", "Ben likes the sea. " * 20]
    piped = result("predict", folder / "run", stdin="\n".join(texts) + "\n")["predictions"]
    assert [row.keys() for row in piped] == [{"label", "probabilities"}] * 4
    assert all(row["probabilities"].keys() == {"sea", "town"} for row in piped)
    assert all(row["label"] == max(row["probabilities"], key=row["probabilities"].get) for row in piped)

    def predictions(*words):
        return json.loads(call("predict", folder / "run", *words, "--json")[0].splitlines()[-1])["predictions"]

    assert predictions(*texts) == piped
    (tmp_path / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    assert predictions("--file", tmp_path / "texts.txt") == piped
    table = write(tmp_path / "table.csv", [(text, "x") for text in texts if text], header="review,other")
    assert predictions("--file", table, "--columns", "text=review") == [piped[0], *piped[2:]]
    out, _ = call("predict", folder / "run", *texts)
    assert [line.split("\t")[0] for line in out.splitlines()] == [row["label"] for row in piped]
    call("predict", folder / "run", "--file", tmp_path / "texts.txt", "--out", tmp_path / "out.jsonl")
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == piped


USED = """
import json, runpy, sys
for words in json.loads(sys.argv[1]):
    sys.argv = ["headstock", *words]
    try:
        runpy.run_module("headstock", run_name="__main__")
    except SystemExit as left:
        assert not left.code, left.code
print(json.dumps(sorted({name for name in sys.modules if name.count(".") < 2})))
"""


def test_using_a_run_imports_no_compiler_and_nothing_heavy(run, classifier):
    words = [
        ["predict", str(classifier[0] / "run"), "Anne likes it."],
        ["generate", str(run[0]), "Anne", "--max-tokens", "2"],
    ]
    done = subprocess.run([sys.executable, "-c", USED, json.dumps(words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    assert {"torch", "headstock.train"} <= imported
    heavy = {"torch._dynamo", "torch._inductor", "sympy", "sklearn", "scipy", "matplotlib", "transformers", "pandas"}
    assert not imported & (heavy | {"pyarrow", "tensorboard", "triton", "jinja2"})


def test_evaluate_measures_a_classifier(classifier, call):
    folder, done = classifier
    out, _ = call("evaluate", folder / "run", "--json")
    assert json.loads(out.splitlines()[-1])["metrics"]["accuracy"] == done["valid"]["accuracy"]
    out, _ = call("evaluate", folder / "run", folder / "train.csv", "--columns", "text=review,label=stars")
    assert "accuracy" in out
    assert "95%" in out


def test_a_run_remembers_its_columns(classifier, call, tmp_path):
    folder = classifier[0]

    def said(*words):
        return json.loads(call(*words, "--json", "-q")[0].splitlines()[-1])

    wanted = said("evaluate", folder / "run", folder / "train.csv", "--columns", "text=review,label=stars")
    assert said("evaluate", folder / "run", folder / "train.csv") == wanted
    found = said("predict", folder / "run", "--file", folder / "test.csv")["predictions"]
    kept = (folder / "run" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert found == [json.loads(line) for line in kept]
    usual = write(tmp_path / "usual.csv", REVIEWS[:5])  # text,label: what is not called as in training has its own name
    assert said("predict", folder / "run", "--file", usual)["predictions"] == found
    assert said("evaluate", folder / "run", usual)["metrics"]["rows"] == 5
    for words in (["--column", "review"], ["--columns", "text=review"]):
        assert said("predict", folder / "run", "--file", folder / "test.csv", *words)["predictions"] == found


def test_evaluate_and_finetune_print_the_same_line_with_the_majority_class(classifier, run, call, tmp_path):
    folder = classifier[0]
    train = folder / "train.csv"
    files = ["--train", train, "--valid", train, "--columns", "text=review,label=stars"]
    out, _ = call("finetune", run[0], "--out", tmp_path / "run", *files, *QUICK)
    measured = next(line for line in out.splitlines() if line.startswith("valid: ")).removeprefix("valid: ")
    assert "majority class 66.7%" in measured
    out, _ = call("evaluate", tmp_path / "run", train)
    assert out.splitlines()[0] == f"{train}: {measured}"


def test_predictions_carry_columns_and_are_csv_by_the_name_of_the_file(classifier, call, tmp_path):
    folder, file = classifier[0], tmp_path / "rows.csv"
    file.write_text(
        'id,review,stars\n7,"Anne, sees Paris.",town\n8, ,sea\n9,Ben likes the sea.,sea\n', encoding="utf-8"
    )
    words = ["predict", folder / "run", "--file", file, "--skip-blank", "--with", "id,text,label"]
    said, err = call(*words, "--json")
    rows = json.loads(said.splitlines()[-1])
    assert "1 blank row" in err and rows["skipped_rows"] == 1
    assert [(row["id"], row["text"], row["input.label"]) for row in rows["predictions"]] == [
        ("7", "Anne, sees Paris.", "town"),
        ("9", "Ben likes the sea.", "sea"),
    ]
    for name, delimiter in (("p.csv", ","), ("p.tsv", "\t")):
        call(*words, "--out", tmp_path / name)
        with (tmp_path / name).open(encoding="utf-8", newline="") as written:
            table = list(csv.DictReader(written, delimiter=delimiter))
        assert list(table[0]) == ["id", "text", "input.label", "label", "probabilities.sea", "probabilities.town"]
        for row, wanted in zip(table, rows["predictions"], strict=True):
            assert (row["id"], row["text"], row["label"]) == (wanted["id"], wanted["text"], wanted["label"])
            assert float(row["probabilities.sea"]) == wanted["probabilities"]["sea"]
    call(*words, "--out", tmp_path / "p.jsonl")
    lines = (tmp_path / "p.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows["predictions"]
    said, _ = call("predict", folder / "run", "Anne sees Paris.", "--with", "text")
    assert said.split("\t")[0] == "Anne sees Paris."


def test_blank_rows_are_refused_with_the_option_that_leaves_them_out(classifier, run, call, tmp_path):
    folder = classifier[0]
    rows = write(tmp_path / "rows.csv", [*REVIEWS, (" ", "sea"), ("Ben sees home.", "")])
    for words in (["finetune", run[0], "--train", rows, "--out", tmp_path / "run"], ["evaluate", folder / "run", rows]):
        _, err = call(*words, code=2)
        assert "rows.csv:26" in err and "--skip-blank" in err
    said = json.loads(call("evaluate", folder / "run", rows, "--skip-blank", "--json")[0].splitlines()[-1])["metrics"]
    assert (said["rows"], said["skipped_rows"]) == (len(REVIEWS), 2)
    files = ["--train", rows, "--out", tmp_path / "run", "--skip-blank", *QUICK[:-1]]
    out, err = call("finetune", run[0], *files, "--json")
    done = json.loads(out.splitlines()[-1])
    assert any("2 blank rows" in line for line in done["warnings"])
    assert "warning: " in err
    assert json.loads(call("evaluate", tmp_path / "run", "--json")[0].splitlines()[-1])["metrics"]["rows"]


def test_plain_text_has_no_labels_to_train_on(run, call, tmp_path):
    (tmp_path / "rows.txt").write_text("Anne sees Paris.\nBen likes the sea.\n")
    _, err = call("finetune", run[0], "--train", tmp_path / "rows.txt", "--out", tmp_path / "run", code=2)
    assert "rows.txt" in err and "no labels" in err and ".csv" in err and "rows.label" in err


def test_a_copied_run_is_called_by_its_new_name(run, classifier, call, tmp_path):
    folder = classifier[0]
    files = ["--train", folder / "train.csv", "--valid", folder / "train.csv", "--test", folder / "test.csv"]
    again = {"pretrain": (run[0], []), "finetune": (folder / "run", [run[0], *files])}
    for verb, (old, words) in again.items():
        new = tmp_path / verb
        shutil.copytree(old, new)
        out, _ = call(verb, *words, "--out", new, "--resume")
        assert out.startswith(f"{new}: ")
        assert str(old) not in out
        assert json.loads(call(verb, *words, "--out", new, "--resume", "--json")[0])["run"] == str(new)


def test_wrong_words_to_a_classifier(classifier, run, call, tmp_path):
    folder, _ = classifier

    def said(*words) -> str:
        _, err = call(*words, "--quiet", code=2)
        assert len(err.splitlines()) == 1
        assert list(tmp_path.iterdir()) == []
        return err

    assert "has no head to predict with" in said("predict", run[0], "x", "--out", tmp_path / "out.jsonl")
    assert "not both" in said("predict", folder / "run", "x", "--file", folder / "test.csv")
    line = said("predict", folder / "run", "--file", folder / "test.csv", "--out", tmp_path / "out.parquet")
    assert "out.parquet" in line and ".csv" in line
    assert "'nobody'" in said("predict", folder / "run", "--file", folder / "test.csv", "--with", "nobody")
    assert "only text" in said("predict", folder / "run", "a text", "--with", "id")
    assert "'nobody'" in said("predict", folder / "run", "--file", folder / "test.csv", "--column", "nobody")
    line = said("evaluate", folder / "run", folder / "test.csv", "--columns", "text=review")
    assert "test.csv: has no labels to measure by" in line
    named = ["--columns", "text=review,label=stars"]
    line = said("evaluate", folder / "run", folder / "train.csv", *named, "--documents", "line")
    assert f"--documents is for text; here {folder / 'run'} is measured on labelled rows" in line
    assert "no left-to-right language model" in said("generate", folder / "run", "x")


def test_what_cannot_be_finetuned_is_refused_in_one_line(run, classifier, call, tmp_path):
    stock = tmp_path / "stock"
    shutil.copytree(run[0], stock)
    good = write(tmp_path / "good.csv", REVIEWS)

    def said(*words, source=stock, train=good, valid=good) -> str:
        before = sorted(tmp_path.rglob("*"))
        files = ["--train", train, "--valid", valid, "--out", tmp_path / "new"]
        _, err = call("finetune", source, *files, *QUICK, *words, code=2)
        assert sorted(tmp_path.rglob("*")) == before
        assert len(err.splitlines()) == 1
        return err.removeprefix("headstock: ").replace(f"{tmp_path}/", "")

    one = write(tmp_path / "one.csv", [row for row in REVIEWS if row[1] == "sea"])
    assert said(train=one).startswith("one.csv: one class only, 'sea'")
    unseen = write(tmp_path / "unseen.csv", [*REVIEWS[:3], ("Anne sees Rome.", "twon")])
    told = "unseen.csv:5: label 'twon' is new; training has 'sea', 'town'; did you mean 'town'?\n"
    assert said(valid=unseen) == told
    assert said("--test", unseen) == told
    blank = write(tmp_path / "blank.csv", [*REVIEWS[:2], (" ", "sea"), *REVIEWS[:2]])
    for bad in ({"train": blank}, {"valid": blank}):
        assert said(**bad).startswith("blank.csv:4: text is blank")
    table = write(tmp_path / "table.csv", REVIEWS, header="review,stars")
    line = said(train=table)
    assert line.startswith("table.csv: no column 'text' (columns: 'review', 'stars')")
    assert "no column 'star'" in said("--columns", "text=review,label=star", train=table, valid=table)
    assert said(train=tmp_path / "godo.csv") == "godo.csv: no such file; did you mean 'good.csv'?\n"
    assert "is not a run folder, it has no config.json" in said(source=stock / "checkpoints")
    assert said(source=tmp_path / "stok") == "stok: no such run; did you mean 'stock'?\n"
    assert "with --freeze there is nothing to train below the head" in said("--freeze", "--layer-decay", 0.9)
    assert "task.pool: must be one of 'last', 'cls', 'mean', 'max', 'concat', not 'lats'" in said("--pool", "lats")
    assert "did you mean 'classify'?" in said("--task", "clasify")
    assert "does not go with init scratch" in said("--init", "scratch", "--adapt-steps", 5)
    assert "must be auto, cpu, cuda or mps" in said("--device", "gpu")
    fine = classifier[0] / "run"
    assert "cannot go on as a language model" in said("--adapt-steps", 5, source=fine)
    (stock / "tokenizer.json").rename(stock / "elsewhere.json")
    assert said().startswith("stock: its tokenizer.json is missing")
    (stock / "elsewhere.json").rename(stock / "tokenizer.json")
    (stock / "model.safetensors").unlink()
    assert said().startswith("stock: has no model.safetensors yet")
