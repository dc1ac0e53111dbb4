"""Grow a language model from raw text, graft task heads onto it, and say with numbers whether that paid.

The words of the command line are here too: `headstock.pretrain(...)`, `headstock.load(run).generate(...)`.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# found on first use: `import headstock` must not cost the seconds that torch takes
_HOMES = {
    "plan": "headstock.planner.planner",
    "pretrain": "headstock.train.pretrain",
    "finetune": "headstock.train.finetune",
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
