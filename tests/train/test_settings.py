"""Presets, files and options become one checked whole."""

import math
from dataclasses import fields

import pytest

from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_store
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.errors import ConfigError, UserError
from headstock.model.backbone import BACKBONES
from headstock.tasks.base import TASKS
from headstock.tasks.labelled import LabelledTask
from headstock.train.models import build_model, build_task
from headstock.train.resolve import require_corpus, resolve_pretrain_config, supports, with_vocabulary
from headstock.train.run_folder import open_run
from headstock.train.settings import (
    TrainSettings,
    assign_sections,
    make_config,
    override_settings,
    preset_names,
    read_preset,
)

REDUCED = {"width": 16, "heads": 2, "hidden": 32, "depth": 2, "context": 32, "model.dropout": 0.0}
OBJECTIVES = [one for one in TASKS.names() if not issubclass(TASKS.get(one), LabelledTask) and TASKS.get(one).trainable]
PAIRS = [(name, objective) for name in preset_names() for objective in OBJECTIVES]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_makes_a_run(name):
    tree = read_preset(name)
    tree["model"]["vocabulary"] = 100
    chosen = make_config(tree)
    assert make_config(chosen.plain()) == chosen
    if name.endswith(("nano", "classic")):
        BACKBONES.get(chosen.family)(chosen.model)


@pytest.mark.parametrize("content", ["model = 3", "preset = 3", "[task]\nname = [1]", "[model]\nfamily = {}"])
def test_a_recipe_with_something_else_in_place_of_settings_is_refused(tmp_path, content):
    (tmp_path / "recipe.toml").write_text(content)
    with pytest.raises(UserError, match=content.splitlines()[-1].partition(" ")[0].replace("name", "task")):
        resolve_pretrain_config(None, tmp_path / "recipe.toml", {"data.corpus": ["c.txt"]})


@pytest.fixture(scope="module")
def stores(corpus):
    """The same text cut by each kind of tokenizer that presets ask for."""
    text = read_corpus(corpus)
    tokenizers = {
        kind: train_tokenizer((document.text for document in text), TokenizerSettings(kind=kind, vocabulary=300))
        for kind in ("bpe", "wordpiece")
    }
    return {kind: (tokenizer, build_store(text, tokenizer)) for kind, tokenizer in tokenizers.items()}


def family_of(name):
    return read_preset(name)["model"]["family"]


def test_every_preset_has_an_objective_and_every_objective_a_preset():
    able = [pair for pair in PAIRS if supports(family_of(pair[0]), pair[1])]
    assert {name for name, _ in able} == set(preset_names())
    assert {objective for _, objective in able} == set(OBJECTIVES)


@pytest.mark.parametrize(("name", "objective"), [pair for pair in PAIRS if not supports(family_of(pair[0]), pair[1])])
def test_an_objective_that_a_preset_cannot_learn_is_refused_and_the_others_named(name, objective):
    with pytest.raises(UserError, match=rf"cannot learn the objective '{objective}' \(families that can: \w+"):
        resolve_pretrain_config(name, None, {"data.corpus": ["text.txt"], "task.name": objective})


@pytest.mark.parametrize(("name", "objective"), [pair for pair in PAIRS if supports(family_of(pair[0]), pair[1])])
def test_every_preset_goes_with_every_objective_of_its_family(stores, name, objective):
    own = {part.name for part in fields(BACKBONES.get(family_of(name)).Config)}
    small = {key: value for key, value in REDUCED.items() if key.removeprefix("model.") in own}
    given = {"data.corpus": ["text.txt"], "task.name": objective, "vocabulary": 300, "length": 32, **small}
    chosen = resolve_pretrain_config(name, None, given)
    assert chosen.objective == objective
    tokenizer, store = stores[chosen.tokenizer.kind]
    chosen = with_vocabulary(chosen, tokenizer)
    task = build_task(chosen, tokenizer)
    model = build_model(chosen, task)
    batch = task.examples(store, length=32, seed=0).batch(range(16))
    losses, counts = task.losses(model, batch), task.counts(batch)
    for head, count in counts.items():
        assert count > 0
        # before it has learned anything a model can do no better than guess
        assert losses[head].item() / count == pytest.approx(math.log(tokenizer.vocabulary), rel=0.2)
    sum(losses[head] for head in counts).backward()
    unmoved = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert unmoved == []


def test_presets_drop_out_inside_where_their_originals_do():
    """BERT and GPT-2 do not; torch's own layer, which the lab took, does."""
    chosen = {name: resolve_pretrain_config(name, None, {"data.corpus": ["a.txt"]}) for name in preset_names()}
    drops = {name: one.model.inner_dropout for name, one in chosen.items() if one.family in ("transformer", "seq2seq")}
    assert drops == {name: not name.startswith(("gpt-", "bert-")) for name in drops}
    assert len(drops) == 17


