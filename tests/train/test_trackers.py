"""Trackers receive every metric of a run once, also after interruptions and outages, and never stop a run."""

import json
import os
import select
import socket
import socketserver
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from headstock.train import trackers
from headstock.train.finetune import finetune
from headstock.train.pretrain import pretrain
from headstock.train.run_folder import RunFolder
from headstock.train.trackers import flat, numbers
from tests.commands import REVIEWS, write_rows
from tests.servers import free_port, server

os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}


@pytest.fixture
def settings(tiny) -> dict:
    return tiny | {"log_every": 1, "validate_every": 4, "steps": 12}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A run waits until everything is sent, also on a busy machine."""
    monkeypatch.setattr(trackers, "FINAL_SECONDS", 600)
    monkeypatch.setattr(trackers, "STOPPED_SECONDS", 600)


class Stop(Exception):
    """Stops a run from a callback."""


def stop_at(step: int):
    def on_event(event):
        if event.kind == "step" and event.state.step == step:
            raise Stop

    return on_event


def warnings_of(messages: list[str], title: str) -> list[str]:
    return [line for line in messages if title in line and ": run " not in line]


# MLflow


@pytest.fixture(scope="module")
def mlflow_port(tmp_path_factory):
    """MLflow's own server application, in one process, with files as its store: a database takes longer to start."""
    pytest.importorskip("mlflow")
    pytest.importorskip("flask")
    port, folder = free_port(), tmp_path_factory.mktemp("mlflow")
    environment = {"MLFLOW_ALLOW_FILE_STORE": "true", "_MLFLOW_SERVER_FILE_STORE": str(folder)}
    os.environ |= environment
    command = [sys.executable, "-m", "uvicorn", "mlflow.server.fastapi_app:app", "--port", str(port)]
    with server(*command, port=port, seconds=600):
        for name in environment:
            del os.environ[name]
        yield port


class Gate(socketserver.ThreadingTCPServer):
    """Forwards connections to a port while it is open, and drops them while it is closed."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Forwarder)
        self.port, self.is_open, self.dropped = port, True, threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Forwarder(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        gate = self.server
        assert isinstance(gate, Gate)
        with suppress(OSError), socket.create_connection(("127.0.0.1", gate.port)) as target:
            other = {self.request: target, target: self.request}
            while True:
                ready = select.select(list(other), [], [], 0.02)[0]
                if not gate.is_open:
                    gate.dropped.set()
                    return
                for side in ready:
                    if not (data := side.recv(65536)):
                        return
                    other[side].sendall(data)


@pytest.fixture
def gate(mlflow_port, monkeypatch):
    with Gate(mlflow_port) as gate:
        threading.Thread(target=gate.serve_forever, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", gate.url)
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "stories")
        yield gate
        gate.shutdown()


def mlflow_runs(name: str) -> list:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("stories")
    return client.search_runs([experiment.experiment_id], filter_string=f"attributes.run_name = '{name}'")


def check_mlflow(out: Path, run) -> None:
    """The tracked run has the settings, the results and exactly the rows of metrics.jsonl."""
    from mlflow import MlflowClient

    folder, client = RunFolder(out), MlflowClient()
    rows = folder.read_metrics()
    for key in set().union(*rows) - {"step"}:
        expected = {row["step"]: row[key] for row in rows if key in row}
        history = {point.step: point.value for point in client.get_metric_history(run.info.run_id, key)}
        assert history.keys() == expected.keys(), key
        if key not in ("seconds", "tokens_per_second"):  # those of repeated steps are not repeated
            assert history == pytest.approx(expected), key
    assert run.data.params == {key: str(value) for key, value in flat(folder.config()).items()}
    results = numbers(folder.results(), "results/")
    assert {key: value for key, value in run.data.metrics.items() if key.startswith("results/")} == results
    assert results["results/valid_loss"] > 0
    assert run.info.status == "FINISHED"


def test_an_interrupted_run_continues_its_mlflow_run(gate, corpus, tmp_path, settings):
    from mlflow import MlflowClient

    settings |= {"track": "mlflow", "checkpoint_every": 4}
    with pytest.raises(Stop):
        pretrain(corpus, out=tmp_path / "first", settings=settings, callbacks=[stop_at(7)])
    (before,) = mlflow_runs("first")
    assert before.info.status == "FAILED"
    assert before.data.metrics["tokens"] > 0
    pretrain(corpus, out=tmp_path / "first", settings=settings, resume=True)
    (after,) = mlflow_runs("first")
    assert after.info.run_id == before.info.run_id
    check_mlflow(tmp_path / "first", after)
    assert [point.step for point in MlflowClient().get_metric_history(after.info.run_id, "loss")] == list(range(1, 13))
    assert json.loads((tmp_path / "first" / "tracking.json").read_text())["finished"]
    pretrain(corpus, out=tmp_path / "first", settings=settings, overwrite=True)
    assert len(mlflow_runs("first")) == 2


def test_metrics_arrive_after_an_outage(gate, corpus, tmp_path, settings, messages):
    def outage(event):
        if event.kind == "step" and event.state.step == 2:
            while "log" not in trackers.read_state(RunFolder(tmp_path / "outage")).steps:
                time.sleep(0.01)
            gate.is_open = False
        if event.kind == "step" and event.state.step == 8:
            assert gate.dropped.wait(600)
            gate.is_open = True

    pretrain(corpus, out=tmp_path / "outage", settings=settings | {"track": "mlflow"}, callbacks=[outage])
    assert len(warnings_of(messages, "MLflow")) == 1, "once per outage"
    (run,) = mlflow_runs("outage")
    check_mlflow(tmp_path / "outage", run)


def test_a_run_without_its_server_finishes_and_is_sent_later(gate, corpus, tmp_path, settings, messages, monkeypatch):
    pretrain(corpus, out=tmp_path / "untracked", settings=settings)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    pretrain(corpus, out=tmp_path / "alone", settings=settings | {"track": "mlflow"})
    for name in ("model.safetensors", "checkpoints/step-12/model.safetensors"):
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "untracked" / name).read_bytes()
    failed, final = warnings_of(messages, "MLflow")
    assert "training continues" in failed and "--resume" in final
    monkeypatch.setenv("MLFLOW_TRACKING_URI", gate.url)
    pretrain(corpus, out=tmp_path / "alone", settings=settings | {"track": "mlflow"}, resume=True)
    (run,) = mlflow_runs("alone")
    check_mlflow(tmp_path / "alone", run)


# Weights & Biases


@pytest.fixture
def wandb_folder(tmp_path, monkeypatch) -> Path:
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # reads the environment again
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_DIR": tmp_path,
        "WANDB_CONFIG_DIR": tmp_path / "config",
        "WANDB_X_SERVICE_WAIT": 600,  # instead of 30 and 90 seconds, which a process may need on a busy machine
        "WANDB_INIT_TIMEOUT": 600,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb-cache"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return tmp_path / "wandb"


def wandb_records(file: Path) -> list:
    """The records of a .wandb file: a header of 7 bytes, then blocks of 32 KiB in the log format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, records, position, whole = file.read_bytes(), [], 7, b""
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(whole))
            whole = b""
    return records


