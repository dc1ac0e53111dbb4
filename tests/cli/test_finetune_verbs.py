"""`headstock finetune`, `predict` and `evaluate` on labelled rows."""

import csv
import json
import shutil
import subprocess
import sys

from headstock.tasks.text_metrics import DEFINITIONS
from tests.commands import REVIEWS, SHORT_FINETUNING, verb_result, write_rows


def test_finetune_returns_all_documented_keys_and_files(classifier):
    folder, results = classifier
    promised = "run steps tokens seconds tokens_per_second train_loss valid_loss perplexity bits_per_byte metrics"
    assert set(promised.split()) <= set(results)
    assert results["run"] == str(folder / "run")
    assert "test" not in results
    recorded = json.loads((folder / "run" / "config.json").read_text())
    assert recorded["task"]["pool"] == "mean"
    assert recorded["train"]["seed"] == 2
    assert recorded["data"]["columns"] == ["text=review", "label=stars"]
    promised = "config.json tokenizer.json model.safetensors metrics.jsonl results.json README.md predictions.jsonl"
    assert set(promised.split()) <= {path.name for path in (folder / "run").iterdir()}
    assert len((folder / "run" / "predictions.jsonl").read_text().splitlines()) == 5


def test_predict_reads_arguments_files_tables_and_stdin(classifier, call, tmp_path):
    folder, _ = classifier
    texts = ["Anne sees Paris.", "", "le café", "Ben likes the sea. " * 20]
    piped = verb_result("predict", folder / "run", stdin="\n".join(texts) + "\n")["predictions"]
    assert [row.keys() for row in piped] == [{"label", "probabilities"}] * 4
    assert all(row["probabilities"].keys() == {"sea", "town"} for row in piped)
    assert all(row["label"] == max(row["probabilities"], key=row["probabilities"].get) for row in piped)

    def predictions(*arguments):
        return json.loads(call("predict", folder / "run", *arguments, "--json")[0].splitlines()[-1])["predictions"]

    assert predictions(*texts) == piped
    (tmp_path / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    assert predictions("--file", tmp_path / "texts.txt") == piped
    table = write_rows(tmp_path / "table.csv", [(text, "x") for text in texts if text], header="review,other")
    assert predictions("--file", table, "--columns", "text=review") == [piped[0], *piped[2:]]
    out, _ = call("predict", folder / "run", *texts)
    assert [line.split("\t")[0] for line in out.splitlines()] == [row["label"] for row in piped]
    call("predict", folder / "run", "--file", tmp_path / "texts.txt", "--out", tmp_path / "out.jsonl")
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == piped


IMPORTED_MODULES = """
import json, runpy, sys
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["headstock", *arguments]
    try:
        runpy.run_module("headstock", run_name="__main__")
    except SystemExit as left:
        assert not left.code, left.code
print(json.dumps(sorted({name for name in sys.modules if name.count(".") < 2})))
"""


def test_prediction_and_generation_import_nothing_heavy(pretrained, classifier):
    arguments = [
        ["predict", str(classifier[0] / "run"), "Anne likes it."],
        ["generate", str(pretrained[0]), "Anne", "--max-tokens", "2"],
    ]
    process = subprocess.run(
        [sys.executable, "-c", IMPORTED_MODULES, json.dumps(arguments)], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    imported = set(json.loads(process.stdout.splitlines()[-1]))
    assert {"torch", "headstock.train"} <= imported
    heavy = {"torch._dynamo", "torch._inductor", "sympy", "sklearn", "scipy", "matplotlib", "transformers", "pandas"}
    assert not imported & (heavy | {"pyarrow", "tensorboard", "triton", "jinja2"})


def test_evaluate_measures_a_classifier(classifier, call):
    folder, results = classifier
    out, _ = call("evaluate", folder / "run", "--json")
    assert json.loads(out.splitlines()[-1])["metrics"]["accuracy"] == results["valid"]["accuracy"]
    out, _ = call("evaluate", folder / "run", folder / "train.csv", "--columns", "text=review,label=stars")
    assert "accuracy" in out
    assert "95%" in out
    report = (folder / "run" / "report.html").read_text(encoding="utf-8")
    for name, meaning in DEFINITIONS.items():  # of abbreviations
        assert f"({meaning})" in next(line for line in out.splitlines() if line.startswith(name))
        assert f"<dt>{name}</dt>" in report and f"<b>{name}</b> is the {meaning}" in report


def test_a_run_remembers_its_columns(classifier, call, tmp_path):
    folder = classifier[0]

    def output(*arguments):
        return json.loads(call(*arguments, "--json", "-q")[0].splitlines()[-1])

    expected = output("evaluate", folder / "run", folder / "train.csv", "--columns", "text=review,label=stars")
    assert output("evaluate", folder / "run", folder / "train.csv") == expected
    predictions = output("predict", folder / "run", "--file", folder / "test.csv")["predictions"]
    lines = (folder / "run" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert predictions == [json.loads(line) for line in lines]
    usual = write_rows(tmp_path / "usual.csv", REVIEWS[:5])  # text,label: the default names also work
    assert output("predict", folder / "run", "--file", usual)["predictions"] == predictions
    assert output("evaluate", folder / "run", usual)["metrics"]["rows"] == 5
    for arguments in (["--column", "review"], ["--columns", "text=review"]):
        renamed = output("predict", folder / "run", "--file", folder / "test.csv", *arguments)
        assert renamed["predictions"] == predictions


def test_evaluate_and_finetune_print_the_same_line_with_the_majority_class(classifier, pretrained, call, tmp_path):
    folder = classifier[0]
    train = folder / "train.csv"
    files = ["--train", train, "--valid", train, "--columns", "text=review,label=stars"]
    out, err = call("finetune", pretrained[0], "--out", tmp_path / "run", *files, *SHORT_FINETUNING[:-1])
    before_validation = err.partition("valid loss")[0]
    assert "steps | loss" in before_validation  # a log shows the training loss from the start
    measured = next(line for line in out.splitlines() if line.startswith("valid: ")).removeprefix("valid: ")
    assert "majority class 66.7%" in measured
    out, _ = call("evaluate", tmp_path / "run", train)
    assert out.splitlines()[0] == f"{train}: {measured}"


def test_predict_copies_columns_and_writes_csv_tsv_and_jsonl(classifier, call, tmp_path):
    folder, file = classifier[0], tmp_path / "rows.csv"
    file.write_text(
        'id,review,stars\n7,"Anne, sees Paris.",town\n8, ,sea\n9,Ben likes the sea.,sea\n', encoding="utf-8"
    )
    arguments = ["predict", folder / "run", "--file", file, "--skip-blank", "--with", "id,text,label"]
    out, err = call(*arguments, "--json")
    rows = json.loads(out.splitlines()[-1])
    assert "1 blank row" in err and rows["skipped_rows"] == 1
    assert [(row["id"], row["text"], row["input.label"]) for row in rows["predictions"]] == [
        ("7", "Anne, sees Paris.", "town"),
        ("9", "Ben likes the sea.", "sea"),
    ]
    for name, delimiter in (("p.csv", ","), ("p.tsv", "\t")):
        call(*arguments, "--out", tmp_path / name)
        with (tmp_path / name).open(encoding="utf-8", newline="") as written:
            table = list(csv.DictReader(written, delimiter=delimiter))
        assert list(table[0]) == ["id", "text", "input.label", "label", "probabilities.sea", "probabilities.town"]
        for row, expected in zip(table, rows["predictions"], strict=True):
            assert (row["id"], row["text"], row["label"]) == (expected["id"], expected["text"], expected["label"])
            assert float(row["probabilities.sea"]) == expected["probabilities"]["sea"]
    call(*arguments, "--out", tmp_path / "p.jsonl")
    lines = (tmp_path / "p.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows["predictions"]
    out, _ = call("predict", folder / "run", "Anne sees Paris.", "--with", "text")
    assert out.split("\t")[0] == "Anne sees Paris."


def test_blank_rows_are_refused_or_skipped(classifier, pretrained, call, tmp_path):
    folder = classifier[0]
    rows = write_rows(tmp_path / "rows.csv", [*REVIEWS, (" ", "sea"), ("Ben sees home.", "")])
    for arguments in (
        ["finetune", pretrained[0], "--train", rows, "--out", tmp_path / "run"],
        ["evaluate", folder / "run", rows],
    ):
        _, err = call(*arguments, code=2)
        assert "rows.csv:26" in err and "--skip-blank" in err
    out, _ = call("evaluate", folder / "run", rows, "--skip-blank", "--json")
    metrics = json.loads(out.splitlines()[-1])["metrics"]
    assert (metrics["rows"], metrics["skipped_rows"]) == (len(REVIEWS), 2)
    files = ["--train", rows, "--out", tmp_path / "run", "--skip-blank", *SHORT_FINETUNING[:-1]]
    out, err = call("finetune", pretrained[0], *files, "--json")
    results = json.loads(out.splitlines()[-1])
    assert any("2 blank rows" in line for line in results["warnings"])
    assert "warning: " in err
    assert json.loads(call("evaluate", tmp_path / "run", "--json")[0].splitlines()[-1])["metrics"]["rows"]


def test_plain_text_has_no_labels_to_train_on(pretrained, call, tmp_path):
    (tmp_path / "rows.txt").write_text("Anne sees Paris.\nBen likes the sea.\n")
    _, err = call("finetune", pretrained[0], "--train", tmp_path / "rows.txt", "--out", tmp_path / "run", code=2)
    assert "rows.txt" in err and "labels" in err and ".csv" in err and "rows.label" in err


def test_a_copied_run_is_reported_under_its_new_path(pretrained, classifier, call, tmp_path):
    folder = classifier[0]
    files = ["--train", folder / "train.csv", "--valid", folder / "train.csv", "--test", folder / "test.csv"]
    commands = {"pretrain": (pretrained[0], []), "finetune": (folder / "run", [pretrained[0], *files])}
    for verb, (old, arguments) in commands.items():
        new = tmp_path / verb
        shutil.copytree(old, new)
        out, _ = call(verb, *arguments, "--out", new, "--resume")
        assert out.startswith(f"{new}: ")
        assert str(old) not in out
        assert json.loads(call(verb, *arguments, "--out", new, "--resume", "--json")[0])["run"] == str(new)


def test_wrong_options_for_a_classifier(classifier, pretrained, call, tmp_path):
    folder, _ = classifier

    def error(*arguments) -> str:
        _, err = call(*arguments, "--quiet", code=2)
        assert len(err.splitlines()) == 1
        assert list(tmp_path.iterdir()) == []
        return err

    assert "headstock finetune" in error("predict", pretrained[0], "x", "--out", tmp_path / "out.jsonl")
    assert "not both" in error("predict", folder / "run", "x", "--file", folder / "test.csv")
    line = error("predict", folder / "run", "--file", folder / "test.csv", "--out", tmp_path / "out.parquet")
    assert "out.parquet" in line and ".csv" in line
    assert "'nobody'" in error("predict", folder / "run", "--file", folder / "test.csv", "--with", "nobody")
    assert "only text" in error("predict", folder / "run", "a text", "--with", "id")
    assert "'nobody'" in error("predict", folder / "run", "--file", folder / "test.csv", "--column", "nobody")
    line = error("evaluate", folder / "run", folder / "test.csv", "--columns", "text=review")
    assert "test.csv: " in line and "labels" in line
    named = ["--columns", "text=review,label=stars"]
    line = error("evaluate", folder / "run", folder / "train.csv", *named, "--documents", "line")
    assert f"--documents is for text; here {folder / 'run'} is measured on labelled rows" in line
    assert str(folder / "run") in error("generate", folder / "run", "x")


def test_wrong_finetuning_input_is_refused_in_one_line(pretrained, classifier, call, tmp_path):
    stock = tmp_path / "stock"
    shutil.copytree(pretrained[0], stock)
    good = write_rows(tmp_path / "good.csv", REVIEWS)

    def error(*arguments, source=stock, train=good, valid=good) -> str:
        before = sorted(tmp_path.rglob("*"))
        files = ["--train", train, "--valid", valid, "--out", tmp_path / "new"]
        _, err = call("finetune", source, *files, *SHORT_FINETUNING, *arguments, code=2)
        assert sorted(tmp_path.rglob("*")) == before
        assert len(err.splitlines()) == 1
        return err.removeprefix("headstock: ").replace(f"{tmp_path}/", "")

    one = write_rows(tmp_path / "one.csv", [row for row in REVIEWS if row[1] == "sea"])
    assert (line := error(train=one)).startswith("one.csv: ") and "'sea'" in line
    unseen = write_rows(tmp_path / "unseen.csv", [*REVIEWS[:3], ("Anne sees Rome.", "twon")])
    for line in (error(valid=unseen), error("--test", unseen)):
        assert line.startswith("unseen.csv:5: ") and "'twon'" in line and "did you mean 'town'?" in line
    blank = write_rows(tmp_path / "blank.csv", [*REVIEWS[:2], (" ", "sea"), *REVIEWS[:2]])
    for bad in ({"train": blank}, {"valid": blank}):
        assert error(**bad).startswith("blank.csv:4: ")
    table = write_rows(tmp_path / "table.csv", REVIEWS, header="review,stars")
    line = error(train=table)
    assert line.startswith("table.csv: ") and all(name in line for name in ("'text'", "'review'", "'stars'"))
    assert "'star'" in error("--columns", "text=review,label=star", train=table, valid=table)
    line = error(train=tmp_path / "godo.csv")
    assert line.startswith("godo.csv: ") and "did you mean 'good.csv'?" in line
    line = error(source=stock / "checkpoints")
    assert line.startswith("stock/checkpoints: ") and "name one of them: step-" in line
    line = error(source=tmp_path / "stok")
    assert line.startswith("stok: ") and "did you mean 'stock'?" in line
    assert "freeze" in error("--freeze", "--layer-decay", 0.9)
    line = error("--pool", "lats")
    assert "task.pool: " in line and "'lats'" in line and "'concat'" in line
    assert "did you mean 'classify'?" in error("--task", "clasify")
    assert "scratch" in error("--init", "scratch", "--adapt-steps", 5)
    assert "auto, cpu, cuda or mps" in error("--device", "gpu")
    fine = classifier[0] / "run"
    assert str(fine).removeprefix(f"{tmp_path}/") in error("--adapt-steps", 5, source=fine)
    (stock / "tokenizer.json").rename(stock / "elsewhere.json")
    assert error().startswith("stock: ") and "tokenizer.json" in error()
    (stock / "elsewhere.json").rename(stock / "tokenizer.json")
    (stock / "model.safetensors").unlink()
    assert error().startswith("stock: ") and "model.safetensors" in error()
