"""Mutated files, and worker processes that read them: input `i` of a target is a pure function of the target and `i`.

A worker runs with little address space above what it has when it starts. A worker that dies is started again after the
input that it died of, so that a crash of a native library is one failure and not the end of the test.
"""

import copy
import json
import os
import random
import resource
import shutil
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstock.errors import HeadstockError
from tests.commands import CONTEXT, save_time

SECONDS, MEGABYTES = 1.0, 200  # an input may take, of CPU time and of memory
HANG_SECONDS = 60.0  # by the clock, for a machine that does other work
MESSAGE_CHARACTERS = 10_000  # an error is a line, not the file that caused it
WORKER_INPUTS = 2000  # then another worker takes over, so that no input profits from the memory of those before

DEEP, LONG_NUMBER = "@deep@", "@long-number@"  # become text that json.dumps cannot write
ATOMS: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30),
    *(-(2**31), -(2**63), 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"), DEEP, LONG_NUMBER),
    *("", " ", "\0", "\ud800", "\udfff\ud800", "\u202e", "\x1b[2J", "a" * 5000, "é" * 300, "1e999", "NaN", "null"),
    *("../../../../etc/passwd", "/etc/passwd", "file:///etc", "C:\\x", "%s%n", "{{7*7}}", "<script>", "__class__"),
    *([], {}, [[]], [{}], {"": {}}, [None] * 3, [0] * 2000, {"a": {"b": {"c": {}}}}, "float64", "F32", "BPE", "torch"),
]
WRONG_BYTES = [b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\0\0\0\0", b"\x80\x80\x80\x80\x01", b'{["']
DTYPES = ["F64", "F16", "BF16", "I64", "BOOL", "U8", "F8_E4M3", "C64", "F4", "X", 3, None]


# Mutations


def mutate_json(data: bytes, pick: random.Random) -> bytes:
    """Change one to four nodes of a JSON document."""
    tree = json.loads(data)
    for _ in range(pick.randint(1, 4)):
        tree = _changed(tree, pick)
    text = json.dumps(tree)
    text = text.replace(f'"{DEEP}"', "[" * 3000 + "]" * 3000).replace(f'"{LONG_NUMBER}"', "9" * 5000)
    if pick.random() < 0.1 and "{" in text:  # a key twice
        at = text.rindex("{", 0, pick.randint(1, len(text)) + 1 or None) if "{" in text[: len(text)] else 0
        text = text[: at + 1] + '"model": 1, "model": {}, ' * 2 + text[at + 1 :]
    raw = text.encode("utf-8")
    return mutate_bytes(raw, pick) if pick.random() < 0.15 else raw


def _changed(tree: Any, pick: random.Random) -> Any:
    """The tree with one node replaced, removed, copied or renamed."""
    nodes = list(_nodes(tree))
    parent, key = pick.choice(nodes) if nodes else (None, None)
    if parent is None or pick.random() < 0.02:
        return copy.deepcopy(pick.choice(ATOMS))
    way = pick.randrange(8)
    if way == 0:
        del parent[key]
    elif way == 1:
        other, name = pick.choice(nodes)
        parent[key] = json.loads(json.dumps(other[name]))
    elif way == 2 and isinstance(parent, dict):
        parent[pick.choice([str(pick.choice(ATOMS)), f"{key}s", key.upper(), ""])] = copy.deepcopy(parent[key])
    elif way == 3 and isinstance(parent[key], list) and parent[key]:
        copies = pick.choice([2, 50])
        parent[key] = [copy.deepcopy(item) for item in parent[key] for _ in range(copies)][:3000]
    elif way == 4 and isinstance(parent[key], int | float):
        value = parent[key]
        parent[key] = pick.choice([value * 10**9, -value, value + 0.5, str(value), [value]])
    elif way == 5:
        parent[key] = pick.choice([[parent[key]], {"x": parent[key]}, [parent[key], None]])
    else:
        parent[key] = copy.deepcopy(pick.choice(ATOMS))
    return tree


def _nodes(tree: Any, limit: int = 20_000) -> Iterator[tuple[Any, Any]]:
    """(parent, key) of every node; large vocabularies count no more than the settings beside them."""
    stack = [tree]
    while stack and limit > 0:
        here = stack.pop()
        keys = list(here) if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else []
        for key in keys if len(keys) < 40 else [*keys][:3] + [*keys][-3:]:
            limit -= 1
            yield here, key
            stack.append(here[key])


def mutate_bytes(data: bytes, pick: random.Random) -> bytes:
    """Flip, cut, copy, insert or overwrite some bytes."""
    raw = bytearray(data)
    for _ in range(pick.choice([1, 1, 2, 4, 16])):
        at = pick.randrange(len(raw) + 1)
        way = pick.randrange(7)
        if way == 0 and at < len(raw):
            raw[at] ^= 1 << pick.randrange(8)
        elif way == 1:
            del raw[at:]
        elif way == 2:
            del raw[at : at + pick.choice([1, 2, 8, 64])]
        elif way == 3:
            raw[at:at] = pick.randbytes(pick.choice([1, 2, 8, 64]))
        elif way == 4:
            number = pick.choice([0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1])
            raw[at : at + 8] = number.to_bytes(8, pick.choice(["little", "big"]))
        elif way == 5:
            raw[at:at] = raw[at : at + pick.choice([1, 16, 200])]
        else:
            raw[at : at + 4] = pick.choice(WRONG_BYTES)
        if not raw:
            break
    return bytes(raw) if pick.random() > 0.01 else pick.randbytes(pick.choice([0, 1, 7, 8, 9, 100]))


def mutate_safetensors(data: bytes, pick: random.Random) -> bytes:
    """Change the header of a safetensors file, with its length put right or not, or the bytes."""
    if pick.random() < 0.25:
        return mutate_bytes(data, pick)
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    for _ in range(pick.randint(1, 3)):
        names = [name for name in header if name != "__metadata__"]
        if not names:
            break
        entry, way = header[pick.choice(names)], pick.randrange(6)
        if way == 0 and isinstance(entry, dict):
            entry["shape"] = [pick.choice([0, 1, -1, 2**31, 2**62, 2**63, 3, 1.5]) for _ in range(pick.randint(0, 5))]
        elif way == 1 and isinstance(entry, dict):
            entry["data_offsets"] = [pick.choice([0, 4, len(body), len(body) + 1, 2**40, 2**63, -4]) for _ in range(2)]
        elif way == 2 and isinstance(entry, dict):
            entry["dtype"] = pick.choice(DTYPES)
        elif way == 3:
            header[str(pick.choice(ATOMS))] = copy.deepcopy(entry)
        else:
            header = _changed(header, pick)
            if not isinstance(header, dict):
                break
    text = json.dumps(header).replace(f'"{DEEP}"', "[" * 3000 + "]" * 3000).encode()
    size = pick.choice([len(text)] * 6 + [len(text) + 1, 0, 2**20, 10**8, 10**8 + 1, 2**63, 2**64 - 1])
    body = body[: pick.choice([len(body)] * 4 + [0, 1])] + b"x" * pick.choice([0] * 4 + [9])
    return struct.pack("<Q", size) + text + body


MUTATIONS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": mutate_json,
    ".safetensors": mutate_safetensors,
}


