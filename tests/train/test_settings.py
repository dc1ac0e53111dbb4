"""Resolving presets, files and options to a validated configuration."""

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
from headstock.train.resolve import (
    require_corpus,
    resolve_finetune_config,
    resolve_pretrain_config,
    supports,
    with_vocabulary,
)
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
OBJECTIVES = [n for n in TASKS.names() if not issubclass(TASKS.get(n), LabelledTask) and TASKS.get(n).trainable]
PAIRS = [(name, objective) for name in preset_names() for objective in OBJECTIVES]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_valid_configuration(name):
    tree = read_preset(name)
    tree["model"]["vocabulary"] = 100
    run_config = make_config(tree)
    assert make_config(run_config.plain()) == run_config
    if name.endswith(("nano", "classic")):
        BACKBONES.get(run_config.family)(run_config.model)


@pytest.mark.parametrize("content", ["model = 3", "preset = 3", "[task]\nname = [1]", "[model]\nfamily = {}"])
def test_recipes_with_values_of_the_wrong_type_are_rejected(tmp_path, content):
    (tmp_path / "recipe.toml").write_text(content)
    with pytest.raises(UserError, match=content.splitlines()[-1].partition(" ")[0].replace("name", "task")):
        resolve_pretrain_config(None, tmp_path / "recipe.toml", {"data.corpus": ["c.txt"]})


@pytest.fixture(scope="module")
def stores(corpus):
    """The same text tokenized by each kind of tokenizer that presets use."""
    text = read_corpus(corpus)
    tokenizers = {
        kind: train_tokenizer((document.text for document in text), TokenizerSettings(kind=kind, vocabulary=300))
        for kind in ("bpe", "wordpiece")
    }
    return {kind: (tokenizer, build_store(text, tokenizer)) for kind, tokenizer in tokenizers.items()}


def family_of(name):
    return read_preset(name)["model"]["family"]


def test_every_preset_has_an_objective_and_every_objective_a_preset():
    supported = [pair for pair in PAIRS if supports(family_of(pair[0]), pair[1])]
    assert {name for name, _ in supported} == set(preset_names())
    assert {objective for _, objective in supported} == set(OBJECTIVES)


@pytest.mark.parametrize(("name", "objective"), [pair for pair in PAIRS if not supports(family_of(pair[0]), pair[1])])
def test_unsupported_objectives_are_rejected_with_the_families_that_can(name, objective):
    with pytest.raises(UserError, match=rf"cannot learn the objective '{objective}' \(families that can: \w+"):
        resolve_pretrain_config(name, None, {"data.corpus": ["text.txt"], "task.name": objective})


@pytest.mark.parametrize(("name", "objective"), [pair for pair in PAIRS if supports(family_of(pair[0]), pair[1])])
def test_every_preset_trains_every_objective_of_its_family(stores, name, objective):
    names = {part.name for part in fields(BACKBONES.get(family_of(name)).Config)}
    small = {key: value for key, value in REDUCED.items() if key.removeprefix("model.") in names}
    options = {"data.corpus": ["text.txt"], "task.name": objective, "vocabulary": 300, "length": 32, **small}
    run_config = resolve_pretrain_config(name, None, options)
    assert run_config.objective == objective
    tokenizer, store = stores[run_config.tokenizer.kind]
    run_config = with_vocabulary(run_config, tokenizer)
    task = build_task(run_config, tokenizer)
    model = build_model(run_config, task)
    batch = task.examples(store, length=32, seed=0).batch(range(16))
    losses, counts = task.losses(model, batch), task.counts(batch)
    for head, count in counts.items():
        assert count > 0
        # an untrained model predicts nearly uniformly; whether a token is replaced has two answers
        choices = 2 if head == "replaced" else tokenizer.vocabulary
        assert losses[head].item() / count == pytest.approx(math.log(choices), rel=0.2)
    sum(losses[head] for head in counts).backward()
    without_gradient = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert without_gradient == []


def test_presets_have_inner_dropout_where_their_originals_do():
    """BERT and GPT-2 do not; torch's Transformer layer, which the lab uses, does."""
    configs = {name: resolve_pretrain_config(name, None, {"data.corpus": ["a.txt"]}) for name in preset_names()}
    transformers = {name: c.model for name, c in configs.items() if c.family in ("transformer", "seq2seq")}
    for name, model in transformers.items():
        assert model.inner_dropout == (not name.startswith(("gpt-", "bert-")))
    assert len(transformers) == 17


