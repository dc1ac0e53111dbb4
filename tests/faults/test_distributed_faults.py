"""Faults 5 and 15 to 17: the order of samples, lost and hung processes, and checkpoints of another number of them."""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import headstock
from headstock.train import checkpoint_files, sampler, sharding
from headstock.train.checkpoint import Checkpoint, DiskCheckpointer, newest_first, step_of
from headstock.train.distributed import init_distributed
from headstock.train.execution import build_module
from headstock.train.models import build_model, build_task
from headstock.train.optimizers import EMA, make_optimizers
from headstock.train.run_folder import RunFolder
from headstock.train.settings import make_config
from tests.commands import set_options
from tests.conftest import TINY
from tests.faults.harness import amount, is_full, outcome
from tests.train.processes import BackgroundProcess, run_torchrun, start_functions, start_ranks

STATES = TINY | {"steps": 6, "validate_every": 3, "ema": 0.9, "optimizer": "muon", "weights": "last"}


# Fault 5


def pretrain_and_record(corpus, out, file, settings):
    """Pretrain as one rank, and write the ids of the samples that it reads at each step."""
    steps, make_batch = [], sampler.padded_batch

    def record_ids(examples, indices, *arguments, **options):
        steps.append(list(indices))
        return make_batch(examples, indices, *arguments, **options)

    sampler.padded_batch = record_ids
    headstock.pretrain(corpus, out=out, settings=settings, device="cpu")
    file.write_text(json.dumps(steps))


def samples_by_step(folder, corpus, processes, settings):
    """The ids of the samples of each step, those of the ranks in turn."""
    folder.mkdir()
    files = [folder / f"ids-{rank}.json" for rank in range(processes)]
    calls = [(pretrain_and_record, corpus, folder / "run", file, settings) for file in files]
    ranks = start_functions(folder / "rank", calls)
    assert [rank.wait() for rank in ranks] == [0] * processes, ranks[0].stderr
    by_rank = [json.loads(file.read_text()) for file in files]
    steps = []
    for parts in zip(*by_rank, strict=True):
        turns = [part[i] for i in range(max(map(len, parts))) for part in parts if i < len(part)]
        steps.append(turns)
    return steps


def test_fault_05_samples_do_not_depend_on_the_number_of_processes(corpus, tmp_path, record):
    epochs, text = amount(2, 5), tmp_path / "text.txt"
    documents = corpus.read_text(encoding="utf-8").split("\n\n")
    text.write_text("\n\n".join(documents[: amount(60, 300)]), encoding="utf-8")
    corpus, settings = text, TINY | {"epochs": epochs, "batch": 12, "validate_every": 10_000}
    del settings["steps"]
    alone = samples_by_step(tmp_path / "1", corpus, 1, settings)
    assert len(alone) > 2 and len(alone[-1]) < 12  # the last step of an epoch is incomplete
    for processes in (2, 4):
        assert samples_by_step(tmp_path / str(processes), corpus, processes, settings) == alone
    ids = sum(map(len, alone))
    record(5, "sample ids of 1, 2 and 4 processes", epochs=epochs, steps=len(alone), samples=ids, different=0)
    control = samples_by_step(tmp_path / "control", corpus, 1, settings | {"seed": 1})
    assert control != alone


# Fault 15


TORCHRUN = ["--standalone", "--nproc-per-node=2", "--max-restarts=2"]
# without the variable, restarts with gloo hang at times
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
STEPS = amount(30, 120)
LONG = TINY | {"steps": STEPS, "batch": 4, "log_every": 1, "validate_every": 15, "checkpoint_every": 3, "ema": 0.9}


def words(corpus, out, settings):
    return ["pretrain", str(corpus), "--out", str(out), "--device", "cpu", *set_options(settings)]


