"""Bundled runs: pretrained runs that ship with the package, in half precision.

python -m headstock.train.stocks RUN FOLDER     # packs one
"""

import shutil
import sys
from pathlib import Path

import torch

from headstock.io import atomic_folder
from headstock.train.model_card import write_card
from headstock.train.run_folder import RunFolder, open_run

COPIED = ("config.json", "data.json", "tokenizer.json")


def pack(run: RunFolder, folder: Path) -> None:
    """Copy a finished run with its weights in half precision, without checkpoints and metrics."""
    with atomic_folder(folder) as new:
        for name in COPIED:
            shutil.copyfile(run.path / name, new / name)
        stock = RunFolder(new)
        stock.write_results(run.results() | {"run": folder.name})
        halves = {
            name: tensor.to(torch.float16) if tensor.is_floating_point() else tensor
            for name, tensor in run.weights().items()
        }
        stock.save_weights(halves)
        stock.add_to_manifest(*COPIED)
    write_card(RunFolder(folder))


if __name__ == "__main__":
    source, target = sys.argv[1:]
    pack(open_run(source), Path(target))
