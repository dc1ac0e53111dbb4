"""Atomic files and folders, locks, and stale temporary files."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headstock import io as files
from headstock.errors import UserError


def test_a_failed_folder_leaves_nothing(tmp_path):
    def fail():
        with files.atomic_folder(tmp_path / "folder") as folder:
            (folder / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_replaces_the_one_before(tmp_path):
    for text in ("old", "new"):
        with files.atomic_folder(tmp_path / "folder") as folder:
            (folder / "a").write_text(text)
            (folder / text).write_text(text)
    assert sorted(file.name for file in (tmp_path / "folder").iterdir()) == ["a", "new"]
    assert (tmp_path / "folder" / "a").read_text() == "new"


def test_partial_folders_of_killed_processes_are_removed(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from headstock.io import atomic_folder
with atomic_folder(Path({str(tmp_path)!r}) / "folder") as folder:
    (folder / "half").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code])
    assert not (tmp_path / "folder").exists()
    assert len(list(tmp_path.iterdir())) == 1  # the partial folder, under a temporary name
    mine = tmp_path / f".other.{os.getpid()}{files.PARTIAL}"
    mine.mkdir()
    files.remove_stale(tmp_path)
    assert list(tmp_path.iterdir()) == [mine]  # folders of running processes are kept


def leave_partial(folder, name, *, age=0.0):
    """A partial folder with a file in it, last changed `age` seconds ago."""
    partial = folder / f".{name}{files.PARTIAL}"
    partial.mkdir()
    (partial / "half").write_text("x")
    for path in (partial / "half", partial):
        os.utime(path, (time.time() - age, time.time() - age))
    return partial


def test_process_id_0_is_never_alive(tmp_path):
    leave_partial(tmp_path, "step-4.0")
    files.remove_stale(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="process start times are read from /proc")
def test_a_reused_process_id_does_not_protect_older_files(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        older = leave_partial(tmp_path, f"a.{other.pid}", age=7200)
        current = leave_partial(tmp_path, f"b.{files.HOST}-{other.pid}-0")
        leave_partial(tmp_path, f"c.{files.HOST}-{os.getpid()}-999")  # our process id, but an earlier process
        files.remove_stale(tmp_path)
        assert list(tmp_path.iterdir()) == [current] and not older.exists()
        other.communicate(b"\n")
    files.remove_stale(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_partial_folders_of_other_machines_are_kept_for_a_day(tmp_path):
    fresh = leave_partial(tmp_path, "a.00000000-1-0", age=3600)
    leave_partial(tmp_path, "b.00000000-1-0", age=2 * files.ABANDONED_SECONDS)
    other = leave_partial(tmp_path, "somebody-elses")
    files.remove_stale(tmp_path)
    assert sorted(tmp_path.iterdir()) == [fresh, other]


def test_a_folder_that_cannot_be_deleted_is_renamed_away(tmp_path, monkeypatch):
    monkeypatch.setattr(files.shutil, "rmtree", lambda path, **options: None)
    for _ in range(2):
        (tmp_path / "step-1").mkdir()
        (tmp_path / "step-1" / "a").write_text("x")
        files.remove_folder(tmp_path / "step-1")
    assert not (tmp_path / "step-1").exists()
    monkeypatch.undo()
    files.remove_stale(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_followed_and_stays(tmp_path):
    (tmp_path / "disk" / "folder").mkdir(parents=True)
    (tmp_path / "disk" / "folder" / "old").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "folder")
    with files.atomic_folder(tmp_path / "link") as folder:
        (folder / "new").write_text("x")
    assert (tmp_path / "link").is_symlink()
    assert os.listdir(tmp_path / "disk" / "folder") == ["new"] and os.listdir(tmp_path / "disk") == ["folder"]


def test_the_previous_folder_is_restored_if_the_rename_fails(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").write_text("x")
    calls, real = [], os.replace

    def replace(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(files.errno.EBUSY, "busy", str(target))
        real(source, target)

    monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises(OSError, match="busy"), files.atomic_folder(tmp_path / "folder") as folder:
        (folder / "new").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "old"]


LAYOUT = {"a.json": None, "parts": {"part-*": {"*.bin": None}}}


def test_files_outside_the_layout_are_never_replaced_or_removed(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    (folder / "parts" / "part-1").mkdir(parents=True)
    for name in ("a.json", "parts/part-1/x.bin", ".DS_Store", f".a.json.77{files.PARTIAL}"):
        (folder / name).write_text("ours")
    assert files.unknown_entries(folder, LAYOUT) == []
    files.check_replaceable(folder, LAYOUT)
    (folder / "parts" / "mine").mkdir()
    (folder / "parts" / "part-1" / "notes.txt").write_text("mine")
    (folder / "b.json").write_text("mine")
    (folder / "parts" / "part-2").symlink_to(tmp_path)
    assert files.unknown_entries(folder, LAYOUT) == ["b.json", "parts/mine/", "parts/part-1/notes.txt", "parts/part-2/"]
    with pytest.raises(UserError, match=r"b\.json"), files.atomic_folder(folder, layout=LAYOUT):
        pass
    assert (folder / "a.json").exists() and (folder / "b.json").exists()
    files.remove_layout(folder, LAYOUT)
    assert files.unknown_entries(folder, LAYOUT) == ["b.json", "parts/mine/", "parts/part-1/notes.txt", "parts/part-2/"]
    assert not (folder / "a.json").exists() and not (folder / "parts" / "part-1" / "x.bin").exists()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == folder)
    with pytest.raises(UserError, match="mount point"):
        files.check_replaceable(folder, LAYOUT)


def test_inputs_are_found_through_links(tmp_path):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.write_text("x")
    (out / "rows.csv").write_text("x")
    (out / "outwards").symlink_to(elsewhere)
    (tmp_path / "inwards").symlink_to(out / "rows.csv")
    (tmp_path / "link").symlink_to(out)
    for path in ("out/rows.csv", "inwards", "link/rows.csv", "out/outwards", "link", "elsewhere/../out/rows.csv"):
        for folder in (out, tmp_path / "link"):
            with pytest.raises(UserError, match="input"):
                files.check_inputs(folder, [elsewhere, tmp_path / path])
    files.check_inputs(out, [elsewhere, tmp_path / "other.csv", tmp_path / "out2" / "x"])


FULL = """
import resource, signal, sys
from pathlib import Path
from headstock import io as files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
folder = Path(sys.argv[1])
def in_folder():
    with files.atomic_folder(folder / "folder") as temporary:
        (temporary / "a").write_bytes(bytes(9999))
