"""Pretrain small language models on your own text, fine-tune them, and measure whether pretraining was worth it.

The Python API has the verbs of the command line: `headstock.pretrain(...)`, `headstock.load(run).generate(...)`. The
names of this module are public, everything else is private; docs/reference/api.md describes them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstock.api.explain import explain_attention as explain_attention
    from headstock.api.explain import explain_context as explain_context
    from headstock.api.explain import explain_gradients as explain_gradients
    from headstock.api.explain import explain_heads as explain_heads
    from headstock.api.explain import explain_hooks as explain_hooks
    from headstock.api.explain import explain_induction as explain_induction
    from headstock.api.explain import explain_layer as explain_layer
    from headstock.api.explain import explain_logits as explain_logits
    from headstock.api.explain import explain_mask as explain_mask
    from headstock.api.explain import explain_model as explain_model
    from headstock.api.explain import explain_parameters as explain_parameters
    from headstock.api.explain import explain_patch as explain_patch
    from headstock.api.explain import explain_positions as explain_positions
    from headstock.api.explain import explain_prediction as explain_prediction
    from headstock.api.explain import explain_residual as explain_residual
    from headstock.api.explanation import Explanation as Explanation
    from headstock.api.measurements import compare as compare
    from headstock.api.measurements import ensemble as ensemble
    from headstock.api.measurements import lr_find as lr_find
    from headstock.api.measurements import plan as plan
    from headstock.api.measurements import sweep as sweep
    from headstock.api.results import ArmDifference as ArmDifference
    from headstock.api.results import ArmScore as ArmScore
    from headstock.api.results import Comparison as Comparison
    from headstock.api.results import EnsembleResult as EnsembleResult
    from headstock.api.results import Export as Export
    from headstock.api.results import ImportedRun as ImportedRun
    from headstock.api.results import LRCurve as LRCurve
    from headstock.api.results import Plan as Plan
    from headstock.api.results import RunResult as RunResult
    from headstock.api.results import SweepPoint as SweepPoint
    from headstock.api.results import SweepResult as SweepResult
    from headstock.api.runs import distil as distil
    from headstock.api.runs import export_run as export_run
    from headstock.api.runs import finetune as finetune
    from headstock.api.runs import import_run as import_run
    from headstock.api.runs import pretrain as pretrain
    from headstock.api.text import download as download
    from headstock.api.text import open_tokenizer as open_tokenizer
    from headstock.api.text import read_corpus as read_corpus
    from headstock.api.text import train_tokenizer as train_tokenizer
    from headstock.decoding.fill_mask import FilledText as FilledText
    from headstock.errors import UserError as UserError
    from headstock.errors import WorkError as WorkError
    from headstock.inference.evaluation import Evaluation as Evaluation
    from headstock.inference.generate import Generation as Generation
    from headstock.inference.pipeline import Pipeline as Pipeline
    from headstock.inference.pipeline import load as load
    from headstock.inference.score import TextScore as TextScore
    from headstock.inference.search import Hit as Hit
    from headstock.inference.suggest import Suggestion as Suggestion
    from headstock.results import Result as Result
    from headstock.results import ResultList as ResultList
    from headstock.tasks.answer import AnswerPrediction as AnswerPrediction
    from headstock.tasks.classify import ClassPrediction as ClassPrediction
    from headstock.tasks.ordinal import OrdinalPrediction as OrdinalPrediction
    from headstock.tasks.predictions import Prediction as Prediction
    from headstock.tasks.regress import ValuePrediction as ValuePrediction
    from headstock.tasks.tag import TagPrediction as TagPrediction
    from headstock.tasks.translate import TranslationPrediction as TranslationPrediction
    from headstock.train.callbacks import Event as Event

__version__ = "0.1.0"

# where each public name is defined; imported on first use, because importing torch takes seconds
_NAMES_BY_MODULE = {
    "headstock.api.explain": (
        "explain_attention explain_context explain_gradients explain_heads explain_hooks "
        "explain_induction explain_layer explain_logits explain_mask explain_model "
        "explain_parameters explain_patch explain_positions explain_prediction explain_residual"
    ),
    "headstock.api.explanation": "Explanation",
    "headstock.api.measurements": "compare ensemble lr_find plan sweep",
    "headstock.api.results": (
        "ArmDifference ArmScore Comparison EnsembleResult Export ImportedRun "
        "LRCurve Plan RunResult SweepPoint SweepResult"
    ),
    "headstock.api.runs": "distil export_run finetune import_run pretrain",
    "headstock.api.text": "download open_tokenizer read_corpus train_tokenizer",
    "headstock.decoding.fill_mask": "FilledText",
    "headstock.errors": "UserError WorkError",
    "headstock.inference.evaluation": "Evaluation",
    "headstock.inference.generate": "Generation",
    "headstock.inference.pipeline": "Pipeline load",
    "headstock.inference.score": "TextScore",
    "headstock.inference.search": "Hit",
    "headstock.inference.suggest": "Suggestion",
    "headstock.results": "Result ResultList",
    "headstock.tasks.answer": "AnswerPrediction",
    "headstock.tasks.classify": "ClassPrediction",
    "headstock.tasks.ordinal": "OrdinalPrediction",
    "headstock.tasks.predictions": "Prediction",
    "headstock.tasks.regress": "ValuePrediction",
    "headstock.tasks.tag": "TagPrediction",
    "headstock.tasks.translate": "TranslationPrediction",
    "headstock.train.callbacks": "Event",
}
_HOMES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}
__all__ = ["__version__", *sorted(_HOMES)]

if not TYPE_CHECKING:  # a type checker must refuse names that do not exist

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'headstock' has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
