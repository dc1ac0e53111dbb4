"""Training on two nodes: two network namespaces of this machine, joined by a virtual cable."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest

import headstock
from headstock.train.run_folder import RunFolder
from tests.commands import set_options
from tests.conftest import TINY

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


def test_two_nodes_learn_what_one_process_does(corpus, tmp_path):
    if not can_create_namespaces():  # not when tests are collected, which parallel workers do at the same time
        pytest.skip("needs root and network namespaces (ip netns)")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={NODES['hs-node-0']}:29431", "--rdzv-id=two-nodes"]
    command = [
        "-m",
        "headstock",
        "pretrain",
        str(corpus),
        "--out",
        str(tmp_path / "two"),
        "--device",
        "cpu",
        *set_options(SETTINGS),
    ]
    with two_nodes():
        processes = []
        for (name, address), end in zip(NODES.items(), CABLE, strict=True):
            # the nodes share one host name, so each is told its address, and the first that it hosts the rendezvous
            own = [f"--local-addr={address}", f"--rdzv-conf=is_host={name == 'hs-node-0'}"]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": end, "OMP_NUM_THREADS": "1"}
            node = ["ip", "netns", "exec", name, *torchrun, *own, *command, "--json"]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen(node, env=environment, **pipes))
        try:
            outputs = [process.communicate(timeout=180) for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs[0][1][-3000:]
    (results,) = [json.loads(stdout) for stdout, _ in outputs if stdout]  # only rank 0 prints
    assert results["processes"] == 2
    headstock.pretrain(corpus, out=tmp_path / "one", settings=SETTINGS, device="cpu")
    rows = {name: RunFolder(tmp_path / name).read_metrics() for name in ("one", "two")}
    losses = [[row["loss"] for row in metrics if "loss" in row] for metrics in rows.values()]
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
