"""SetFit and prompting in a comparison: the same rows, table and intervals as the other arms."""

import shutil

import pytest

import headstock
from headstock.errors import ConfigError, UserError
from headstock.experiments.compare import compare
from tests.conftest import TINY
from tests.experiments.small import SMALL

PROMPT = {"prompt": "{text} Anne [MASK] home.", "label_words": ["good=likes", "bad=finds"]}


@pytest.fixture(scope="module")
def results(stock, files, tmp_path_factory):
    recipe = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    recipe.write_text('[arms.shown]\nkind = "prompt"\nshots = 1\n')
    arms = ["pretrained", "setfit", "prompt", "shown", "tfidf"]
    out = tmp_path_factory.mktemp("few") / "out"
    return compare(stock, **files, out=out, arms=arms, config_file=recipe, **PROMPT, **SMALL), out


def test_all_arms_have_scores_and_paired_differences(results):
    table, out = results
    assert [row["arm"] for row in table["summary"]] == ["pretrained", "setfit", "prompt", "shown", "tfidf"]
    assert all(row["low"] <= row["score"] <= row["high"] for row in table["summary"])
    assert len(table["pairs"]) == 10 and all(pair["low"] is not None for pair in table["pairs"])
    assert "SetFit reaches" in table["verdicts"][0] and "prompting (shown) reaches" in table["verdicts"][0]
    assert (out / "runs" / "setfit-8" / "model.safetensors").is_file()


def test_only_shown_examples_depend_on_the_seed(results):
    table, _ = results
    losses = {name: [cell["loss"] for cell in table["cells"] if cell["arm"] == name] for name in ("prompt", "shown")}
    assert losses["prompt"][0] == losses["prompt"][1]
    assert losses["shown"][0] != losses["shown"][1]


def test_a_changed_template_is_not_read_from_the_cache(results, stock, files):
    table, out = results
    options = {"arms": ["prompt"], **SMALL}
    again = compare(stock, **files, out=out, **PROMPT, **options)
    assert again["cells"][0]["seconds"] == next(c["seconds"] for c in table["cells"] if c["arm"] == "prompt")
    other = compare(stock, **files, out=out, **PROMPT | {"prompt": "{text} Ben [MASK]."}, **options)
    assert other["cells"][0]["loss"] != again["cells"][0]["loss"]


def test_a_run_that_was_trained_again_is_read_again(stock, corpus, files, tmp_path):
    run, options = tmp_path / "run", {"arms": ["prompt"], **PROMPT, **SMALL}
    shutil.copytree(stock, run)
    first = compare(run, **files, out=tmp_path / "first", **options)
    headstock.pretrain(corpus, out=run, objective="masked", settings=TINY | {"seed": 9}, overwrite=True)
    second = compare(run, **files, out=tmp_path / "second", **options)
    assert first["cells"][0]["loss"] != second["cells"][0]["loss"]


@pytest.mark.parametrize(
    ("arms", "options", "message"),
    [
        (["setfit"], {"task": "tag"}, "--arms: SetFit .* tag"),
        (["setfit"], {"task": "regress"}, "--arms: SetFit .* does not apply to regress"),
        (["setfit"], {"task": "ordinal"}, "--arms: SetFit .* does not apply to ordinal"),
        (["prompt"], {"task": "regress"}, "--arms: prompt.* one class per text and does not apply to regress"),
        (["prompt"], {"task": "pair"}, "--arms: prompt asks about one text and does not apply to pair"),
        (["prompt"], {"label_words": ["good=likes", "bda=finds"]}, "no class 'bda'; did you mean 'bad'"),
        (["setfit"], {"settings": {"method": "finetune"}}, "finetune.method: .* follows from the kind of the arm"),
    ],
)
def test_bad_settings_are_refused_in_one_line(stock, files, tmp_path, arms, options, message):
    with pytest.raises((UserError, ConfigError), match=message) as raised:
        compare(stock, **files, out=tmp_path, arms=arms, **{"labels": [8], "seeds": 1} | options)
    assert "\n" not in str(raised.value)
