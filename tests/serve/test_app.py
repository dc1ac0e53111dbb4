"""The worker on its own, and the endpoints of the server process: their answers are those of the command line."""

import asyncio
import json
import threading

import pytest

pytest.importorskip("fastapi", reason="needs headstock[serve]")

import httpx

from headstock.data import remote
from headstock.serve.worker import QueueFullError, TimeLimitError, Worker
from tests.experiments.small import MAKERS, write_lines

TEXTS = ["Anne likes the sea.", "Zoë finds Paris.", "Ben"]


def test_jobs_that_wait_are_computed_together_and_answered_apart():
    started, release, batches = threading.Event(), threading.Event(), []

    def compute(rows):
        batches.append(list(rows))
        started.set()
        release.wait(10)
        return [row * 2 for row in rows]

    async def run():
        worker = Worker("w", max_queue=8)
        first = worker.submit("double", compute, [1], timeout=60)
        assert started.wait(10)
        others = [worker.submit("double", compute, [n, n], timeout=60) for n in (2, 3)]
        other_key = worker.submit("other", compute, [9], timeout=60)
        late = worker.submit("double", compute, [7], timeout=-1)
        worker.submit("double", compute, [8], timeout=60).cancel()
        release.set()
        assert await asyncio.gather(first, *others, other_key) == [[2], [4, 4], [6, 6], [18]]
        with pytest.raises(TimeLimitError):
            await late
        assert batches == [[1], [2, 2, 3, 3], [9]]
        worker.close()
        with pytest.raises(QueueFullError):
            worker.submit("double", compute, [1], timeout=60)

    asyncio.run(run())


def test_a_full_queue_refuses_and_one_bad_row_fails_alone():
    release = threading.Event()

    def compute(rows):
        release.wait(10)
        return [10 / row for row in rows]

    async def run():
        worker = Worker("w", max_queue=2)
        started = worker.submit("divide", compute, [1], timeout=60)
        while worker.queued:
            await asyncio.sleep(0.001)  # until the worker has taken it
        good, bad = (worker.submit("divide", compute, [n], timeout=60) for n in (5, 0))
        with pytest.raises(QueueFullError):
            worker.submit("divide", compute, [1], timeout=60)
        release.set()
        assert await asyncio.gather(started, good) == [[10], [2]]
        with pytest.raises(ZeroDivisionError):
            await bad
        worker.close()

    asyncio.run(run())


def rounded(prediction):
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in prediction.items()}


# The server process


@pytest.fixture(scope="module")
def client(served):
    with httpx.Client(base_url=served[0], timeout=60) as client:
        yield client


