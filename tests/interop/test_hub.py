"""Models of the Hugging Face Hub by name: the real client against a local server that speaks the Hub's protocol."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headstock.errors import UserError, WorkError
from headstock.inference.pipeline import load
from headstock.interop import export_run, import_run
from headstock.train.finetune import finetune
from headstock.train.run_folder import open_run
from headstock.train.tensors import read_tensors, write_tensors
from tests.commands import REVIEWS, write_rows
from tests.interop import hub_server
from tests.interop.hub_server import TOKEN, publish
from tests.interop.small import small_run

constants = pytest.importorskip("huggingface_hub.constants")
yaml = pytest.importorskip("yaml")  # which huggingface_hub requires

GPT = {"norm": "pre", "positions": "learned"}


class Hub:
    """A server process with a repository acme/tiny."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.start()
        self.run = small_run(folder / "run", GPT, {"name": "causal"})
        export_run(self.run, folder / "exported")
        self.files = {file.name: file.read_bytes() for file in (folder / "exported").iterdir()}
        card = b"---\nlicense: mit\n---\n" + self.files["README.md"].partition(b"\n---\n")[2]
        others = {"onnx/config.json": b"{}", "onnx/model.onnx": b"x", "tf_model.h5": b"x", "pytorch_model.bin": b"x"}
        self.commit = publish(folder, "acme/tiny", self.files | others | {"README.md": card})

    def start(self) -> None:
        command = [sys.executable, hub_server.__file__, str(self.folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{self.process.stdout.readline().strip()}"

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate()

    def requests(self) -> list[dict]:
        log = self.folder / "requests.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    hub = Hub(tmp_path_factory.mktemp("hub"))
    yield hub
    hub.stop()


@pytest.fixture
def hub(server, monkeypatch, tmp_path):
    """The server, as the client's endpoint, with an empty cache and no token."""
    use(server.url, tmp_path / "hf", monkeypatch)
    monkeypatch.setenv("HEADSTOCK_CACHE", str(tmp_path / "cache"))
    (server.folder / "requests.jsonl").unlink(missing_ok=True)
    return server


def use(endpoint, home, monkeypatch, *, offline=False):
    """What HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE and HF_HUB_DISABLE_XET set; the client reads them when imported."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)


def same_weights(first, second):
    ours, theirs = first.weights(), second.weights()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_model_is_imported_by_name(hub, tmp_path):
    run = import_run("hf://acme/tiny", out=tmp_path / "run")
    assert same_weights(run, hub.run)
    downloaded = {record["path"].rpartition("/")[2] for record in hub.requests() if record["method"] == "GET"}
    assert {"config.json", "tokenizer.json"} < downloaded
    assert not downloaded & {"pytorch_model.bin", "tf_model.h5", "model.onnx", "generation_config.json"}
    agents = [record["agent"] for record in hub.requests() if "/resolve/" in record["path"]]
    assert all(agent.startswith("headstock/") for agent in agents)
    origin = run.data()["hub"]
    assert origin == {
        "repo": "acme/tiny", "revision": "main", "commit": hub.commit, "endpoint": hub.url, "license": "mit"
    }  # fmt: skip
    assert run.data()["imported"] == f"hf://acme/tiny@{hub.commit}"
    assert "| licence | mit |" in run.model_card.read_text()


def test_an_interrupted_download_is_resumed(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    (hub.folder / "cut").write_text("5000")
    assert same_weights(import_run("hf://acme/tiny", out=tmp_path / "run"), hub.run)
    ranges = [record["range"] for record in hub.requests() if record["path"].startswith("/cdn/")]
    assert ranges == [None, "bytes=4096-"]  # the whole chunks that had arrived are not sent again


def test_a_name_works_as_a_run_and_without_network_the_second_time(hub, tmp_path, monkeypatch, call):
    rows = write_rows(tmp_path / "rows.csv", REVIEWS)
    settings = {"steps": 1, "batch": 4, "length": 16}
    finetune("hf://acme/tiny", train=rows, valid=rows, out=tmp_path / "tuned", settings=settings, device="cpu")
    tuned = open_run(tmp_path / "tuned")
    assert tuned.config()["transfer"]["run"] == f"hf://acme/tiny@{hub.commit}"  # pinned
    used = open_run("hf://acme/tiny")
    assert str(used) == f"hf://acme/tiny@{hub.commit}" and used.title == "tiny"
    use("http://127.0.0.1:9", tmp_path / "hf", monkeypatch, offline=True)
    assert same_weights(open_run("hf://acme/tiny"), hub.run)  # the branch as last seen
    use("http://127.0.0.1:9", tmp_path / "hf", monkeypatch)  # not set offline, but nothing answers
    assert same_weights(open_run("hf://acme/tiny"), hub.run)
    monkeypatch.setenv("HEADSTOCK_CACHE", str(tmp_path / "another cache"))  # imports again, from the client's cache
    out, err = call("generate", "hf://acme/tiny", "ab", "--max-tokens", 2, "--json", "-q")
    assert json.loads(out.splitlines()[-1])["texts"] and not err


def test_a_revision_is_kept_when_the_branch_moves(hub, tmp_path):
    first = publish(hub.folder, "acme/moving", hub.files)
    assert str(open_run("hf://acme/moving")) == f"hf://acme/moving@{first}"
    tensors = read_tensors(hub.folder / "exported" / "model.safetensors")
    write_tensors(tmp_path / "new", {name: tensor + 1 for name, tensor in tensors.items()}, metadata={"format": "pt"})
    second = publish(hub.folder, "acme/moving", hub.files | {"model.safetensors": (tmp_path / "new").read_bytes()})
    assert str(open_run("hf://acme/moving")) == f"hf://acme/moving@{second}"
    assert same_weights(open_run(f"hf://acme/moving@{first}"), hub.run)
    assert not same_weights(open_run("hf://acme/moving@main"), hub.run)


def test_sharded_and_pickled_weights(hub, tmp_path):
    tensors = read_tensors(hub.folder / "exported" / "model.safetensors")
    small = {name: data for name, data in hub.files.items() if name != "model.safetensors"}
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    files = {}
    for shard, part in shards.items():
        write_tensors(tmp_path / shard, {name: tensors[name] for name in part}, metadata={"format": "pt"})
        files[shard] = (tmp_path / shard).read_bytes()
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    publish(hub.folder, "acme/sharded", small | files | {"model.safetensors.index.json": json.dumps(index).encode()})
    assert same_weights(open_run("hf://acme/sharded"), hub.run)
    torch.save(tensors, tmp_path / "weights")
    publish(hub.folder, "acme/pickled", small | {"pytorch_model.bin": (tmp_path / "weights").read_bytes()})
    assert same_weights(open_run("hf://acme/pickled"), hub.run)
    torch.save({"weight": Path("code")}, tmp_path / "code")
    publish(hub.folder, "acme/code", small | {"pytorch_model.bin": (tmp_path / "code").read_bytes()})
    with pytest.raises(UserError, match="contains more than tensors"):
        open_run("hf://acme/code")


def test_mistakes_are_one_line(hub, tmp_path, monkeypatch):
    config = hub.files["config.json"]
    publish(hub.folder, "acme/private", hub.files, access="private")
    publish(hub.folder, "acme/gated", hub.files, access="gated")
    publish(hub.folder, "acme/bare", {"config.json": config})
    publish(hub.folder, "acme/mamba", {"config.json": b'{"model_type": "mamba"}', "model.safetensors": b"x"})
    publish(hub.folder, "acme/empty", {"README.md": b"nothing"})
    expected = {
        "hf://acme/nothing": "no such model at",
        "hf://acme/private": "no such model at .* HF_TOKEN",
        "hf://acme/gated": "is gated; request access",
        "hf://acme/tiny@v9": "no such revision",
        "hf://acme/bare": "has no model.safetensors",
        "hf://acme/mamba": "unsupported model_type 'mamba'",
        "hf://acme/empty": "no config.json",
        "hf://acme/a/b": "expected hf://ORG/NAME",
        "hf://": "expected hf://ORG/NAME",
        "hf://acme/-tiny": "not a valid name",
    }
    for name, message in expected.items():
        with pytest.raises(UserError, match=message) as caught:
            open_run(name)
        assert "\n" not in str(caught.value) and name in str(caught.value)
    assert not any(record["path"].startswith("/cdn/") for record in hub.requests())  # no weights of refused models
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert same_weights(open_run("hf://acme/gated"), hub.run) and same_weights(open_run("hf://acme/private"), hub.run)
    cdn = [record for record in hub.requests() if record["path"].startswith("/cdn/")]
    assert not any(record["authorized"] for record in cdn)  # the token goes to the Hub alone
    use("http://127.0.0.1:9", tmp_path / "empty", monkeypatch)
    with pytest.raises(WorkError, match="cannot reach http"):
        open_run("hf://acme/tiny")
    use(hub.url, tmp_path / "empty", monkeypatch, offline=True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        open_run("hf://acme/tiny")


def test_a_push_is_listed_and_then_made(hub, tmp_path, monkeypatch, call):
    with pytest.raises(UserError, match=r"refused access \(401\).*HF_TOKEN"):
        export_run(hub.run, push="me/model")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (hub.folder / "requests.jsonl").unlink()
    out, _ = call("export", hub.run.path, "--push", "me/model", "--dry-run", "--json")
    listed = json.loads(out.splitlines()[-1])["push"]
    sizes = {file["path"]: file["bytes"] for file in listed["files"]}
    assert sizes["model.safetensors"] > 10_000 and listed["dry_run"] and not hub.requests()
    out, _ = call("export", hub.run.path, "--push", "hf://me/model", "--private")
    assert f"uploaded to {hub.url}/me/model" in out and "would" not in out
    assert json.loads((hub.folder / "repos/me/model/created.json").read_text())["visibility"] == "private"
    assert same_weights(open_run("hf://me/model"), hub.run)
    card = (open_snapshot(hub, "me/model") / "README.md").read_text()
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert metadata["library_name"] == "transformers" and metadata["pipeline_tag"] == "text-generation"
    assert 'from_pretrained("me/model")' in card and "headstock import hf://me/model" in card
    assert sizes.keys() == {file.name for file in open_snapshot(hub, "me/model").iterdir()}
    for options, message in (
        (["--dry-run", tmp_path / "a"], "--dry-run: requires --push"),
        (["--push", "me", tmp_path / "a"], "expected ORG/NAME"),
        (["--push", "me/model", "--to", "onnx"], "requires --to huggingface"),
        ([], "expected a folder"),
    ):
        _, err = call("export", hub.run.path, *options, code=2)
        assert message in err and err.count("\n") == 1


def open_snapshot(hub, repo):
    refs = json.loads((hub.folder / "repos" / repo / "refs.json").read_text())
    return hub.folder / "repos" / repo / refs["main"]


def test_the_card_names_the_base_model_and_the_results(hub, tmp_path, monkeypatch):
    rows = write_rows(tmp_path / "rows.csv", REVIEWS)
    settings = {"steps": 1, "batch": 4, "length": 16, "pool": "last", "head_bias": False}
    files = {"train": rows, "valid": rows, "test": rows}
    finetune("hf://acme/tiny", **files, out=tmp_path / "tuned", settings=settings, device="cpu")
    export_run(tmp_path / "tuned", tmp_path / "exported")
    metadata = yaml.safe_load((tmp_path / "exported" / "README.md").read_text().split("---\n")[1])
    assert metadata["base_model"] == "acme/tiny" and metadata["license"] == "mit"
    (result,) = metadata["model-index"][0]["results"]
    scores = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert scores["accuracy"] == load(tmp_path / "tuned").run.results()["test"]["accuracy"]
