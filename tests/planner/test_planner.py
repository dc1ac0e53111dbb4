"""A plan: by the rules, inside the minutes and the memory, usable as it is, and corrected by what is measured."""

import json
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import headstock
from headstock.cost.training import model_cost, optimizer_flops
from headstock.data.corpus import read_corpus
from headstock.errors import UserError
from headstock.experiments.recipe import to_toml
from headstock.planner import forecast
from headstock.planner.corpus_size import count, extent, packed_share
from headstock.planner.forecast import Costs, costs, fits, fitted, seconds_of, steps_in
from headstock.planner.machine import Machine, look_at
from headstock.planner.planner import Planner, flat, plan
from headstock.planner.probe import Measured, corrected
from headstock.planner.summary import told
from headstock.train.blueprint import blueprint
from headstock.train.compile import CALLS
from headstock.train.optimizers import make_optimizers
from headstock.train.settings import make_config

LAPTOP = Machine("cpu", "a laptop", False, products=1e11, traffic=1e10, launch=5e-6, free=8 << 30, held=300 << 20)
CARD = Machine("cuda", "a card", True, products=7e14, traffic=4e12, launch=5e-6, free=80 << 30, held=300 << 20)
EACH = Costs(1000, 800, 6000.0, tokens=2048, step=0.1, reading=1e-5, saving=0.2, peak=1 << 20)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A little over 100 kB of words that do not repeat as one."""
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list("aeioulmnrst"), size=draw.integers(2, 8))) for _ in range(800)]
    lines = [" ".join(draw.choice(words, size=draw.integers(5, 60))) for _ in range(700)]
    path = tmp_path_factory.mktemp("plan") / "text.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def found(text):
    return extent(read_corpus(text))


def planner(found, *, minutes=None, objective=None):
    return Planner(found, {"corpus": ["text.txt"]}, minutes, objective, None)


def made(found, machine, **asked):
    asked = planner(found, **asked)
    return asked.plan(*asked.choose(machine), machine)


def grown(found, times):
    """As if there were so many times as much of the text."""
    return replace(found, bytes=times * found.bytes, documents=times * found.documents, whole=False)


# the text


def test_a_small_corpus_is_read_whole(text, found):
    assert found.read and found.whole
    assert found.bytes == sum(len(line.encode()) for line in text.read_text().splitlines())
    assert found.documents == 700


def test_of_a_large_corpus_a_part_is_read(text, found, tmp_path, monkeypatch):
    import gzip

    from headstock.planner import corpus_size as module

    monkeypatch.setattr(module, "READ_ALL", 10_000)
    monkeypatch.setattr(module, "SAMPLE", 20_000)
    for guess, path in ((1.02, text), (1.3, tmp_path / "text.txt.gz")):
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.read_bytes()))
        told = extent(read_corpus(path))
        assert not told.read and not told.whole and len(told.sample) < 400
        assert found.bytes / guess < told.bytes < guess * found.bytes
    assert packed_share("", b"text") == 1.0


def test_tokens_are_those_that_the_run_will_have(text, found, tmp_path):
    counted = count(found, 600)
    settings = {"depth": 1, "width": 8, "heads": 1, "hidden": 8, "context": 32, "steps": 1, "tensorboard": False}
    headstock.pretrain(text, out=tmp_path / "run", settings=settings | {"vocabulary": 600, "deduplicate": False})
    data = json.loads((tmp_path / "run" / "data.json").read_text())
    tokens = data["train_tokens"] + data["valid_tokens"]
    assert found.bytes / counted.bytes_per_token == pytest.approx(tokens, rel=0.01)


# what is chosen


def test_more_minutes_give_a_larger_model_that_reads_more(found):
    much = grown(found, 3000)
    plans = [made(much, LAPTOP, minutes=minutes, objective="causal") for minutes in (1, 20, 400)]
    assert [p.costs.parameters for p in plans] == sorted({p.costs.parameters for p in plans})
    assert [p.tokens for p in plans] == sorted({p.tokens for p in plans})
    for one, minutes in zip(plans, (1, 20, 400), strict=True):
        assert one.seconds <= 60 * minutes * 1.001
        assert one.tokens >= 6 * one.costs.inner or one.choice.label == "2 x 64"


def test_a_faster_machine_trains_a_larger_model_in_the_same_time(found):
    much = grown(found, 3000)
    laptop, card = (made(much, machine, minutes=5, objective="masked") for machine in (LAPTOP, CARD))
    assert card.costs.parameters > 4 * laptop.costs.parameters


def test_without_minutes_the_text_decides(found):
    small, large = (made(grown(found, times), LAPTOP) for times in (10, 1000))
    assert small.choice.objective == large.choice.objective == "hybrid"
    assert small.costs.parameters < large.costs.parameters
    assert small.passes == pytest.approx(10, rel=0.05)


def test_a_text_that_is_soon_read_is_learned_left_to_right(found):
    assert made(grown(found, 3000), LAPTOP, minutes=2).choice.objective == "causal"
    assert made(found, LAPTOP, minutes=60).choice.objective == "hybrid"


def test_no_more_passes_than_pay(found):
    one = made(found, CARD, minutes=60, objective="causal")
    assert one.passes <= 4.5 and one.seconds < 60 * 60
    assert one.tree["model"]["dropout"] > 0


@pytest.mark.parametrize("objective", ["causal", "masked", "hybrid", "both-ways", "denoise"])
def test_every_objective_can_be_planned(found, objective):
    one = made(found, LAPTOP, minutes=1, objective=objective)
    told = one.plain()
    assert told["config"]["task"]["name"] == objective
    assert told["parameters"] > 0 and told["seconds"] > 0 and told["peak_bytes"] > 0 and told["flops"] > 0


def test_what_does_not_fit_is_read_in_parts_or_made_smaller(found):
    much = grown(found, 3000)
    roomy = made(much, CARD, minutes=300, objective="causal")
    tight = made(much, replace(CARD, free=2 << 30), minutes=300, objective="causal")
    assert tight.costs.peak < 2 << 30 < roomy.costs.peak
    assert tight.costs.parameters < roomy.costs.parameters or tight.tree["train"].get("micro_batch")


def test_rows_at_once_are_halved_until_they_fit(found):
    asked = planner(grown(found, 3000), minutes=60, objective="causal")
    choice, counted = asked.choose(CARD)
    chosen = asked.build(choice.tree | {"train": choice.tree["train"] | {"batch": 512}}, counted)
    room = replace(CARD, free=int(costs(chosen, CARD).peak / 4))
    smaller = fitted(chosen, room)
    assert fits(smaller, room) and not fits(chosen, room)
    assert smaller.train.micro_batch is not None and 512 % smaller.train.micro_batch == 0
    assert smaller.train.batch == 512


# what it takes


def test_muon_costs_what_torch_counts(found):
    chosen = planner(found, minutes=1, objective="causal").build(made(found, LAPTOP, minutes=1).tree, count(found, 500))
    model, task = blueprint(chosen, weights=True)
    muon = make_optimizers(model, chosen.train)[0]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with FlopCounterMode(display=False) as counter:
        muon.step()
    parts = model_cost(model, task, model.dimensions(length=64))
    assert optimizer_flops(parts.weights(), "muon") == counter.get_total_flops()
    assert optimizer_flops(parts.weights(), "adamw") == 0


def test_parameters_are_those_of_the_model(found):
    one = made(found, LAPTOP, minutes=1, objective="masked")
    chosen = planner(found).build(one.tree, count(found, one.tree["tokenizer"]["vocabulary"]))
    model, _ = blueprint(chosen)
    assert one.costs.parameters == model.parameter_counts()["total"]
    assert one.costs.inner < one.costs.parameters


def test_time_is_steps_and_validations_and_checkpoints():
    assert seconds_of(EACH, 1000, 20_000) == pytest.approx(1000 * 0.1 + 10 * (20_000 * 1e-5 + 0.2))
    assert seconds_of(EACH, 3, 20_000) == pytest.approx(3 * 0.1 + 3 * (0.2 + 0.2))  # no more validations than steps
    steps = steps_in(EACH, 60, 20_000)
    assert seconds_of(EACH, steps, 20_000) <= 60 < seconds_of(EACH, steps + 1, 20_000)


def test_what_was_measured_takes_the_place_of_the_forecast():
    measured = Measured(
        steps=[1.0, *[0.2] * 4, *[0.4] * 5],
        tokens=20_000,
        validation=0.5,
        validated=10_000,
        saving=0.1,
        peak=7,
    )
    now = corrected(EACH, measured)
    assert now.step == pytest.approx(0.4) and now.tokens == 2000 and now.tokens_per_second == pytest.approx(5000)
    assert now.starting == pytest.approx(0.0)  # the first steps took 1.8 s, and five of the others would take 2
    assert now.reading == pytest.approx(5e-5) and now.peak == 7 and now.saving == 0.1 and now.measured
    slow = corrected(EACH, replace(measured, steps=[9.0, *[0.4] * 9]))
    assert slow.starting == pytest.approx(8.6)


def test_a_small_step_on_a_card_takes_what_its_calls_take(found):
    one = made(found, CARD, minutes=1, objective="hybrid")
    chosen = planner(found).build(one.tree, count(found, one.tree["tokenizer"]["vocabulary"]))
    recorded = costs(chosen, CARD)
    assert recorded.step >= forecast.RECORDED * CALLS * chosen.model.depth
    assert recorded.starting >= 250 * CALLS * chosen.model.depth  # each shape is called kernel by kernel at first
    plain = costs(replace(chosen, train=replace(chosen.train, compile=False)), CARD)
    assert plain.step >= CALLS * chosen.model.depth and plain.starting == 0
    assert costs(chosen, LAPTOP).starting == 0


def test_what_was_tried_on_a_card_is_what_is_run(found):
    asked = planner(found, minutes=1, objective="causal")
    for machine, way, word in ((CARD, "recorded", "replay"), (CARD, "plain", False), (LAPTOP, "plain", None)):
        choice, counted = asked.choose(machine)
        tried = replace(EACH, way=way, measured=True)
        assert asked.plan(choice, counted, machine, tried).tree["train"].get("compile") is word


def test_time_and_speed_are_those_that_a_run_tells(found):
    asked = planner(found, minutes=1, objective="causal")
    tried = replace(EACH, step=0.01, starting=2.0, cold=30.0, measured=True)
    one = asked.plan(*asked.choose(CARD), CARD, tried)
    aside = 10 * (one.valid_tokens * tried.reading + tried.saving)
    assert one.tokens_per_second == pytest.approx(one.tokens / (one.seconds - aside))
    assert one.tokens_per_second < tried.tokens_per_second
    assert any("a new process may take up to 30 s more" in line for line in told(one))
    late = asked.plan(*asked.choose(CARD), CARD, replace(tried, starting=70.0, cold=0.0))
    assert late.seconds > 70 and any("more than the 1 minutes" in line for line in told(late))
    assert not any("new process" in line for line in told(late))


def test_held_out_text_that_is_read_twice_takes_twice_as_long(found):
    plans = {o: made(found, LAPTOP, minutes=60, objective=o) for o in ("causal", "hybrid")}
    held = {o: p.choice.text.tokens * 0.05 / 0.95 for o, p in plans.items()}
    assert plans["causal"].tree["train"]["valid_tokens"] > held["causal"]  # all of it is read
    assert plans["causal"].valid_tokens == pytest.approx(held["causal"])
    assert plans["hybrid"].valid_tokens == pytest.approx(
        min(2 * held["hybrid"], plans["hybrid"].tree["train"]["valid_tokens"])
    )
    assert plans["hybrid"].valid_tokens > held["hybrid"]


def test_a_machine_is_looked_at():
    seen = look_at(torch.device("cpu"))
    assert seen.products > 1e8 and seen.traffic > 1e7 and 0 < seen.launch < 0.1
    assert seen.free > 1 << 20 and seen.held > 1 << 20


# as a whole


def test_a_recipe_gives_back_the_settings():
    tree = {"data": {"corpus": ['a "b".txt', "é"]}, "model": {"bias": False, "lr": 4e-3, "depth": 2, "no": None}}
    assert tomllib.loads(to_toml(tree, "A heading\nof two lines")) == {
        "data": {"corpus": ['a "b".txt', "é"]},
        "model": {"bias": False, "lr": 4e-3, "depth": 2},
    }


def test_a_probed_plan_can_be_run_and_is_what_was_said(text, tmp_path, monkeypatch):
    from headstock.planner import planner as module
    from headstock.planner import probe

    monkeypatch.setattr(module, "ROUNDS", 1)
    monkeypatch.setattr(probe, "STEPS", 12)
    monkeypatch.setattr(probe, "TRIED", 0.0)
    one = plan(text, device="cpu", minutes=0.02, probe=True)
    told = one.plain()
    assert told["probed"] and one.costs.measured and told["tokens_per_second"] > 0
    path = tmp_path / "plan.toml"
    path.write_text(to_toml(one.tree))
    results = headstock.pretrain(out=tmp_path / "run", config_file=path, device="cpu", settings={"tensorboard": False})
    assert results["parameters"]["total"] == told["parameters"]
    assert results["steps"] == told["steps"]
    assert results["tokens"] == pytest.approx(told["tokens"], rel=0.05)
    assert told["peak_bytes"] == pytest.approx(results["peak_bytes"], rel=0.2)


def test_wrong_wishes_are_named(text):
    for wish, words in (
        ({"minutes": -1}, "minutes"),
        ({"objective": "caused"}, "objective"),
        ({"device": "tpu"}, "device"),
    ):
        with pytest.raises(UserError, match=words):
            plan(text, **wish)
    with pytest.raises(UserError, match="no text"):
        plan([])


def test_flat_names_are_options():
    assert flat({"model": {"depth": 4}, "train": {"lr": 0.1}}) == {"model.depth": 4, "train.lr": 0.1}


def test_a_forecast_can_be_made_for_any_run():
    chosen = make_config({"model": {"vocabulary": 300, "depth": 2, "width": 32, "heads": 2}, "train": {"batch": 8}})
    each = forecast.costs(chosen, LAPTOP)
    assert each.step > 0 and forecast.costs(chosen, replace(LAPTOP, slower=3.0)).step == pytest.approx(3 * each.step)
