"""Throughput of `headstock serve`: concurrent requests against one at a time, and against Hugging Face.

    python benchmarks/serve.py                    64 clients that classify, 32 that complete; ratios of one run
    python benchmarks/serve.py --soak 5           64 clients for 5 minutes: only 200 and 503, and no growing memory
    python benchmarks/serve.py --tiny             a quick check that everything runs

Servers are processes of their own, reached through sockets by a client that costs little. The peer is the same run
exported to Hugging Face behind a plain FastAPI handler (peers/huggingface_server.py), and `transformers serve` where
accelerate is installed; the answers of all must be the same.
After a warm-up all measurements are repeated in turn; the table has medians. The CPU time of the server varies less
than wall-clock time on a shared machine. Needs headstock[serve,interop].
"""

import argparse
import asyncio
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

from inference import causal_run, classifier_run, some_texts

import headstock
from headstock.interop import export_run
from headstock.tasks.special_tokens import special_tokens_for

PEER = Path(__file__).parent / "peers" / "huggingface_server.py"
START_SECONDS = 300
Body = dict[str, Any]


# Client


class Connection:
    """A kept-alive HTTP connection that posts JSON; general clients cost as much as the server itself."""

    def __init__(self, port: int):
        self.port = port

    async def __aenter__(self) -> "Connection":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.writer.close()

    async def post(self, path: str, body: Body) -> tuple[int, bytes]:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
        self.writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = await self.reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", answer, re.IGNORECASE)
        assert length is not None, answer
        return int(answer.split(b" ", 2)[1]), await self.reader.readexactly(int(length[1]))


@dataclass
class Measurement:
    """Requests of several clients that each send the next one when they have their answer."""

    rate: float  # requests per second
    cpu: float  # seconds of the server's CPU time per request
    latencies: list[float]  # seconds
    answers: list[Any]  # in the order of the requests

    def quantile(self, share: float) -> float:
        return sorted(self.latencies)[min(len(self.latencies) - 1, int(share * len(self.latencies)))]


async def send_all(port: int, path: str, bodies: Sequence[Body], clients: int) -> tuple[list[float], list[Any]]:
    """Seconds and answers of all requests."""
    numbers, seconds, answers = iter(range(len(bodies))), [0.0] * len(bodies), [None] * len(bodies)

    async def client() -> None:
        async with Connection(port) as connection:
            for number in numbers:
                start = time.perf_counter()
                status, answer = await connection.post(path, bodies[number])
                seconds[number] = time.perf_counter() - start
                assert status == 200, (status, answer)
                answers[number] = json.loads(answer)

    await asyncio.gather(*(client() for _ in range(clients)))
    return seconds, answers


def measure(server: "Server", path: str, bodies: Sequence[Body], clients: int) -> Measurement:
    cpu, start = server.cpu_seconds(), time.perf_counter()
    latencies, answers = asyncio.run(send_all(server.port, path, bodies, clients))
    seconds = time.perf_counter() - start
    return Measurement(len(bodies) / seconds, (server.cpu_seconds() - cpu) / len(bodies), latencies, answers)


