"""Fully sharded training: what one process learns, from checkpoints that any number of processes can load."""

import errno
import json
import os
import shutil

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

import headstock
from headstock.errors import UserError, WorkError
from headstock.model.backbones.recurrent import Recurrent, RecurrentConfig
from headstock.model.model import Model
from headstock.train.checkpoint import DiskCheckpointer, TrainState
from headstock.train.checkpoint_files import read_checkpoint_shapes, read_part
from headstock.train.distributed import DistributedContext, init_distributed
from headstock.train.evaluate import precision
from headstock.train.execution import build_module, check_settings
from headstock.train.optimizers import make_optimizers, update_weights
from headstock.train.run_folder import RunFolder
from headstock.train.settings import TrainSettings
from headstock.train.sharding import shard_module
from headstock.train.step import LossModule
from headstock.train.tensors import find_damage, read_tensors
from tests.commands import set_options
from tests.conftest import TINY
from tests.model.small import small_model
from tests.train.processes import start_functions, start_ranks
from tests.train.test_graphed_step import NextToken, texts

SETTINGS = TINY | {"log_every": 1, "validate_every": 4, "ema": 0.9, "optimizer": "muon", "micro_batch": 1, "batch": 4}
SETTINGS |= {"steps": 12, "parallel": "fsdp", "weights": "last"}


def arguments(corpus, out, *options):
    return ["pretrain", corpus, "--out", out, "--device", "cpu", *set_options(SETTINGS), *options]


def train_ranks(folder, count, corpus, out, *options):
    ranks = start_ranks(folder, count, *arguments(corpus, out, *options), OMP_NUM_THREADS="1")
    assert [rank.wait() for rank in ranks] == [0] * count, ranks[0].stderr
    return RunFolder(out)