# Targets


@dataclass(frozen=True)
class Target:
    """A reader, the folder of a valid input, and the files of it that are mutated."""

    name: str
    seed: Path
    files: tuple[str, ...]
    read: Callable[[Path], Any]

    def input(self, number: int) -> tuple[str, bytes]:
        """The name and content of the mutated file."""
        pick = random.Random(f"{self.name} {number}")
        file = pick.choice(self.files)
        data = (self.seed / file).read_bytes()
        return file, MUTATIONS.get(Path(file).suffix, mutate_bytes)(data, pick)


@dataclass
class Outcome:
    inputs: int = 0
    refused: int = 0
    seconds: float = 0.0  # the slowest input
    megabytes: float = 0.0  # of the input that needed most
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        self.inputs += other.inputs
        self.refused += other.refused
        self.seconds, self.megabytes = max(self.seconds, other.seconds), max(self.megabytes, other.megabytes)
        self.failures += other.failures


def fuzz(targets: Sequence[Target], count: int) -> Outcome:
    """Read `count` mutated inputs, of each target in turn, in worker processes."""
    total, number = Outcome(), 0
    while number < count:
        stop = min(count, number + WORKER_INPUTS)
        receiver, sender = CONTEXT.Pipe(duplex=False)
        at, began = CONTEXT.Value("q", -1), CONTEXT.Value("d", time.monotonic())
        process = CONTEXT.Process(target=_work, args=(targets, number, stop, sender, at, began))
        process.start()
        sender.close()
        outcomes, died = _collect(process, receiver, began), None
        if process.exitcode:  # it died, or was killed because it hung
            died = at.value
            assert died >= 0, "the worker could not read the valid inputs"
            reason = "hung" if process.exitcode == -signal.SIGKILL else f"exit code {process.exitcode}"
            target = targets[died % len(targets)].name
            outcomes.append(Outcome(1, failures=[{"target": target, "input": died, "error": f"died: {reason}"}]))
        for outcome in outcomes:
            total.add(outcome)
        number = stop if died is None else died + 1
    return total


