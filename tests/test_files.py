"""Files and folders are whole or not there."""

import os
import subprocess
import sys

import pytest

from headstock import files


def test_a_failed_folder_leaves_nothing(tmp_path):
    def fail():
        with files.whole_folder(tmp_path / "made") as folder:
            (folder / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_replaces_the_one_before(tmp_path):
    for text in ("old", "new"):
        with files.whole_folder(tmp_path / "made") as folder:
            (folder / "a").write_text(text)
            (folder / text).write_text(text)
    assert sorted(file.name for file in (tmp_path / "made").iterdir()) == ["a", "new"]
    assert (tmp_path / "made" / "a").read_text() == "new"


def test_what_a_killed_process_left_is_swept_away(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from headstock.files import whole_folder
with whole_folder(Path({str(tmp_path)!r}) / "made") as folder:
    (folder / "half").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code])
    assert not (tmp_path / "made").exists()
    assert len(list(tmp_path.iterdir())) == 1  # the half-made one, under another name
    mine = tmp_path / f".other.{os.getpid()}{files.PARTIAL}"
    mine.mkdir()
    files.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [mine]  # a living process's work is left alone


def test_a_text_is_replaced_whole(tmp_path):
    path = tmp_path / "deep" / "a.json"
    files.write_json(path, {"é": 1})
    files.write_json(path, {"é": 2})
    assert path.read_text(encoding="utf-8") == '{\n  "é": 2\n}\n'
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]


def test_the_cache_can_be_moved(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADSTOCK_CACHE", str(tmp_path))
    assert files.cache_folder() == tmp_path