def wandb_rows(records: list) -> list[dict]:
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            rows.append({key: json.loads(value) for key, value in items.items() if not key.startswith("_")})
    return rows


def test_an_interrupted_ensemble_continues_its_wandb_run(wandb_folder, corpus, tmp_path, settings):
    pretrain(corpus, out=tmp_path / "base", settings=settings)
    rows = write_rows(tmp_path / "rows.csv", REVIEWS)
    options = {"epochs": 4, "batch": 8, "ensemble": 2, "track": "wandb", "tensorboard": False, "log_every": 100}
    with pytest.raises(Stop):
        finetune(tmp_path / "base", train=rows, out=tmp_path / "towns", settings=options, callbacks=[stop_at(8)])
    results = finetune(tmp_path / "base", train=rows, out=tmp_path / "towns", settings=options, resume=True)
    first, second = sorted(wandb_folder.glob("offline-run-*/*.wandb"))
    assert first.name == second.name, "the id of the run"
    before, after = wandb_records(first), wandb_records(second)
    logged = wandb_rows(before) + wandb_rows(after)
    written = []
    for number in range(2):
        for row in RunFolder(tmp_path / "towns").member(number).read_metrics():
            written.append({key if key == "step" else f"members/{number}/{key}": row[key] for key in row})
    assert logged == written
    (opened,) = [record.run for record in after if record.WhichOneof("record_type") == "run"]
    assert opened.display_name == "towns"
    config = {item.key: json.loads(item.value_json) for item in opened.config.update}
    assert config["transfer.ensemble"] == 2 and config["task.name"] == "classify"
    summary = {}
    for record in after:
        if record.WhichOneof("record_type") == "summary":
            summary |= {item.key: json.loads(item.value_json) for item in record.summary.update}
    assert summary["results/valid/accuracy"] == results["valid"]["accuracy"]


def test_without_a_key_wandb_says_so_and_the_run_finishes(
    wandb_folder, corpus, tmp_path, settings, messages, monkeypatch
):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    results = pretrain(corpus, out=tmp_path / "run", settings=settings | {"track": "wandb"})
    assert results["steps"] == 12
    assert any("no API key" in line for line in warnings_of(messages, "Weights & Biases"))


# Every tracker


def test_a_missing_package_is_named_and_the_run_finishes(corpus, tmp_path, settings, messages, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    results = pretrain(corpus, out=tmp_path / "run", settings=settings | {"track": "mlflow"})
    assert results["steps"] == 12
    assert any("pip install 'headstock[mlflow]'" in line for line in messages)
    assert not (tmp_path / "run" / "tracking.json").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"steps": {"log": "x"}}', '{"steps": 3}', '{"unknown": 1}'])
def test_damaged_tracking_state_is_replaced(tmp_path, text, messages):
    (tmp_path / "tracking.json").write_text(text)
    assert trackers.read_state(RunFolder(tmp_path)) == trackers.TrackingState()
    assert any("damaged" in line for line in messages)


def test_names_of_metrics_are_those_that_mlflow_accepts():
    assert trackers.mlflow_name("results/F1 (macro)") == "results/F1 _macro_"
