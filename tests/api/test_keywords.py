"""The keywords of the API are the settings, with their types; a wrong name is refused with the nearest one."""

import inspect
import types
from collections.abc import Sequence
from dataclasses import fields
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest

import headstock
from headstock.api import keywords
from headstock.errors import UserError
from headstock.experiments import compare_settings, sweep_trials
from headstock.model.backbone import BACKBONES
from headstock.tasks.base import TASKS
from headstock.train.settings import FROM_SCRATCH, PRETRAINING

TOKENIZER_FILE = {"file"}  # the keyword `tokenizer`
SOURCE = {"run", "preset"}  # how a comparison or a range test names its runs
PRETRAIN, FINETUNE = {"pretrain"}, {"finetune"}
VERBS = {
    "pretrain": (keywords.PretrainKeywords, PRETRAIN, set()),
    "finetune": (keywords.FinetuneKeywords, FINETUNE, set()),
    "distil": (keywords.FinetuneKeywords, FINETUNE, {"init", "freeze", "skip_blank", *SOURCE}),
    "compare": (keywords.CompareKeywords, FINETUNE, {*compare_settings.FIXED_SETTINGS, *SOURCE}),
    "sweep": (keywords.SweepKeywords, PRETRAIN | FINETUNE, set(sweep_trials.FIXED_SETTINGS)),
    "lr_find": (keywords.LRFindKeywords, PRETRAIN | FINETUNE, {"valid", "test"}),
}


def members(hint) -> set:
    """The alternatives of a type; a list of settings is a Sequence for callers."""
    if get_origin(hint) in (Union, types.UnionType):
        return set().union(*map(members, get_args(hint)))
    if get_origin(hint) is Literal:
        return {("literal", value, type(value)) for value in get_args(hint)}
    if get_origin(hint) in (tuple, Sequence):
        return {("sequence", get_args(hint)[0])}
    return {hint}


def all_settings(kinds: set[str]) -> dict[str, set]:
    """The types of every setting of pretraining or fine-tuning, in any of its sections."""
    sections = [BACKBONES.get(name).Config for name in BACKBONES.names()]
    for kind, classes in (("pretrain", PRETRAINING), ("finetune", FROM_SCRATCH)):
        if kind in kinds:
            sections += classes.values()
            sections += [TASKS.get(n).Config for n in TASKS.names() if TASKS.get(n).is_labelled == (kind == "finetune")]
    settings: dict[str, set] = {"family": {str}}
    for section in sections:
        hints = get_type_hints(section)
        for part in fields(section):
            settings.setdefault(part.name, set()).update(members(hints[part.name]))
    return settings


@pytest.mark.parametrize("verb", VERBS)
def test_keywords_are_the_settings(verb):
    kind, kinds, excluded = VERBS[verb]
    parameters = set(inspect.signature(getattr(headstock, verb)).parameters)
    expected = all_settings(kinds)
    left_out = parameters | excluded | TOKENIZER_FILE
    expected = {name: hint for name, hint in expected.items() if name not in left_out}
    hints = {name: members(hint) for name, hint in get_type_hints(kind).items()}
    assert hints == expected


def test_a_wrong_name_has_a_hint(tmp_path):
    for function, wrong, right in (
        (headstock.finetune, "epoch", "epochs"),
        (headstock.pretrain, "overwritte", "overwrite"),
        (headstock.compare, "label", "labels"),
        (headstock.sweep, "widht", "width"),
        (headstock.lr_find, "max_lrs", "max_lr"),
    ):
        with pytest.raises(UserError, match=rf"{function.__name__}: unknown keyword '{wrong}'; did you mean '{right}'"):
            function(**({} if function is headstock.lr_find else {"out": tmp_path / "run"}), **{wrong: 1})
    with pytest.raises(UserError, match=r"unknown keyword 'set' \(settings are keywords: lr=3e-4\)"):
        headstock.finetune("reviews-en", train=[("a", "x"), ("b", "y")], out=tmp_path / "run", set={"lr": 1e-4})  # type: ignore[call-arg]
    with pytest.raises(UserError, match="epochs: must be float or nothing, not 'three'"):
        headstock.finetune("reviews-en", train=[("a", "x"), ("b", "y")], out=tmp_path / "run", epochs="three")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
