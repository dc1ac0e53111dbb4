"""Imported once by the server of forks, so that commands need not load and compute the same again.

No thread may start here: it would be missing in the forked processes.
"""

import contextlib
import copy
import functools

import sympy.combinatorics  # noqa: F401  loaded by the first formula
import typer.main

import headstock.api  # noqa: F401
from headstock.cli.app import app, find_verbs
from headstock.cost.parameter_table import formula_table
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.model import Model
from headstock.report import charts, render
from headstock.report.theme import png_of, svg_of
from headstock.tasks.causal import CausalConfig, CausalLM
from tests.conftest import TINY


def compile_templates() -> None:
    for package in ("headstock.report", "headstock.explain"):
        environment = render.environment(package)
        for name in environment.list_templates(extensions=["html"]):
            environment.get_template(name)


def load_fonts() -> None:
    figure = charts.loss([(1, 2.0), (2, 1.0)], [(2, 1.0)], wide=True)
    svg_of(figure)
    png_of(figure)


def simplify_formulas() -> None:
    """Results of sympy stay in its cache."""
    tokenizer = train_tokenizer(["text"], TokenizerSettings(kind="char"))
    sizes = {name: TINY[name] for name in ("depth", "width", "heads", "hidden", "context", "vocabulary")}
    backbone, task = Transformer(TransformerConfig(**sizes)), CausalLM(CausalConfig(), tokenizer)
    formula_table(Model(backbone, task.heads(backbone)))


def build_parsers() -> None:
    find_verbs()
    typer.main.get_command(app)


def list_onnx_operators() -> None:
    """The exporter of PyTorch lists all operators for each graph, in 0.8 s; let it copy one list."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    listed = functools.cache(ONNXRegistry.from_torchlib)

    def from_torchlib(**options: int) -> ONNXRegistry:
        registry = copy.copy(listed(**options))
        registry.functions = {target: list(versions) for target, versions in registry.functions.items()}
        return registry

    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)


compile_templates()
load_fonts()
simplify_formulas()
build_parsers()
with contextlib.suppress(ImportError, AttributeError):
    list_onnx_operators()
