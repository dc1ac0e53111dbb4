"""Files that other programs read: GitHub's workflows and forms, CITATION.cff, pre-commit hooks; and the licences."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import headstock
from headstock.data.catalog import load_catalog

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if path.stem != "config"]
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "vendor.github-issue-forms": FORMS,
    "vendor.github-issue-config": [ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}


def schema_errors(schema: str, *files: Path) -> str:
    """What a schema that check-jsonschema contains objects to."""
    words = [sys.executable, "-m", "check_jsonschema", "--default-filetype", "yaml", "--builtin-schema", schema]
    done = subprocess.run([*words, *map(str, files)], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_match_their_schemas(schema):
    pytest.importorskip("check_jsonschema")
    assert SCHEMAS[schema]
    assert schema_errors(schema, *SCHEMAS[schema]) == ""


def test_a_file_that_does_not_match_is_noticed(tmp_path):
    pytest.importorskip("check_jsonschema")
    broken = (ROOT / ".github" / "workflows" / "release.yml").read_text().replace("runs-on:", "runs-in:")
    (tmp_path / "release.yml").write_text(broken)
    assert "runs-in" in schema_errors("vendor.github-workflows", tmp_path / "release.yml")


def test_the_bug_report_asks_for_the_doctor():
    assert "headstock doctor" in (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()


def test_the_hooks_are_valid_and_local():
    pytest.importorskip("pre_commit")
    config = ROOT / ".pre-commit-config.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "pre_commit", "validate-config", config], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert re.findall(r"repo: (\S+)", config.read_text()) == ["local"]  # nothing is downloaded


def test_versions_agree():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {headstock.__version__}\n" in citation
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]
    versions = {line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r"3\.\d+$", line)}
    for workflow in ("test.yml", "release.yml"):
        matrix = re.search(r"python: (\[.*\])", (ROOT / ".github" / "workflows" / workflow).read_text())
        assert set(json.loads(matrix[1])) == versions


def test_the_licences_are_those_of_the_catalog():
    page = (ROOT / "docs" / "reference" / "licences.md").read_text(encoding="utf-8")
    for entry in load_catalog().values():
        assert f"| `{entry.name}` | {entry.card()['source']} | {entry.licence} |" in page
    for stock in (ROOT / "src" / "headstock" / "stocks").iterdir():
        assert f"| `{stock.name}` |" in page


def test_every_extra_is_documented():
    page = (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert all(f"`{extra}`" in page for extra in extras)


def test_the_image_gets_all_files_of_the_build():
    copied = " ".join(re.findall(r"^COPY (.+) \./$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE))
    allowed = (ROOT / ".dockerignore").read_text()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        assert name in copied and f"!{name}\n" in allowed
