"""How much memory there is, where a container, or a system other than Linux, has its own way to say it."""

import os
import sys

import pytest
import torch

from headstock.train import peak_memory as peak

CPU = torch.device("cpu")
GB = 1 << 30


def test_files_that_were_read_leave_a_container_its_room(monkeypatch, tmp_path):
    monkeypatch.setattr(peak, "CGROUP", tmp_path)
    assert peak.cgroup_free_bytes() == sys.maxsize
    (tmp_path / "memory.max").write_text(f"{16 * GB}\n")
    (tmp_path / "memory.current").write_text(f"{13 * GB}\n")
    assert peak.cgroup_free_bytes() == 3 * GB
    stat = f"anon {GB}\nfile {12 * GB}\ninactive_file {11 * GB}\nactive_file {GB}\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert peak.cgroup_free_bytes() == 14 * GB
    (tmp_path / "memory.max").write_text("max\n")
    assert peak.cgroup_free_bytes() == sys.maxsize


@pytest.fixture
def no_files(monkeypatch):
    """A system that has nothing under /proc."""
    monkeypatch.setattr(peak, "lines", lambda path: [])


def test_what_a_process_held_is_asked_of_the_system_where_there_are_no_files(no_files):
    pytest.importorskip("resource")  # Windows has none
    assert peak.PeakMemory(CPU).bytes() > 1 << 20


def test_windows_tells_neither_what_was_held_nor_what_is_free(no_files, monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.delattr(os, "sysconf", raising=False)
    assert peak.PeakMemory(CPU).bytes() == peak.process_bytes(CPU) == 0
    assert peak.free_bytes(CPU) == peak.ASSUMED_FREE
