"""No file that Headstock reads is unpickled with code in it: fifty payloads in place of each file of each load path.

The load paths are the files of `tests/faults/targets.py` (weights, tokenizers, configs, checkpoints, Hugging Face
files, reports, recipes, token stores, labelled data) and those of `more_load_paths`. The last test lists every call in
the package that could run code from a file.
"""

import json
import os
import re
import shutil
import time
import warnings
from pathlib import Path

import pytest

import headstock
from headstock.data.catalog import is_complete, load_catalog
from headstock.data.corpus import read_corpus
from headstock.data.downloads import read_archive
from headstock.data.glue import glue_tasks, read_rows
from headstock.data.winograd import read_schemas
from headstock.errors import HeadstockError
from headstock.experiments.grid import read_json
from headstock.inference.pipeline import load
from headstock.inference.search import MANIFEST, SearchSettings, open_documents, open_index
from headstock.interop import import_run
from headstock.train.checkpoint import newest_valid
from headstock.train.checkpoint_files import read_part
from headstock.train.run_folder import RunFolder
from tests.faults.fuzzing import Target
from tests.faults.harness import amount
from tests.faults.payloads import make_payloads
from tests.faults.targets import GPT, RUNS, make_sentencepiece, write_huggingface


def read_whole_run(folder: Path) -> None:
    run = RunFolder(folder)
    run.manifest()
    run.read_metrics()
    run.calibration()
    if run.adapter_file.is_file():
        run.adapter()
    load(folder, device="cpu")


def read_corpora(folder: Path) -> None:
    for file in sorted(folder.iterdir()):
        try:
            list(read_corpus([str(file)]).chunks())
        except HeadstockError:
            continue  # the others may be accepted


def read_sharded(folder: Path) -> None:
    newest_valid(folder)
    read_part(folder / "step-4", "model")


def read_lab(folder: Path) -> None:
    import_run(folder / "model.pt", out=folder.parent / "run")


def read_bin(folder: Path) -> None:
    shutil.rmtree(folder.parent / "run", ignore_errors=True)
    import_run(folder, out=folder.parent / "run")


def read_caches(folder: Path) -> None:
    entry = load_catalog()["tiny-shakespeare"]
    is_complete(folder, entry)
    read_json(folder / "trial.json")
    read_archive(folder / "archive.whl", {"x": "0" * 64})


def read_other_data(folder: Path) -> None:
    for read in (lambda: read_schemas(folder / "schemas.txt"), lambda: read_schemas(folder / "schemas.xml")):
        try:
            read()
        except HeadstockError:
            continue
    if (folder / "glue.tsv").is_file():
        read_rows(folder / "glue.tsv", glue_tasks()[0])


