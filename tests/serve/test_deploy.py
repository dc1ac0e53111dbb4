"""The files of deploy/ and the limits in docs/howto/serve.md agree with the program."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="needs headstock[serve]")

from headstock.cli.app import app as program
from headstock.cli.app import find_verbs
from headstock.serve.settings import ServeSettings

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
UNIT = (ROOT / "deploy" / "headstock.service").read_text(encoding="utf-8")


def serve_options() -> set[str]:
    import typer

    find_verbs()
    verb = typer.main.get_command(program).commands["serve"]
    return {name for option in verb.params for name in option.opts}


def options_in(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def docker_command(instruction: str) -> list[str]:
    return json.loads(re.search(rf"{instruction} (\[.*\])", DOCKERFILE)[1])


def test_the_container_runs_a_command_that_exists_as_another_user_than_root():
    words = docker_command("ENTRYPOINT")
    assert words[:2] == ["headstock", "serve"] and options_in(words) <= serve_options()
    assert re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE) == [("10001", "10001")]


def test_the_health_check_of_the_container_tells_a_live_server_from_a_dead_one(server):
    port = server.url.rpartition(":")[2]
    for address, code in ((f":{port}/health", 0), (f":{port}/nothing", 1)):
        words = [word.replace(":8000/health", address) for word in docker_command("CMD")]
        check = subprocess.run([sys.executable, *words[1:]], capture_output=True, check=False)
        assert check.returncode == code


def test_the_systemd_unit_is_valid_and_runs_a_command_that_exists(tmp_path):
    words = re.search(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)[1].split()
    assert words[1] == "serve" and options_in(words) <= serve_options()
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / "headstock.service"
    for text, valid in ((UNIT, True), (UNIT.replace("[Service]", "[Service]\nProtectSystem=perhaps"), False)):
        unit.write_text(text.replace(words[0], sys.executable), encoding="utf-8")
        check = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
        assert (check.stderr == "") is valid, check.stderr


def test_the_kubernetes_manifest_probes_a_path_and_drops_all_rights():
    yaml = pytest.importorskip("yaml")
    documents = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text(encoding="utf-8"))
    deployment, service = documents
    pod = deployment["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert options_in(container["args"]) <= serve_options() and service["metadata"]["name"] in container["args"]
    assert {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")} == {
        "/health"
    }
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"] and rights["capabilities"] == {"drop": ["ALL"]}
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["terminationGracePeriodSeconds"] > ServeSettings().grace


def test_the_table_of_limits_names_every_limit_with_its_default():
    page = (ROOT / "docs" / "howto" / "serve.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`[^|]*\| ([\d,]+) \|", page, re.MULTILINE)
    table = {name: float(value.replace(",", "")) for name, value in rows}
    no_limits = {"host", "port", "token", "allow_hosts", "workers"}
    assert table == {field.name: field.default for field in fields(ServeSettings) if field.name not in no_limits}
