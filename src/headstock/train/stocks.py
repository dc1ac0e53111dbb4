"""Stocks: pretrained runs that ship with the package, in half precision and without what only training needs.

python -m headstock.train.stocks RUN FOLDER     # makes one
"""

import shutil
import sys
from pathlib import Path

import torch

from headstock.io import atomic_folder
from headstock.train.model_card import write_card
from headstock.train.run_folder import RunFolder, open_run

KEPT = ("config.json", "data.json", "tokenizer.json")


def pack(run: RunFolder, folder: Path) -> None:
    """A finished run as a stock: its weights rounded to half precision, and the files that say what it is."""
    with atomic_folder(folder) as beside:
        for name in KEPT:
            shutil.copyfile(run.path / name, beside / name)
        stock = RunFolder(beside)
        stock.write_results(run.results() | {"run": folder.name})
        halves = {
            name: tensor.to(torch.float16) if tensor.is_floating_point() else tensor
            for name, tensor in run.weights().items()
        }
        stock.save_weights(halves)
        stock.add_to_manifest(*KEPT)
    write_card(RunFolder(folder))


if __name__ == "__main__":
    source, target = sys.argv[1:]
    pack(open_run(source), Path(target))
