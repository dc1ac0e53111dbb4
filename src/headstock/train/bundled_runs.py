"""Packs a pretrained run in half precision, as those that ship with the package.

python -m headstock.train.bundled_runs RUN FOLDER
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
        packed = RunFolder(new)
        packed.write_results(run.results() | {"run": folder.name})
        weights = run.weights()
        packed.save_weights({name: t.to(torch.float16) if t.is_floating_point() else t for name, t in weights.items()})
        packed.add_to_manifest(*COPIED)
    write_card(RunFolder(folder))


if __name__ == "__main__":
    pack(open_run(sys.argv[1]), Path(sys.argv[2]))
