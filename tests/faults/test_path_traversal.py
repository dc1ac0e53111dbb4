"""Names in archives, indexes, manifests and results never lead to a read or a write outside their folder."""

import gzip
import io
import json
import os
import shutil
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from headstock.cli.command import Common
from headstock.cli.experiments import report
from headstock.data.downloads import read_archive
from headstock.data.minimal_pairs import read_minimal_pairs
from headstock.data.token_shards import verify_store
from headstock.errors import HeadstockError
from headstock.inference.pipeline import load
from headstock.interop import import_run
from headstock.train.run_folder import RunFolder
from headstock.train.tensors import find_damage
from tests.faults.targets import GPT, RUNS, write_huggingface

PAIR = b'{"sentence_good": "Anne sees.", "sentence_bad": "Anne see."}\n'
LINKS = {"symbolic": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "device": tarfile.CHRTYPE, "fifo": tarfile.FIFOTYPE}


class Outside:
    """A folder with files that nothing may read or write; reads show in the access time, also those of native code."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        self.add("secret.txt", b"secret")
        self.add("secret.jsonl", PAIR)

    def add(self, name: str, data: bytes) -> Path:
        (self.folder / name).write_bytes(data)
        return self.folder / name

    def arm(self) -> None:
        now = time.time()
        for file in self.folder.iterdir():
            os.utime(file, (now - 9 * 24 * 3600, now))  # a read after a change updates the access time everywhere
        self.before = {file.name: file.stat() for file in self.folder.iterdir()}

    def touched(self) -> list[str]:
        """Files that were read, changed, added or removed."""
        now = {file.name: file.stat() for file in self.folder.iterdir()}
        both = now.keys() & self.before.keys()
        changed = [name for name in both if times(now[name]) != times(self.before[name])]
        return sorted(changed + list(now.keys() ^ self.before.keys()))


def times(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_atime_ns, stat.st_mtime_ns


def names_of(target: Path, inside: Path) -> list[str]:
    """Ways to name a file outside of a folder."""
    relative = os.path.relpath(target, inside)
    return [relative, str(target), f"./{relative}", f"x/../{relative}", f"{inside.name}/../{relative}", f"~/{relative}"]


# Cases: each makes inputs that name a file outside, and returns the calls that read them


def weight_index(home: Path, outside: Outside) -> list[Callable[[], object]]:
    calls: list[Callable[[], object]] = []
    for weights in ("model.safetensors", "pytorch_model.bin"):
        folder = home / weights
        write_huggingface(home / f"{weights}-run", folder, GPT, {"name": "causal"})
        secret = outside.add("weights.safetensors", (folder / "model.safetensors").read_bytes())
        (folder / "model.safetensors").unlink()

        def read(folder: Path = folder, weights: str = weights, name: str = "") -> None:
            (folder / f"{weights}.index.json").write_text(json.dumps({"weight_map": {"wte.weight": name}}))
            import_run(folder, out=home / "imported")

        calls += [lambda name=name, read=read: read(name=name) for name in names_of(secret, folder)]
    return calls


def hub_index(home: Path, outside: Outside) -> list[Callable[[], object]]:
    pytest.importorskip("huggingface_hub")
    from headstock.interop.hub import parse_hub_name, sharded_files

    def read(name: str) -> None:
        (home / "index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        sharded_files(home / "index.json")

    calls: list[Callable[[], object]] = [lambda name=name: read(name) for name in names_of(outside.folder, home)]
    hub_names = ("hf://../x", "hf://a/../../x", "hf://a/b@../../../x", "hf://a/..@main")
    return calls + [lambda name=name: parse_hub_name(name) for name in hub_names]


def manifests(home: Path, outside: Outside) -> list[Callable[[], object]]:
    checkpoint, store = home / "step-4", home / "store"
    secret, calls = outside.folder / "secret.txt", []
    for folder in (checkpoint, store):
        folder.mkdir()

    def verify_checkpoint(name: str) -> None:
        (checkpoint / "manifest.json").write_text(json.dumps({name: {"bytes": 6, "sha256": "0" * 64}}))
        assert find_damage(checkpoint)

    def verify(name: str) -> None:
        index = {"format": 1, "files": {name: {"bytes": 6, "sha256": "0" * 64}}}
        (store / "index.json").write_text(json.dumps(index))
        verify_store(store)

    for name in names_of(secret, checkpoint):
        calls += [lambda name=name: verify_checkpoint(name), lambda name=name: verify(name)]
    run = home / "run"
    shutil.copytree(RUNS / "causal", run)

    def load_run(name: str) -> None:
        entries = json.loads((RUNS / "causal" / "manifest.json").read_text())
        (run / "manifest.json").write_text(json.dumps(entries | {name: {"bytes": 6, "sha256": "0" * 64}}))
        load(run, device="cpu")

    return calls + [lambda name=name: load_run(name) for name in names_of(secret, run)]


def tars(home: Path, outside: Outside) -> list[Callable[[], object]]:
    calls: list[Callable[[], object]] = []
    for number, name in enumerate(names_of(outside.folder / "evil.jsonl", home)):
        path = home / f"{number}.tar.gz"
        write_tar(path, [(name, PAIR, None, "")])
        calls += [lambda path=path: read_minimal_pairs([path]), lambda path=path: read_package(path)]
    for kind, type_ in LINKS.items():
        path = home / f"{kind}.tar.gz"
        write_tar(path, [("pairs/a.jsonl", b"", type_, str(outside.folder / "secret.jsonl"))])
        calls += [lambda path=path: read_minimal_pairs([path]), lambda path=path: read_package(path)]
    return calls


def write_tar(path: Path, members: list[tuple[str, bytes, bytes | None, str]]) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, data, type_, target in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            if type_ is not None:
                member.type, member.linkname, member.devmajor, member.devminor = type_, target, 1, 5
            tar.addfile(member, io.BytesIO(data))
    path.write_bytes(gzip.compress(stream.getvalue()))


def read_package(path: Path) -> None:
    """Every member whose name matches, as the catalog reads a package; the keys become names of files."""
    files = read_archive(path, {"*.jsonl": ""})
    assert all(Path(name).name == name and name not in (".", "..") for name in files)
    assert b"secret" not in b"".join(files.values())


def zips(home: Path, outside: Outside) -> list[Callable[[], object]]:
    calls: list[Callable[[], object]] = []
    for number, name in enumerate([*names_of(outside.folder / "evil.jsonl", home), "link.jsonl"]):
        path, member = home / f"{number}.whl", zipfile.ZipInfo(name)
        if name == "link.jsonl":
            member.external_attr = 0o120777 << 16  # a symbolic link
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(member, str(outside.folder / "secret.txt") if name == "link.jsonl" else PAIR)
        calls.append(lambda path=path: read_archive(path, {"*.jsonl": ""}))
    return calls


def reports(home: Path, outside: Outside) -> list[Callable[[], object]]:
    """Metrics and arms name the charts that are saved as files."""
    calls: list[Callable[[], object]] = []
    for number, name in enumerate(names_of(outside.folder / "evil", home / "0" / "figures")[:2]):
        folder = home / str(number)
        folder.mkdir()
        results = (RUNS / "compare" / "results.json").read_text(encoding="utf-8")
        for word in ("accuracy", "scratch", "pretrained"):
            results = results.replace(json.dumps(word), json.dumps(f"{name}-{word}"))
        tree = json.loads(results)
        tree.pop("details", None)
        tree["cells"] = [cell | {"epochs": []} for cell in tree["cells"]]
        (folder / "results.json").write_text(json.dumps(tree), encoding="utf-8")
        calls.append(lambda folder=folder: report(Common(quiet=True, prints=False), folder, samples=0))
    return calls


def linked_runs(home: Path, outside: Outside) -> list[Callable[[], object]]:
    """Folders that are links are not followed when a run is removed."""
    run = home / "run"
    shutil.copytree(RUNS / "causal", run, ignore=shutil.ignore_patterns("checkpoints"))
    (run / "checkpoints").symlink_to(outside.folder, target_is_directory=True)
    (run / "members").symlink_to(outside.folder.parent, target_is_directory=True)
    return [RunFolder(run).remove_checkpoints, RunFolder(run).remove]


CASES = (weight_index, hub_index, manifests, tars, zips, reports, linked_runs)


def test_fault_24_nothing_outside_is_read_or_written(tmp_path, record):
    outside, tried, refused = Outside(tmp_path / "outside"), 0, 0
    for case in CASES:
        home = tmp_path / case.__name__
        home.mkdir()
        for call in case(home, outside):
            outside.arm()
            others = {path for path in tmp_path.rglob("*") if home not in path.parents}
            try:
                call()
            except HeadstockError:
                refused += 1
            assert outside.touched() == [], case.__name__
            assert {path for path in tmp_path.rglob("*") if home not in path.parents} == others, case.__name__
            tried += 1
    what = "names of files outside in indexes, manifests, archives, results and links"
    record(24, what, names=tried, refused=refused, read_outside=0, written_outside=0)


def test_fault_24_reads_and_writes_would_be_noticed(tmp_path):
    outside = Outside(tmp_path / "outside")
    outside.arm()
    (outside.folder / "secret.txt").read_bytes()
    if outside.touched() != ["secret.txt"]:
        pytest.skip("this file system does not record accesses")
    outside.arm()
    write_tar(tmp_path / "evil.tar.gz", [("../outside/evil.jsonl", PAIR, None, "")])
    (tmp_path / "inside").mkdir()
    with tarfile.open(tmp_path / "evil.tar.gz") as tar:
        tar.extractall(tmp_path / "inside", filter="fully_trusted")
    assert outside.touched() == ["evil.jsonl"]
