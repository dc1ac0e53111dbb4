"""Fields of configs that name code, modules or other models: nothing is imported from them, and no socket is opened."""

import json
import os
import shutil
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.commands import CONTEXT
from tests.faults.targets import GPT, RUNS, write_huggingface

CODE = """
import os, pathlib
pathlib.Path(os.environ["MARKER"]).touch()
class Evil:
    pass
"""
FILES = [f"{name}_evil.py" for name in ("modeling", "configuration", "tokenization")]
FILES += ["evil.py", "__init__.py", "sitecustomize.py"]
MAP = {f"Auto{kind}": "modeling_evil.Evil" for kind in ("Config", "Model", "ModelForCausalLM", "Tokenizer")}
URL, NAME = "http://127.0.0.1:9/evil", "attacker/evil"

HF_CONFIG: list[dict[str, Any]] = [  # added to a config.json that transformers wrote
    {"auto_map": MAP, "trust_remote_code": True},
    {"auto_map": dict.fromkeys(MAP, f"{NAME}--modeling_evil.Evil")},
    {"_name_or_path": NAME, "name_or_path": URL, "base_model_name_or_path": NAME, "_commit_hash": "0" * 40},
    {"quantization_config": {"quant_method": "evil", "modules_to_not_convert": ["evil.Evil"], "config": URL}},
    {"custom_pipelines": {"evil": {"impl": "evil.Evil", "pt": ["AutoModel"]}}},
    {"torch_dtype": "os.system('x')", "dtype": "__import__('evil')"},
    {"activation_function": "evil.Evil"},
    {"architectures": ["evil.Evil"]},
    {"architectures": ["__import__('evil')"], "auto_map": MAP},
    {"model_type": "evil"},
    {"model_type": "../evil", "auto_map": MAP},
    {"rope_scaling": {"type": "evil.Evil", "factor": URL}, "attn_implementation": f"{NAME}"},
    {"_attn_implementation": "kernels-community/evil", "use_kernels": True},
    {"tokenizer_class": "evil.Evil", "processor_class": "evil.Evil", "task_specific_params": {"x": URL}},
    {"decoder": {"auto_map": MAP}, "encoder": {"_name_or_path": NAME}, "text_config": {"auto_map": MAP}},
    {"headstock": {"model": {"family": "evil"}, "task": {"name": "evil:Evil"}}},
]
TOKENIZER_CONFIG: list[dict[str, Any]] = [
    {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}},
    {"tokenizer_class": "evil.Evil", "trust_remote_code": True, "name_or_path": NAME},
    {"tokenizer_file": URL, "vocab_file": "/etc/passwd", "special_tokens_map_file": URL, "gguf_file": URL},
    {"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}{% include 'evil' %}"},
    {"model_max_length": 1e30, "backend": "evil", "_tokenizer": {"__class__": "evil.Evil"}},
]
OTHER_FILES: dict[str, Any] = {  # beside a valid model
    "adapter_config.json": {"base_model_name_or_path": NAME, "auto_mapping": {"parent_library": "evil"}},
    "generation_config.json": {"custom_generate": "evil", "trust_remote_code": True},
    "preprocessor_config.json": {"auto_map": {"AutoProcessor": "evil.Evil"}},
    "custom_generate/generate.py": CODE,
    "modules.json": [{"idx": 0, "name": "0", "path": "", "type": "evil.Evil"}],
    "requirements.txt": "evil",
    "setup.py": CODE,
    "conftest.py": CODE,
}
OWN_CONFIG: list[tuple[str, str, Any]] = [  # section, setting and value of our config.json
    ("model", "family", "evil"),
    ("model", "family", "evil.Evil"),
    ("task", "name", "evil:Evil"),
    ("task", "name", "../evil"),
    ("model", "activation", "evil.Evil"),
    ("tokenizer", "file", URL),
    ("data", "corpus", [URL]),
    ("data", "valid", [URL]),
    ("transfer", "run", f"hf://{NAME}"),
    ("train", "device", "evil"),
    ("train", "callbacks", ["evil.Evil"]),
    ("evil", "x", "evil.Evil"),
]
PROCESSES = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn")


