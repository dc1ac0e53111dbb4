"""OpenAI's API by OpenAI's own client and LangChain's classes, against the real server process."""

import base64
import json
import math

import numpy as np
import pytest

import headstock

pytest.importorskip("fastapi", reason="needs headstock[serve]")
openai = pytest.importorskip("openai", reason="needs the openai client")

PROMPT, TEXTS = "Story 7\nAnne", ["Anne likes the sea.", "Zoë", "Ben finds Paris and home."]


@pytest.fixture(scope="module")
def client(served):
    return openai.OpenAI(base_url=f"{served[0]}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def causal(runs):
    return headstock.load(runs["causal"], device="cpu")


@pytest.fixture
def printed(call, runs):
    """What a command prints with --json."""

    def printed(verb, model, *words):
        return json.loads(call(verb, runs[model], *words, "--json", "--quiet", "--device", "cpu")[0].splitlines()[-1])

    return printed


def test_models_are_listed_and_described(client, served):
    models = list(client.models.list())
    assert [model.id for model in models] == list(served[1].values())
    model = client.models.retrieve("causal")
    assert (model.object, model.owned_by) == ("model", "headstock") and model.created > 0
    assert model.endpoints == ["/v1/completions", "/v1/score", "/v1/embeddings", "/v1/explain"]
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("nothing")
    assert error.value.code == "model_not_found"


# Completions


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 1.3, "top_p": 0.8, "seed": 1},
        {"temperature": 0, "stop": ["e"]},
        {"temperature": 1, "seed": 2, "top_k": 20, "repetition_penalty": 1.4, "stop": ["ab", "."]},
    ],
    ids=str,
)
def test_completions_are_those_of_the_command_line_streamed_or_not(client, printed, options):
    words = [word for stop in options.get("stop", []) for word in ("--stop", stop)]
    for name, value in options.items():
        words += [] if name == "stop" else ["--" + name.replace("_", "-"), value]
    expected = printed("generate", "causal", PROMPT, "--max-tokens", 24, "--samples", 2, *words)
    extra = {name: options[name] for name in ("top_k", "repetition_penalty") if name in options}
    body = {name: value for name, value in options.items() if name not in extra}
    body |= {"model": "causal", "prompt": PROMPT, "max_tokens": 24, "n": 2, "extra_body": extra}
    whole = client.completions.create(**body)
    assert [PROMPT + choice.text for choice in whole.choices] == expected["texts"]
    reasons = ["length" if ended == "length" else "stop" for ended in expected["ended"]]
    assert [choice.finish_reason for choice in whole.choices] == reasons
    texts, ends = ["", ""], [None, None]
    for chunk in client.completions.create(**body, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert [PROMPT + text for text in texts] == expected["texts"] and ends == reasons


def test_text_arrives_in_pieces_and_with_its_usage(client, causal):
    options = {"model": "causal", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert sum(bool(chunk.choices and chunk.choices[0].text) for chunk in chunks) > 6
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[-1].choices == []
    prompt = len(causal.tokenizer.encode(PROMPT))
    for usage in (chunks[-1].usage, client.completions.create(**options).usage):
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 12, prompt + 12)


def test_prompts_may_be_texts_or_tokens(client, causal):
    options = {"model": "causal", "max_tokens": 6, "temperature": 1, "seed": 3}
    prompts = [PROMPT, "Ben", "Zoë"]
    ids = causal.tokenizer.encode_batch(prompts)
    expected = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in prompts]
    assert len(set(expected)) > 1
    for several in (prompts, ids):
        choices = client.completions.create(prompt=several, **options).choices
        assert [(choice.index, choice.text) for choice in choices] == list(enumerate(expected))
    assert client.completions.create(prompt=ids[0], **options).choices[0].text == expected[0]
    echoed = client.completions.create(prompt=ids[0], echo=True, **options).choices[0].text
    assert echoed == PROMPT + expected[0]


def test_seeds_repeat_and_samples_differ(client):
    options = {"model": "causal", "prompt": PROMPT, "max_tokens": 16, "temperature": 1.2}
    texts = [[c.text for c in client.completions.create(n=3, seed=s, **options).choices] for s in (4, 4, 5)]
    assert texts[0] == texts[1] != texts[2] and len(set(texts[0])) == 3
    unseeded = {client.completions.create(**options).choices[0].text for _ in range(3)}
    assert len(unseeded) > 1  # unlike the command line, whose default seed is 0


