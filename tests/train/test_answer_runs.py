"""Question-answering runs: trained on a small file, used from Python and the command line."""

import json
import random

import pytest

import headstock
from headstock.errors import UserError
from headstock.train.run_folder import RunFolder
from tests.commands import command
from tests.conftest import TINY

LEARN = {"least_steps": 0, "epochs": 14, "lr": 0.01, "batch": 16}
QUICK = {"least_steps": 0, "epochs": 1, "lr": 1e-3, "batch": 32}
WHO, WHERE = ["Anne", "Ben", "Zoë"], ["home", "the sea", "Paris"]


@pytest.fixture(scope="module")
def pretrained(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "masked"
    headstock.pretrain(corpus, out=out, objective="masked", settings=TINY | {"steps": 30, "lr": 0.01, "seed": 7})
    return out


def make_questions(count: int, seed: int, *, answered=True, unanswerable=0.0) -> list[dict]:
    """Questions about the person or the location in a story that names each once.

    A share of them is `unanswerable`: the story does not name what they ask for.
    """
    pick = random.Random(seed)
    rows = []
    for number in range(count):
        who, where, verb = pick.choice(WHO), pick.choice(WHERE), pick.choice(["sees", "likes", "finds"])
        missing = pick.random() < unanswerable
        question = pick.choice(["who", "where"])
        facts = {"who": who, "where": where}
        if missing:
            facts[question] = "it"
        filler = " ".join(["Story"] * pick.randint(0, 12))
        context = f"{filler} {facts['who']} {verb} {facts['where']}.".strip()
        row = {"id": f"s{seed}-{number}", "question": f"{question}?", "context": context}
        if answered:
            answer = facts[question]
            row["answers"] = [] if missing else [{"text": answer, "answer_start": context.rindex(answer)}]
        rows.append(row)
    return rows


def write(path, rows):
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    return {
        "train": write(folder / "train.jsonl", make_questions(160, 1)),
        "valid": write(folder / "valid.jsonl", make_questions(40, 2)),
        "unlabelled": write(folder / "test.jsonl", make_questions(10, 3, answered=False)),
    }


@pytest.fixture(scope="module")
def trained(pretrained, files, tmp_path_factory):
    """A run that answers questions, and its results."""
    out = tmp_path_factory.mktemp("runs") / "answers"
    splits = {"train": files["train"], "valid": files["valid"], "test": files["unlabelled"]}
    return out, headstock.finetune(pretrained, task="answer", out=out, settings=LEARN, **splits)


def test_metrics_of_a_trained_run(trained, files):
    out, done = trained
    assert done["headline"] == "f1"
    assert done["metrics"]["f1"] >= done["metrics"]["exact_match"] > 0.8
    low, high = done["metrics"]["intervals"]["f1"]
    assert 0 <= low <= done["metrics"]["f1"] <= high <= 1
    assert done["epochs"][-1]["valid_accuracy"] > 0.8 > done["epochs"][0]["valid_accuracy"]
    assert done["epochs"][-1]["valid_loss"] < done["epochs"][0]["valid_loss"] / 2
    assert done["parameters"]["span"] == 2 * 16 + 2
    loaded = headstock.load(out)
    data = loaded.task.prepare(loaded.held_out())
    rows = [len(windows) for windows in loaded.task.examples(data, length=32).windows]
    assert min(rows) == 1 < max(rows)  # contexts that fit, and contexts that are read in windows


def test_unlabelled_questions_are_predicted_in_their_order(trained, files):
    out, done = trained
    assert done["measured_on"] == "valid"
    predictions = [json.loads(line) for line in (out / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = make_questions(10, 3)
    assert [row["id"] for row in predictions] == [row["id"] for row in rows]
    correct = [p["answer"] == row["answers"][0]["text"] for p, row in zip(predictions, rows, strict=True)]
    assert sum(correct) >= 8


def test_answers_are_spans_of_the_context(trained):
    loaded = headstock.load(trained[0])
    rows = make_questions(20, 5, answered=False)
    predictions = loaded.predict(rows)
    assert [prediction["id"] for prediction in predictions] == [row["id"] for row in rows]
    for prediction, row in zip(predictions, rows, strict=True):
        assert prediction["answer"] == row["context"][prediction["start"] : prediction["end"]] != ""
        assert 0 < prediction["score"] <= 1
    context = "Story Story Zoë likes Paris."
    both = loaded.answer(["who?", "where?"], context=context)
    assert [row["answer"] for row in both] == ["Zoë", "Paris"]
    (alone,) = loaded.answer("who?", context=context)  # another batch size, and so another order of summation
    assert both[0] == alone | {"score": pytest.approx(alone["score"], abs=1e-6)}
    assert set(both[0]) == {"answer", "start", "end", "score"}


def test_evaluate_reads_a_file_or_the_held_out_rows(trained, files):
    out, done = trained
    loaded = headstock.load(out)
    held_out = loaded.evaluate()
    assert {name: held_out[name] for name in done["metrics"]} == done["metrics"]
    on_file = loaded.evaluate(files["train"])
    assert on_file["rows"] == 160
    assert on_file["f1"] > 0.8
    with pytest.raises(UserError, match=r"test.jsonl: has no answers to measure by; add a column 'answers'"):
        loaded.evaluate(files["unlabelled"])


def test_the_command_reads_a_context_file_and_prints_json(trained, tmp_path):
    context = tmp_path / "story.txt"
    context.write_text("Story Story Ben finds the sea.\n", encoding="utf-8")
    code, out, err = command("answer", trained[0], "--context", context, "who?", "where?", "--json")
    assert code == 0, err
    answers = json.loads(out.splitlines()[-1])["answers"]
    assert [row["answer"] for row in answers] == ["Ben", "the sea"]
    assert (answers[0]["start"], answers[0]["end"]) == (12, 15)


def test_the_command_marks_the_answer_in_its_context(trained, call):
    out, _ = call("answer", trained[0], "--context", "Story Story Ben finds the sea.", "who?")
    answer, excerpt = out.splitlines()
    assert answer.startswith("Ben\t0.")
    assert excerpt.strip() == "Story Story [Ben] finds the sea."


@pytest.mark.parametrize(
    ("context", "question", "message"),
    [
        (" ", "who?", "--context is empty"),
        ("nowhere.txt", "who?", "--context nowhere.txt: no such file"),
        ("Ben finds Paris.", " ", "the question is empty"),
    ],
)
def test_empty_and_missing_inputs_are_rejected(trained, call, context, question, message):
    assert message in call("answer", trained[0], "--context", context, question, code=2)[1]


def test_context_files_without_text_are_rejected(trained, call, tmp_path):
    for content, message in ((b" \n", "no text in it"), (b"\xff\xfe", "not UTF-8 at byte 0")):
        (tmp_path / "story.txt").write_bytes(content)
        assert message in call("answer", trained[0], "--context", tmp_path / "story.txt", "who?", code=2)[1]


def test_runs_of_other_tasks_are_rejected(pretrained):
    with pytest.raises(UserError, match=r"is a language model; .*headstock finetune --task"):
        headstock.load(pretrained).answer("who?", context="Ben finds Paris.")


def test_unanswerable_questions(pretrained, tmp_path):
    train = write(tmp_path / "train.jsonl", make_questions(160, 6, unanswerable=0.5))
    valid = write(tmp_path / "valid.jsonl", make_questions(40, 7, unanswerable=0.5))
    done = headstock.finetune(pretrained, task="answer", train=train, valid=valid, out=tmp_path / "run", settings=LEARN)
    assert RunFolder(tmp_path / "run").config()["task"]["unanswerable"] is True
    assert done["metrics"]["exact_match"] > 0.7  # never or always answering: about half
    loaded = headstock.load(tmp_path / "run")
    unanswered, answered = (
        loaded.answer("who?", context=f"Story Story {who} likes Paris.")[0] for who in ("it", "Ben")
    )
    assert (unanswered["answer"], unanswered["start"], unanswered["end"]) == ("", None, None)
    assert answered["answer"] == "Ben"
    assert loaded.answer("who?", context="Story Story it likes Paris.", threshold=99.0)[0]["answer"]
    assert loaded.answer("who?", context="Story Story it likes Paris.")[0] == unanswered, (
        "a threshold applies to one call"
    )


def test_frozen_backbones_and_ensembles(pretrained, files, tmp_path):
    options = {"train": files["train"], "valid": files["valid"], "task": "answer"}
    frozen = {"epochs": 20, "lr": 0.05, "least_steps": 0, "layers": "mix"}
    done = headstock.finetune(pretrained, out=tmp_path / "frozen", freeze=True, settings=frozen, **options)
    assert done["parameters"]["trainable"] == 2 * 16 + 2 + 3 + 1  # the head, a weight per layer, their scale
    assert done["epochs"][-1]["train_loss"] < done["epochs"][0]["train_loss"] * 0.8
    metrics = headstock.load(tmp_path / "frozen").evaluate()
    assert {name: metrics[name] for name in done["metrics"]} == done["metrics"]
    headstock.finetune(pretrained, out=tmp_path / "two", settings=QUICK | {"ensemble": 2}, **options)
    assert headstock.load(tmp_path / "two").answer("who?", context="Ben finds Paris.")[0]["answer"]
