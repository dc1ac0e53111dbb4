"""Plans a run: the largest model that a text, a machine and a time budget allow, and its cost."""

import logging
import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from headstock import config
from headstock.data.corpus import read_corpus
from headstock.errors import UserError
from headstock.model.backbone import BACKBONES
from headstock.planner import probe as probing
from headstock.planner import rules
from headstock.planner.corpus_size import CorpusSize, TokenCounts, count_tokens, measure_corpus
from headstock.planner.forecast import (
    CostEstimate,
    affordable_steps,
    estimate_costs,
    fit_micro_batch,
    fits_in_memory,
    run_seconds,
)
from headstock.planner.machine import Machine, busy_warning, measure_machine
from headstock.planner.rules import TOKENS_PER_PARAMETER, TextStatistics, max_epochs, planned_objectives
from headstock.train.budget import validation_tokens
from headstock.train.distributed import choose_device
from headstock.train.execution import LAUNCH_SECONDS, MIN_COMPILED_SECONDS
from headstock.train.resolve import with_direction
from headstock.train.settings import DataSettings, RunConfig, make_config

logger = logging.getLogger(__name__)

VALID_FRACTION = DataSettings().valid_fraction
STEP_SHARE = 0.9  # of the time budget; the rest is for validations and checkpoints
RETRY_FACTOR = 1.5  # plan again if a step is this much slower or faster than forecast
MAX_PROBES = 3
SMALLER_PLAN = "it was measured slower than it is when idle, and the plan is smaller for it"


@dataclass(frozen=True)
class Candidate:
    """A model size for the text, and how many tokens there is time to train on."""

    label: str
    objective: str
    sections: dict[str, Any]  # settings of tokenizer, task, model and train
    tokens: float
    text: TextStatistics

    @property
    def epochs(self) -> float:
        return self.tokens / max(1.0, self.text.tokens)


@dataclass(frozen=True)
class TrainingPlan:
    config: dict[str, Any]  # settings by section, as in a recipe
    candidate: Candidate
    steps: int
    costs: CostEstimate
    machine: Machine
    valid_tokens: float  # per validation
    minutes: float | None
    exact: bool  # True if the whole corpus was read

    @property
    def seconds(self) -> float:
        """Duration as the run will report it: steps, validations, checkpoints and compilation."""
        return run_seconds(self.costs, self.steps, self.valid_tokens)

    @property
    def tokens_per_second(self) -> float:
        """Speed as the run will report it: with the slow first steps, without validations and checkpoints."""
        return self.tokens / (self.costs.startup_seconds + self.steps * self.costs.step_seconds)

    @property
    def tokens(self) -> int:
        return self.steps * self.costs.step_tokens

    @property
    def epochs(self) -> float:
        return self.tokens / max(1.0, self.candidate.text.tokens)

    def to_dict(self) -> dict[str, Any]:
        """The plan as `headstock plan --json` prints it."""
        text = self.candidate.text
        return {
            "parameters": self.costs.parameters,
            "flops": self.costs.flops_per_token * self.tokens,
            "seconds": round(self.seconds, 1),
            "peak_bytes": self.costs.peak_bytes,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "steps": self.steps,
            "tokens": self.tokens,
            "passes": round(self.epochs, 3),
            "text": {"bytes": text.bytes, "tokens": round(text.tokens), "exact": self.exact},
            "probed": self.costs.probed,
            "measured_parts": list(self.costs.measured_parts),
            "device": self.machine.name,
            "reasons": rules.REASONS,
            "config": self.config,
        }