class Watch:
    """Records and refuses sockets, processes and imports of modules from the hostile folders."""

    def __init__(self, folder: Path):
        self.folder, self.events = str(folder), list[str]()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        is_socket = event.startswith("socket.") and event not in ("socket.__new__", "socket.gethostname")
        if is_socket or event in PROCESSES:
            self.refuse(event)
        elif event == "import" and "evil" in str(arguments[0]):
            self.refuse(f"import {arguments[0]}")
        elif event == "exec" and self.folder in getattr(arguments[0], "co_filename", ""):
            self.refuse(f"exec {arguments[0].co_filename}")

    def refuse(self, event: str) -> None:
        self.events.append(event)
        raise PermissionError(event)


def use_all(home: str, folders: list[str], sender: Any) -> None:
    """Import, load and use each folder, watched; sends what the watch recorded and how many were refused."""
    import headstock
    from headstock.errors import HeadstockError
    from headstock.interop import export_run, import_run

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.pop(name, None)
    watch, refused = Watch(Path(home)), 0
    sys.addaudithook(watch)
    for number, folder in enumerate(folders):
        os.chdir(folder)  # where a careless import would look first
        try:
            run = Path(folder)
            if not (run / "data.json").exists():
                run = import_run(run, out=Path(home) / f"run-{number}").path
            pipeline = headstock.load(run, device="cpu")
            pipeline.generate("a", max_tokens=2)
            export_run(run, Path(home) / f"export-{number}")
        except HeadstockError:
            refused += 1
    sender.send((watch.events, refused))


def be_careless(home: str, folders: list[str], sender: Any) -> None:
    """The control: what a loader that trusts its files would do."""
    watch = Watch(Path(home))
    sys.addaudithook(watch)
    sys.path.insert(0, folders[0])
    with suppress(OSError):
        __import__("modeling_evil")
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", 9))
    source = Path(folders[0]) / "setup.py"
    with suppress(OSError):
        exec(compile(CODE, str(source), "exec"))
    sender.send((watch.events, 0))


def watched(work: Any, home: Path, folders: list[Path]) -> tuple[list[str], int]:
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=work, args=(str(home), [str(folder) for folder in folders], sender))
    process.start()
    sender.close()
    result = receiver.recv()
    process.join()
    return result


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> tuple[Path, list[Path]]:
    home = tmp_path_factory.mktemp("code")
    write_huggingface(home / "source", home / "valid", GPT, {"name": "causal"})
    config, tokenizer = (json.loads((home / "valid" / f"{n}.json").read_text()) for n in ("config", "tokenizer_config"))
    folders = []

    def add(changes: dict[str, Any], source: Path = home / "valid") -> None:
        folder = home / f"model-{len(folders)}"
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("checkpoints", "manifest.json"))
        for name in FILES:
            (folder / name).write_text(CODE)
        for name, content in changes.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
        folders.append(folder)

    for fields in HF_CONFIG:
        add({"config.json": config | fields})
    for fields in TOKENIZER_CONFIG:
        add({"tokenizer_config.json": tokenizer | fields})
    for name, content in OTHER_FILES.items():
        add({name: content})
    own = json.loads((RUNS / "causal" / "config.json").read_text())
    for section, name, value in OWN_CONFIG:
        add({"config.json": own | {section: own.get(section, {}) | {name: value}}}, RUNS / "causal")
    return home, folders


def test_fault_25_no_code_is_imported_and_no_socket_opened(hostile, tmp_path, monkeypatch, record):
    home, folders = hostile
    monkeypatch.setenv("MARKER", str(tmp_path / "marker"))
    events, refused = watched(use_all, home, folders)
    assert events == []
    assert not (tmp_path / "marker").exists()
    assert 0 < refused < len(folders)
    figures = {"imported_and_used": len(folders) - refused, "refused": refused, "imports": 0, "sockets": 0}
    record(25, "fields and files that name code or other models", folders=len(folders), **figures)


def test_fault_25_the_watch_notices_imports_sockets_and_code(hostile, tmp_path, monkeypatch):
    home, folders = hostile
    monkeypatch.setenv("MARKER", str(tmp_path / "marker"))
    events, _ = watched(be_careless, home, folders)
    assert [event.split(" ")[0] for event in events] == ["import", "socket.getaddrinfo", "exec"]
