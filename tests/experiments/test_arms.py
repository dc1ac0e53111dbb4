"""Arms are created by name, once per run, with their own settings."""

import json

import pytest

from headstock.errors import UserError
from headstock.experiments.compare_settings import DEFAULT_ARMS, Arm, check_arm_names, kind_of_arm, make_arms


@pytest.fixture
def runs(tmp_path):
    """Empty run folders: arms open them without reading."""

    def make(*names):
        paths = [tmp_path / name for name in names]
        for path in paths:
            path.mkdir(parents=True)
            (path / "config.json").write_text(json.dumps({}))
        return paths

    return make


def test_arms_of_a_single_run_do_not_name_it(runs):
    (path,) = runs("tiny")
    arms = make_arms([path], DEFAULT_ARMS)
    assert [(arm.name, arm.kind) for arm in arms] == [(kind, kind) for kind in DEFAULT_ARMS]
    assert [arm.run and arm.run.path for arm in arms] == [path, path, path, None]


def test_arms_of_several_runs_name_the_run_except_tfidf(runs):
    paths = runs("small", "large")
    arms = make_arms(paths, ["tfidf", "scratch", "frozen"])
    names = ["tfidf", "scratch small", "scratch large", "frozen small", "frozen large"]
    assert [arm.name for arm in arms] == names
    assert [arm.run.path for arm in arms[1:]] == paths * 2


def test_runs_of_the_same_name_are_distinguished_by_path(runs):
    paths = runs("a/tiny", "b/tiny")
    assert [arm.name for arm in make_arms(paths, ["frozen"])] == [f"frozen {path}" for path in paths]


def test_the_kind_of_an_arm_determines_its_options(runs):
    (path,) = runs("tiny")
    options = {arm.name: arm.options() for arm in make_arms([path], DEFAULT_ARMS)}
    assert options["scratch"] == {"transfer.init": "scratch", "transfer.freeze": False}
    assert options["pretrained"] == {"transfer.init": "pretrained", "transfer.freeze": False}
    assert options["frozen"] == {"transfer.init": "pretrained", "transfer.freeze": True}


def test_common_settings_of_lora_are_for_its_arms(runs):
    (path,) = runs("tiny")
    common = {"lora": 4, "transfer.lora_alpha": 8.0, "lr": 0.01}
    tables = {"wide": {"kind": "lora", "transfer.lora": 32}}
    full, lora, wide = (arm.options(common) for arm in make_arms([path], ["pretrained", "lora", "wide"], tables))
    assert full == {"lr": 0.01, "transfer.init": "pretrained", "transfer.freeze": False}
    assert lora == full | {"lora": 4, "lora_alpha": 8.0, "lora_dropout": 0.0, "lora_targets": "attention"}
    assert wide == lora | {"lora": 32}
    assert make_arms([path], ["lora"])[0].options()["lora"] == 8


def test_a_common_setting_is_for_the_arms_it_applies_to(runs):
    (path,) = runs("tiny")
    common = {"linear_probe": True, "transfer.token_dropout": 0.1}
    names = ["pretrained", "lora", "scratch", "frozen", "setfit"]
    options = {arm.name: arm.options(common) for arm in make_arms([path], names)}
    assert [name for name in names if options[name].get("linear_probe")] == ["pretrained", "lora"]
    dropped = [name for name in names if "transfer.token_dropout" in options[name]]
    assert dropped == ["pretrained", "lora", "scratch"]
    (own,) = make_arms([path], ["frozen"], {"frozen": {"linear_probe": True}})
    assert own.options()["linear_probe"]  # and refused, as the arm's own setting


def test_tables_define_custom_arms_and_settings_of_standard_ones(runs):
    (path,) = runs("tiny")
    tables = {"fast": {"kind": "frozen", "lr": 0.01}, "scratch": {"epochs": 3}, "unused": {"kind": "pretrained"}}
    fast, scratch, pretrained = make_arms([path], ["fast", "scratch", "pretrained"], tables)
    assert fast.kind == "frozen"
    assert [arm.settings for arm in (fast, scratch, pretrained)] == [{"lr": 0.01}, {"epochs": 3}, {}]
    assert fast.options() == {"transfer.init": "pretrained", "transfer.freeze": True, "lr": 0.01}
    assert tables["fast"] == {"kind": "frozen", "lr": 0.01}  # unchanged


def test_tfidf_alone_needs_no_run():
    assert make_arms([], ["tfidf"]) == [Arm("tfidf", "tfidf")]
    assert make_arms([], ["words"], {"words": {"kind": "tfidf"}}) == [Arm("words", "tfidf")]


@pytest.mark.parametrize(
    ("names", "tables", "message"),
    [
        (["scrach"], {}, r"--arms scrach: no such arm; did you mean 'scratch'\? \(have: frozen, .*tfidf\)"),
        (["fats"], {"fast": {"kind": "frozen"}}, r"did you mean 'fast'\?"),
        (["xyz"], {}, r"--arms xyz: no such arm \(have: "),
        (["frozen", "scratch", "frozen"], {}, r"--arms: frozen given twice"),
        (["fast"], {"fast": {"lr": 1}}, r"arms\.fast\.kind: must be one of frozen, .*, not 'fast'"),
        (["scratch"], {"fast": {"kind": "frozn"}}, r"arms\.fast\.kind: .*, not 'frozn'; did you mean 'frozen'\?"),
        (["scratch"], {"fast": {"kind": 3}}, r"arms\.fast\.kind: .*, not 3"),
        (["tfidf"], {"tfidf": {"C": 1, "n": 2}}, r"arms\.tfidf: TF-IDF has no settings, so C, n cannot be set"),
        (["scratch"], {}, r"no run to compare: give one"),
    ],
)
def test_invalid_arms_are_refused(names, tables, message):
    with pytest.raises(UserError, match=message) as raised:
        make_arms([], names, tables)
    assert "\n" not in str(raised.value)


def test_missing_and_repeated_runs_are_refused(runs, tmp_path):
    (path,) = runs("tiny")
    with pytest.raises(UserError, match=r"no such run; did you mean 'tiny'\?"):
        make_arms([tmp_path / "tinny"], ["scratch"])
    with pytest.raises(UserError, match="tiny: given twice"):
        make_arms([path, tmp_path / "." / "tiny"], ["scratch"])


def test_names_can_be_checked_without_a_run():
    check_arm_names(["scratch", "tfidf"], {})
    with pytest.raises(UserError, match="no such arm"):
        check_arm_names(["scratch", "tf-idf"], {})
    assert kind_of_arm("fast", {"fast": {"kind": "tfidf"}}) == "tfidf"
