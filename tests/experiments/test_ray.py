"""Trials on a real Ray cluster of two nodes: the same files as locally, also when a worker or a node is killed."""

import gzip
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

from headstock import ray_cluster
from headstock.data import document_split
from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.errors import UserError, WorkError
from headstock.experiments.bench.runner import bench
from headstock.experiments.compare import compare
from headstock.experiments.ray_trials import place_trials
from headstock.experiments.sweep import sweep
from headstock.io import sha256
from headstock.logs import messages_to
from headstock.ray_cluster import import_ray, parse_address, probe_nodes, run_tasks
from tests.commands import command, set_options
from tests.experiments.small import SETTINGS, without_timings, write_rows
from tests.experiments.test_sweep import BASE
from tests.ray_nodes import RayNodes, can_hide, wait_until
from tests.train.processes import start_command

ARMS = {"arms": ["scratch", "frozen", "tfidf"], "labels": [8], "seeds": 2, "settings": SETTINGS, "leakage": "skip"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes with one CPU each. The second does not see the folders of tests: no disk is shared."""
    cluster = RayNodes(hidden=tmp_path_factory.getbasetemp())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        ray = import_ray()  # reads the environment when it is imported
        try:
            cluster.add_node()
            # one connection for all tests: workers start, and import torch, once
            ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
            yield cluster
        finally:
            ray.shutdown()
            cluster.stop()


@pytest.fixture
def nodes(cluster):
    """The cluster with both nodes, also after a test that kills one."""
    if len(cluster.nodes) == 1:
        cluster.add_node()
    wait_until(lambda: len(ray_cluster.alive_nodes()) == 2, "both nodes have joined")
    return cluster


@pytest.fixture
def shared():
    """A folder that every node sees."""
    folder = Path(tempfile.mkdtemp(prefix="hs-shared-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def local(stock, files, tmp_path_factory):
    """A comparison in this process."""
    out = tmp_path_factory.mktemp("local") / "out"
    return compare(stock, **files, out=out, **ARMS), out


def read(folder: Path, pattern: str) -> dict:
    """JSON files without timings, which name no folder but that of the experiment."""
    texts = {path.relative_to(folder): path.read_text() for path in folder.glob(pattern)}
    return {name: without_timings(json.loads(text.replace(str(folder), "OUT"))) for name, text in texts.items()}


def assert_same_files(out: Path, local: Path):
    assert read(out, "cells/*.json") == read(local, "cells/*.json")
    assert read(out, "cells/*.json")
    configs = read(local, "runs/*/config.json")
    assert configs and read(out, "runs/*/config.json") == configs
    for run in (local / "runs").iterdir():
        assert (out / "runs" / run.name / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
        assert {path.name for path in run.iterdir()} == {path.name for path in (out / "runs" / run.name).iterdir()}


def kill_a_task(nodes, node, task="run_on_worker"):
    """Start a thread that kills the first worker of a node that runs a task."""

    def wait_and_kill():
        os.kill(wait_until(lambda: nodes.workers(node, task), "a task runs")[0], signal.SIGKILL)

    thread = threading.Thread(target=wait_and_kill)
    thread.start()
    return thread


def test_a_task_that_is_lost_too_often_fails(nodes, monkeypatch):
    monkeypatch.setattr(ray_cluster, "ATTEMPTS", 1)

    def slow():
        import time

        time.sleep(60)

    killer = kill_a_task(nodes, nodes.nodes[0], "slow")
    with pytest.raises(WorkError, match="lost 1 times"):
        list(run_tasks(slow, [()], names=["slow"], cpus=1))
    killer.join()


def test_a_comparison_is_the_same_although_a_worker_is_killed(nodes, stock, files, local, tmp_path):
    messages = []
    killer = kill_a_task(nodes, nodes.nodes[1])
    with messages_to(messages.append):
        results = compare(stock, **files, out=tmp_path / "out", on="ray", **ARMS)
    killer.join()
    assert_same_files(tmp_path / "out", local[1])
    assert without_timings(results["summary"]) == without_timings(local[0]["summary"])
    assert any("2 nodes, 2 trials side by side" in line for line in messages)
    assert sum("lost (its worker died); running it again" in line for line in messages) == 1
    messages.clear()
    with messages_to(messages.append):  # all results are found, and nothing runs
        compare(stock, **files, out=tmp_path / "out", on="ray", **ARMS)
    assert sum("(cached)" in line for line in messages) == 6


def test_an_error_of_a_trial_is_raised_as_it_is(nodes):
    def fail():
        from headstock.errors import UserError

        raise UserError("rows.csv:3: bad")

    with pytest.raises(UserError) as error:
        list(run_tasks(fail, [(), ()], names=["a", "b"]))
    assert str(error.value) == "rows.csv:3: bad" and type(error.value) is UserError


def test_sweeps_are_the_same(nodes, corpus, stock, files, shared, tmp_path):
    text = shutil.copy(corpus, shared / "text.txt")
    search = {"grid": {"lr": "1e-3..1e-2"}, "method": "asha", "sample": 3, "reduction": 2, "seeds": 1, "settings": BASE}
    sweep(text, out=tmp_path / "pretrain", **search)
    sweep(text, out=shared / "pretrain", on="ray", **search)
    grid = {"grid": {"lr": [1e-3, 1e-2]}, "seeds": 1, "settings": SETTINGS}
    grid |= {"run": stock, "train": files["train"], "valid": files["valid"]}
    sweep(out=tmp_path / "local", **grid)
    sweep(out=tmp_path / "remote", on="ray", **grid)  # which needs no shared folder
    assert_same_files(tmp_path / "remote", tmp_path / "local")
    cells = read(shared / "pretrain", "cells/*.json")
    assert cells == read(tmp_path / "pretrain", "cells/*.json") and len(cells) == 3
    assert len(list((shared / "pretrain" / "runs").iterdir())) == 1  # only the best is kept


@pytest.mark.skipif(not can_hide(), reason="needs a mount namespace")
def test_text_that_a_node_does_not_see_is_refused(nodes, corpus, tmp_path):
    with pytest.raises(UserError, match=r"does not see .*stories\.txt; trials that pretrain need"):
        sweep(corpus, out=tmp_path / "out", grid={"lr": [1e-3, 1e-2]}, seeds=1, settings=BASE, on="ray")
    assert not list((tmp_path / "out").glob(".*"))
    assert [unseen for _, unseen in probe_nodes([Path(__file__)])] == [[], []]  # which both see


@pytest.fixture
def text(corpus, tmp_path):
    """Documents in files of several formats, with copies within and across files, and one file without any."""
    texts = corpus.read_text(encoding="utf-8").split("\n\n")
    (tmp_path / "a.txt").write_text("\n\n".join(texts[:120] + texts[:3]), encoding="utf-8")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts[100:200])
    (tmp_path / "c.txt").write_text("\n \n", encoding="utf-8")
    write_rows(tmp_path / "d.csv", [(text,) for text in [*texts[200:], "ø unknown ж", texts[0]]], ("text",))
    return [tmp_path / name for name in ("a.txt", "b.jsonl.gz", "c.txt", "d.csv")]


def store_files(stores) -> dict:
    """The hash of every file of a store; of its index without the build time and the digest that covers it."""
    index = json.loads((stores.folder / "index.json").read_text())
    index.pop("digest")
    for name in ("seconds", "megabytes_per_second"):
        index["summary"].pop(name)
    return {path.name: sha256(path) for path in stores.folder.glob("*.bin")} | {"index": index}


def test_a_token_store_has_the_same_bytes(nodes, text, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(document_split, "BATCH_CHARACTERS", 2000)  # several batches of each file
    tokenizer = train_tokenizer(read_corpus(corpus).first_texts(100), TokenizerSettings(kind="word", vocabulary=90))
    docs, options = read_corpus(text, documents="block"), {"shard_tokens": 500, "valid_fraction": 0.1}
    local = build_split_stores(docs, tokenizer, cache=tmp_path / "local", **options)
    remote = build_split_stores(docs, tokenizer, cache=tmp_path / "remote", on="ray", **options)
    files = store_files(local)
    assert store_files(remote) == files and sum(name.startswith("train-0") for name in files) > 3
    assert files["index"]["summary"]["duplicates"] == 24 and files["index"]["valid"]["unknown"]["tokens"]
    # a control: in another order of the files, the same documents are another store
    swapped = build_split_stores(read_corpus(text[::-1], documents="block"), tokenizer, cache=tmp_path / "c", **options)
    assert store_files(swapped) != files


def test_an_error_in_the_text_names_its_line(nodes, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": 2\n')
    tokenizer = train_tokenizer(["one two"], TokenizerSettings(kind="char"))
    with pytest.raises(UserError, match=r"a\.jsonl:2"):
        build_split_stores(read_corpus(tmp_path / "a.jsonl"), tokenizer, cache=tmp_path / "cache", on="ray")


def test_bench_on_the_nodes(nodes, tmp_path):
    results = bench(quick=True, only=["start"], on="ray", out=tmp_path / "bench.json")
    (row,) = results["results"]
    assert row["work"] == "headstock --help" and row["value"] > 0 and row["node"]


def test_ctrl_c_cancels_the_trials(nodes, stock, files, tmp_path):
    settings = {**SETTINGS, "epochs": 100_000}
    options = [f"--{name}={path}" for name, path in files.items()] + set_options(settings)
    options += ["--arms=tfidf,scratch", "--labels=8", "--seeds=1", "--leakage=skip", f"--out={tmp_path / 'out'}"]
    process = start_command(tmp_path / "command", "compare", stock, *options, f"--on=ray:{nodes.address}")
    process.wait_until(lambda: "TF-IDF" in process.stderr)
    wait_until(lambda: any(map(nodes.workers, nodes.nodes)), "a trial runs")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, process.stderr
    last = process.stderr.splitlines()[-1]
    assert "1 of 2 trials are saved" in last and "repeat the command" in last
    wait_until(lambda: not any(map(nodes.workers, nodes.nodes)), "the trial is cancelled")
    assert [path.name for path in (tmp_path / "out" / "cells").iterdir()] == ["tfidf-8-0.json"]


# Last of the tests on nodes, so that no other one has to be started
def test_a_killed_node_loses_no_task(nodes, shared):
    second, messages = nodes.nodes[1], []

    def work(number, go):
        import os
        import time

        while not os.path.exists(go):
            time.sleep(0.1)
        return 2 * number

    def kill_node():
        wait_until(lambda: nodes.workers(second, "work"), "a task runs on the second node")
        nodes.kill(second)
        (shared / "go").touch()

    killer = threading.Thread(target=kill_node)
    killer.start()
    with messages_to(messages.append):  # three tasks for two CPUs
        values = dict(run_tasks(work, [(n, str(shared / "go")) for n in range(3)], names=["a", "b", "c"]))
    killer.join()
    assert values == {0: 0, 1: 2, 2: 4}
    assert sum("lost (" in line for line in messages) == 1
    wait_until(lambda: len(ray_cluster.alive_nodes()) == 1, "its death is noticed")


@pytest.mark.parametrize(
    ("on", "address"),
    [("ray", None), ("ray:auto", "auto"), ("ray:head:6379", "head:6379"), ("ray://head:10001", "ray://head:10001")],
)
def test_addresses(on, address):
    assert parse_address(on) == address


@pytest.mark.parametrize("on", ["ray:127.0.0.1:1", "ray://127.0.0.1:1", "ray:no-such-host.invalid:6379"])
def test_an_address_without_a_cluster(on):
    with pytest.raises(WorkError, match="no Ray cluster answers"):
        ray_cluster.check_reachable(on, parse_address(on))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on": "spark"}, "--on spark: must be ray"),
        ({"on": "ray:"}, "--on ray:: must be ray"),
        ({"on": None, "gpus_per_trial": 0.5}, "--gpus-per-trial 0.5: needs --on ray"),
        ({"on": "ray", "gpus_per_trial": 1.5}, "must be a fraction up to 1, or a whole number"),
        ({"on": "ray", "cpus_per_trial": 0}, "must be a whole number above 0"),
        ({"on": "ray", "device": "cpu", "gpus_per_trial": 1}, "contradicts --device cpu"),
    ],
)
def test_invalid_options(options, message):
    with pytest.raises(UserError) as error:
        place_trials(options.pop("on"), options.pop("device", "auto"), **options)
    assert message in str(error.value)


def hide_ray():
    sys.modules["ray"] = None


def test_without_ray(tmp_path):
    code, _, err = command("bench", "--quick", "--on", "ray", "--out", tmp_path / "b.json", patch=hide_ray)
    assert code == 2 and "pip install 'headstock[ray]'" in err and len(err.splitlines()) == 1
