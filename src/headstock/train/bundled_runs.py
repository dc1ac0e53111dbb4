"""The pretrained runs that ship with the package: facts about them, and packing a run in half precision.

python -m headstock.train.bundled_runs RUN FOLDER
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from headstock.data.catalog import licence_of
from headstock.io import atomic_folder
from headstock.train.model_card import write_card
from headstock.train.run_folder import RunFolder, open_run

COPIED = ("config.json", "data.json", "tokenizer.json")


def pack(run: RunFolder, folder: Path) -> None:
    """Copy a finished run with its weights in half precision, without checkpoints, metrics and excerpts of the text."""
    with atomic_folder(folder) as new:
        for name in COPIED:
            shutil.copyfile(run.path / name, new / name)
        packed = RunFolder(new)
        results = run.results() | {"run": folder.name}
        packed.write_results({name: value for name, value in results.items() if name != "samples"})
        weights = run.weights()
        packed.save_weights({name: t.to(torch.float16) if t.is_floating_point() else t for name, t in weights.items()})
        packed.add_to_manifest(*COPIED)
    write_card(RunFolder(folder))


def describe_bundled_run(name: str) -> dict[str, Any]:
    """The facts about a bundled run that help to choose one."""
    run = open_run(name)
    settings, data, results = run.config(), run.data(), run.results()
    return {
        "name": name,
        "family": settings["model"]["family"],
        "objective": settings["task"]["name"],
        "parameters": results["parameters"]["total"],
        "context": settings["model"].get("context"),
        "vocabulary": settings["model"]["vocabulary"],
        "perplexity": results["perplexity"],
        "text": list(data["corpus"]),
        "text_bytes": data["train_bytes"],
        "licence": [licence_of(corpus) for corpus in data["corpus"]],
        "bytes": sum(file.stat().st_size for file in run.path.iterdir() if file.is_file()),
    }


if __name__ == "__main__":
    pack(open_run(sys.argv[1]), Path(sys.argv[2]))
