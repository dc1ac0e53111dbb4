"""Wheel and sdist: what is in them, that one makes the other, and that the wheel works without the repository."""

import email
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import headstock

ROOT = Path(__file__).parents[2]
NAME = f"headstock-{headstock.__version__}"
DATA = f"{NAME}.data/data/share/"


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """The folder of the sdist and of the wheel that was built from it, as `python -m build` does."""
    if not all(map(importlib.util.find_spec, ("build", "hatchling"))):
        pytest.skip("build and hatchling are not installed")
    folder = tmp_path_factory.mktemp("dist")
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist) -> zipfile.ZipFile:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        yield archive


def test_the_wheel_contains_the_package_and_nothing_else(wheel):
    names = set(wheel.namelist())
    package = {name.removeprefix("headstock/") for name in names if name.startswith("headstock/")}
    source = ROOT / "src" / "headstock"
    tracked = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert package == {name for name in tracked if "__pycache__" not in name}
    stock = "stocks/reviews-en-uncased/model.safetensors"  # the demo's
    for part in ("model/presets/gpt-nano.toml", "data/catalog.toml", stock, "py.typed"):
        assert part in package
    for folder, suffix in (("report/templates", ".html"), ("explain/templates", ".html"), ("serve/static", ".js")):
        assert any(name.startswith(folder) and name.endswith(suffix) for name in package), folder
    others = {name for name in names if not name.startswith(("headstock/", f"{NAME}.dist-info/"))}
    assert others == {
        f"{DATA}man/man1/headstock.1",
        f"{DATA}bash-completion/completions/headstock",
        f"{DATA}zsh/site-functions/_headstock",
        f"{DATA}fish/vendor_completions.d/headstock.fish",
    }


def test_the_wheel_is_small(dist):
    (file,) = dist.glob("*.whl")
    assert file.name == f"{NAME}-py3-none-any.whl" and file.stat().st_size < 60e6


def test_the_metadata(wheel):
    metadata = email.message_from_bytes(wheel.read(f"{NAME}.dist-info/METADATA"))
    assert metadata["Version"] == headstock.__version__ and metadata["License-Expression"] == "Apache-2.0"
    assert "Programming Language :: Python :: 3.13" in metadata.get_all("Classifier")
    assert {"serve", "interop", "tables", "remote", "search", "ray"} <= set(metadata.get_all("Provides-Extra"))
    assert f"{NAME}.dist-info/licenses/LICENSE" in wheel.namelist()


def test_twine_accepts_both(dist):
    pytest.importorskip("twine")
    words = [sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir())]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def digests(archive: zipfile.ZipFile) -> dict[str, str]:
    return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def test_the_sdist_makes_the_same_wheel(dist, wheel, tmp_path):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"hatch_build.py", "LICENSE", "README.md", "pyproject.toml"} <= names
    assert not any(name.startswith(("tests", "docs", "benchmarks", ".venv")) for name in names)
    words = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as direct:
        assert digests(direct) == digests(wheel)


def test_the_wheel_works_elsewhere(wheel, tmp_path):
    """From its files alone, in another folder: the bundled model, a preset, a page of the report and the doctor."""
    wheel.extractall(tmp_path / "site")
    code = (
        "import headstock, sys; from pathlib import Path; assert Path(headstock.__file__).is_relative_to(sys.argv[1])\n"
        "print(headstock.load('reviews-en', device='cpu').fill('The film was [MASK].')[0].filled)\n"
        "from headstock.train.settings import preset_names; print(len(preset_names()), 'presets')\n"
        "from headstock.report.render import environment; environment('headstock.report').list_templates()\n"
        "from headstock.maintenance.extras import missing; print(missing())\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "site")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    filled, presets, missing = done.stdout.splitlines()
    assert filled.startswith("The film was ") and "[MASK]" not in filled
    assert int(presets.split()[0]) > 20 and missing == "[]"


@pytest.mark.skipif(not shutil.which("groff"), reason="needs groff")
def test_the_man_page_of_the_wheel_has_no_warnings(wheel, tmp_path):
    page = tmp_path / "headstock.1"
    page.write_bytes(wheel.read(f"{DATA}man/man1/headstock.1"))
    done = subprocess.run(["groff", "-man", "-ww", "-z", "-Tutf8", page], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