def plan(
    corpus: str | Path | Sequence[str | Path],
    *,
    device: str = "auto",
    minutes: float | None = None,
    objective: str | None = None,
    probe: bool = False,
    documents: str | None = None,
    column: str | None = None,
    seed: int | None = None,
) -> TrainingPlan:
    """Plan a run for this text. `probe` measures real steps and corrects the forecast."""
    if minutes is not None and minutes <= 0:
        raise UserError(f"--minutes {minutes}: must be above 0")
    if objective is not None and objective not in planned_objectives():
        raise UserError(f"--objective {objective}: must be one of {', '.join(planned_objectives())}")
    paths = [str(corpus)] if isinstance(corpus, str | Path) else [str(path) for path in corpus]
    if not paths:
        raise UserError("no text to plan for: name a file, folder or glob")
    data: dict[str, Any] = {"corpus": paths}
    data |= {key: value for key, value in (("documents", documents), ("column", column)) if value}
    text = measure_corpus(read_corpus(paths, documents=documents or "auto", column=column or "text"))  # type: ignore[arg-type]
    torch_device = choose_device(device)
    machine = measure_machine(torch_device)
    if warning := busy_warning(torch_device, effect=SMALLER_PLAN):
        logger.warning(warning)
    planner = Planner(text, data, minutes, objective, seed)
    candidate, counts = planner.choose(machine)
    proposal = planner.plan(candidate, counts, machine)
    cold_start = 0.0
    for remaining in reversed(range(MAX_PROBES if probe else 0)):
        forecast = proposal.costs
        costs = probing.probe(
            planner.build(proposal.config, counts),
            counts.tokenizer,
            text.sample,
            forecast,
            valid_tokens=proposal.valid_tokens,
            steps_for=partial(planner.steps, candidate, valid_tokens=proposal.valid_tokens),
            device=torch_device,
        )
        cold_start = max(cold_start, costs.cold_start_seconds)  # later probes reuse the kernels of the first
        costs = replace(costs, cold_start_seconds=cold_start)
        proposal = planner.plan(candidate, counts, machine, costs)
        ratio = costs.step_seconds / forecast.step_seconds
        if max(ratio, 1 / ratio) < RETRY_FACTOR or minutes is None or not remaining:
            break
        machine = replace(machine, slowdown=machine.slowdown * ratio)
        candidate, counts = planner.choose(machine)
        revised = planner.plan(candidate, counts, machine)
        if shape(revised) == shape(proposal):
            break
        logger.info("a step takes %.2f times as long as forecast; trying %s instead", ratio, candidate.label)
        proposal = revised
    return proposal


def shape(plan: TrainingPlan) -> tuple[Any, int]:
    return plan.config["model"], plan.config["train"]["batch"]