def _collect(process: Any, receiver: Any, began: Any) -> list[Outcome]:
    """What a worker reports until it ends; it is killed if one input takes too long."""
    outcomes: list[Outcome] = []
    while True:
        if receiver.poll(0.5):
            try:
                outcomes.append(receiver.recv())
            except EOFError:
                process.join()
                return outcomes
        elif time.monotonic() - began.value > HANG_SECONDS:
            process.kill()


def _work(targets: Sequence[Target], first: int, stop: int, sender: Any, at: Any, began: Any) -> None:
    """Read inputs with limited memory; sends the outcome of each."""
    import logging
    import warnings

    save_time()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="headstock-fuzz-") as home:
        folders = [Path(home) / str(number) / "input" for number in range(len(targets))]
        for target, folder in zip(targets, folders, strict=True):
            shutil.copytree(target.seed, folder)
            target.read(folder)  # the valid input, which also imports what reading needs
        _silence()
        for number in range(first, stop):
            at.value, began.value = number, time.monotonic()
            target, folder = targets[number % len(targets)], folders[number % len(targets)]
            file, data = target.input(number)
            (folder / file).write_bytes(data)
            with _address_space(MEGABYTES):  # of its own: libraries keep some memory of the inputs before
                outcome = _read(target, folder, number, file)
            sender.send(outcome)
            shutil.copyfile(target.seed / file, folder / file)
    sender.close()


def _silence() -> None:
    """Native libraries write what they think of a file to standard error."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _read(target: Target, folder: Path, number: int, file: str) -> Outcome:
    memory, start = _reset_peak(), time.process_time()
    problem, refused = None, 0
    try:
        target.read(folder)
    except HeadstockError as error:
        refused = 1
        problem = _problem_of(error)
    except BaseException as error:
        problem = f"{type(error).__name__}: {str(error)[:300]} {_where(error)}"
    seconds, megabytes = time.process_time() - start, max(0.0, (_peak() - memory) / 2**20)
    if problem is None and seconds > SECONDS:
        problem = f"took {seconds:.1f} s"
    if problem is None and megabytes > MEGABYTES:
        problem = f"took {megabytes:.0f} MB"
    failures = [{"target": target.name, "input": number, "file": file, "error": problem}] if problem else []
    return Outcome(1, refused, seconds, megabytes, failures)


def _problem_of(error: HeadstockError) -> str | None:
    """Why a refusal is not good enough: out of memory is a failure also where it is reported as one line."""
    text, cause = str(error), error.__cause__ or error.__context__
    while cause is not None and "memory" not in text:  # said on purpose
        if isinstance(cause, MemoryError) or "can't allocate" in str(cause):
            return f"out of memory: {text[:200]}"
        cause = cause.__cause__ or cause.__context__
    if len(text) > MESSAGE_CHARACTERS:
        return f"a message of {len(text)} characters: {text[:200]}"
    if any(ord(character) < 32 and character not in "\n\t" for character in text):
        return f"control characters in the message: {text[:200]!r}"
    return None


def _where(error: BaseException) -> str:
    import traceback

    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "headstock" in frame.filename]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-3:][::-1])


@contextmanager
def _address_space(megabytes: int) -> Iterator[None]:
    """At most this much memory above what the process has now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _reset_peak() -> int:
    """Forget the highest memory use of this process so far; returns what it uses now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0