for work in (lambda: files.write_bytes(folder / "b.json", bytes(9999)), in_folder):
    try:
        work()
    except OSError as wrong:
        print(wrong.filename, wrong.strerror)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits exist on Unix only")
def test_write_errors_name_the_destination(tmp_path):
    process = subprocess.run([sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, check=True)
    assert process.stdout == f"{tmp_path / 'b.json'} File too large\n{tmp_path / 'folder'} File too large\n"
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_atomically(tmp_path):
    path = tmp_path / "deep" / "a.json"
    files.write_json(path, {"é": 1})
    files.write_json(path, {"é": 2})
    assert path.read_text(encoding="utf-8") == '{\n  "é": 2\n}\n'
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADSTOCK_CACHE", str(tmp_path))
    assert files.cache_folder() == tmp_path


def test_a_lock_on_a_deleted_file_is_not_acquired(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    flock = fcntl.flock

    def delete_first(descriptor, operation):  # as if the lock holder finished between open and flock
        (tmp_path / "lock").unlink(missing_ok=True)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    with files.try_lock(tmp_path / "lock") as acquired:
        assert not acquired


@pytest.mark.parametrize("name", ["ENOLCK", "ENOSYS", "EIO"])
def test_a_file_system_without_locks_grants_every_lock(tmp_path, monkeypatch, name):
    fcntl = pytest.importorskip("fcntl")

    def flock(descriptor, operation):
        raise OSError(getattr(files.errno, name), name)

    monkeypatch.setattr(fcntl, "flock", flock)
    if name == "EIO":
        with pytest.raises(OSError, match="EIO"), files.try_lock(tmp_path / "lock"):
            pass
    else:
        with files.try_lock(tmp_path / "lock") as acquired:
            assert acquired


def test_fingerprints_ignore_key_order():
    assert files.fingerprint({"b": [1, "é"], "a": None}) == files.fingerprint({"a": None, "b": [1, "é"]})
    assert files.fingerprint([1]) != files.fingerprint([2])
