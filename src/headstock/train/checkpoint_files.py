"""The files of a checkpoint: whole tensors, or the shards of each process, in safetensors with a manifest.

    model.safetensors, optimizer.safetensors, average.safetensors     one process or DDP: rank 0 writes them
    shard-00001-model-00001-of-00001.safetensors, shard-00002-...     FSDP: each process writes its own
    progress.json, manifest.json                                      the training state; size and SHA-256 of each file

Shards are written and read by torch.distributed.checkpoint in its safetensors format, whose file headers say where a
shard belongs. Its default format has a pickle among its files; this one has none. A tensor is named PART/NAME.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Size, Tensor

from headstock.errors import UserError
from headstock.io import atomic_folder, checksum, write_json
from headstock.train.sharding import shard_like
from headstock.train.tensors import MANIFEST, read_shapes, read_tensors, write_tensors

# torch.distributed.checkpoint is imported where it is used: that takes a second

PARTS = ("model", "optimizer", "average")
PROGRESS = "progress.json"
SHARDS = "shard-*.safetensors"
Result = TypeVar("Result")


def is_sharded(path: Path) -> bool:
    return any(path.glob(SHARDS))


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a folder of whole tensors atomically; the manifest is the last file."""
    with atomic_folder(path) as folder:
        for part in PARTS:
            if own := tensors_of(part, tensors):
                write_tensors(folder / f"{part}.safetensors", own)
        write_json(folder / PROGRESS, state)
        write_json(folder / MANIFEST, {file.name: checksum(file) for file in sorted(folder.iterdir())})


def write_sharded_checkpoint(
    path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any], group: dist.ProcessGroup
) -> None:
    """Write a folder atomically, to which every process of the group adds its shards; all of them must call this.

    If one of them fails, the folder is not created, and all raise its error.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    with ExitStack() as stack:
        folder = on_main(group, lambda: stack.enter_context(atomic_folder(path)))
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        try:
            dcp.save(dict(tensors), storage_writer=writer, process_group=group)
        except dcp.CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None
        own = {file.name: checksum(file) for file in folder.glob(f"shard-{dist.get_rank(group) + 1:05}-*")}
        checksums: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(checksums, own, group=group)

        def finish() -> None:
            write_json(folder / PROGRESS, state)
            own = {PROGRESS: checksum(folder / PROGRESS)}
            write_json(folder / MANIFEST, {name: sums[name] for sums in (*checksums, own) for name in sums})
            stack.close()  # gives the folder its name

        on_main(group, finish)


def on_main(group: dist.ProcessGroup, function: Callable[[], Result]) -> Result:
    """Call a function in rank 0; every process returns its result, or raises its error."""
    outcome: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            outcome = [function()]
        except OSError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    if isinstance(outcome[0], OSError):
        raise outcome[0]
    return outcome[0]


def read_checkpoint_shapes(path: Path) -> dict[str, Size]:
    """The shape of each whole tensor, from the file headers alone."""
    if is_sharded(path):
        return {name: entry.size for name, entry in read_shard_metadata(path).items()}
    files = {part: path / f"{part}.safetensors" for part in PARTS}
    shapes = {part: read_shapes(file) for part, file in files.items() if file.is_file()}
    return {f"{part}/{name}": shape for part in shapes for name, shape in shapes[part].items()}


def read_part(path: Path, part: str) -> dict[str, Tensor]:
    """The whole tensors of a part by name; none if the checkpoint lacks the part."""
    if is_sharded(path):
        metadata = tensors_of(part, read_shard_metadata(path))
        tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.items()}
        load_shards(path, {f"{part}/{name}": tensor for name, tensor in tensors.items()})
        return tensors
    file = path / f"{part}.safetensors"
    return read_tensors(file) if file.is_file() else {}


@torch.no_grad()
def load_checkpoint(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copy a checkpoint into tensors of the same shapes, of which each process may have all rows or its own."""
    if is_sharded(path):
        load_shards(path, tensors)
        return
    for part in PARTS:
        if own := tensors_of(part, tensors):
            with safe_open(path / f"{part}.safetensors", framework="pt") as file:
                for name, tensor in own.items():
                    tensor.copy_(shard_like(file.get_tensor(name), tensor))


def load_shards(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copy the rows that each tensor needs, from whichever files have them. Processes do not communicate."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    with shard_errors(path), warnings.catch_warnings(action="ignore", category=UserWarning):  # "a single process"
        dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)


def read_shard_metadata(path: Path) -> dict[str, Any]:
    """DCP's description of each tensor: size, dtype and the positions of its shards, which must cover it exactly."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    with shard_errors(path):
        metadata: dict[str, Any] = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    for name, entry in metadata.items():
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise UserError(f"{path}: its shards of {name} do not make a whole tensor")
    return metadata


@contextmanager
def shard_errors(path: Path) -> Iterator[None]:
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except (SafetensorError, CheckpointException, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: is not a complete sharded checkpoint ({error})") from None


def tensors_of(part: str, tensors: Mapping[str, Result]) -> dict[str, Result]:
    """The entries of a part, without its name in front of theirs."""
    prefix = f"{part}/"
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def copy_to_host(tensors: Mapping[str, Tensor], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in main memory (pinned, if they come from a GPU), in the buffers of the last call where there are any."""
    on_gpu = False
    for name, tensor in tensors.items():
        if name not in buffers:
            buffers[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        source, target = (t.to_local() if hasattr(t, "to_local") else t for t in (tensor, buffers[name]))
        target.copy_(source, non_blocking=True)
        on_gpu |= tensor.is_cuda
    if on_gpu:
        torch.cuda.current_stream().synchronize()
    return {name: buffers[name] for name in tensors}