def test_log_probabilities_are_those_of_the_model(client, causal):
    options = {"model": "causal", "prompt": "Anne", "max_tokens": 8, "temperature": 0, "logprobs": 3}
    (choice,) = client.completions.create(**options).choices
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == [4 + len("".join(logprobs.tokens[:i])) for i in range(8)]
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 3 and top[token] == value == max(top.values())  # greedy
    (score,) = causal.score("Anne" + choice.text)
    assert [value for _, value in score.tokens[1:]] != logprobs.token_logprobs  # special tokens are never generated
    echoed = client.completions.create(**options, echo=True).choices[0].logprobs
    prompt = len(causal.tokenizer.encode("Anne"))
    assert echoed.tokens[prompt:] == logprobs.tokens and echoed.text_offset[0] == 0
    assert echoed.token_logprobs[:prompt] == pytest.approx([value for _, value in score.tokens[:prompt]], abs=1e-4)
    tokens, values = [], []
    for chunk in client.completions.create(**options, stream=True):
        tokens += chunk.choices[0].logprobs.tokens
        values += chunk.choices[0].logprobs.token_logprobs
    assert tokens == logprobs.tokens and values == pytest.approx(logprobs.token_logprobs, abs=1e-4)


def test_the_best_of_several_has_the_highest_mean_log_probability(client):
    options = {"model": "causal", "prompt": PROMPT, "max_tokens": 8, "temperature": 1.5, "seed": 3, "logprobs": 0}
    choices = client.completions.create(n=4, **options).choices
    means = [sum(choice.logprobs.token_logprobs) / max(1, len(choice.logprobs.tokens)) for choice in choices]
    best = client.completions.create(n=1, best_of=4, **options)
    assert best.choices[0].text == choices[means.index(max(means))].text
    assert best.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in choices)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 1025}, "1024"),
        ({"n": 17}, "16"),
        ({"logprobs": 101}, "100"),
        ({"prompt": "x" * 20_001}, "20000"),
        ({"extra_body": {"top_k": 101}}, "100"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"suffix": "the end"}, "suffix"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": [[999_999]]}, "vocabulary"),
        ({"prompt": ["x"] * 64, "n": 8}, "256"),
        ({"temperature": -1}, "temperature"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused_with_its_limit(client, options, words):
    with pytest.raises(openai.UnprocessableEntityError, match=words):
        client.completions.create(**{"model": "causal", "prompt": "x", "max_tokens": 1} | options)


def test_a_run_that_cannot_generate_says_which_can(client):
    with pytest.raises(openai.UnprocessableEntityError, match="causal"):
        client.completions.create(model="classify", prompt="x")


# Embeddings


def test_embeddings_are_those_of_the_command_line(client, printed):
    expected = printed("embed", "causal", *TEXTS)["vectors"]
    body = {"model": "causal", "input": TEXTS}
    for options in ({}, {"encoding_format": "float"}):  # the client asks for base64 by default
        vectors = [row.embedding for row in client.embeddings.create(**body, **options).data]
        assert np.array(vectors, dtype=np.float32).tolist() == np.array(expected, dtype=np.float32).tolist()
    raw = client.embeddings.with_raw_response.create(**body, encoding_format="base64").http_response.json()
    assert np.frombuffer(base64.b64decode(raw["data"][1]["embedding"]), "<f4").tolist() == expected[1]


def test_embeddings_of_tokens_and_of_other_layers(client, causal, printed):
    ids = causal.tokenizer.encode_batch(TEXTS)
    rows = client.embeddings.create(model="causal", input=ids)
    assert rows.usage.prompt_tokens == sum(map(len, ids))
    texts = client.embeddings.create(model="causal", input=TEXTS)
    assert [row.embedding for row in rows.data] == [row.embedding for row in texts.data]
    options = {"layers": "1", "pool": "mean"}
    own = client.embeddings.create(model="causal", input=TEXTS, extra_body=options, encoding_format="float").data
    expected = printed("embed", "causal", *TEXTS, "--layers", 1, "--pool", "mean")["vectors"]
    assert [row.embedding for row in own] == expected
    with pytest.raises(openai.UnprocessableEntityError, match="dimensions"):
        client.embeddings.create(model="causal", input="x", dimensions=4)


# LangChain


def test_langchain_completes_streams_and_embeds(served, causal):
    langchain = pytest.importorskip("langchain_openai", reason="needs langchain-openai")
    place = {"base_url": f"{served[0]}/v1", "api_key": "none", "model": "causal"}
    model = langchain.OpenAI(**place, temperature=0, max_tokens=12)
    (expected,) = causal.generate(PROMPT, temperature=0, max_tokens=12)
    assert PROMPT + model.invoke(PROMPT) == expected.text
    assert PROMPT + "".join(model.stream(PROMPT)) == expected.text
    assert len(list(model.stream(PROMPT))) > 3
    batch = model.generate([PROMPT, "Ben"])
    assert batch.generations[0][0].text == expected.text.removeprefix(PROMPT)
    assert batch.llm_output["token_usage"]["completion_tokens"] == 24
    # by default it counts tokens with OpenAI's tokenizer and sends their ids, which mean nothing to this run
    embeddings = langchain.OpenAIEmbeddings(**place, check_embedding_ctx_length=False)
    own = causal.embed(TEXTS)
    assert np.array(embeddings.embed_documents(TEXTS), dtype=np.float32).tolist() == own.tolist()
    assert math.isclose(embeddings.embed_query(TEXTS[0])[0], own[0][0], rel_tol=1e-6)
