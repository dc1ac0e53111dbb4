"""The number of processes changes nothing but the order of summation: in float64, losses agree to the last digits."""

import pytest
import torch

import headstock
from headstock.train import step
from headstock.train.run_folder import RunFolder
from tests.conftest import TINY
from tests.train.processes import start_functions, start_ranks

# one document per row: processes have different numbers of tokens
SETTINGS = TINY | {"depth": 1, "batch": 8, "rows": "padded", "log_every": 1, "validate_every": 10}
SETTINGS |= {"schedule": "constant", "warmup": 0, "lr": 1e-2}  # a shorter run begins alike
total_counts = step.total_counts


def mean_of_means(task, batches, distributed):
    """Wrong: each process divides by its own number of tokens instead of by that of all."""
    counts = {}
    for batch in batches:
        for head, count in task.counts(batch).items():
            counts[head] = counts.get(head, 0) + count * distributed.size
    return counts, total_counts(task, batches, distributed)[1]


def pretrain(corpus, out, settings, wrong):
    torch.set_default_dtype(torch.float64)
    if wrong:
        step.total_counts = mean_of_means
    headstock.pretrain(corpus, out=out, settings=settings, device="cpu")


@pytest.fixture
def curves(corpus, tmp_path):
    def curves(processes, *, parallel="ddp", wrong=False, steps=20):
        out = tmp_path / f"{processes}-{parallel}-{wrong}"
        call = (pretrain, corpus, out, SETTINGS | {"parallel": parallel, "steps": steps}, wrong)
        ranks = start_functions(out.with_name(f"{out.name}-rank"), [call] * processes, OMP_NUM_THREADS="1")
        assert [rank.wait() for rank in ranks] == [0] * processes, ranks[0].stderr
        rows = RunFolder(out).read_metrics()
        return {name: [row[name] for row in rows if name in row] for name in ("loss", "valid_loss", "train_loss")}

    return curves


def difference(first, second):
    assert all(len(first[name]) == len(second[name]) > 1 for name in first)
    return max(abs(a - b) for name in first for a, b in zip(first[name], second[name], strict=True))


def test_losses_do_not_depend_on_the_number_of_processes(curves):
    alone = curves(1)
    assert len(alone["loss"]) == 20 and alone["loss"][-1] < alone["loss"][0] - 1
    for processes, parallel in ((2, "ddp"), (2, "fsdp"), (4, "ddp")):
        assert difference(alone, curves(processes, parallel=parallel)) < 1e-11, (processes, parallel)
    wrong = curves(2, wrong=True, steps=5)["loss"]
    assert max(abs(a - b) for a, b in zip(wrong, alone["loss"], strict=False)) > 1e-4


def test_layers_above_the_one_that_is_read_have_no_gradients(corpus, tmp_path):
    headstock.pretrain(corpus, out=tmp_path / "source", settings=SETTINGS | {"depth": 2, "steps": 1}, report=False)
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\n" + "Anne likes Paris.,a\nBen sees the sea.,b\n" * 8)
    settings = [f"--set={setting}" for setting in ('layers="1"', "epochs=2", "least_steps=4", "batch=4")]
    command = ["finetune", tmp_path / "source", "--train", rows, "--out", tmp_path / "tuned", "--device=cpu", *settings]
    ranks = start_ranks(tmp_path / "rank", 2, *command, "--set=valid_fraction=0.3", OMP_NUM_THREADS="1")
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0], ranks[0].stderr
    finally:
        for rank in ranks:
            rank.kill()
    assert RunFolder(tmp_path / "tuned").results()["steps"] > 1
