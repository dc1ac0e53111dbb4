"""The job files of deploy/: the Slurm script saves, requeues and resumes; commands in manifests have valid options."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from typer.main import get_command

from headstock.cli.app import find_verbs
from headstock.cli.command import app

DEPLOY = Path(__file__).parents[1] / "deploy"
# stand-ins for Slurm and torchrun: what the script tells them is recorded, and training ends by SIGTERM
PROGRAMS = {
    "scontrol": '[ "$1" = show ] && echo node1 && exit; echo "scontrol $*" >> "$RECORD"',
    "scancel": 'echo "scancel $*" >> "$RECORD"; kill -TERM "$(cat "$RECORD.pid")"',
    "srun": 'while [ "$1" != torchrun ]; do shift; done; exec "$@"',
    "torchrun": """
        trap 'echo saved >> "$RECORD"; exit 143' TERM
        mkdir -p run; touch run/config.json; echo "torchrun $*" >> "$RECORD"; echo $$ > "$RECORD.pid"
        while true; do sleep 0.05; done""",
}


@pytest.fixture
def slurm(tmp_path):
    """Starts the script in a folder as Slurm would; returns its process."""
    for name, script in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(tmp_path / "record")}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2"}

    def start(script=DEPLOY / "slurm.sbatch"):
        (tmp_path / "record.pid").unlink(missing_ok=True)
        words = ["bash", str(script), "text.txt", "run", "--steps", "9"]
        return subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)

    return start


def wait_for(path: Path):
    while not path.is_file() or not path.read_text().endswith("\n"):
        time.sleep(0.05)


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_the_slurm_script_saves_requeues_and_resumes(slurm, tmp_path):
    record = tmp_path / "record"
    for _ in range(2):
        process = slurm()
        wait_for(tmp_path / "record.pid")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    first, second = record.read_text().split("scontrol requeue 7\n")[:2]
    for lines, resumes in ((first, False), (second, True)):
        torchrun, scancel, saved = lines.splitlines()
        assert "--nnodes=2 --nproc-per-node=1" in torchrun and "--rdzv-endpoint=node1:29400" in torchrun
        assert "-m headstock pretrain text.txt --out run" in torchrun and torchrun.endswith("--steps 9")
        assert ("--resume" in torchrun) is resumes
        assert scancel == "scancel --signal=TERM 7.0" and saved == "saved"


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_without_its_trap_the_slurm_script_requeues_nothing(slurm, tmp_path):
    text = (DEPLOY / "slurm.sbatch").read_text()
    (tmp_path / "broken.sbatch").write_text(text.replace("\ntrap stop TERM\n", "\n"))
    process = slurm(tmp_path / "broken.sbatch")
    wait_for(tmp_path / "record.pid")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    os.kill(int((tmp_path / "record.pid").read_text()), signal.SIGKILL)
    process.stdout.close()
    assert "requeue" not in (tmp_path / "record").read_text()


@pytest.mark.parametrize("name", ["slurm.sbatch", "kuberay.yaml", "pytorchjob.yaml", "skypilot.yaml"])
def test_commands_have_valid_options(name):
    find_verbs()
    text = (DEPLOY / name).read_text().replace("\\\n", " ")
    commands = re.findall(r"^[^#\n]*headstock (compare|pretrain) (.*(?:\n +--.*)*)", text, re.MULTILINE)
    assert commands
    for verb, words in commands:
        known = {option for parameter in get_command(app).commands[verb].params for option in parameter.opts}
        assert set(re.findall(r"(?<!\S)--[a-z-]+", words)) <= known


@pytest.mark.parametrize("name", ["kuberay.yaml", "pytorchjob.yaml", "skypilot.yaml"])
def test_manifests_are_yaml(name):
    yaml = pytest.importorskip("yaml")
    assert all(isinstance(document, dict) for document in yaml.safe_load_all((DEPLOY / name).read_text()))
