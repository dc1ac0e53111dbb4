"""Before a run: how large a model this text, this machine and these minutes allow, and what it will take."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from headstock import config
from headstock.data.corpus import read_corpus
from headstock.errors import UserError
from headstock.model.backbone import BACKBONES
from headstock.planner import rules
from headstock.planner.corpus_size import Counted, Extent, count, extent
from headstock.planner.forecast import Costs, costs, fits, fitted, seconds_of, steps_in
from headstock.planner.machine import Machine, look_at
from headstock.planner.probe import WORDS
from headstock.planner.probe import probe as try_out
from headstock.planner.rules import MOST_PASSES, TOKENS_PER_WEIGHT, Text
from headstock.train.budget import valid_tokens_of
from headstock.train.compile import CALLS, WORTH
from headstock.train.distributed import choose_device
from headstock.train.pretrain import with_direction
from headstock.train.settings import DataSettings, RunConfig, make_config

Say = Callable[[str], None]
VALID = DataSettings().valid_fraction
FREE = 0.9  # of the minutes are for steps; the rest for validations and checkpoints
WRONG = 1.5  # times slower or faster than forecast, and the size is chosen again
ROUNDS = 3


@dataclass(frozen=True)
class Choice:
    """A model for the text, and how much of it there is time to read."""

    label: str
    objective: str
    tree: dict[str, Any]
    tokens: float  # to be read
    text: Text

    @property
    def passes(self) -> float:
        return self.tokens / max(1.0, self.text.tokens)


@dataclass(frozen=True)
class Plan:
    tree: dict[str, Any]  # sections, as a recipe has them
    choice: Choice
    steps: int
    costs: Costs
    machine: Machine
    valid_tokens: float  # in each validation
    minutes: float | None
    exact: bool  # the text was read through

    @property
    def seconds(self) -> float:
        """What the run will tell as its own: steps, validations and checkpoints, recording and compiling among them."""
        return seconds_of(self.costs, self.steps, self.valid_tokens)

    @property
    def tokens_per_second(self) -> float:
        """Likewise: of all steps, the slow ones at the beginning too, without validations and checkpoints."""
        return self.tokens / (self.costs.starting + self.steps * self.costs.step)

    @property
    def tokens(self) -> int:
        return self.steps * self.costs.tokens

    @property
    def passes(self) -> float:
        return self.tokens / max(1.0, self.choice.text.tokens)

    def plain(self) -> dict[str, Any]:
        """What --json says of it."""
        return {
            "parameters": self.costs.parameters,
            "flops": self.costs.flops * self.tokens,
            "seconds": round(self.seconds, 1),
            "peak_bytes": self.costs.peak,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "steps": self.steps,
            "tokens": self.tokens,
            "passes": round(self.passes, 3),
            "text": {"bytes": self.choice.text.bytes, "tokens": round(self.choice.text.tokens), "exact": self.exact},
            "probed": self.costs.measured,
            "device": self.machine.name,
            "reasons": rules.REASONS,
            "config": self.tree,
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
    say: Say = lambda line: None,
) -> Plan:
    """A run for this text: its settings and what they will take; `probe` makes real steps and corrects the forecast."""
    if minutes is not None and minutes <= 0:
        raise UserError(f"--minutes {minutes}: must be above 0")
    if objective is not None and objective not in MOST_PASSES:
        raise UserError(f"--objective {objective}: must be one of {', '.join(MOST_PASSES)}")
    paths = [str(corpus)] if isinstance(corpus, str | Path) else [str(path) for path in corpus]
    if not paths:
        raise UserError("no text to plan for: name a file, folder or glob")
    data: dict[str, Any] = {"corpus": paths}
    data |= {key: value for key, value in (("documents", documents), ("column", column)) if value}
    read = read_corpus(paths, documents=documents or "auto", column=column or "text")  # type: ignore[arg-type]
    found = extent(read)
    chosen_device = choose_device(device)
    machine = look_at(chosen_device)
    planner = Planner(found, data, minutes, objective, seed)
    choice, counted = planner.choose(machine)
    made = planner.plan(choice, counted, machine)
    cold = 0.0
    for left in reversed(range(ROUNDS if probe else 0)):
        chosen, forecast = planner.build(made.tree, counted), made.costs
        tried = try_out(
            chosen,
            counted.tokenizer,
            found.sample,
            forecast,
            valid_tokens=made.valid_tokens,
            steps_for=partial(planner.steps, choice, valid_tokens=made.valid_tokens),
            device=chosen_device,
            say=say,
        )
        cold = max(cold, tried.cold)  # later probes find kernels that the first one loaded
        tried = replace(tried, cold=cold)
        made = planner.plan(choice, counted, machine, tried)
        off = tried.step / forecast.step
        if max(off, 1 / off) < WRONG or minutes is None or not left:
            break
        machine = replace(machine, slower=machine.slower * off)
        choice, counted = planner.choose(machine)
        again = planner.plan(choice, counted, machine)
        if again.tree["model"] == made.tree["model"] and again.tree["train"]["batch"] == made.tree["train"]["batch"]:
            break
        say(f"a step takes {off:.2f} times as long as forecast, so it is {choice.label} instead")
        made = again
    return made


@dataclass(frozen=True)
class Planner:
    """What was asked for."""

    found: Extent
    data: dict[str, Any]
    minutes: float | None
    objective: str | None
    seed: int | None

    def choose(self, machine: Machine) -> tuple[Choice, Counted]:
        """The size, with tokens counted in its own vocabulary: first in a guess at it, then in what was chosen."""
        entries = rules.vocabulary(512 if self.minutes is None else 256, self.found.bytes)
        for _ in range(2):
            counted = count(self.found, entries)
            choice = self.best(machine, self.text(counted), counted)
            if choice.tree["tokenizer"]["vocabulary"] == entries:
                break
            entries = choice.tree["tokenizer"]["vocabulary"]
        else:
            counted = count(self.found, entries)
            choice = replace(choice, text=self.text(counted))
        return choice, counted

    def text(self, counted: Counted) -> Text:
        tokens = self.found.bytes / counted.bytes_per_token * (1 - VALID)
        return Text(self.found.bytes, self.found.documents, tokens, counted.nine_in_ten, counted.middle)

    def best(self, machine: Machine, text: Text, counted: Counted) -> Choice:
        """By the objective that was asked for, or else by the one that suits how often the text is read."""
        if self.objective is not None:
            return self.largest(machine, text, counted, self.objective)
        if self.minutes is not None:
            choice = self.largest(machine, text, counted, "causal")
            if choice.passes < MOST_PASSES["causal"]:
                return choice
        return self.largest(machine, text, counted, rules.READ_OFTEN)

    def largest(self, machine: Machine, text: Text, counted: Counted, objective: str) -> Choice:
        """The largest model that still reads enough tokens for its weights, and that memory can hold."""
        best: Choice | None = None
        for size in rules.sizes(objective, text):
            chosen = self.build(size.tree | {"train": size.tree["train"] | {"batch": 16}}, counted)
            each = costs(chosen, machine)
            most = MOST_PASSES[objective] * text.tokens
            if self.minutes is not None:
                free = max(FREE * 60 * self.minutes - each.starting, 0.1 * 60 * self.minutes)
                most = min(most, free * each.tokens_per_second)
            enough = most >= TOKENS_PER_WEIGHT * each.inner and fits(one_row(chosen), machine)
            if best is not None and not enough:
                break
            best = Choice(size.label, objective, size.tree, most, text)
        assert best is not None
        return best

    def build(self, tree: dict[str, Any], counted: Counted) -> RunConfig:
        """As a run; of a text that was read whole, the vocabulary is what there really is."""
        asked = tree["tokenizer"]["vocabulary"]
        entries = counted.tokenizer.vocabulary if self.found.whole else asked
        return make_config(with_direction(config.merge(tree, {"model": {"vocabulary": min(entries, asked)}})))

    def plan(self, choice: Choice, counted: Counted, machine: Machine, tried: Costs | None = None) -> Plan:
        """Settings and forecast of a choice, or what came out when it was tried."""
        tree = deepcopy(config.merge({"data": self.data}, choice.tree))
        length = tree["train"].get("length") or tree["model"].get("context") or 256
        if "batch" not in tree["train"]:  # presets bring their own
            tree["train"]["batch"] = rules.rows_of(choice.tokens, length)
            tree["model"]["dropout"] = rules.dropout_of(choice.objective, choice.passes)
        tree["train"]["valid_tokens"] = valid_tokens_of(choice.tokens)
        if machine.device == "cuda":  # decided here, so that a probe is compiled where the run will be
            so_far = self.build(tree, counted)
            step = costs(so_far, machine).step
            whole = step * choice.tokens / (tree["train"]["batch"] * length)
            seconds = whole if self.minutes is None else min(whole, 60 * self.minutes)
            large = BACKBONES.get(tree["model"]["family"]).supports_compile and step > CALLS * so_far.model.depth
            if large and seconds >= WORTH:
                tree["train"]["compile"] = True
        chosen = fitted(self.build(tree, counted), machine)
        if chosen.train.micro_batch:
            tree["train"]["micro_batch"] = chosen.train.micro_batch
        if tried is not None and tried.way is not None and machine.device == "cuda":
            tree["train"]["compile"] = WORDS[tried.way]  # what was tried is what will be run
        if self.seed is not None:
            tree["train"]["seed"] = self.seed
        each = tried or costs(chosen, machine)
        held = rules.held_out(choice.objective, choice.text.tokens * VALID / (1 - VALID))
        valid = min(tree["train"]["valid_tokens"], held)
        tree["train"]["steps"] = steps = self.steps(choice, each, valid_tokens=valid)
        return Plan(tree, choice, steps, each, machine, valid, self.minutes, self.found.read)

    def steps(self, choice: Choice, each: Costs, *, valid_tokens: float) -> int:
        """As many as there is time for, and no more passes than pay."""
        steps = math.ceil(MOST_PASSES[choice.objective] * choice.text.tokens / each.tokens)
        return steps if self.minutes is None else min(steps, steps_in(each, 60 * self.minutes, valid_tokens))


def one_row(chosen: RunConfig) -> RunConfig:
    return replace(chosen, train=replace(chosen.train, batch=1, micro_batch=None))


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    """`{"model": {"depth": 4}}` -> `{"model.depth": 4}`, as options name them."""
    return {f"{section}.{key}": value for section, values in tree.items() for key, value in values.items()}
