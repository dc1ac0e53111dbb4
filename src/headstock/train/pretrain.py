"""From a pile of text to a language model in a run folder."""

import json
import logging
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor

from headstock import __version__, config
from headstock.data.corpus import Corpus, read_corpus, resolve_paths
from headstock.data.token_shards import UnknownTokens
from headstock.data.token_store import SplitStores, build_split_stores
from headstock.data.tokenizer import Tokenizer, open_tokenizer, tokenizer_statistics, train_tokenizer
from headstock.errors import UserError
from headstock.model.allocation import AllocationLimit, AllocationTooLarge
from headstock.model.backbone import BACKBONES
from headstock.model.model import Model
from headstock.rng import derive_seed
from headstock.tasks.base import TASKS, Task
from headstock.train.budget import Budget
from headstock.train.callbacks import Callback, log_metrics, tensorboard
from headstock.train.distributed import DistributedContext, process_group
from headstock.train.evaluate import BatchSums, bootstrap_intervals, evaluate
from headstock.train.loop import sequence_length, train
from headstock.train.model_card import write_card
from headstock.train.peak_memory import PeakMemory
from headstock.train.run_folder import (
    RunFolder,
    check_inputs_outside,
    check_not_source,
    check_output_folder,
    locked_run,
    open_run,
)
from headstock.train.settings import RunConfig, assign_sections, make_config, override_settings, read_preset
from headstock.train.state import TrainState
from headstock.train.validation import ValidationBudget

DATA_PATHS = {"corpus", "valid", "train", "test"}  # settings of data that say where it lies
logger = logging.getLogger(__name__)

SPARE_BYTES = 1 << 30  # what a model's tables may take that its weights file does not hold


