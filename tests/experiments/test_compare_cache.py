"""A comparison reuses finished trials, and resumes to the same results after an interruption."""

import json
import shutil
import signal
from functools import partial

import numpy as np
import pytest

from headstock.errors import UserError
from headstock.experiments.compare import compare
from headstock.train.run_folder import RunFolder
from tests.commands import command, set_options
from tests.experiments.process_patches import stop_comparison
from tests.experiments.small import (
    GRID,
    SETTINGS,
    fail_if_trained,
    modification_times,
    read_rows,
    without_timings,
    write_rows,
)


def test_finished_trials_are_not_repeated(done, stock, files):
    results, out, _ = done
    before = modification_times(out)
    again = compare(stock, **files, out=out, **GRID, callbacks=[fail_if_trained])
    assert modification_times(out) == before
    assert without_timings(again) == without_timings(results)
    assert again["seconds"] >= sum(cell["seconds"] for cell in results["cells"]) - 0.1  # including cached trials


def test_slices_follow_from_finished_trials(done, stock, files, tmp_path):
    """A slice is scored from stored rows, so that it needs no training; a wrong one is refused before any."""
    _, finished, _ = done
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    options = GRID | {"out": out, "callbacks": [fail_if_trained]}
    requested = compare(stock, **files, **options, slices=["label", "contains:le"])["slices"][:2]
    assert [part["slice"] for part in requested] == ["label", "contains:le"]
    labels = np.array([row["label"] for row in read_rows(files["test"])])
    for group in requested[0]["groups"]:
        rows = labels == group["value"]
        assert group["rows"] == rows.sum()
        for arm in group["arms"]:
            cells = [json.loads((out / "cells" / f"{arm['arm']}-24-{seed}.json").read_text()) for seed in range(2)]
            correct = np.array([cell["tallies"]["accuracy"][0] for cell in cells])  # (seeds, rows)
            assert arm["score"] == pytest.approx(correct[:, rows].mean())
            assert arm["low"] <= arm["score"] <= arm["high"]
        scores = {arm["arm"]: arm["score"] for arm in group["arms"]}
        for pair in group["pairs"]:
            assert pair["difference"] == pytest.approx(scores[pair["a"]] - scores[pair["b"]])
            assert pair["low"] <= pair["difference"] <= pair["high"]
    with pytest.raises(UserError, match="--slice labels"):
        compare(stock, **files, **GRID | {"out": tmp_path / "new", "callbacks": [fail_if_trained]}, slices=["labels"])


def changed_results(before, after):
    """The result files that were rewritten or added."""
    return {
        name.removeprefix("cells/") for name in after if name.startswith("cells/") and before.get(name) != after[name]
    }


def test_a_changed_setting_of_one_arm_invalidates_only_that_arm(done, stock, files, tmp_path):
    _, finished, _ = done
    out, recipe = tmp_path / "out", tmp_path / "recipe.toml"
    shutil.copytree(finished, out)
    recipe.write_text("[arms.frozen]\nlr = 0.5\n")
    compare(stock, **files, out=out, **GRID, config_file=recipe)
    changed = changed_results(modification_times(finished), modification_times(out))
    assert changed == {f"frozen-{labels}-{seed}.json" for labels in (8, 24) for seed in range(2)}
    assert RunFolder(out / "runs" / "frozen-24").config()["train"]["lr"] == 0.5


def test_more_labels_and_seeds_reuse_existing_trials(done, stock, files, tmp_path):
    _, finished, _ = done
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    results = compare(
        stock, **files, out=out, labels=[8, 24, 40], seeds=3, settings=SETTINGS, arms=["scratch", "tfidf"]
    )
    new = {(40, seed) for seed in range(3)} | {(8, 2), (24, 2)}
    assert changed_results(modification_times(finished), modification_times(out)) == {
        f"{arm}-{n}-{s}.json" for arm in ("scratch", "tfidf") for n, s in new
    }
    assert results["details"]["labels"] == 40
    assert (out / "runs" / "scratch-40").is_dir()


def test_changed_weights_invalidate_the_arms_that_use_them(done, stock, files, tmp_path):
    _, finished, _ = done
    out, other = tmp_path / "out", tmp_path / "tiny"
    shutil.copytree(finished, out)
    shutil.copytree(stock, other)
    small = GRID | {"labels": [24]}
    compare(other, **files, out=out, **small, callbacks=[fail_if_trained])  # a moved run is the same run
    RunFolder(other).save_weights({name: tensor * 1.5 for name, tensor in RunFolder(other).weights().items()})
    compare(other, **files, out=out, **small)
    changed_arms = {
        name.split("-")[0] for name in changed_results(modification_times(finished), modification_times(out))
    }
    assert changed_arms == {"pretrained", "frozen"}


def test_changed_rows_invalidate_all_trials(done, stock, files, tmp_path):
    _, finished, _ = done
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    rows = [(row["text"], row["label"]) for row in read_rows(files["test"])]
    test = write_rows(tmp_path / "test.csv", [*rows[:-1], (rows[-1][0], "bad" if rows[-1][1] == "good" else "good")])
    compare(stock, **files | {"test": test}, out=out, arms=["frozen", "tfidf"], **GRID)
    assert len(changed_results(modification_times(finished), modification_times(out))) == 8


@pytest.mark.parametrize(("kill", "code"), [(False, 130), (True, -signal.SIGKILL)])
def test_an_interrupted_comparison_resumes_to_the_same_results(done, stock, files, tmp_path, kill, code):
    results, _, _ = done
    out = tmp_path / "out"
    options = [f"--{name}={path}" for name, path in files.items()] + set_options(SETTINGS)
    words = ["compare", stock, *options, "--labels=24,8", "--seeds=2", "--quiet", f"--out={out}"]
    exit_code, _, err = command(*words, patch=partial(stop_comparison, kill=kill))
    assert exit_code == code, err
    before = modification_times(out)
    assert len([name for name in before if name.startswith("cells/") and name.endswith(".json")]) >= 3
    assert not (out / "results.json").exists()
    if not kill:
        assert f"4 of 16 trials are saved in {out}" in err.splitlines()[-1]
    again = compare(stock, **files, out=out, **GRID)
    after = modification_times(out)
    saved = [name for name in before if name.endswith(".json") and ".partial" not in name]
    assert all(after[name] == before[name] for name in saved)
    assert without_timings(again) == without_timings(results)
    assert not list(out.rglob("*.partial"))