def workers(process):
    """The process ids of torchrun's workers."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def kill_a_worker(process, out, pick, *, after):
    """Kill one of the workers with -9, once there is a checkpoint of a step."""
    end = time.monotonic() + 120
    while not any(step_of(path) >= after for path in newest_first(out / "checkpoints")):
        assert process.is_alive() and time.monotonic() < end, "the run did not get to its checkpoint"
        time.sleep(0.005)
    os.kill(pick.choice(workers(process)), signal.SIGKILL)
    return step_of(newest_first(out / "checkpoints")[0])


@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers of torchrun in /proc")
def test_fault_15_a_killed_worker_is_restarted_and_the_run_continues(corpus, tmp_path, record):
    pick, kills, steps = random.Random(15), amount(1, 20), []
    undisturbed = {}
    for parallel in ("ddp", "fsdp")[: amount(1, 2)]:
        settings = LONG | {"parallel": parallel}
        ranks = start_ranks(tmp_path / "rank", 2, *words(corpus, tmp_path / parallel, settings), OMP_NUM_THREADS="1")
        assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
        undisturbed[parallel] = outcome(tmp_path / parallel)
    for number in range(kills):
        parallel, out = list(undisturbed)[number % len(undisturbed)], tmp_path / f"run-{number}"
        command = words(corpus, out, LONG | {"parallel": parallel})
        torchrun = BackgroundProcess(tmp_path / "torchrun", run_torchrun, TORCHRUN, command, **ENVIRONMENT)
        try:
            steps.append(kill_a_worker(torchrun.process, out, pick, after=pick.randrange(3, STEPS // 2)))
            assert torchrun.wait(240) == 0, torchrun.stderr[-3000:]
        finally:
            torchrun.kill()
        assert "resuming from" in torchrun.stderr
        assert outcome(out) == undisturbed[parallel]
        shutil.rmtree(out)
    record(15, "worker of torchrun killed with -9", kills=kills, recovered=kills, bit_identical_runs=kills)


def test_fault_15_a_restart_continues_only_the_run_of_its_own_job(corpus, tmp_path, monkeypatch, call):
    """The control: a run from before this job is neither continued nor replaced, however often it is restarted."""
    out = tmp_path / "run"
    headstock.pretrain(corpus, out=out, settings=TINY, device="cpu")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    call(*words(corpus, out, TINY))  # created while this job, the parent process of the tests, was running
    os.utime(out / "data.json", (1, 1))
    assert "exists already" in call(*words(corpus, out, TINY), code=2)[1]


# Fault 16


def test_fault_16_a_hung_process_stops_the_others(corpus, tmp_path, record):
    timeout, settings = 3.0, TINY | {"steps": 100_000, "log_every": 1, "validate_every": 100_000}
    cases = [("ddp", 1), ("ddp", 0), *[("fsdp", 1), ("fsdp", 0), ("ddp", 0)] * amount(0, 6)]
    seconds = []
    for number, (parallel, hung) in enumerate(cases):
        groups, limits = [], {"limited": timeout, "control": 600.0}
        if number and not is_full():
            del limits["control"]
        for name, limit in limits.items():
            own = words(corpus, tmp_path / f"{number}-{name}", settings | {"parallel": parallel})
            folder = tmp_path / f"{number}-{name}-rank"
            groups.append(start_ranks(folder, 2, *own, HEADSTOCK_TIMEOUT=str(limit), OMP_NUM_THREADS="1"))
        try:
            for ranks in groups:
                ranks[0].wait_until(lambda ranks=ranks: "steps" in ranks[0].stderr)  # both are training now
                ranks[hung].send_signal(signal.SIGSTOP)
            began = time.monotonic()
            survivor, *controls = (ranks[1 - hung] for ranks in groups)
            assert survivor.wait() == 1, survivor.stderr
            seconds.append(time.monotonic() - began)
            assert seconds[-1] < timeout + 10
            assert f"rank {1 - hung} of 2" in survivor.stderr and "HEADSTOCK_TIMEOUT" in survivor.stderr
            assert "Traceback" not in survivor.stderr
            assert all(control.process.is_alive() for control in controls)  # without the timeout it would wait on
        finally:
            for rank in [rank for ranks in groups for rank in ranks]:
                rank.kill()
    record(16, "process stopped with SIGSTOP", hangs=len(cases), timeout_s=timeout, longest_s=round(max(seconds), 1))


# Fault 17


def reshard(source, target, wrong=False):
    """Load the newest checkpoint of a run as one of some processes, and save it again to another folder."""
    distributed = init_distributed("cpu", 60.0)
    if wrong:
        checkpoint_files.shard_like = first_rows
    run = RunFolder(source)
    config = make_config(run.config())
    task = build_task(config, run.tokenizer())
    model = build_module(build_model(config, task), task, config.train, distributed).model
    optimizers, ema = make_optimizers(model, config.train), EMA(model, config.train.ema)
    checkpointer = DiskCheckpointer(model, optimizers, ema, config.train, run=run, distributed=distributed)
    state = checkpointer.resume()
    checkpointer.run = RunFolder(target)
    checkpointer.save(state)
    if distributed.size > 1:
        torch.distributed.destroy_process_group()


def first_rows(tensor, like):
    """Wrong: every process takes the rows of rank 0."""
    if not sharding.is_dtensor(like):
        return tensor
    sharded = torch.empty_like(like)
    local = sharded.to_local()
    local.copy_(tensor[: len(local)])
    return sharded


def reshard_with(processes, source, target, wrong=False):
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("checkpoints"))
    calls = [(reshard, source, target, wrong)] * processes
    ranks = start_functions(target.with_name(f"{target.name}-rank"), calls)
    assert [rank.wait() for rank in ranks] == [0] * processes, ranks[0].stderr


def equal_tensors(first, second):
    a, b = (Checkpoint.read(newest_first(run / "checkpoints")[0]).tensors() for run in (first, second))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_fault_17_checkpoints_are_equal_after_any_number_of_processes(corpus, tmp_path, record):
    first = tmp_path / "first"
    settings = STATES | {"parallel": "fsdp", "width": 20, "hidden": 33}  # rows that 4 and 3 do not divide
    ranks = start_ranks(tmp_path / "rank", 2, *words(corpus, first, settings), OMP_NUM_THREADS="1")
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    assert len(Checkpoint.read(newest_first(first / "checkpoints")[0]).tensors()) > 50
    chain = [1, 4, 2, 3, 8, 1, 2] if is_full() else [4, 1]
    source = first
    for number, processes in enumerate(chain):
        target = tmp_path / f"hop-{number}"
        reshard_with(processes, source, target)
        assert equal_tensors(first, target), processes
        source = target
    reshard_with(2, source, tmp_path / "wrong", wrong=True)
    assert not equal_tensors(first, tmp_path / "wrong")
    record(17, f"resharded {' -> '.join(map(str, [2, *chain]))}", loads=len(chain), bit_identical=len(chain))