def pretrain(
    corpus: str | Path | Sequence[str | Path] = (),
    *,
    out: str | Path,
    preset: str | None = None,
    objective: str | None = None,
    config_file: str | Path | None = None,
    tokenizer: str | Path | None = None,
    start: str | Path | None = None,
    settings: dict[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train a tokenizer and a language model on text; returns the run's results.

    Settings come from the preset, then the file, then `settings` (`{"depth": 4}` or `{"model.depth": 4}`);
    the later wins. With `resume`, a run that was stopped goes on as if it had not been, and one that is not there
    begins (the command line refuses that). `start` is a finished run whose model, tokenizer and weights this one
    begins with, to learn from other text.
    """
    run = RunFolder(Path(out))
    paths = [str(corpus)] if isinstance(corpus, str | Path) else [str(path) for path in corpus]
    given = dict(settings or {})
    given |= {"task.name": objective} if objective else {}
    if "-" in paths:  # kept in a file from now on, so that the run can be resumed and measured
        paths = list(read_corpus(paths, column=given.get("data.column", "text")).paths)
    given |= {"data.corpus": paths} if paths else {}
    given |= {"tokenizer.file": str(tokenizer)} if tokenizer else {}
    if start and not resume:
        check_not_source(run, open_run(start))
    with locked_run(run):
        check_output_folder(run, resume=resume, overwrite=overwrite)
        going_on = resume and run.exists()
        # joining waits for all processes: each has looked at the folder before one makes it
        with process_group(device) as distributed:
            chosen = resumed_config(run, given) if going_on else gather_config(preset, config_file, given, start=start)
            done = going_on and run.is_complete()
            if not going_on:
                texts = [source.path for source in resolve_paths((*chosen.data.corpus, *chosen.data.valid))]
                check_inputs_outside(run, [*texts, chosen.tokenizer.file, config_file])
            weights = source_weights(open_run(start)) if start and not done else None
            stores = None
            if distributed.is_main:
                stores = reopen_stores(run, chosen) if going_on else prepare(run, chosen, weights)
                save_data_paths(run, chosen)
            distributed.barrier()  # the folder is there now, for every process
            if done:
                return finished_results(run, distributed)
            return work(run, stores or reopen_stores(run, None), distributed, callbacks, weights)


def finished_results(run: RunFolder, distributed: DistributedContext) -> dict[str, Any]:
    """The results of a run that was to be resumed and needs no more than, at most, its card."""
    logger.info(f"{run} is finished: nothing to resume")
    if distributed.is_main and not run.model_card.is_file():  # it was stopped just before it wrote it
        write_card(run)
    return run.results()


def gather_config(
    preset: str | None, file: str | Path | None, given: dict[str, Any], *, start: str | Path | None = None
) -> RunConfig:
    """Preset, file and options as one checked whole, with text to learn from."""
    chosen = resolve_config(preset, file, given, start=start)
    if not chosen.data.corpus:
        raise UserError("no text to train on: name a file, folder or glob, or - for standard input")
    return chosen


def resolve_config(
    preset: str | None, file: str | Path | None, given: dict[str, Any], *, start: str | Path | None = None
) -> RunConfig:
    """The same of a run that need not have text, such as one that is only to be looked at."""
    written = config.read_settings(Path(file), tables=config.SECTIONS) if file else {}
    if start is not None:
        if preset or given.get("tokenizer.file"):
            raise UserError(f"{start}: a run to start from brings its own model and tokenizer; name no other")
        written = over(source_settings(open_run(start)), written)
    named = written.pop("preset", None)
    base = read_preset(preset or named or "gpt-nano") if preset or named or "model" not in written else {}
    tree = over(base, written)
    objective = given.pop("task.name", None)
    if objective:
        tree = over(tree, {"task": {"name": objective}})
    family = given.pop("model.family", None)
    if family and family != tree.get("model", {}).get("family", "transformer"):
        tree = tree | {"model": {"family": family}}  # what another family's model is made like says nothing of this one
    tree = override_settings(tree, without_nsp(given, tree))
    tree = with_direction(tree)
    wish = tree.get("tokenizer", {}).get("vocabulary", 8000)
    tree = config.merge({"model": {"vocabulary": wish}}, tree)  # checked now, settled when the tokenizer is there
    chosen = with_segments(make_config(tree), tree)
    row, context = chosen.train.length, getattr(chosen.model, "context", None)
    if row and context and row > context:
        raise UserError(f"train.length: {row} is longer than model.context {context}")
    return chosen


def over(tree: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both as one, the later wins; settings of an objective that is replaced go, unless the new one has them too."""
    task = dict(tree.get("task", {}))
    was = task.get("name", "causal")
    now = above.get("task", {}).get("name", was)
    old, new = ({part.name for part in fields(TASKS.get(name).Config)} for name in (was, now))
    kept = {key: value for key, value in task.items() if key not in old - new}
    return config.merge(tree | {"task": kept}, above)


def source_settings(source: RunFolder) -> dict[str, Any]:
    """What a run that begins with another's weights takes over from it: all but its text and its length."""
    tree = source.config()
    if "transfer" in tree:
        raise UserError(f"{source}: is a fine-tuned run, which cannot go on as a language model")
    source.check_weights_exist()
    del tree["data"]
    for length in ("steps", "epochs", "minutes"):
        tree["train"].pop(length)
    tree["tokenizer"] |= {"file": str(source.tokenizer_file)}
    return tree


def with_direction(tree: dict[str, Any]) -> dict[str, Any]:
    """A model that must see both sides of a token, or only one, is built so unless that was set by hand."""
    name = tree.get("task", {}).get("name", "causal")
    family, causal = tree.get("model", {}).get("family", "transformer"), TASKS.get(name).causal
    if not TASKS.get(name).trainable:
        able = ", ".join(o for o in TASKS.names() if TASKS.get(o).trainable and not TASKS.get(o).is_labelled)
        raise UserError(f"--objective {name}: predicts nothing, so there is nothing to learn (objectives: {able})")
    if not fits(family, name):
        able = ", ".join(other for other in BACKBONES.names() if fits(other, name))
        learns = ", ".join(other for other in TASKS.names() if not TASKS.get(other).is_labelled and fits(family, other))
        raise UserError(
            f"model.family: {family!r} cannot learn the objective {name!r} (families that can: {able}; "
            f"objectives for {family!r}: {learns})"
        )
    if causal is None or hasattr(BACKBONES.get(family), "causal"):
        return tree
    asked = tree.get("model", {}).get("causal", causal)
    if asked != causal:
        raise UserError(f"model.causal: must be {str(causal).lower()} for the objective {name!r}, not {asked}")
    return config.merge(tree, {"model": {"causal": causal}})


def fits(family: str, objective: str) -> bool:
    """Whether models of a family read in the way, or can be told to, that an objective asks for."""
    backbone, task = BACKBONES.get(family), TASKS.get(objective)
    direction = getattr(backbone, "causal", None)  # None where a setting decides it
    alike = (
        backbone.bidirectional == task.needs_bidirectional and backbone.is_encoder_decoder == task.needs_encoder_decoder
    )
    return alike and task.trainable and (None in (direction, task.causal) or direction == task.causal)


def with_segments(chosen: RunConfig, tree: dict[str, Any]) -> RunConfig:
    """A model whose rows join several texts can tell them apart, unless fewer kinds were set by hand."""
    needed = TASKS.get(chosen.objective).segments(chosen.task)
    if not needed or chosen.model.segments >= needed:
        return chosen
    if "segments" in tree["model"]:
        asked = tree["model"]["segments"]
        raise UserError(f"model.segments: must be {needed} or more, not {asked}: rows are of {needed} texts")
    return replace(chosen, model=replace(chosen.model, segments=needed))


def without_nsp(given: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """The settings less `nsp` where the objective has none anyway; to ask for it there is a mistake."""
    name = tree.get("task", {}).get("name", "causal")
    if "task.nsp" not in given or "nsp" in {part.name for part in fields(TASKS.get(name).Config)}:
        return given
    if given["task.nsp"]:
        raise UserError(f"--nsp: next-sentence prediction goes with the objective 'masked', not with {name!r}")
    return {key: value for key, value in given.items() if key != "task.nsp"}


def resumed_config(run: RunFolder, given: dict[str, Any]) -> RunConfig:
    return make_config(check_same_settings(run, given, moved=True))


def check_same_settings(run: RunFolder, given: dict[str, Any], *, moved: bool = False) -> dict[str, Any]:
    """A run goes on with its own settings; what was asked for now must not contradict them.

    With `moved`, paths of data may be others than before: whoever asks then compares what is in the files.
    """
    tree = run.config()
    given = dict(given)
    objective = given.pop("task.name", tree["task"]["name"])
    wanted = config.merge({"task": {"name": objective}}, assign_sections(given, tree))
    if moved:
        for name in DATA_PATHS & wanted.get("data", {}).keys():
            if tree["data"][name] and wanted["data"][name]:
                tree["data"][name] = config.to_dict(wanted["data"].pop(name))
        file = wanted.get("tokenizer", {}).get("file")
        if file and tree["tokenizer"]["file"] and open_tokenizer(Path(file)).fingerprint == run.data()["tokenizer"]:
            del wanted["tokenizer"]["file"]
    differing = [
        f"{section}.{key} is {json.dumps(tree[section].get(key))}, not {json.dumps(value)}"
        for section, values in wanted.items()
        for key, value in values.items()
        if config.to_dict(value) != tree[section].get(key)
    ]
    if differing:
        raise UserError(f"{run}: resuming goes on with the run's own settings; {'; '.join(differing)}")
    return tree


def save_data_paths(run: RunFolder, chosen: RunConfig) -> None:
    """Write down where a resumed run found its data, which is the same by its content, so that it is found again."""
    tree = run.config()
    own = chosen.plain()["data"]
    moved = config.merge(tree, {"data": {name: own[name] for name in DATA_PATHS & tree["data"].keys()}})
    if moved != tree:
        run.write("config.json", moved)


def prepare(run: RunFolder, chosen: RunConfig, weights: dict[str, Tensor] | None = None) -> SplitStores:
    """Text, tokenizer and token store; the run's folder appears only when all of it went well."""
    corpus, valid = corpora(chosen)
    if chosen.tokenizer.file:
        tokenizer = open_tokenizer(Path(chosen.tokenizer.file))
    else:
        logger.info(f"training a {chosen.tokenizer.kind} tokenizer of at most {chosen.tokenizer.vocabulary:,} entries")
        tokenizer = train_tokenizer(corpus.sample_texts(), chosen.tokenizer)
    task = TASKS.get(chosen.objective)(chosen.task, tokenizer)  # refuses a tokenizer that lacks a mark it needs
    logger.info(tokenizer_line(tokenizer, corpus))
    stores = build_run_stores(chosen, tokenizer, corpus, valid)
    for side in (stores.train, stores.valid):  # refuses text that it cannot learn from, before a step is made
        task.examples(side, length=chosen.train.length or getattr(chosen.model, "context", None) or 256)
    chosen = with_vocabulary(chosen, tokenizer)
    if spare := chosen.model.vocabulary - tokenizer.vocabulary:
        logger.info(
            f"the model's vocabulary is padded to {chosen.model.vocabulary:,}: {spare:,} entries stand for no token"
        )
    if weights is not None:
        take_over(build_model(chosen, tokenizer)[0], weights)  # refuses what does not fit
    sources = {"corpus": list(corpus.names()), "how": corpus.describe()}
    card = {"fingerprint": stores.folder.name, "tokenizer": tokenizer.fingerprint, **sources, **stores.summary}
    run.create(chosen.plain(), tokenizer, card)
    return stores


def reopen_stores(run: RunFolder, chosen: RunConfig | None) -> SplitStores:
    """The same store for a run that exists; refuses text that has changed since."""
    chosen = chosen or make_config(run.config())
    stores = build_run_stores(chosen, run.tokenizer(), *corpora(chosen))
    if stores.folder.name != run.data()["fingerprint"]:
        raise UserError(f"{run}: the corpus is not what it was when the run began, so it cannot be resumed")
    return stores


def corpora(chosen: RunConfig) -> tuple[Corpus, Corpus | None]:
    data = chosen.data
    read = partial(read_corpus, documents=data.documents, column=data.column)
    return read(data.corpus), read(data.valid) if data.valid else None


def build_run_stores(chosen: RunConfig, tokenizer: Tokenizer, corpus: Corpus, valid: Corpus | None) -> SplitStores:
    data = chosen.data
    task = TASKS.get(chosen.objective)(chosen.task, tokenizer)
    return build_split_stores(
        corpus,
        tokenizer,
        valid=valid,
        valid_fraction=data.valid_fraction,
        deduplicate=data.deduplicate,
        sentences=task.needs_sentences,
        seed=data.split_seed,
    )


def with_vocabulary(chosen: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """The model's vocabulary is the tokenizer's, rounded up as set, unless a larger one was asked for by name."""
    wish, have = chosen.model.vocabulary, tokenizer.vocabulary
    asked = wish != chosen.tokenizer.vocabulary
    if asked and wish < have:
        raise UserError(f"model.vocabulary: {wish} is smaller than the tokenizer's {have}")
    padded = -(-have // chosen.train.vocabulary_multiple) * chosen.train.vocabulary_multiple
    return chosen if asked else replace(chosen, model=replace(chosen.model, vocabulary=padded))


def tokenizer_line(tokenizer: Tokenizer, corpus: Corpus) -> str:
    texts = corpus.first_texts(200)
    facts = tokenizer_statistics(tokenizer, texts, sample=" ".join(texts[0].split()[:8]))
    split = " ".join(facts["sample"])
    return (
        f"tokenizer: {facts['vocabulary']:,} entries, {facts['tokens_per_word']:.2f} tokens a word, "
        f"{facts['unknown_rate']:.2%} unknown; {split}"
    )


def build_model(chosen: RunConfig, tokenizer: Tokenizer) -> tuple[Model, Task]:
    """A fresh model and the task it is for; the same seed gives the same weights, and the caller's draws go on."""
    task = TASKS.get(chosen.objective)(chosen.task, tokenizer)
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed every GPU's generator too, which nothing here draws from
        torch.default_generator.manual_seed(derive_seed(chosen.train.seed, "weights"))
        backbone = BACKBONES.get(chosen.family)(chosen.model)
        model = Model(backbone, task.heads(backbone))
    task.needs_prefix = backbone.carries_state
    return model, task


def load_run_model(run: RunFolder, chosen: RunConfig, tokenizer: Tokenizer) -> tuple[Model, Task]:
    """A run's model with its weights, and its task."""
    shapes = run.shapes()
    values = check_values(run, chosen, shapes)
    try:
        with AllocationLimit(8 * values + SPARE_BYTES):
            model, task = build_model(chosen, tokenizer)
    except AllocationTooLarge:
        sizes = ", ".join(f"{name} {getattr(chosen.model, name)}" for name in ("context", "width", "vocabulary"))
        raise UserError(
            f"{run}: the sizes in config.json ({sizes}) need more memory than its {values} weights"
        ) from None
    except (RuntimeError, OverflowError, TypeError) as wrong:
        raise UserError(f"{run}: no model has the sizes in config.json ({str(wrong).splitlines()[0]})") from None
    model.check_shapes(shapes, source=str(run))
    model.load_tensors(run.weights(checked=True), source=str(run))
    return model, task


def source_weights(run: RunFolder) -> dict[str, Tensor]:
    """The weights of a run that another one begins with."""
    check_sizes(run, make_config(run.config()), run.tokenizer())
    return run.weights(checked=True)


def check_values(run: RunFolder, chosen: RunConfig, shapes: Mapping[str, Size]) -> int:
    """How many values a run's weights are; refuses a size in config.json that is larger than that."""
    values = sum(shape.numel() for shape in shapes.values())
    for part in fields(chosen.model):
        size, most = getattr(chosen.model, part.name), len(shapes) if part.name.endswith("depth") else values
        if part.name != "context" and isinstance(size, int) and size > most:
            raise UserError(f"{run}: config.json says model.{part.name} {size}, but its weights are {values} numbers")
    return values


def check_sizes(run: RunFolder, chosen: RunConfig, tokenizer: Tokenizer) -> None:
    """Refuse sizes in config.json that the weights do not have, before any memory is taken for them."""
    shapes = run.shapes()
    check_values(run, chosen, shapes)
    try:
        with torch.device("meta"):
            model, _ = build_model(chosen, tokenizer)
        model.check_shapes(shapes, source=str(run))
        spare = sum(buffer.nbytes for name, buffer in model.named_buffers() if name not in shapes)
    except (RuntimeError, OverflowError, TypeError) as wrong:
        raise UserError(f"{run}: no model has the sizes in config.json ({str(wrong).splitlines()[0]})") from None
    if spare > SPARE_BYTES:
        raise UserError(f"{run}: config.json says model.context {chosen.model.context}, which takes {spare} bytes")


def work(
    run: RunFolder,
    stores: SplitStores,
    distributed: DistributedContext,
    callbacks: Sequence[Callback],
    weights: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Train, measure on all held-out text, and write down what came out."""
    chosen = make_config(run.config())
    model, task = build_model(chosen, run.tokenizer())
    if weights is not None:
        take_over(model, weights)
    sizes = model.parameter_counts()
    parts = ", ".join(f"{count:,} {name}" for name, count in sizes.items() if name != "total" and count)
    logger.info(f"{chosen.family}: {sizes['total']:,} parameters ({parts}) on {distributed.device}")
    active: list[Callback] = []
    peak = PeakMemory(distributed.device)
    with ExitStack() as stack:
        if distributed.is_main:
            active = [log_metrics(run), *callbacks]
            if chosen.train.tensorboard:
                active.append(stack.enter_context(tensorboard(run)))
        done = train(model, task, stores, chosen.train, run=run, distributed=distributed, callbacks=active)
    length = sequence_length(model, chosen.train)
    rows = done.micro_batch or chosen.train.micro_batch or chosen.train.batch // distributed.size
    valid = task.examples(stores.valid, length=length)
    size, unknown, pieces = stores.valid.bytes, stores.valid.unknown or UnknownTokens(), BatchSums()
    budget = Budget.of(chosen.train, 1)
    most = min(ValidationBudget(chosen.train, budget, length).final_examples(done) or len(valid), len(valid))
    share = most / max(1, len(valid))
    if share < 1:
        logger.info(
            f"measuring on {share:.0%} of the held-out text, which takes a tenth of the minutes; evaluate measures all"
        )
    metrics = evaluate(
        model,
        task,
        valid,
        distributed=distributed,
        rows=rows,
        size=size,
        dtype=chosen.train.dtype,
        most=most,
        batch_sums=pieces,
        unknown=unknown,
    )
    results = describe_results(run, done, metrics, sizes, distributed)
    results |= {"peak_bytes": peak.bytes(), "measured_share": round(share, 4), "unknown": asdict(unknown)}
    if unknown.tokens and "bits_per_byte" in metrics:
        logger.info(unknown_note(unknown, stores.valid.tokens))
    if distributed.size == 1:  # a process knows its own batches only
        results["intervals"] = bootstrap_intervals(task, pieces, size=round(size * share), unknown=unknown)
    if distributed.is_main:
        drawn = {"length": length, "seed": chosen.train.seed}
        results["samples"] = [asdict(sample) for sample in task.samples(model, stores.valid, **drawn)]
        run.write_results(results)
        write_card(run)
    return results


def unknown_note(unknown: UnknownTokens, tokens: int) -> str:
    return (
        f"{unknown.tokens / tokens:.1%} of the held-out tokens are unknown: bits per byte include 8 bits for each of "
        f"the {unknown.bytes:,} bytes that they hide, and 8 for each unknown token"
    )


def take_over(model: Model, weights: dict[str, Tensor]) -> None:
    model.load_tensors(transferred_tensors(model, weights), source="the run to start from")


def transferred_tensors(model: Model, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A started model's tensors: the other run's backbone and the heads that both have; what only one has is new."""
    mine = model.tensors()

    def heads(names: Iterable[str]) -> set[str]:
        return {name.split(".")[1] for name in names if name.startswith("heads.")}

    def kept(name: str, known: set[str]) -> bool:
        return not name.startswith("heads.") or name.split(".")[1] in known

    both = heads(mine) & heads(weights)
    fresh = {name: tensor for name, tensor in mine.items() if not kept(name, both)}
    return fresh | {name: tensor for name, tensor in weights.items() if kept(name, both)}


def describe_results(
    run: RunFolder, done: TrainState, metrics: dict[str, float], sizes: dict[str, int], distributed: DistributedContext
) -> dict[str, Any]:
    named = {"valid_loss": metrics["loss"]}
    told = [name for name in metrics if name.endswith("perplexity")]
    named |= {key: metrics[key] for key in (*told, "bits_per_byte", "next_accuracy") if key in metrics}
    return {
        "run": str(run),
        "steps": done.step,
        "best_step": done.best_step,
        "spikes": done.spikes,
        "tokens": done.tokens,
        "seconds": round(done.seconds, 3),
        "tokens_per_second": round(done.tokens / max(1e-9, done.seconds - done.overhead_seconds), 1),
        "train_loss": done.loss,
        **named,
        "metrics": metrics,
        "parameters": sizes,
        "device": str(distributed.device),
        "processes": distributed.size,
        "versions": {"headstock": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
