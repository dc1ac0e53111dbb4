"""How much memory there is, where a container, or a system other than Linux, has its own way to say it."""

import os
import sys

import pytest
import torch

from headstock.train import memory

CPU = torch.device("cpu")
GB = 1 << 30


def test_files_that_were_read_leave_a_container_its_room(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.cgroup_free_bytes() == sys.maxsize
    (tmp_path / "memory.max").write_text(f"{16 * GB}\n")
    (tmp_path / "memory.current").write_text(f"{13 * GB}\n")
    assert memory.cgroup_free_bytes() == 3 * GB
    stat = f"anon {GB}\nfile {12 * GB}\ninactive_file {11 * GB}\nactive_file {GB}\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert memory.cgroup_free_bytes() == 14 * GB
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.cgroup_free_bytes() == sys.maxsize


@pytest.fixture
def no_files(monkeypatch):
    """A system that has nothing under /proc."""
    monkeypatch.setattr(memory, "lines", lambda path: [])


def test_what_a_process_held_is_asked_of_the_system_where_there_are_no_files(no_files):
    pytest.importorskip("resource")  # Windows has none
    assert memory.PeakMemory(CPU).bytes() > 1 << 20


def test_windows_tells_neither_what_was_held_nor_what_is_free(no_files, monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.delattr(os, "sysconf", raising=False)
    assert memory.PeakMemory(CPU).bytes() == memory.process_bytes(CPU) == 0
    assert memory.free_bytes(CPU) == memory.ASSUMED_FREE