def test_runs_without_the_setting_keep_their_inner_dropout():
    for name in ("bert-nano", "seq2seq-nano"):
        tree = resolve_pretrain_config(name, None, {"data.corpus": ["a.txt"]}).plain()
        del tree["model"]["inner_dropout"]
        assert make_config(tree).model.inner_dropout
    old = open_run("reviews-en").config()
    assert "inner_dropout" not in old["model"] and make_config(old).model.inner_dropout


def test_another_objective_drops_the_settings_of_the_previous_one(tmp_path):
    options = {"data.corpus": ["text.txt"]}
    assert resolve_pretrain_config("bert-nano", None, dict(options)).objective == "masked"
    run_config = resolve_pretrain_config("bert-nano", None, options | {"task.name": "causal"})
    assert (run_config.objective, run_config.model.causal, run_config.model.norm) == ("causal", True, "post")
    file = tmp_path / "recipe.toml"
    file.write_text('preset = "bert-nano"\n[task]\nname = "causal"\n')
    assert resolve_pretrain_config(None, file, dict(options)).objective == "causal"
    file.write_text('[model]\ndepth = 2\n[task]\nname = "masked"\nfracton = 0.2\n')
    with pytest.raises(ConfigError, match=r"task\.fracton: unknown setting"):  # unknown settings are still reported
        resolve_pretrain_config(None, file, options | {"task.name": "causal"})


def test_options_are_assigned_to_sections():
    assigned = assign_sections(
        {"depth": 3, "lr": 0.1, "vocabulary": 500, "model.vocabulary": 512, "documents": "line"}, {}
    )
    assert assigned == {
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


def test_problems_of_all_sections_are_reported_together():
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


def test_files_override_presets_and_options_override_files(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text('preset = "gpt-nano"\n[model]\ndepth = 7\nwidth = 64\n[data]\ncorpus = ["a.txt"]\n')
    run_config = resolve_pretrain_config(None, file, {"width": 32})
    assert (run_config.model.depth, run_config.model.width, run_config.model.heads) == (7, 32, 4)
    assert run_config.data.corpus == ("a.txt",)


def test_a_corpus_is_required():
    with pytest.raises(UserError, match="no text to train on"):
        require_corpus(resolve_pretrain_config("gpt-nano", None, {}))


def test_a_run_length_replaces_one_of_another_unit():
    tree = {"train": {"epochs": 8, "lr": 2e-3}}
    assert override_settings(tree, {"train.steps": 5})["train"] == {"lr": 2e-3, "steps": 5}
    assert override_settings(tree, {"lr": 1e-3})["train"] == {"epochs": 8, "lr": 1e-3}
    with pytest.raises(ConfigError, match="cannot be set together"):
        make_config(override_settings(tree, {"train.steps": 5, "train.minutes": 1}))


def test_the_default_of_log_every_changes_no_key_of_a_cached_result():
    """The first versions printed no training loss of a fine-tuning; their cached trials stay valid."""
    config = resolve_finetune_config(open_run("reviews-en"), "classify", None, {"data.train": "rows.csv"})
    assert config.train.log_every is None
    assert config.plain(for_key=True)["train"]["log_every"] == 10**9 and config.plain()["train"]["log_every"] is None


def test_another_family_ignores_the_model_of_the_preset():
    run_config = resolve_pretrain_config(
        "gpt-nano", None, {"model.family": "recurrent", "model.hidden": 24, "data.corpus": ["x"]}
    )
    assert run_config.family == "recurrent" and run_config.model.hidden == 24
    assert run_config.model.width == BACKBONES.get("recurrent").Config(vocabulary=5).width


@pytest.mark.parametrize(
    "settings",
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
def test_invalid_numbers_are_rejected(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        TrainSettings(**settings)


def test_a_preset_option_wins_over_that_of_the_file(tmp_path):
    (tmp_path / "recipe.toml").write_text('preset = "gpt-nano"\n[data]\ncorpus = ["c.txt"]\n[model]\ncontext = 64\n')
    own, other = (resolve_pretrain_config(preset, tmp_path / "recipe.toml", {}) for preset in (None, "modern-nano"))
    assert (own.model.positions, other.model.positions) == ("learned", "rotary")
    assert own.model.context == other.model.context == 64