# Servers


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int

    def cpu_seconds(self) -> float:
        """CPU time of the process and its workers; not a number where the system does not tell."""
        pid = self.process.pid
        try:
            workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            stats = [Path(f"/proc/{process}/stat").read_text() for process in (pid, *workers)]
        except OSError:
            return float("nan")
        fields = [stat.rpartition(")")[2].split() for stat in stats]
        return sum(int(times[11]) + int(times[12]) for times in fields) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Resident bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def is_healthy(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            return connection.recv(100).startswith(b"HTTP/1.1 200")


@contextmanager
def running(words: Sequence[object], port: int, threads: int) -> Iterator[Server]:
    """A server process, once it answers."""
    process = subprocess.Popen([sys.executable, *map(str, words)], env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    server, give_up = Server(process, port), time.monotonic() + START_SECONDS
    try:
        while True:
            assert process.poll() is None and time.monotonic() < give_up, f"did not start: {' '.join(map(str, words))}"
            try:
                if server.is_healthy():
                    break
            except OSError:
                time.sleep(0.2)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def our_server(folder: Path, port: int, threads: int, *, workers: int = 1) -> Any:
    runs = (folder / "classes", folder / "causal")
    options = ["--port", port, "--device", "cpu", "--workers", workers, "-q"]
    return running(["-m", "headstock", "serve", *runs, *options], port, threads)


def peer_server(folder: Path, port: int, threads: int) -> Any:
    return running([PEER, folder / "classes-hf", folder / "causal-hf", port, threads], port, threads)


def transformers_server(folder: Path, port: int, threads: int) -> Any:
    command = Path(sys.executable).parent / "transformers"
    return running([command, "serve", folder / "causal-hf", "--port", port, "--device", "cpu"], port, threads)


# Measurements


def make_requests(folder: Path, args: argparse.Namespace) -> tuple[list[Body], list[Body], list[Body]]:
    """Classifications, completions, and the completions as Hugging Face takes them: with special tokens."""
    texts = some_texts(args.texts, words=args.words, seed=1)
    pipeline = headstock.load(folder / "causal", device="cpu")
    special = special_tokens_for(pipeline.task, pipeline.tokenizer, left_to_right=True)
    prompts = pipeline.tokenizer.encode_batch(some_texts(args.completions, words=8, seed=2))
    options = {"max_tokens": args.tokens}
    ours = [{"prompt": prompt, "temperature": 0, **options} for prompt in prompts]
    return (
        [{"input": text} for text in texts],
        ours,
        [{"prompt": special.wrap(prompt), **options} for prompt in prompts],
    )


def check_classes(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        probabilities = {score["label"]: score["score"] for score in other["predictions"][0]}
        for name, value in own["predictions"][0]["probabilities"].items():
            assert abs(value - probabilities[name]) < 1e-4, (own, other)


def equal_texts(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return statistics.mean(own["choices"][0]["text"] == other["choices"][0]["text"] for own, other in pairs)


def compare(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    for name in ("classes", "causal"):
        export_run(folder / name, folder / f"{name}-hf", to="huggingface")
    classify, complete, their_complete = make_requests(folder, args)
    few = max(8, len(classify) // 8)  # requests of one client, which take long
    with ExitStack() as stack:
        ours = stack.enter_context(our_server(folder, free_port(), args.threads))
        theirs = stack.enter_context(peer_server(folder, free_port(), args.threads))
        cases: dict[str, tuple[Server, str, list[Body], int]] = {
            "classify, one at a time": (ours, "/v1/classify", classify[:few], 1),
            "classify, 64 clients": (ours, "/v1/classify", classify, 64),
            "classify, 64 clients, Hugging Face": (theirs, "/v1/classify", classify[: 2 * few], 64),
            "complete, one at a time": (ours, "/v1/completions", complete[: max(2, len(complete) // 8)], 1),
            "complete, 32 clients": (ours, "/v1/completions", complete, 32),
            "complete, 32 clients, Hugging Face": (theirs, "/v1/completions", their_complete[:32], 32),
        }
        two = stack.enter_context(our_server(folder, free_port(), args.threads, workers=2))
        cases["classify, 64 clients, two workers"] = (two, "/v1/classify", classify, 64)
        if find_spec("accelerate") is not None:
            server = stack.enter_context(transformers_server(folder, free_port(), args.threads))
            decode = headstock.load(folder / "causal", device="cpu").tokenizer.decode
            named = {"model": str(folder / "causal-hf")}
            bodies = [body | {"prompt": decode(body["prompt"])} | named for body in complete[:32]]
            cases["complete, 32 clients, transformers serve"] = (server, "/v1/completions", bodies, 32)
        rounds: dict[str, list[Measurement]] = {name: [measure(*case)] for name, case in cases.items()}  # the warm-up
        check_classes(rounds["classify, 64 clients"][0].answers[: 2 * few], rounds[list(cases)[2]][0].answers)
        for name in [name for name in list(cases)[5:] if name.startswith("complete")]:
            same = equal_texts(rounds["complete, 32 clients"][0].answers[:32], rounds[name][0].answers)
            assert same > 0.9, f"{name}: only {same:.0%} of the completions are ours"  # rounding may break a tie
        alone = equal_texts(
            rounds["complete, 32 clients"][0].answers[: len(cases["complete, one at a time"][2])],
            rounds["complete, one at a time"][0].answers,
        )
        assert alone == 1, "batched completions are not those of single requests"
        for _ in range(args.rounds):
            for name, case in cases.items():
                rounds[name].append(measure(*case))
    return [summarize(name, measurements[1:] or measurements) for name, measurements in rounds.items()]


def summarize(name: str, rounds: Sequence[Measurement]) -> dict[str, Any]:
    middle = statistics.median
    return {
        "work": name,
        "requests_per_second": middle(one.rate for one in rounds),
        "p50_ms": 1000 * middle(one.quantile(0.5) for one in rounds),
        "p99_ms": 1000 * middle(one.quantile(0.99) for one in rounds),
        "cpu_ms_per_request": 1000 * middle(one.cpu for one in rounds),
    }


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """How many times as many requests per second the concurrent clients get, by wall-clock and by CPU time."""
    results = {}
    by_name = {row["work"]: row for row in rows}
    two_workers = "classify, 64 clients, two workers"
    for name in ("classify, 64 clients", two_workers, "complete, 32 clients"):
        own, work = by_name[name], name.partition(",")[0]
        for other, row in by_name.items():
            if row is own or not other.startswith(work) or other == two_workers:
                continue
            results[f"{own['work']} / {other.removeprefix(work + ', ')}"] = {
                "ratio": own["requests_per_second"] / row["requests_per_second"],
                "cpu_ratio": row["cpu_ms_per_request"] / own["cpu_ms_per_request"],
            }
    return results


# Soak


def soak(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """64 clients with mixed requests, some of which leave before their answer; fails where memory grows."""
    classify, complete, _ = make_requests(folder, args)
    with our_server(folder, free_port(), args.threads) as server:
        statuses: Counter[int] = Counter()
        warm = min(30.0, 6 * args.soak)  # seconds until memory is measured first
        asyncio.run(soak_clients(server, classify, complete, warm, statuses))
        before = server.memory()
        asyncio.run(soak_clients(server, classify, complete, 60 * args.soak, statuses))
        time.sleep(1)
        growth, healthy = server.memory() / before - 1, server.is_healthy()
    result = {"minutes": args.soak, "statuses": dict(statuses), "memory_mb": before / 1e6, "memory_growth": growth}
    print(json.dumps(result | {"healthy": healthy}))
    assert set(statuses) <= {200, 503} and healthy and growth <= 0.05, "the soak test failed"
    return result | {"healthy": healthy}


async def soak_clients(
    server: Server, classify: list[Body], complete: list[Body], seconds: float, statuses: Counter[int]
) -> None:
    end = time.monotonic() + seconds

    async def client(number: int) -> None:
        pick = random.Random(number)
        while time.monotonic() < end:
            async with Connection(server.port) as connection:
                for _ in range(20):
                    path, bodies = pick.choice([("/v1/classify", classify), ("/v1/completions", complete)])
                    work = asyncio.ensure_future(connection.post(path, pick.choice(bodies)))
                    if pick.random() < 0.05:  # leaves early
                        await asyncio.wait({work}, timeout=0.01)
                        work.cancel()
                        break
                    status, _ = await work
                    statuses[status] += 1
                    if time.monotonic() > end:
                        break

    await asyncio.gather(*map(client, range(64)))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads of each server's model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--causal", default="gpt-nano", help="preset of the language model")
    parser.add_argument("--masked", default="bert-nano", help="preset of the classifier")
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--texts", type=int, default=1024, help="classifications by 64 clients")
    parser.add_argument("--words", type=float, default=6, help="mean words of a text to classify")
    parser.add_argument("--completions", type=int, default=64, help="completions by 32 clients")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of a completion")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="let 64 clients run for so long instead")
    parser.add_argument("--json", type=Path, help="JSON file to write")
    parser.add_argument("--tiny", action="store_true", help="very small models and few requests")
    args = parser.parse_args()
    if args.tiny:
        args.texts, args.completions, args.tokens, args.rounds, args.vocabulary = 64, 32, 6, 0, 300
    return args


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        causal_run(folder, args)
        classifier_run(folder, args)
        if args.soak:
            results: dict[str, Any] = soak(folder, args)
        else:
            rows = compare(folder, args)
            results = {"threads": args.threads, "results": rows, "ratios": ratios(rows)}
            print(f"{'':40s} {'requests/s':>10s} {'p50 ms':>8s} {'p99 ms':>8s} {'CPU ms/request':>15s}")
            for row in rows:
                times = f"{row['p50_ms']:8.1f} {row['p99_ms']:8.1f} {row['cpu_ms_per_request']:15.2f}"
                print(f"{row['work']:40s} {row['requests_per_second']:10.1f} {times}")
            for comparison, values in results["ratios"].items():
                print(f"{comparison}: {values['ratio']:.1f}x requests/s, {values['cpu_ratio']:.1f}x by CPU time")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
