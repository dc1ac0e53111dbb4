"""Pretrain small language models on your own text, fine-tune them, and measure whether pretraining was worth it.

The Python API has the verbs of the command line: `headstock.pretrain(...)`, `headstock.load(run).generate(...)`.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# imported on first use, because importing torch takes seconds
_HOMES = {
    "plan": "headstock.planner.planner",
    "pretrain": "headstock.train.pretrain",
    "finetune": "headstock.train.finetune",
    "distil": "headstock.experiments.distil",
    "ensemble": "headstock.experiments.ensemble",
    "lr_find": "headstock.train.lr_finder",
    "compare": "headstock.experiments.compare",
    "sweep": "headstock.experiments.sweep",
    "export_run": "headstock.interop",
    "import_run": "headstock.interop",
    "load": "headstock.inference.pipeline",
    "Pipeline": "headstock.inference.pipeline",
    "read_corpus": "headstock.data.corpus",
    "train_tokenizer": "headstock.data.tokenizer",
    "open_tokenizer": "headstock.data.tokenizer",
    "UserError": "headstock.errors",
    "WorkError": "headstock.errors",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headstock' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