def test_a_run_that_was_made_before_the_setting_drops_out_inside_as_it_did():
    for name in ("bert-nano", "seq2seq-nano"):
        tree = resolve_pretrain_config(name, None, {"data.corpus": ["a.txt"]}).plain()
        del tree["model"]["inner_dropout"]
        assert make_config(tree).model.inner_dropout
    old = open_run("reviews-en").config()
    assert "inner_dropout" not in old["model"] and make_config(old).model.inner_dropout


def test_another_objective_leaves_the_old_ones_settings_behind(tmp_path):
    given = {"data.corpus": ["text.txt"]}
    assert resolve_pretrain_config("bert-nano", None, dict(given)).objective == "masked"
    chosen = resolve_pretrain_config("bert-nano", None, given | {"task.name": "causal"})
    assert (chosen.objective, chosen.model.causal, chosen.model.norm) == ("causal", True, "post")
    file = tmp_path / "recipe.toml"
    file.write_text('preset = "bert-nano"\n[task]\nname = "causal"\n')
    assert resolve_pretrain_config(None, file, dict(given)).objective == "causal"
    file.write_text('[model]\ndepth = 2\n[task]\nname = "masked"\nfracton = 0.2\n')
    with pytest.raises(ConfigError, match=r"task\.fracton: unknown setting"):  # what nobody knows is still told
        resolve_pretrain_config(None, file, given | {"task.name": "causal"})


def test_settings_find_their_section():
    placed = assign_sections(
        {"depth": 3, "lr": 0.1, "vocabulary": 500, "model.vocabulary": 512, "documents": "line"}, {}
    )
    assert placed == {
        "model": {"depth": 3, "vocabulary": 512},
        "train": {"lr": 0.1},
        "tokenizer": {"vocabulary": 500},
        "data": {"documents": "line"},
    }


def test_unknown_settings_are_all_named_with_the_nearest():
    with pytest.raises(ConfigError) as caught:
        assign_sections({"dept": 3, "train.lrr": 0.1}, {})
    problems = dict(caught.value.problems)
    assert "did you mean 'depth'?" in problems["dept"]
    assert "did you mean 'train.lr'?" in problems["train.lrr"]


def test_problems_of_all_sections_come_together():
    tree = {
        "model": {"vocabulary": 9, "width": 30, "heads": 4},
        "train": {"batch": 0, "schedule": "cosin"},
        "trian": {},
    }
    with pytest.raises(ConfigError) as caught:
        make_config(tree)
    text = str(caught.value)
    assert "model.width: 30 must be a multiple of heads 4" in text
    assert "train.schedule" in text
    assert "did you mean 'cosine'?" in text
    assert "trian: unknown section; did you mean 'train'?" in text


def test_a_run_has_one_length():
    with pytest.raises(ConfigError, match="epochs: cannot be set together with steps"):
        make_config({"model": {"vocabulary": 9}, "train": {"steps": 1, "epochs": 2.0}})


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'gpt-nano'"):
        read_preset("gpt-nanno")


def test_file_over_preset_and_option_over_file(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text('preset = "gpt-nano"\n[model]\ndepth = 7\nwidth = 64\n[data]\ncorpus = ["a.txt"]\n')
    chosen = resolve_pretrain_config(None, file, {"width": 32})
    assert (chosen.model.depth, chosen.model.width, chosen.model.heads) == (7, 32, 4)
    assert chosen.data.corpus == ("a.txt",)


def test_without_text_there_is_nothing_to_do():
    with pytest.raises(UserError, match="no text to train on"):
        require_corpus(resolve_pretrain_config("gpt-nano", None, {}))


def test_a_length_on_the_command_line_takes_the_place_of_the_file_s():
    tree = {"train": {"epochs": 8, "lr": 2e-3}}
    assert override_settings(tree, {"train.steps": 5})["train"] == {"lr": 2e-3, "steps": 5}
    assert override_settings(tree, {"lr": 1e-3})["train"] == {"epochs": 8, "lr": 1e-3}
    with pytest.raises(ConfigError, match="cannot be set together"):
        make_config(override_settings(tree, {"train.steps": 5, "train.minutes": 1}))


def test_another_family_leaves_the_preset_s_model_aside():
    chosen = resolve_pretrain_config(
        "gpt-nano", None, {"model.family": "recurrent", "model.hidden": 24, "data.corpus": ["x"]}
    )
    assert chosen.family == "recurrent" and chosen.model.hidden == 24
    assert chosen.model.width == BACKBONES.get("recurrent").Config(vocabulary=5).width


@pytest.mark.parametrize(
    "wrong",
    [
        {"log_every": 0},
        {"beta1": 1.0},
        {"lr": math.nan},
        {"lr": math.inf},
        {"clip": -1.0},
        {"weight_decay": -0.1},
        {"minutes": math.nan},
        {"seed": -1},
    ],
)
def test_numbers_that_cannot_be_trained_with_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TrainSettings(**wrong)