@pytest.fixture
def answer(client):
    """The answer to a request that must succeed."""

    def answer(path, **body):
        response = client.post(f"/v1/{path}", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    return answer


@pytest.fixture
def refused(client):
    """The error of a request that must fail with this status."""

    def refused(path, status, **body):
        response = client.post(f"/v1/{path}", json=body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    return refused


@pytest.fixture
def printed(call):
    """What a command prints with --json."""
    return lambda *words: json.loads(call(*words, "--json", "--quiet", "--device", "cpu")[0].splitlines()[-1])


@pytest.mark.parametrize("task", ["classify", "tag"])
def test_predictions_of_texts_are_those_of_the_command_line(answer, printed, runs, task):
    expected = printed("predict", runs[task], *TEXTS)["predictions"]
    assert answer(task, input=TEXTS) == {"model": task, "predictions": expected}
    assert answer("predict", model=task, input=TEXTS[0])["predictions"] == expected[:1]
    assert expected[0] != expected[1]


@pytest.mark.parametrize("task", MAKERS)
def test_predictions_of_rows_are_those_of_the_command_line(answer, printed, runs, tmp_path, task):
    rows = MAKERS[task](5, name="new")
    columns = {"pair": ("text", "text_b"), "tag": ("tokens",), "answer": ("question", "context", "id")}[task]
    rows = [{name: row[name] for name in columns} for row in rows]
    expected = printed("predict", runs[task], "--file", write_lines(tmp_path / "rows.jsonl", rows))["predictions"]
    assert answer(task, input=rows)["predictions"] == expected
    (alone,) = answer(task, input=rows[1])["predictions"]
    assert rounded(alone) == rounded(expected[1])  # float rounding depends on the size of the batch


def test_settings_of_a_request_are_those_of_the_command_line(answer, printed, runs):
    texts = ["anne sees a dog .", "ben likes the red house ."]
    for beams in (1, 3):
        expected = printed("translate", runs["translate"], *texts, "--beams", beams, "--max-tokens", 7)["texts"]
        predictions = answer("translate", input=texts, beams=beams, max_tokens=7)["predictions"]
        assert [row["text"] for row in predictions] == expected
    expected = printed("predict", runs["classify"], *TEXTS, "--abstain-below", 0.99)["predictions"]
    assert answer("classify", input=TEXTS, abstain_below=0.99)["predictions"] == expected
    assert all(row["abstained"] for row in expected)


def test_fills_and_scores_are_those_of_the_command_line(answer, printed, runs):
    texts = ["Anne [MASK] home.", "Ben [MASK] the [MASK]."]
    expected = printed("fill", runs["masked"], *texts, "--top", 3, "--pieces", 2)
    assert answer("fill", input=texts, top=3, pieces=2) == {"model": "masked", **expected}
    expected = printed("fill", runs["masked"], texts[0], "--among", "sees,likes", "--normalize")
    assert answer("fill", input=texts[0], among=["sees", "likes"], normalize=True) == {"model": "masked", **expected}
    assert answer("score", input=TEXTS) == {"model": "causal", **printed("score", runs["causal"], *TEXTS)}
    expected = printed("score", runs["masked"], *TEXTS, "--pseudo")
    assert answer("score", model="masked", input=TEXTS, pseudo=True) == {"model": "masked", **expected}


EXPLAINED = {
    "prediction": ("classify", {}),
    "attention": ("masked", {"layer": 1}),
    "residual": ("causal", {}),
    "logits": ("masked", {"at": 1}),
    "layer": ("causal", {"word": "2"}),
}


@pytest.mark.parametrize("kind", EXPLAINED)
def test_explanations_are_those_of_the_command_line(answer, client, printed, runs, kind):
    model, options = EXPLAINED[kind]
    text = "Anne [MASK] home." if model == "masked" else "Anne sees home."
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    expected = json.dumps(printed("explain", kind, runs[model], text, *words)).replace(str(runs[model]), model)
    body = {"model": model, "kind": kind, "input": text, **options}
    assert answer("explain", **body) == {"model": model, "kind": kind, **json.loads(expected)}


def test_a_page_of_an_explanation_may_run_its_own_scripts_only(client):
    page = client.post("/v1/explain", json={"kind": "attention", "input": "Anne sees home.", "format": "html"})
    assert page.status_code == 200 and page.text.lower().startswith("<!doctype html>")
    policy = page.headers["content-security-policy"]
    assert "sandbox allow-scripts" in policy and "default-src 'none'" in policy
    assert policy.count("sha256-") == page.text.count("<script") > 0
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]


def test_limits_are_named(refused, runs):
    assert "at most 20000" in refused("classify", 422, input="x" * 20_001)["message"]
    assert "at most 256" in refused("score", 422, input=["x"] * 257)["message"]
    assert refused("fill", 422, input="[MASK]", top=101) | {"message": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "param": "top",
        "code": None,
    }
    assert "limit of 20000" in refused("pair", 422, input={"text": "x" * 15_000, "text_b": "y" * 15_000})["message"]
    assert "'text', 'text_b'" in refused("pair", 422, input={"text": "x"})["message"]
    assert "expected" in refused("classify", 422, input=[["two", "texts"]])["message"]
    assert "[MASK]" in refused("fill", 422, input="no mask")["message"]
    assert refused("classify", 422, input="x", inptu="y")["param"] == "inptu"
    assert "kind" in refused("explain", 422, kind="atention", input="x")["message"]


def test_models_are_found_by_name_or_by_what_they_can_do(refused, client):
    error = refused("classify", 404, model="clasify", input="x")
    assert error["code"] == "model_not_found" and "did you mean 'classify'" in error["message"]
    assert refused("regress", 404, input="x")["code"] == "model_not_found"  # no served run can
    assert "masked" in refused("fill", 422, model="causal", input="[MASK]")["message"]
    error = refused("explain", 422, model="masked", kind="attention", input="x " * 500)
    assert "masked" in error["message"] and "/" not in error["message"]  # no path
    response = client.post("/v1/classify", content=b"{")
    assert response.status_code == 422 and response.json()["error"]["type"] == "invalid_request_error"
    assert client.get("/v1/nothing").json()["error"]["message"] == "GET /v1/nothing: Not Found"


def test_the_openapi_document_has_every_task_with_an_example(client):
    document = client.get("/openapi.json").json()
    for task in ("classify", "pair", "regress", "ordinal", "tag", "answer", "translate"):
        body = document["paths"][f"/v1/{task}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
        assert schema["examples"] and "input" in schema["required"]
    completion = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert completion["max_tokens"]["anyOf"][0]["maximum"] == 1024


def test_metrics_count_what_was_served(client, answer):
    def value(name):
        lines = client.get("/metrics").text.splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)), 0.0)

    counter = 'headstock_requests_total{method="POST",route="/v1/classify",status="200"}'
    before, batches = value(counter), value('headstock_batch_rows_count{model="classify"}')
    answer("classify", input=TEXTS)
    assert value(counter) == before + 1
    assert value('headstock_batch_rows_count{model="classify"}') == batches + 1
    assert value('headstock_queue_length{model="classify"}') == 0
    client.get("/v1/" + "x" * 20)
    assert 'route="other"' in client.get("/metrics").text and "xxxx" not in client.get("/metrics").text


def test_a_url_in_a_request_is_never_fetched(client, web):
    """Commands open URLs, so a request must not be able to name one: every field of every request is a URL here."""
    url = web.url("canary.csv")
    (web.folder / "canary.csv").write_text("text,label\ngood,1\n")
    document = client.get("/openapi.json").json()

    def as_url(value):
        if isinstance(value, dict):
            return {key: as_url(item) for key, item in value.items()}
        if isinstance(value, list):
            return [as_url(item) for item in value]
        return url if isinstance(value, str) else value

    asked = 0
    for path, methods in document["paths"].items():
        body = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        if "$ref" in body.get("schema", {}):
            schema = document["components"]["schemas"][body["schema"]["$ref"].rpartition("/")[2]]
            example = schema.get("examples", [{}])[0]
            for fields in (as_url(example), example | {"model": url}, dict.fromkeys(schema["properties"], url)):
                asked += client.post(path, json=fields | {"stream": False}).status_code < 600
    for options in ({"name": url}, {"columns": f"text={url}"}, {"model": url}, {}):
        asked += client.post("/v1/files", params=options, content=f"text\n{url}\n").status_code < 600
    assert asked > 20
    assert not any("canary" in line for line in web.requests())
    remote.cached_copy(url)
    assert any("canary" in line for line in web.requests()), "the control: a command does fetch it"
