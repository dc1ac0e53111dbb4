"""Faults 10 and 11: a full disk and a read-only folder are one-line errors, and what was saved stays whole."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headstock
from headstock.train.checkpoint import find_damage, newest_first, newest_valid
from tests.commands import command, set_options
from tests.conftest import TINY
from tests.faults.harness import SMALL, is_full, outcome
from tests.train.processes import start_command

MEGABYTES = 24
WIDE = TINY | {"depth": 1, "width": 256, "vocabulary": 1000, "steps": 12}  # a checkpoint has seven megabytes
NO_SPACE, READ_ONLY = "No space left on device", "Read-only file system"


@pytest.fixture(params=["tmpfs", "ext4"] if is_full() else ["tmpfs"])
def disk(request, tmp_path) -> Iterator[Path]:
    """A mounted file system of 24 MB; skipped where mounting is not permitted."""
    folder, image = tmp_path / "disk", tmp_path / "image"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", folder]
    if request.param == "ext4":
        with image.open("wb") as file:
            file.truncate(MEGABYTES << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
        mount = ["mount", "-o", "loop", image, folder]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """Fill a disk with a file up to its last byte, or leave some bytes free."""
    file = disk / "filler"
    with file.open("wb", buffering=0) as filler:
        size = 1 << 16
        while size:
            try:
                filler.write(bytes(size))
            except OSError:
                size //= 2
    if leave:
        os.truncate(file, file.stat().st_size - leave)
    return file


def failed(result: tuple[int, str, str], reason: str, name: object) -> None:
    """A command ended with exit code 1, not by a signal such as SIGBUS, and one line that names the place."""
    code, _, err = result
    assert code == 1, (code, err)
    last = err.splitlines()[-1]
    assert last.startswith("headstock: ") and reason in last and str(name) in last, last
    assert "Traceback" not in err and "internal error" not in err


# Fault 10: a full disk


def test_fault_10_a_full_disk_during_a_save(corpus, disk, record):
    settings = set_options(WIDE | {"keep": 9, "checkpoint_every": 1})
    failed(command("pretrain", corpus, "--out", disk / "run", *settings), NO_SPACE, "the last good one is")
    saved = newest_first(disk / "run" / "checkpoints")
    assert saved and all(find_damage(path) is None for path in saved)
    assert not list(disk.rglob("*.partial"))
    record(10, f"save ({kind(disk)})", exit_code=1, whole_checkpoints=len(saved))


def test_fault_10_the_run_goes_on_when_there_is_space_again(corpus, disk, tmp_path):
    """Killed by a full disk in the last save, in the final weights, or in the results."""
    settings = SMALL | {"checkpoint_every": 3}
    headstock.pretrain(corpus, out=tmp_path / "whole", settings=settings)
    for leave in (0, 20_000, 60_000, 90_000):
        shutil.rmtree(disk / "run", ignore_errors=True)
        filler = fill(disk, leave)
        code, _, err = command("pretrain", corpus, "--out", disk / "run", *set_options(settings))
        assert code == 1 and NO_SPACE in err.splitlines()[-1], err
        filler.unlink()
        headstock.pretrain(corpus, out=disk / "run", settings=settings, resume=True)
        assert outcome(disk / "run") == outcome(tmp_path / "whole")


def test_fault_10_a_full_disk_during_the_building_of_a_store(disk, tmp_path, monkeypatch, record):
    pick, text = random.Random(0), tmp_path / "text.txt"
    text.write_text("\n\n".join(" ".join(pick.choices("abcdefgh", k=200)) for _ in range(20_000)))  # 8 MB
    monkeypatch.setenv("HEADSTOCK_CACHE", str(disk / "cache"))
    fill(disk, leave=4 << 20)
    options = [*set_options(TINY | {"tokenizer.kind": "char"}), "--out", tmp_path / "run"]
    failed(command("pretrain", text, *options), NO_SPACE, "the token store could not be written")
    assert list((disk / "cache" / "stores").iterdir()) == [] and not (tmp_path / "run").exists()
    record(10, f"token store ({kind(disk)})", exit_code=1, files_left=0)


def test_fault_10_a_full_disk_during_logging(corpus, disk, tmp_path, record):
    settings = TINY | {"steps": 10**5, "log_every": 1, "checkpoint_every": 5, "validate_every": 10**5, "keep": 1}
    settings |= {"tensorboard": True}
    process = start_command(tmp_path / "process", "pretrain", corpus, "--out", disk / "run", *set_options(settings))
    process.wait_until(lambda: newest_first(disk / "run" / "checkpoints"))
    fill(disk)
    failed((process.wait(), "", process.stderr), NO_SPACE, disk / "run")
    newest = newest_valid(disk / "run" / "checkpoints")
    assert newest is not None
    record(10, f"log and TensorBoard ({kind(disk)})", exit_code=1, last_checkpoint="whole")


def test_fault_10_a_full_disk_during_a_report(stock, disk, record):
    run = shutil.copytree(stock, disk / "run")
    command("report", run)
    before = (run / "report.html").read_bytes()
    fill(disk)
    failed(command("report", run), NO_SPACE, "report.html")
    assert (run / "report.html").read_bytes() == before
    failed(command("tokenizer", "train", stock / "README.md", "--out", disk / "t.json"), NO_SPACE, "t.json")
    assert headstock.load(run).score("Anne sees Paris.")  # reading needs no space
    record(10, f"report and tokenizer ({kind(disk)})", exit_code=1, earlier_file="unchanged")


def test_fault_10_control_a_memory_mapped_file_dies_of_sigbus(disk, tmp_path):
    """Why stores are not written through a memory map: on a full disk, the process gets SIGBUS."""
    fill(disk)
    code = "import sys, numpy; numpy.memmap(sys.argv[1], mode='w+', shape=1 << 20)[:] = 1"
    run = subprocess.run([sys.executable, "-c", code, disk / "map"], capture_output=True)
    assert run.returncode == -7 or b"No space" in run.stderr  # some file systems reserve the space


def kind(disk: Path) -> str:
    return "ext4" if (disk / "lost+found").exists() else "tmpfs"


# Fault 11: a read-only folder


@pytest.fixture
def read_only(tmp_path) -> Iterator[Path]:
    """A file system that can be filled, then remounted read-only with `lock`: root ignores permissions."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_fault_11_a_read_only_folder(corpus, stock, files, read_only, tmp_path, record, monkeypatch):
    run = shutil.copytree(stock, read_only / "run")
    unfinished = shutil.copytree(stock, read_only / "unfinished")
    (unfinished / "results.json").unlink()
    subprocess.run(["mount", "-o", "remount,ro", read_only], check=True)
    out, train = read_only / "new", f"--train={files['train']}"
    commands = {
        "pretrain": ["pretrain", corpus, "--out", out, *set_options(TINY)],
        "pretrain --resume": ["pretrain", corpus, "--out", unfinished, "--resume"],
        "finetune": ["finetune", stock, train, "--out", out],
        "compare": ["compare", stock, train, f"--test={files['test']}", "--out", out, "--labels=8", "--seeds=1"],
        "sweep": ["sweep", corpus, "--grid=depth=1,2", "--out", out, *set_options(TINY)],
        "tokenizer": ["tokenizer", "train", corpus, "--out", read_only / "t.json"],
        "report": ["report", run],
        "export": ["export", run, out],
        "explain": ["explain", "params", run, "--out", read_only / "params.html"],
    }
    if not is_full():
        commands = {name: commands[name] for name in ("pretrain", "pretrain --resume", "compare", "report")}
    for words in commands.values():
        failed(command(*words), READ_ONLY, read_only)
    assert headstock.load(run).score("Anne sees Paris.")  # runs can be used where nothing can be written
    monkeypatch.setenv("HEADSTOCK_CACHE", str(read_only / "cache"))
    failed(command("pretrain", corpus, "--out", tmp_path / "run", *set_options(TINY)), READ_ONLY, read_only / "cache")
    subprocess.run(["mount", "-o", "remount,rw", read_only], check=True)  # a control: the folder was the reason
    assert command("report", run)[0] == 0
    record(11, "read-only file system", commands=len(commands) + 1, exit_code=1)