def more_load_paths(home: Path) -> list[Target]:
    """Readers beside those that are fuzzed."""
    run, corpora, caches, lab = (home / name for name in ("whole-run", "corpora", "caches", "lab"))
    shutil.copytree(RUNS / "classify", run, ignore=shutil.ignore_patterns("manifest.json"))
    names = ("adapter.safetensors", "calibration.json", "manifest.json", "metrics.jsonl", "model.safetensors")
    paths = [Target("files of a run", run, (*names, "tokenizer.json", "source_tokenizer.json"), read_whole_run)]
    for folder in (corpora, caches, lab):
        folder.mkdir()
    endings = ("txt", "jsonl", "csv", "tsv", "parquet", "txt.gz", "txt.bz2", "txt.xz", "jsonl.zst", "parquet.gz")
    paths.append(Target("corpora", corpora, tuple(f"corpus.{ending}" for ending in endings), read_corpora))
    paths.append(Target("caches", caches, ("SOURCE.json", "trial.json", "archive.whl"), read_caches))
    paths.append(Target("other data", caches, ("schemas.txt", "schemas.xml", "glue.tsv"), read_other_data))
    checkpoints = home / "sharded"
    (checkpoints / "step-4").mkdir(parents=True)
    (checkpoints / "step-4" / "manifest.json").write_text("{}")
    shards = ("step-4/.metadata", "step-4/shard-00001-model-00001-of-00001.safetensors", "step-4/progress.json")
    paths.append(Target("sharded checkpoint", checkpoints, shards, read_sharded))
    make_sentencepiece(lab / "sentencepiece.model", lab / "dict.txt")
    paths.append(Target("lab checkpoint", lab, ("model.pt", "dict.txt", "sentencepiece.model"), read_lab))
    whole, parts = home / "bin", home / "bin-parts"
    for folder in (whole, parts):
        write_huggingface(home / f"{folder.name}-source", folder, GPT, {"name": "causal"})
        (folder / "model.safetensors").unlink()
    paths.append(Target("pytorch_model.bin", whole, ("pytorch_model.bin",), read_bin))
    index = {"weight_map": {"wte.weight": "pytorch_model-00001-of-00001.bin"}}
    (parts / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    paths.append(Target("sharded .bin", parts, ("pytorch_model-00001-of-00001.bin",), read_bin))
    return paths


def remove(marker: Path) -> None:
    if marker.is_dir() and not marker.is_symlink():
        marker.rmdir()
    else:
        marker.unlink(missing_ok=True)


def test_fault_21_pickles_run_nothing(targets, tmp_path, record):
    marker = tmp_path / "marker"
    payloads = make_payloads(marker)
    fuzzed = [target for group in targets.values() for target in group]
    paths = [(t, file) for t in [*fuzzed, *more_load_paths(tmp_path)] for file in sorted(set(t.files))]
    tried = refused = 0
    for number, (target, file) in enumerate(paths):
        before = (target.seed / file).read_bytes() if (target.seed / file).is_file() else None
        for turn in range(amount(2, len(payloads))):
            payload = payloads[(2 * number + turn) % len(payloads)]
            (target.seed / file).write_bytes(payload.data)
            try:
                target.read(target.seed)
            except HeadstockError:
                refused += 1
            assert not os.path.lexists(marker), (target.name, file, payload.name)
            tried += 1
        (target.seed / file).unlink() if before is None else (target.seed / file).write_bytes(before)
    assert len(payloads) == 50 and refused > tried / 2
    what = f"{len(payloads)} payloads in place of {len(paths)} files"
    record(21, what, load_paths=len(paths), attempts=tried, refused=refused, payloads_that_ran=0)


def test_fault_21_every_payload_runs_where_it_is_trusted(tmp_path, record):
    marker = tmp_path / "marker"
    payloads = make_payloads(marker)
    for payload in payloads:
        with warnings.catch_warnings(action="ignore"):
            payload.trust(payload.data)
        give_up = time.monotonic() + 30
        while not os.path.lexists(marker) and time.monotonic() < give_up:
            time.sleep(0.001)  # for a process that the payload started
        assert os.path.lexists(marker), payload.name
        remove(marker)
    record(21, "control: the same payloads in pickle.load", payloads=len(payloads), payloads_that_ran=len(payloads))


def test_fault_21_arrays_of_a_cached_search_index(tmp_path):
    marker, pipeline = tmp_path / "marker", headstock.load(RUNS / "causal", device="cpu")
    documents = open_documents(["Anne sees Paris.", "Ben likes the sea."])
    folder = open_index(pipeline, documents, SearchSettings(), cache=tmp_path / "cache").folder
    payload = next(payload for payload in make_payloads(marker) if payload.name == "npy of objects")
    for name in ("vectors.npy", "offsets.npy", "mean.npy"):
        (folder / name).write_bytes(payload.data)
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["bytes"][name] = len(payload.data)
        (folder / MANIFEST).write_text(json.dumps(manifest))
        index = open_index(pipeline, documents, SearchSettings(), cache=tmp_path / "cache")
        assert len(index) == 2 and not index.reused  # built again
        assert not os.path.lexists(marker)


def test_fault_21_tags_in_the_yaml_of_a_model_card(tmp_path):
    pytest.importorskip("huggingface_hub")
    from headstock.interop.hub import licence

    marker, card = tmp_path / "marker", tmp_path / "README.md"
    card.write_text(f"---\nlicense: !!python/object/apply:os.mkdir ['{marker}']\n---\n# A model\n", encoding="utf-8")
    assert licence(card) is None
    assert not marker.exists()


# every call that could run code from a file, by module; all others fail the test
CODE = re.compile(
    r"(?:\b(?:pickle|_pickle|dill|marshal|shelve|joblib|cloudpickle)\.\w*load\w*|torch\.load|np\.load|yaml\.\w*load"
    r"|(?<![\w.])(?:eval|exec|compile|__import__)|import_module|spec_from_file_location|runpy|trust_remote_code"
    r"|torch\.hub|torch\.jit\.load|AutoModel|AutoTokenizer|AutoConfig)\("
)
KNOWN = {
    "interop/imported_run.py": {"torch.load("},  # weights only
    "interop/lab.py": {"torch.load("},  # in a hint
    "inference/search.py": {"np.load("},  # refuses objects, numpy's default
    "experiments/distil.py": {"np.load("},  # likewise
    "data/ray_store.py": {"pickle.loads("},  # what our own processes send each other through Ray
    "experiments/ray_trials.py": {"pickle.loads("},
    "__init__.py": {"import_module("},  # names in the package
    "cli/app.py": {"import_module("},
    "registry.py": {"import_module("},
    "train/run_folder.py": {"import_module("},  # a constant
}


def test_no_other_call_could_run_code_from_a_file():
    package = Path(headstock.__file__).parent
    found: dict[str, set[str]] = {}
    for file in package.rglob("*.py"):
        for line in file.read_text(encoding="utf-8").splitlines():
            code = line.split("#")[0]
            for match in CODE.finditer(code):
                found.setdefault(file.relative_to(package).as_posix(), set()).add(match[0])
                assert match[0] != "torch.load(" or "weights_only=True" in code
                assert "allow_pickle=True" not in code
    assert {name: calls for name, calls in found.items() if not calls <= KNOWN.get(name, set())} == {}
    assert CODE.search("x = yaml.unsafe_load(f)") and CODE.search("pickle.loads(x)") and not CODE.search("model.eval()")
