"""`headstock doctor`: a real self-test, what is missing, what is broken, and nothing private in the output."""

import getpass
import json
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from headstock.maintenance import extras, self_test, system
from headstock.maintenance.self_test import run_self_test


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[str, dict]:
    """The output for people, then the JSON object, of one run with the self-test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADSTOCK_TOKEN", "pa55word")
        patch.setenv("HF_ENDPOINT", "https://me:pa55word@hub.example.org")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        from headstock.maintenance.doctor import diagnose

        diagnosis = diagnose("cpu")
    return diagnosis.markdown(), json.loads(json.dumps(diagnosis.to_dict()))


def test_a_tiny_model_is_trained_saved_loaded_and_used(report):
    text, facts = report
    assert facts["ok"] and facts["problems"] == []
    stages = facts["self_test"]["stages"]
    assert list(stages) == list(self_test.STAGES)
    assert stages["pretrain"]["steps"] > 0 and stages["pretrain"]["tokens_per_second"] > 100
    assert stages["generate"]["text"].startswith("Anne") and len(stages["generate"]["text"]) > 6
    assert text.startswith("**headstock ") and "tokens/s" in text


def test_versions_extras_and_folders_are_listed(report):
    text, facts = report
    assert facts["versions"]["torch"] == metadata.version("torch")
    assert set(facts["extras"]) == set(metadata.metadata("headstock").get_all("Provides-Extra"))
    assert "writable" in facts["folders"]["cache"] and "free" in facts["folders"]["current"]
    assert all(f"**{title}**" in text for title in ("System", "Versions", "Extras", "Folders", "Environment"))
    assert all(line == "" or line.startswith(("- ", "**")) for line in text.splitlines())


def test_nothing_private_is_printed(report):
    text, facts = report
    for output in (text, json.dumps(facts)):
        assert "pa55word" not in output and "HEADSTOCK_TOKEN" in output
        assert str(Path.home()) + "/" not in output
        assert f"/{getpass.getuser()}/" not in output


def test_paths_are_anonymous(monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    assert system.anonymous("/home/alice/runs") == "~/runs"
    assert system.anonymous("/home/alicetown and /scratch/alice/runs") == "/home/alicetown and /scratch/$USER/runs"
    monkeypatch.setenv("HOME", "/")
    assert system.anonymous("/data/runs") == "/data/runs"


def test_secrets_are_not_shown():
    shown = system.environment_variables(
        {"HF_TOKEN": "s", "HEADSTOCK_SERVE": "s", "HEADSTOCK_TIMEOUT": "5", "AWS_SECRET_ACCESS_KEY": "s", "OMP_X": "1"}
    )
    assert shown == {"HF_TOKEN": "(set)", "HEADSTOCK_SERVE": "(set)", "HEADSTOCK_TIMEOUT": "5", "OMP_X": "1"}


def test_a_cache_that_is_not_writable_and_a_device_that_is_not_there_fail(call, monkeypatch):
    monkeypatch.setenv("HEADSTOCK_CACHE", "/proc/headstock")
    words = ["--no-self-test"] if torch.cuda.is_available() else ["--device", "cuda"]
    out, err = call("doctor", *words, "--json", "--quiet", code=1)
    answer = json.loads(out.splitlines()[-1])
    assert "cache folder" in answer["error"] and not answer["ok"] and answer["versions"]["torch"]
    assert list(answer["self_test"]["stages"]) == ["torch"]
    if not torch.cuda.is_available():
        problem = "pretrain: --device cuda: no CUDA device is available; use --device cpu or auto"
        assert answer["self_test"]["error"] == problem and problem in answer["error"]
    assert err == f"headstock: {answer['error']}\n"


def test_without_package_metadata_requirements_are_not_checked(call, monkeypatch):
    """As with PYTHONPATH=src: every other package has its metadata."""

    def unless_headstock(function):
        def look_up(name):
            if name == "headstock":
                raise metadata.PackageNotFoundError(name)
            return function(name)

        return look_up

    for name in ("metadata", "requires", "version"):
        monkeypatch.setattr(metadata, name, unless_headstock(getattr(metadata, name)))
    answer = json.loads(call("doctor", "--no-self-test", "--json")[0].splitlines()[-1])
    assert list(answer["self_test"]["stages"]) == ["torch"]
    assert answer["ok"] and answer["extras"] == {} and list(answer["versions"]) == ["Python"]
    assert any("not installed as a package" in warning for warning in answer["warnings"])


def test_an_unknown_device_is_refused(refused):
    assert "must be one of auto, cpu, cuda, mps" in refused("doctor", "--device", "gpu")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os.abort()", "torch: the process was killed by signal 6"),
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
        ("import time; time.sleep(60)", "torch: not done after 1 s"),
    ],
)
def test_a_broken_torch_is_reported(code, error, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(self_test, "TIME_LIMIT", 1.0 if "sleep" in code else 60.0)
    assert error in run_self_test("cpu").error


def test_missing_requirements_of_an_extra_are_named(tmp_path, monkeypatch):
    """A package whose metadata has an extra that needs a newer version, a missing package and another extra."""
    folder = tmp_path / "toy-1.0.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.4", "Name: toy", "Version: 1.0", "Provides-Extra: big", "Provides-Extra: all"]
    needs = ["torch>=2", "rich>=999; extra == 'big'", "absent-package[x]>=1; extra == 'big'"]
    needs += ["never; extra == 'big' and sys_platform == 'none'", "toy[big]; extra == 'all'"]
    (folder / "METADATA").write_text("\n".join(lines + [f"Requires-Dist: {need}" for need in needs]) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert extras.missing("toy") == []
    expected = [f"rich>=999 ({metadata.version('rich')} installed)", "absent-package>=1"]
    assert extras.missing("toy", "big") == extras.missing("toy", "all") == expected
    assert list(extras.versions("toy")) == ["torch", "rich"]
    assert "torch" in {requirement.name for requirement in extras.requirements("headstock")}
    assert not list(extras.unmet(Requirement("torch[optree]>=2"))) or extras.installed_version("optree") is None
