"""Continuous batching through real sockets: equal texts, fairness, and rows that are freed."""

import asyncio
import json
import re
import socket

import pytest

pytest.importorskip("fastapi", reason="needs headstock[serve]")

import httpx

import headstock

PROMPTS = [f"Story {number}\n{who}" for number, who in enumerate(["Anne", "Ben", "Zoë", "le café"] * 6)]


@pytest.fixture(scope="module")
def causal(runs):
    return headstock.load(runs["causal"], device="cpu")


def in_loop(url, function, *arguments):
    """Run an asynchronous function with a client."""

    async def run():
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=100)) as client:
            return await function(client, *arguments)

    return asyncio.run(run())


async def complete(client, prompt, **options):
    body = {"model": "causal", "prompt": prompt, "max_tokens": 20, "temperature": 0} | options
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def metric(url, name):
    line = next(line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith(name))
    return float(line.rsplit(" ", 1)[1])


def test_concurrent_completions_are_those_of_prompts_alone(served, causal):
    """Greedy and sampled, of different lengths, beyond the context, while other requests are answered."""
    options = [{"max_tokens": 5 + 3 * i, "temperature": i % 2, "seed": i} for i in range(len(PROMPTS))]

    async def together(client):
        rows = [complete(client, prompt, **own) for prompt, own in zip(PROMPTS, options, strict=True)]
        others = [client.post("/v1/classify", json={"input": prompt}) for prompt in PROMPTS]
        return await asyncio.gather(*rows), await asyncio.gather(*others)

    steps = metric(served[0], 'headstock_batch_rows_count{model="causal"}')
    texts, others = in_loop(served[0], together)
    steps = metric(served[0], 'headstock_batch_rows_count{model="causal"}') - steps
    assert all(response.status_code == 200 for response in others)
    alone = [causal.generate(prompt, **own)[0].text for prompt, own in zip(PROMPTS, options, strict=True)]
    assert [prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)] == alone
    assert len(set(texts)) > 3
    assert steps < sum(own["max_tokens"] for own in options) / 3  # they were decoded together


def test_concurrent_predictions_are_those_of_texts_alone(served, runs):
    async def together(client):
        responses = await asyncio.gather(*(client.post("/v1/classify", json={"input": text}) for text in PROMPTS * 3))
        return [response.json()["predictions"][0] for response in responses]

    classifier = headstock.load(runs["classify"], device="cpu")
    alone = [classifier.predict(text)[0] for text in PROMPTS] * 3
    for own, other in zip(in_loop(served[0], together), alone, strict=True):
        assert own["label"] == other["label"]
        assert own["probabilities"] == pytest.approx(other["probabilities"], abs=2e-6)


def test_a_client_that_leaves_frees_its_rows(served):
    """Streaming or not: the rows end long before their 1024 tokens."""
    url = served[0]
    body = {"model": "causal", "prompt": "Anne", "max_tokens": 1024, "n": 8, "temperature": 0}

    async def leave(client):
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    break
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.3))

    before = metric(url, 'headstock_batch_rows_count{model="causal"}')
    in_loop(url, leave)
    for _ in range(200):
        if metric(url, 'headstock_decoding_rows{model="causal"}') == 0:
            break
        asyncio.run(asyncio.sleep(0.02))
    else:
        raise AssertionError("the rows of clients that left are still decoded")
    assert metric(url, 'headstock_batch_rows_count{model="causal"}') - before < 1024


def test_short_requests_do_not_wait_for_a_long_text(served):
    async def both(client):
        long = asyncio.create_task(complete(client, "Anne", max_tokens=1000))
        await asyncio.sleep(0.05)
        response = await client.post("/v1/score", json={"model": "causal", "input": "Ben"})
        short = await complete(client, "Ben", max_tokens=2)
        done = long.done()
        await long
        return response.status_code, short, done

    status, short, done = in_loop(served[0], both)
    assert (status, done) == (200, False) and short


def test_a_long_request_ends_at_the_time_limit(runs, tmp_path):
    from tests.serve.conftest import start_server

    server = start_server(tmp_path / "log.txt", runs["causal"], "--device", "cpu", "--timeout", "0.5")
    body = {"prompt": "Anne", "max_tokens": 1024, "n": 16, "temperature": 0}
    try:
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == 504 and response.json()["error"]["type"] == "timeout"
        response = httpx.post(f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=60)
        events = re.findall("^data: (.*)$", response.text, re.MULTILINE)
        assert response.status_code == 200 and len(events) > 1 and "[DONE]" not in events
        assert "time limit" in json.loads(events[-1])["error"]["message"]
        assert httpx.post(f"{server.url}/v1/completions", json=body | {"max_tokens": 1}).status_code == 200
    finally:
        server.stop()


def test_answers_do_not_wait_for_acknowledgements():
    """With Nagle's algorithm the second packet of an answer waits 40 ms for the acknowledgement of the first."""
    from headstock.serve.server import bind
    from headstock.serve.settings import ServeSettings

    async def options(listener):
        sockets = []
        accepted = asyncio.Event()

        async def accept(reader, writer):
            sockets.append(writer.get_extra_info("socket"))
            accepted.set()

        listener.listen()
        async with await asyncio.start_server(accept, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            await accepted.wait()
            no_delay = sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
        return no_delay

    with bind(ServeSettings(port=0)) as listener:
        assert asyncio.run(options(listener)) != 0
    with socket.socket() as plain:  # whose protocol asyncio does not know
        plain.bind(("127.0.0.1", 0))
        assert asyncio.run(options(plain)) == 0