def rewind(source, target, *, step):
    """A copy of a finished run as it was after one of its checkpoints."""
    shutil.copytree(source, target)
    for name in ("results.json", "model.safetensors", "README.md"):
        (target / name).unlink(missing_ok=True)
    for path in (target / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return target


@pytest.fixture(scope="module")
def one(corpus, tmp_path_factory):
    """The run of one process, which shards nothing."""
    out = tmp_path_factory.mktemp("one") / "run"
    headstock.pretrain(corpus, out=out, settings=SETTINGS, device="cpu")
    return RunFolder(out)


@pytest.fixture(scope="module")
def two(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return train_ranks(folder / "rank", 2, corpus, folder / "run")


def curves(run):
    names = ("loss", "valid_loss", "gradient")
    return {name: [row[name] for row in run.read_metrics() if name in row] for name in names}


def test_sharded_processes_learn_what_one_does(one, two):
    for name, curve in curves(one).items():
        assert len(curve) > 2
        assert curves(two)[name] == pytest.approx(curve, abs=1e-5), name
    weights, sharded = one.weights(), two.weights()
    differences = {name: float((weights[name] - sharded[name]).abs().max()) for name in weights}
    assert max(differences.values()) < 1e-3, differences


def test_each_process_writes_its_own_shards(one, two):
    whole, sharded = (run.checkpoints / "step-12" for run in (one, two))
    assert read_checkpoint_shapes(sharded) == read_checkpoint_shapes(whole)
    values = [sum(t.numel() for t in read_tensors(file).values()) for file in sharded.glob("*.safetensors")]
    assert sum(values) == sum(shape.numel() for shape in read_checkpoint_shapes(whole).values())
    assert len(values) == 2 and max(values) < 0.52 * sum(values)
    assert find_damage(sharded) is None and set(json.loads((sharded / "manifest.json").read_text())) == {
        path.name for path in sharded.iterdir() if path.name != "manifest.json"
    }


def test_a_sharded_checkpoint_can_be_used_as_a_run(two):
    checkpoint = headstock.load(two.checkpoints / "step-12").run
    final = two.weights()  # the averaged weights of the last step
    assert all(torch.equal(tensor, final[name]) for name, tensor in checkpoint.weights().items())
    assert checkpoint.shapes() == {name: tensor.shape for name, tensor in final.items()}


def test_shards_that_do_not_fit_together_are_refused(tmp_path, two):
    shutil.copytree(two.checkpoints / "step-12", tmp_path / "step-12")
    shard = next((tmp_path / "step-12").glob("shard-00001-*"))
    shard.rename(tmp_path / "lost")
    with pytest.raises(UserError, match="whole tensor"):
        read_part(tmp_path / "step-12", "model")
    assert "shard-00001" in find_damage(tmp_path / "step-12")
    shard.write_bytes(b"no tensors")
    with pytest.raises(UserError, match="not a complete"):
        read_part(tmp_path / "step-12", "model")


@pytest.mark.parametrize("processes", [1, 4])
def test_checkpoints_load_with_another_number_of_processes(corpus, tmp_path, two, processes):
    out = rewind(two.path, tmp_path / "run", step=8)
    if processes == 1:
        headstock.pretrain(corpus, out=out, settings=SETTINGS, device="cpu", resume=True)
        run = RunFolder(out)
    else:
        run = train_ranks(tmp_path / "rank", processes, corpus, out, "--resume")
    for name, curve in curves(two).items():
        assert curves(run)[name] == pytest.approx(curve, abs=1e-5), name


def save_to_a_full_disk(folder, file):
    """Save a checkpoint of which rank 1 cannot write its shards, and report the error."""
    distributed, settings = init_distributed("cpu", 60.0), TrainSettings(parallel="fsdp")
    model = build_module(small_model(width=32), NextToken(), settings, distributed).model

    def fail(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if distributed.rank == 1:
        HuggingFaceStorageWriter.write_data = fail
    checkpointer = DiskCheckpointer(model, [], None, settings, run=RunFolder(folder), distributed=distributed)
    with pytest.raises(WorkError) as caught:
        checkpointer.save(TrainState(step=3))
    file.write_text(str(caught.value))
    torch.distributed.destroy_process_group()


def test_no_process_saves_if_one_of_them_cannot(tmp_path):
    files = [tmp_path / f"error-{rank}.txt" for rank in range(2)]
    ranks = start_functions(tmp_path / "rank", [(save_to_a_full_disk, tmp_path / "run", file) for file in files])
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    for file in files:
        assert "step 3" in file.read_text() and "No space left" in file.read_text()
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def sharded_sizes(file):
    """Write how many values of weights, gradients and optimizer states this process holds, and how many there are."""
    distributed = init_distributed("cpu", 60.0)
    model = small_model(width=32)
    total = sum(parameter.numel() for parameter in model.parameters())
    module = LossModule(model, NextToken(), smoothing=0.0)
    shard_module(module, distributed.device, distributed.size)
    optimizers = make_optimizers(model, TrainSettings(optimizer="adamw"))
    module(texts(5, 9))["token"].backward()
    update_weights(optimizers, 1.0, to_none=False)
    local = {
        "weights": [p.to_local() for p in model.parameters()],
        "gradients": [p.grad.to_local() for p in model.parameters()],
        "moments": [state["exp_avg"].to_local() for o in optimizers for state in o.state.values()],
    }
    sizes = {name: sum(tensor.numel() for tensor in tensors) for name, tensors in local.items()}
    file.write_text(json.dumps(sizes | {"total": total}))
    torch.distributed.destroy_process_group()


def test_each_process_holds_its_share_of_weights_gradients_and_optimizer_states(tmp_path):
    files = [tmp_path / f"sizes-{rank}.json" for rank in range(2)]
    ranks = start_functions(tmp_path / "rank", [(sharded_sizes, file) for file in files])
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    sizes = [json.loads(file.read_text()) for file in files]
    for name in ("weights", "gradients", "moments"):
        assert sum(size[name] for size in sizes) == sizes[0]["total"]
        assert max(size[name] for size in sizes) <= 0.52 * sizes[0]["total"]


def sharded_dtypes(file, dtype, reduce_dtype, cpu_offload):
    """One step of a module sharded as the settings say: in which dtypes it computed, and what it learned."""
    distributed = init_distributed("cpu", 60.0)
    settings = TrainSettings(
        parallel="fsdp", dtype=dtype, reduce_dtype=reduce_dtype, cpu_offload=cpu_offload, activation_checkpointing=True
    )
    torch.manual_seed(0)
    module = build_module(small_model(width=32), NextToken(), settings, distributed)
    seen = {}
    linear = module.model.backbone.blocks[0].feed.up
    linear.register_forward_pre_hook(lambda layer, _: seen.update(weight=str(layer.weight.dtype)))
    optimizers = make_optimizers(module.model, settings)
    with precision(distributed.device, dtype):
        loss = module(texts(5 + distributed.rank, 9))["token"]
    loss.backward()
    norm = float(update_weights(optimizers, 1.0, to_none=False))
    kept = {str(p.dtype) for p in module.model.parameters()} | {str(p.grad.dtype) for p in module.model.parameters()}
    file.write_text(json.dumps(seen | {"kept": sorted(kept), "norm": norm, "loss": loss.item()}))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """What `sharded_dtypes` reports for three policies, in two processes each."""
    policies = [("float32", "float32", False), ("bfloat16", "float32", True), ("bfloat16", "bfloat16", False)]
    folder, ranks = tmp_path_factory.mktemp("policies"), []
    for policy in policies:
        files = [folder / f"{'-'.join(map(str, policy))}-{rank}.json" for rank in range(2)]
        ranks += start_functions(folder / files[0].stem, [(sharded_dtypes, file, *policy) for file in files])
    assert [rank.wait() for rank in ranks] == [0] * 6, ranks[0].stderr
    return {policy: json.loads((folder / f"{'-'.join(map(str, policy))}-0.json").read_text()) for policy in policies}


def test_weights_are_gathered_in_the_precision_of_the_run_and_kept_in_float32(policies):
    whole, mixed, reduced = policies.values()
    assert [row["weight"] for row in policies.values()] == ["torch.float32", "torch.bfloat16", "torch.bfloat16"]
    assert all(row["kept"] == ["torch.float32"] for row in policies.values())
    assert mixed["loss"] == pytest.approx(whole["loss"], rel=1e-2) and mixed["loss"] != whole["loss"]
    assert mixed["norm"] == pytest.approx(whole["norm"], rel=1e-2)
    # gradients summed in bfloat16 are rounded once more: the setting arrives
    assert reduced["loss"] == mixed["loss"] and reduced["norm"] != mixed["norm"]


def test_offloaded_recomputing_and_saving_processes_learn_what_one_does(corpus, tmp_path, one):
    options = ["--set=cpu_offload=true", "--set=activation_checkpointing=true", "--set=async_save=true"]
    run = train_ranks(tmp_path / "rank", 2, corpus, tmp_path / "run", *options)
    assert find_damage(run.checkpoints / "step-12") is None
    for name, curve in curves(one).items():
        assert curves(run)[name] == pytest.approx(curve, abs=1e-5), name


def test_what_cannot_be_sharded_is_refused():
    with pytest.raises(UserError, match="unfreeze"):
        TrainSettings(parallel="fsdp", unfreeze=1.0)
    with pytest.raises(UserError, match=r"(?s)cpu_offload.*reduce_dtype"):
        TrainSettings(cpu_offload=True, reduce_dtype="bfloat16")
    with pytest.raises(UserError, match="several processes"):
        check_settings(TrainSettings(parallel="fsdp", cpu_offload=True), DistributedContext(torch.device("cpu")))
    lstm = Model(Recurrent(RecurrentConfig(vocabulary=13, depth=1, width=8, hidden=8)), {})
    with pytest.raises(UserError, match="use ddp"):
        build_module(lstm, NextToken(), TrainSettings(parallel="fsdp"), DistributedContext(torch.device("cpu"), 0, 2))
