"""A comparison reuses finished trials, and resumes to the same results after an interruption."""

import shutil
import signal
import subprocess
import sys

import pytest

from headstock.experiments.compare import compare
from headstock.train.run_folder import RunFolder
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
    told = sum(cell["seconds"] for cell in results["cells"])
    assert again["seconds"] >= told - 0.1  # including cached trials


def made_again(before, after):
    """The result files that were rewritten or added."""
    return {
        name.removeprefix("cells/") for name in after if name.startswith("cells/") and before.get(name) != after[name]
    }


def test_a_changed_setting_of_one_arm_invalidates_only_that_arm(done, stock, files, tmp_path):
    _, old, _ = done
    out, recipe = tmp_path / "out", tmp_path / "recipe.toml"
    shutil.copytree(old, out)
    recipe.write_text("[arms.frozen]\nlr = 0.5\n")
    compare(stock, **files, out=out, **GRID, config_file=recipe)
    changed = made_again(modification_times(old), modification_times(out))
    assert changed == {f"frozen-{labels}-{seed}.json" for labels in (8, 24) for seed in range(2)}
    assert RunFolder(out / "runs" / "frozen-24").config()["train"]["lr"] == 0.5


def test_more_labels_and_seeds_reuse_existing_trials(done, stock, files, tmp_path):
    _, old, _ = done
    out = tmp_path / "out"
    shutil.copytree(old, out)
    results = compare(
        stock, **files, out=out, labels=[8, 24, 40], seeds=3, settings=SETTINGS, arms=["scratch", "tfidf"]
    )
    new = {(40, seed) for seed in range(3)} | {(8, 2), (24, 2)}
    assert made_again(modification_times(old), modification_times(out)) == {
        f"{arm}-{n}-{s}.json" for arm in ("scratch", "tfidf") for n, s in new
    }
    assert results["details"]["labels"] == 40
    assert (out / "runs" / "scratch-40").is_dir()


def test_changed_weights_invalidate_the_arms_that_use_them(done, stock, files, tmp_path):
    _, old, _ = done
    out, other = tmp_path / "out", tmp_path / "tiny"
    shutil.copytree(old, out)
    shutil.copytree(stock, other)
    small = GRID | {"labels": [24]}
    compare(other, **files, out=out, **small, callbacks=[fail_if_trained])  # a moved run is the same run
    RunFolder(other).save_weights({name: tensor * 1.5 for name, tensor in RunFolder(other).weights().items()})
    compare(other, **files, out=out, **small)
    changed = {name.split("-")[0] for name in made_again(modification_times(old), modification_times(out))}
    assert changed == {"pretrained", "frozen"}


def test_changed_rows_invalidate_all_trials(done, stock, files, tmp_path):
    _, old, _ = done
    out = tmp_path / "out"
    shutil.copytree(old, out)
    rows = [(row["text"], row["label"]) for row in read_rows(files["test"])]
    test = write_rows(tmp_path / "test.csv", [*rows[:-1], (rows[-1][0], "bad" if rows[-1][1] == "good" else "good")])
    compare(stock, **files | {"test": test}, out=out, arms=["frozen", "tfidf"], **GRID)
    assert len(made_again(modification_times(old), modification_times(out))) == 8


STOPPED = """
import os, signal, sys
from headstock import io as files
from headstock.cli import main
from headstock.experiments import evaluation

instant = sys.argv.pop(1)
made, whole, fit = [], os.replace, evaluation.fit

def replace(beside, path):
    if "/cells/" in str(path):
        made.append(path)
        if instant == "kill" and len(made) == 4:
            os.kill(os.getpid(), signal.SIGKILL)  # written, not yet renamed
    whole(beside, path)

def fit_and_stop(*given, callbacks, **more):
    def stop(event):
        if instant == "interrupt" and len(made) == 4 and event.kind == "step":
            os.kill(os.getpid(), signal.SIGINT)
    return fit(*given, callbacks=[*callbacks, stop], **more)

files.os.replace, evaluation.fit = replace, fit_and_stop
main()
"""


@pytest.mark.parametrize(("instant", "code"), [("interrupt", 130), ("kill", -signal.SIGKILL)])
def test_an_interrupted_comparison_resumes_to_the_same_results(done, stock, files, tmp_path, instant, code):
    results, _, _ = done
    out, script = tmp_path / "out", tmp_path / "stopped.py"
    script.write_text(STOPPED)
    options = [f"--{name}={path}" for name, path in files.items()]
    options += [f"--set={name}={value}" for name, value in SETTINGS.items()]
    command = ["compare", str(stock), *options, "--labels=24,8", "--seeds=2", f"--out={out}"]
    stopped = subprocess.run([sys.executable, script, instant, *command], capture_output=True, text=True)
    assert stopped.returncode == code, stopped.stderr
    kept = modification_times(out)
    assert len([name for name in kept if name.startswith("cells/") and name.endswith(".json")]) >= 3
    assert not (out / "results.json").exists()
    if instant == "interrupt":
        assert stopped.stderr.splitlines()[-1] == (
            f"headstock: stopped; 4 of 16 trials are saved in {out}; repeat the command to continue"
        )
    again = compare(stock, **files, out=out, **GRID)  # called by the command
    after = modification_times(out)
    assert all(
        after[name] == stamp for name, stamp in kept.items() if name.endswith(".json") and ".partial" not in name
    )
    assert without_timings(again) == without_timings(results)
    assert not list(out.rglob("*.partial"))
