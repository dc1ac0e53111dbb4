"""Runs that answer questions: trained on a few that can be learned, asked through Python and the command line."""

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
def stock(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("stocks") / "masked"
    headstock.pretrain(corpus, out=out, objective="masked", settings=TINY | {"steps": 30, "lr": 0.01, "seed": 7})
    return out


def asked(count: int, seed: int, *, answered=True, without=0.0) -> list[dict]:
    """Who is it, and where, in a story that says both once, amid one to three words that say neither.

    A share of them `without` an answer asks for what the story does not say.
    """
    pick = random.Random(seed)
    rows = []
    for number in range(count):
        who, where, verb = pick.choice(WHO), pick.choice(WHERE), pick.choice(["sees", "likes", "finds"])
        gone = pick.random() < without
        wanted = pick.choice(["who", "where"])
        told = {"who": who, "where": where}
        if gone:
            told[wanted] = "it"
        filler = " ".join(["Story"] * pick.randint(0, 12))
        context = f"{filler} {told['who']} {verb} {told['where']}.".strip()
        row = {"id": f"s{seed}-{number}", "question": f"{wanted}?", "context": context}
        if answered:
            answer = told[wanted]
            row["answers"] = [] if gone else [{"text": answer, "answer_start": context.rindex(answer)}]
        rows.append(row)
    return rows


def write(path, rows):
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    return {
        "train": write(folder / "train.jsonl", asked(160, 1)),
        "valid": write(folder / "valid.jsonl", asked(40, 2)),
        "unlabelled": write(folder / "test.jsonl", asked(10, 3, answered=False)),
    }


@pytest.fixture(scope="module")
def learned(stock, files, tmp_path_factory):
    """A run that has learned to answer, and its results."""
    out = tmp_path_factory.mktemp("runs") / "answers"
    named = {"train": files["train"], "valid": files["valid"], "test": files["unlabelled"]}
    return out, headstock.finetune(stock, task="answer", out=out, settings=LEARN, **named)


def test_it_learns_to_answer_and_says_how_well(learned, files):
    out, done = learned
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
    assert min(rows) == 1 < max(rows)  # contexts that fit, and contexts that must be read in windows


def test_unlabelled_questions_are_predicted_in_their_order(learned, files):
    out, done = learned
    assert done["measured_on"] == "valid"
    told = [json.loads(line) for line in (out / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = asked(10, 3)
    assert [row["id"] for row in told] == [row["id"] for row in rows]
    right = sum(one["answer"] == row["answers"][0]["text"] for one, row in zip(told, rows, strict=True))
    assert right >= 8


def test_answers_are_words_of_the_context(learned):
    loaded = headstock.load(learned[0])
    rows = asked(20, 5, answered=False)
    found = loaded.predict(rows)
    assert [one["id"] for one in found] == [row["id"] for row in rows]
    for one, row in zip(found, rows, strict=True):
        assert one["answer"] == row["context"][one["start"] : one["end"]] != ""
        assert 0 < one["score"] <= 1
    context = "Story Story Zoë likes Paris."
    both = loaded.answer(["who?", "where?"], context=context)
    assert [row["answer"] for row in both] == ["Zoë", "Paris"]
    (alone,) = loaded.answer("who?", context=context)  # another number of rows, and so another order of sums
    assert both[0] == alone | {"score": pytest.approx(alone["score"], abs=1e-6)}
    assert set(both[0]) == {"answer", "start", "end", "score"}


def test_evaluate_measures_what_it_is_given_and_what_was_held_out(learned, files):
    out, done = learned
    loaded = headstock.load(out)
    again = loaded.evaluate()
    assert {name: again[name] for name in done["metrics"]} == done["metrics"]
    given = loaded.evaluate(files["train"])
    assert given["rows"] == 160
    assert given["f1"] > 0.8
    with pytest.raises(UserError, match=r"test.jsonl: has no answers to measure by; add a column 'answers'"):
        loaded.evaluate(files["unlabelled"])


def test_the_command_answers_from_a_file_and_says_so_in_json(learned, tmp_path):
    context = tmp_path / "story.txt"
    context.write_text("Story Story Ben finds the sea.\n", encoding="utf-8")
    code, out, err = command("answer", learned[0], "--context", context, "who?", "where?", "--json")
    assert code == 0, err
    answers = json.loads(out.splitlines()[-1])["answers"]
    assert [row["answer"] for row in answers] == ["Ben", "the sea"]
    assert (answers[0]["start"], answers[0]["end"]) == (12, 15)


def test_the_command_shows_an_answer_where_it_stands(learned, call):
    out, _ = call("answer", learned[0], "--context", "Story Story Ben finds the sea.", "who?")
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
def test_what_cannot_be_answered_is_refused(learned, call, context, question, message):
    assert message in call("answer", learned[0], "--context", context, question, code=2)[1]


def test_files_that_hold_no_text_are_refused(learned, call, tmp_path):
    for content, message in ((b" \n", "no text in it"), (b"\xff\xfe", "not UTF-8 at byte 0")):
        (tmp_path / "story.txt").write_bytes(content)
        assert message in call("answer", learned[0], "--context", tmp_path / "story.txt", "who?", code=2)[1]


def test_other_runs_do_not_answer(stock):
    with pytest.raises(UserError, match=r"is a language model; .*headstock finetune --task"):
        headstock.load(stock).answer("who?", context="Ben finds Paris.")


def test_questions_without_an_answer_are_learned_too(stock, tmp_path):
    train = write(tmp_path / "train.jsonl", asked(160, 6, without=0.5))
    valid = write(tmp_path / "valid.jsonl", asked(40, 7, without=0.5))
    done = headstock.finetune(stock, task="answer", train=train, valid=valid, out=tmp_path / "run", settings=LEARN)
    assert RunFolder(tmp_path / "run").config()["task"]["unanswerable"] is True
    assert done["metrics"]["exact_match"] > 0.7  # always silent or never: about half
    loaded = headstock.load(tmp_path / "run")
    silent, said = (loaded.answer("who?", context=f"Story Story {who} likes Paris.")[0] for who in ("it", "Ben"))
    assert (silent["answer"], silent["start"], silent["end"]) == ("", None, None)
    assert said["answer"] == "Ben"
    assert loaded.answer("who?", context="Story Story it likes Paris.", threshold=99.0)[0]["answer"]
    assert loaded.answer("who?", context="Story Story it likes Paris.")[0] == silent, "a threshold is for one call"


def test_a_frozen_backbone_and_several_models_answer_as_well(stock, files, tmp_path):
    named = {"train": files["train"], "valid": files["valid"], "task": "answer"}
    frozen = {"epochs": 20, "lr": 0.05, "least_steps": 0, "layers": "mix"}
    done = headstock.finetune(stock, out=tmp_path / "frozen", freeze=True, settings=frozen, **named)
    assert done["parameters"]["trainable"] == 2 * 16 + 2 + 3 + 1  # the head, a weight a layer, their scale
    assert done["epochs"][-1]["train_loss"] < done["epochs"][0]["train_loss"] * 0.8
    found = headstock.load(tmp_path / "frozen").evaluate()
    assert {name: found[name] for name in done["metrics"]} == done["metrics"]
    headstock.finetune(stock, out=tmp_path / "two", settings=QUICK | {"ensemble": 2}, **named)
    assert headstock.load(tmp_path / "two").answer("who?", context="Ben finds Paris.")[0]["answer"]