@dataclass(frozen=True)
class Planner:
    """What to plan for."""

    corpus: CorpusSize
    data: dict[str, Any]  # settings of the data section
    minutes: float | None
    objective: str | None
    seed: int | None

    def choose(self, machine: Machine) -> tuple[Candidate, TokenCounts]:
        """Choose a model, with tokens counted in its own vocabulary, which is guessed at first."""
        vocabulary = rules.vocabulary_size(512 if self.minutes is None else 256, self.corpus.bytes)
        for _ in range(2):
            counts = count_tokens(self.corpus, vocabulary)
            candidate = self.best_candidate(machine, self.statistics(counts), counts)
            if candidate.sections["tokenizer"]["vocabulary"] == vocabulary:
                break
            vocabulary = candidate.sections["tokenizer"]["vocabulary"]
        else:
            counts = count_tokens(self.corpus, vocabulary)
            candidate = replace(candidate, text=self.statistics(counts))
        return candidate, counts

    def statistics(self, counts: TokenCounts) -> TextStatistics:
        return TextStatistics(
            bytes=self.corpus.bytes,
            documents=self.corpus.documents,
            tokens=self.corpus.bytes / counts.bytes_per_token * (1 - VALID_FRACTION),
            p90_length=counts.p90_length,
            median_length=counts.median_length,
        )

    def best_candidate(self, machine: Machine, text: TextStatistics, counts: TokenCounts) -> Candidate:
        """The candidate for the requested objective, or else for the one that suits the number of epochs."""
        if self.objective is not None:
            return self.largest_candidate(machine, text, counts, self.objective)
        if self.minutes is not None:
            candidate = self.largest_candidate(machine, text, counts, "causal")
            if candidate.epochs < max_epochs("causal"):
                return candidate
        return self.largest_candidate(machine, text, counts, rules.REPEATED_TEXT_OBJECTIVE)

    def largest_candidate(
        self, machine: Machine, text: TextStatistics, counts: TokenCounts, objective: str
    ) -> Candidate:
        """The largest model that fits in memory and trains on enough tokens for its parameters."""
        best: Candidate | None = None
        for size in rules.model_sizes(objective, text):
            run_config = self.build(size.sections | {"train": size.sections["train"] | {"batch": 16}}, counts)
            costs = estimate_costs(run_config, machine)
            tokens = max_epochs(objective) * text.tokens
            if self.minutes is not None:
                budget = 60 * self.minutes
                seconds = max(STEP_SHARE * budget - costs.startup_seconds, 0.1 * budget)
                tokens = min(tokens, seconds * costs.tokens_per_second)
            has_enough_tokens = tokens >= TOKENS_PER_PARAMETER * costs.non_embedding_parameters
            if best is not None and not (has_enough_tokens and fits_in_memory(with_one_row(run_config), machine)):
                break
            best = Candidate(size.label, objective, size.sections, tokens, text)
        assert best is not None
        return best

    def build(self, sections: dict[str, Any], counts: TokenCounts) -> RunConfig:
        """The run of these settings; a small text may give a smaller vocabulary than they ask for."""
        vocabulary = sections["tokenizer"]["vocabulary"]
        if self.corpus.sample_is_complete:
            vocabulary = min(vocabulary, counts.tokenizer.vocabulary)
        return make_config(with_direction(config.merge(sections, {"model": {"vocabulary": vocabulary}})))

    def plan(
        self, candidate: Candidate, counts: TokenCounts, machine: Machine, measured: CostEstimate | None = None
    ) -> TrainingPlan:
        """The settings of a candidate, with measured costs or else a forecast."""
        settings = deepcopy(config.merge({"data": self.data}, candidate.sections))
        model, train = settings["model"], settings["train"]
        length = train.get("length") or model.get("context") or 256
        if "batch" not in train:  # presets have their own
            train["batch"] = rules.batch_size(candidate.tokens, length)
            model["dropout"] = rules.dropout(candidate.objective, candidate.epochs)
        train["valid_tokens"] = validation_tokens(candidate.tokens)
        run_config = self.build(settings, counts)
        if machine.device == "cuda" and self.is_worth_compiling(candidate, run_config, machine, length):
            train["compile"] = True  # decided here, so that a probe is compiled if the run will be
            run_config = self.build(settings, counts)
        run_config = fit_micro_batch(run_config, machine)
        if run_config.train.micro_batch:
            train["micro_batch"] = run_config.train.micro_batch
        if measured is not None and measured.mode is not None and machine.device == "cuda":
            train["compile"] = probing.COMPILE_SETTING[measured.mode]  # the run uses the mode of the probe
        if self.seed is not None:
            train["seed"] = self.seed
        costs = measured or estimate_costs(run_config, machine)
        held_out = candidate.text.tokens * VALID_FRACTION / (1 - VALID_FRACTION)
        valid_tokens = min(train["valid_tokens"], rules.validation_tokens(candidate.objective, held_out))
        train["steps"] = steps = self.steps(candidate, costs, valid_tokens=valid_tokens)
        return TrainingPlan(settings, candidate, steps, costs, machine, valid_tokens, self.minutes, self.corpus.exact)

    def is_worth_compiling(self, candidate: Candidate, run_config: RunConfig, machine: Machine, length: int) -> bool:
        """Whether a run on a GPU is long enough, and its model large enough, for torch.compile to pay off."""
        step = estimate_costs(run_config, machine).step_seconds
        seconds = step * candidate.tokens / (run_config.train.batch * length)
        if self.minutes is not None:
            seconds = min(seconds, 60 * self.minutes)
        supported = BACKBONES.get(run_config.family).supports_compile
        return supported and step > LAUNCH_SECONDS * run_config.model.depth and seconds >= MIN_COMPILED_SECONDS

    def steps(self, candidate: Candidate, costs: CostEstimate, *, valid_tokens: float) -> int:
        """As many steps as there is time for, up to the number of epochs that pay off."""
        steps = math.ceil(max_epochs(candidate.objective) * candidate.text.tokens / costs.step_tokens)
        return steps if self.minutes is None else min(steps, affordable_steps(costs, 60 * self.minutes, valid_tokens))


def with_one_row(run_config: RunConfig) -> RunConfig:
    return replace(run_config, train=replace(run_config.train, batch=1, micro_batch=None))
