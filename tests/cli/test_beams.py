"""`headstock generate --beams`."""

import json

import pytest

import headstock
from headstock.errors import UserError
from tests.conftest import TINY


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "causal"
    headstock.pretrain(corpus, out=out, settings=TINY | {"steps": 40, "lr": 5e-3})
    return out


def test_beams_on_the_command_line_and_in_python(run, call):
    loaded, prompts = headstock.load(run), ["Anne sees", "Zoë", "Ben"]
    options = {"max_tokens": 8, "length_penalty": 0.0}
    greedy = loaded.generate(prompts, max_tokens=8, temperature=0.0)
    assert [row.text for row in loaded.generate(prompts, beams=1, **options)] == [row.text for row in greedy]
    rows = loaded.generate(prompts, beams=6, **options)
    assert all(row.text.startswith(prompt) for row, prompt in zip(rows, prompts, strict=True))
    separately = [loaded.generate(prompt, beams=6, **options)[0] for prompt in prompts]
    assert [row.text for row in separately] == [row.text for row in rows]
    arguments = ["generate", run, *prompts, "--beams", 6, "--max-tokens", 8, "--length-penalty", 0]
    output = json.loads(call(*arguments, "--json")[0].splitlines()[-1])
    assert output == {"texts": [row.text for row in rows], "ended": [row.ended for row in rows]}


def test_no_repeat_and_stop(run):
    loaded = headstock.load(run)
    (unrestricted,), (without_repeats,) = (loaded.generate("Anne", beams=3, max_tokens=24, no_repeat=n) for n in (0, 1))
    tokens = loaded.tokenizer.encode(without_repeats.text)
    assert len(tokens) == len(set(tokens)) and without_repeats.text != unrestricted.text
    continuation = unrestricted.text.removeprefix("Anne")
    (stopped,) = loaded.generate("Anne", beams=3, max_tokens=24, stop=[continuation[4]])
    assert stopped.text == "Anne" + continuation[: continuation.index(continuation[4])] and stopped.ended == "stop"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--beams", 0], "beams: must be 1 or more, not 0"),
        (["--beams", -2, "--no-repeat", -1], "no_repeat: must be 0"),
        (["--beams", 2, "--temperature", 0.5, "--top-k", 3], "temperature, top_k cannot be set together with beams"),
        (["--beams", 2, "--repetition-penalty", 1.2], "repetition_penalty"),
        (["--beams", 2, "--samples", 3], "samples cannot be set together with beams"),
        (["--beams", 2, "--stream"], "--stream does not work with --beams"),
        (["--beams", 2, "--no-cache"], "cache"),
        (["--length-penalty", 0.6], "length_penalty"),
        (["--no-repeat", 3], "no_repeat"),
    ],
)
def test_wrong_calls(run, call, arguments, message):
    out, err = call("generate", run, "Anne", *arguments, code=2)
    assert message in err
    assert out == ""


def test_a_prompt_must_fit(run):
    with pytest.raises(UserError, match="does not fit into the model's context of 32"):
        headstock.load(run).generate("Anne sees Paris. " * 20, beams=2)
