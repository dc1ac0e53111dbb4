"""Every recipe is settings that the program understands: a claim whose recipe no longer loads cannot be made again."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headstock.config import flatten_tables
from headstock.errors import ConfigError
from headstock.experiments import compare_settings as settings
from headstock.experiments import sweep_settings
from headstock.train.resolve import resolve_finetune_config as transfer_config
from headstock.train.resolve import resolve_pretrain_config
from headstock.train.run_folder import open_run
from tests.benchmarks import load_benchmark, load_script

FOLDER = Path(__file__).parent.parent / "recipes"
BENCHMARKS = FOLDER.parent / "benchmarks"
RECIPES = [*sorted(FOLDER.glob("*.toml")), *sorted(BENCHMARKS.glob("cls_books*.toml"))]


def load(path: Path) -> None:
    written = tomllib.loads(path.read_text(encoding="utf-8"))
    if "sweep" in written:
        plan = sweep_settings.make_plan(path, {}, {}, {})
        point = sweep_settings.corner_points(plan.grid)[0]
        if plan.sweep.run:
            transfer_config(open_run("reviews-en"), plan.sweep.task, None, plan.settings | point)
        else:
            given = {"data.corpus": list(plan.sweep.corpus), **plan.settings}
            resolve_pretrain_config(plan.preset, None, given | point)
    elif "compare" in written:
        plan = settings.make_plan(path, {}, {})
        if plan.compare.task != "translate":  # for which no stock ships
            transfer_config(open_run("reviews-en"), plan.compare.task, None, dict(plan.settings))
        if plan.pretrain:
            asked = flatten_tables({key: value for key, value in plan.pretrain.items() if key != "preset"})
            resolve_pretrain_config(plan.pretrain.get("preset"), None, asked)
    elif "teachers" in written:  # of benchmarks/distilled_classifier.py
        load_pretrainings(written["pretrain"])
        for part in (written["teachers"], written["student"]):
            load_finetunings(part["models"], part["finetune"], written["pretrain"])
    elif "candidates" in written:  # of benchmarks/cls_books.py
        load_pretrainings(written["pretrain"])
        load_finetunings(written["candidates"], written["finetune"], written["pretrain"])
    elif (task := written.get("task", {}).get("name")) in ("classify", "pair", "tag", "answer", "translate"):
        source = None if "preset" in written.get("transfer", {}) else open_run("reviews-en")
        transfer_config(source, task, path, {})
    else:
        resolve_pretrain_config(None, path, {})


def load_pretrainings(pretrainings: dict[str, Any]) -> None:
    tables = load_benchmark("distilled_classifier").pretraining_tables
    for sections in pretrainings.values():
        assert "config" in sections or sections["start"] in pretrainings
        resolve_pretrain_config(None, None, flatten_tables(tables(sections, FOLDER)))


def load_finetunings(models: dict[str, Any], common: dict[str, Any], pretrainings: dict[str, Any]) -> None:
    for model in models.values():
        assert model["run"] in pretrainings
        own = {key: value for key, value in model.items() if key != "run"}
        transfer_config(open_run("reviews-en"), "classify", None, common | own)


def test_there_are_recipes():
    assert len(RECIPES) > 20


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads(path):
    load(path)


def test_a_recipe_with_a_slip_does_not(tmp_path):
    slip = (FOLDER / "reviews-en.toml").read_text(encoding="utf-8").replace("depth", "dept")
    (tmp_path / "slip.toml").write_text(slip, encoding="utf-8")
    with pytest.raises(ConfigError, match="did you mean 'depth'"):
        load(tmp_path / "slip.toml")


def test_a_result_has_its_recipe():
    """A folder of results belongs to a recipe: of its own name, or of the comparison or run its name begins with."""
    stems = {path.stem for path in RECIPES}
    for folder in (FOLDER / "results").iterdir():
        assert any(folder.name == stem or folder.name.startswith(f"{stem}-") for stem in stems), folder.name
        for file in folder.glob("results.json"):
            assert json.loads(file.read_text(encoding="utf-8"))


def test_stored_verdicts_are_worded_as_now():
    """`python scripts/verdicts.py` rewrites them."""
    scripts = load_script("verdicts")
    old = [path for path, results in scripts.comparisons() if results["verdicts"] != scripts.current_verdicts(results)]
    assert old == []
