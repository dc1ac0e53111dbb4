"""Training on two nodes: two network namespaces of this machine, joined by a virtual cable."""

import ctypes
import json
import os
import shutil
import subprocess
from contextlib import contextmanager

import pytest

import headstock
from headstock.train.run_folder import RunFolder
from tests.commands import set_options
from tests.conftest import TINY
from tests.train.processes import BackgroundProcess, run_torchrun

NODES = {"hs-node-0": "10.231.7.1", "hs-node-1": "10.231.7.2"}
CABLE = ("hs-veth-0", "hs-veth-1")
SETTINGS = TINY | {"steps": 6, "batch": 4, "log_every": 1, "validate_every": 3, "parallel": "fsdp"}


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


@contextmanager
def two_nodes():
    try:
        for name in NODES:
            ip("netns", "add", name)
        ip("link", "add", CABLE[0], "type", "veth", "peer", "name", CABLE[1])
        for (name, address), end in zip(NODES.items(), CABLE, strict=True):
            ip("link", "set", end, "netns", name)
            for command in (["addr", "add", f"{address}/24", "dev", end], ["link", "set", end, "up"]):
                ip("-n", name, *command)
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in NODES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)


def can_create_namespaces():
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    try:
        with two_nodes():
            return True
    except subprocess.CalledProcessError:
        return False


def run_node(name, interface, options, command):
    """torchrun in a network namespace."""
    with open(f"/run/netns/{name}") as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    run_torchrun(options, command)


def test_two_nodes_learn_what_one_process_does(corpus, tmp_path):
    if not can_create_namespaces():  # not when tests are collected, which parallel workers do at the same time
        pytest.skip("needs root and network namespaces (ip netns)")
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-id=two-nodes", "--monitor-interval=0.1"]
    options += ["--rdzv-backend=c10d", f"--rdzv-endpoint={NODES['hs-node-0']}:29431"]
    command = ["pretrain", str(corpus), "--out", str(tmp_path / "two"), "--device", "cpu", *set_options(SETTINGS)]
    with two_nodes():
        nodes = []
        for (name, address), interface in zip(NODES.items(), CABLE, strict=True):
            # the nodes share one host name, so each is told its address, and the first that it hosts the rendezvous
            own = [*options, f"--local-addr={address}", f"--rdzv-conf=is_host={name == 'hs-node-0'}"]
            nodes.append(BackgroundProcess(tmp_path / name, run_node, name, interface, own, [*command, "--json"]))
        try:
            assert [node.wait(180) for node in nodes] == [0, 0], nodes[0].stderr[-3000:]
        finally:
            for node in nodes:
                node.kill()
    (results,) = [json.loads(node.stdout) for node in nodes if node.stdout]  # only rank 0 prints
    assert results["processes"] == 2
    headstock.pretrain(corpus, out=tmp_path / "one", settings=SETTINGS, device="cpu")
    rows = {name: RunFolder(tmp_path / name).read_metrics() for name in ("one", "two")}
    losses = [[row["loss"] for row in metrics if "loss" in row] for metrics in rows.values()]
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
