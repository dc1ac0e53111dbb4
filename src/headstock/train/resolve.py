"""Resolves the configuration of a run from presets, settings files, options and source runs."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from headstock import config
from headstock.data.records import Records
from headstock.data.tokenizer import Tokenizer
from headstock.errors import ConfigError, UserError, did_you_mean
from headstock.model.backbone import BACKBONES
from headstock.model.backbones.encoder_decoder import config_from_transformer
from headstock.model.layer_features import check_layers
from headstock.model.lora import check_lora
from headstock.tasks.base import TASKS
from headstock.tasks.labelled import LabelledTask
from headstock.train.run_folder import RunFolder, open_run
from headstock.train.settings import (
    RUN_LENGTHS,
    RunConfig,
    TrainSettings,
    TransferSettings,
    family_of,
    kind_of_transfer,
    make_config,
    objective_of,
    override_settings,
    read_preset,
    setting_names,
)

logger = logging.getLogger(__name__)

Tree = dict[str, Any]  # settings by section, before they are checked

DEFAULT_PRESET, DEFAULT_VOCABULARY = "gpt-nano", 8000

# Training defaults of fine-tuning, tuned on the validation rows of short film quotes
FINETUNE_DEFAULTS: Tree = {
    "batch": 16,
    "schedule": "linear",
    "warmup": 0.1,
    "beta2": 0.999,
    "weight_decay": 0.01,
    "valid_tokens": 10**12,
    "keep": 1,
    "tensorboard": False,
}
DEFAULTS_BY_INIT: dict[str, Tree] = {
    "pretrained": {"lr": 3e-4, "epochs": 4.0},
    "scratch": {"lr": 1e-3, "epochs": 6.0},
    "frozen": {"lr": 1e-3, "epochs": 40.0, "weight_decay": 0.0},
    "setfit": {"lr": 1e-4, "epochs": 4.0, "batch": 32, "weights": "last"},
    "lora": {"lr": 3e-3, "epochs": 4.0},
}
COPYING = (
    "model.causal=false: every position attends to the token that it predicts, so the model learns to copy it and its "
    "loss says nothing about the text; this is a demonstration, not a language model"
)
CHARACTERS_PER_TOKEN = 4  # roughly


# Pretraining


def resolve_pretrain_config(
    preset: str | None, file: str | Path | None, options: Tree, *, start: str | Path | None = None
) -> RunConfig:
    """The configuration of a pretraining run: preset, then file, then options; the later wins.

    `start` is a run whose model, tokenizer and training settings come before the file.
    """
    options, settings = dict(options), read_file(file)
    if start is not None:
        if preset or options.get("tokenizer.file"):
            raise UserError(f"{start}: the run to start from has its own model and tokenizer; name no other")
        settings = merge_objective(source_settings(open_run(start)), settings)
    file_preset = settings.pop("preset", None)
    preset = preset or file_preset
    base = read_preset(preset or DEFAULT_PRESET) if preset or "model" not in settings else {}
    tree = merge_objective(base, settings)
    if objective := options.pop("task.name", None):
        tree = merge_objective(tree, {"task": {"name": objective}})
    family = options.pop("model.family", None)
    if family and family != family_of(tree):
        tree = tree | {"model": {"family": family}}  # the sizes of another family do not apply
    tree = with_direction(override_settings(tree, without_nsp(options, tree)))
    tree = with_preliminary_vocabulary(tree)
    run_config = with_segments(make_config(tree), tree)
    check_length(run_config)
    return run_config


def require_corpus(run_config: RunConfig) -> RunConfig:
    if not run_config.data.corpus:
        raise UserError("no text to train on: name a file, folder or glob, or - for standard input")
    return run_config


def merge_objective(tree: Tree, override: Tree) -> Tree:
    """Merge two trees, the later wins. Settings of a replaced objective are dropped unless the new one has them."""
    old = objective_of(tree)
    new = override.get("task", {}).get("name", old)
    obsolete = setting_names(TASKS.get(old).Config) - setting_names(TASKS.get(new).Config)
    task = {key: value for key, value in tree.get("task", {}).items() if key not in obsolete}
    return config.merge(tree | {"task": task}, override)


def source_settings(source: RunFolder) -> Tree:
    """The settings that a run takes over from the run it starts from: all but its text and its length."""
    tree = source.config()
    if "transfer" in tree:
        objective = TASKS.get(tree["task"]["name"]).pretraining_objective
        if objective is None or "imported" not in source.data():
            raise UserError(f"{source}: is a fine-tuned run and cannot be pretrained further")
        del tree["transfer"]
        tree = merge_objective(tree, {"task": {"name": objective}})
    source.check_weights_exist()
    del tree["data"]
    for length in RUN_LENGTHS:
        tree["train"].pop(length)
    tree["train"].pop("mirror", None)
    tree["tokenizer"] = tree.get("tokenizer", {}) | {"file": str(source.tokenizer_file)}
    return tree


def with_direction(tree: Tree) -> Tree:
    """Set the model's attention direction to what the objective needs, and check that the family supports it."""
    name, family = objective_of(tree), family_of(tree)
    task, objectives = TASKS.get(name), [other for other in TASKS.names() if not TASKS.get(other).is_labelled]
    if not task.trainable:
        trainable = ", ".join(other for other in objectives if TASKS.get(other).trainable)
        raise UserError(f"--objective {name}: predicts nothing, so it cannot be trained (objectives: {trainable})")
    if not supports(family, name):
        families = ", ".join(other for other in BACKBONES.names() if supports(other, name))
        others = ", ".join(other for other in objectives if supports(family, other))
        raise UserError(
            f"model.family: {family!r} cannot learn the objective {name!r} (families that can: {families}; "
            f"objectives for {family!r}: {others})"
        )
    if task.causal is None or fixed_direction(family) is not None:
        return tree
    causal = tree.get("model", {}).get("causal", task.causal)
    if causal != task.causal and not task.copies_unmasked:
        raise UserError(f"model.causal: must be {str(task.causal).lower()} for the objective {name!r}, not {causal}")
    if causal != task.causal:
        logger.warning(COPYING)
    return config.merge(tree, {"model": {"causal": causal}})


def supports(family: str, objective: str) -> bool:
    """Whether models of a family can learn an objective."""
    backbone, task, direction = BACKBONES.get(family), TASKS.get(objective), fixed_direction(family)
    return (
        task.trainable
        and backbone.is_bilm == task.needs_bilm
        and backbone.is_encoder_decoder == task.needs_encoder_decoder
        and (None in (direction, task.causal) or direction == task.causal)
    )


def fixed_direction(family: str) -> bool | None:
    """Whether all models of a family are causal; None where a setting decides it."""
    return getattr(BACKBONES.get(family), "causal", None)


def with_segments(run_config: RunConfig, tree: Tree) -> RunConfig:
    """Give the model enough segment embeddings for an objective whose rows join several texts."""
    needed = TASKS.get(run_config.objective).segments(run_config.task)
    if not needed or run_config.model.segments >= needed:
        return run_config
    if "segments" in tree["model"]:
        segments = tree["model"]["segments"]
        raise UserError(f"model.segments: must be {needed} or more, not {segments}: rows have {needed} texts")
    return replace(run_config, model=replace(run_config.model, segments=needed))


def without_nsp(options: Tree, tree: Tree) -> Tree:
    """Drop `nsp=false` for an objective without next-sentence prediction; reject `nsp=true` there."""
    name = objective_of(tree)
    if "task.nsp" not in options or "nsp" in setting_names(TASKS.get(name).Config):
        return options
    if options["task.nsp"]:
        raise UserError(f"--nsp: next-sentence prediction needs the objective 'masked', not {name!r}")
    return {key: value for key, value in options.items() if key != "task.nsp"}


# Fine-tuning


def labelled_task_names() -> list[str]:
    return [name for name in TASKS.names() if TASKS.get(name).is_labelled]


def labelled_task(name: str) -> type[LabelledTask]:
    """A task class by name, which must be one that is trained on labelled rows."""
    names = labelled_task_names()
    if name in names:
        return cast(type[LabelledTask], TASKS.get(name))
    if name in TASKS.names():
        raise UserError(f"--task {name}: is a pretraining objective (tasks for fine-tuning: {', '.join(names)})")
    raise UserError(f"--task {name}: no such task{did_you_mean(name, names)} (have: {', '.join(names)})")


def resolve_finetune_config(
    source: RunFolder | None, task: str, file: str | Path | None, options: Tree, *, preset: str | None = None
) -> RunConfig:
    """The configuration of a fine-tuning run: the source's model, the task's defaults, a file, then options.

    Without a source, the model and the tokenizer are new and follow a preset.
    """
    settings = read_file(file)
    tree = preset_tree(preset, task, settings, options) if source is None else source_tree(source, task)
    tree = override_settings(config.merge(tree, settings, {"transfer": tree["transfer"]}), options)
    if source is None:
        tree = with_preliminary_vocabulary(tree)
    elif tree["transfer"].get("lora") and family_of(tree) != family_of(source.config()):
        raise UserError(
            f"transfer.lora: {source} has no cross-attention, which is new in a translator and must be trained whole; "
            "leave out --lora, or start from an encoder-decoder"
        )
    if source is not None and tree["transfer"].get("lm_loss"):
        check_lm_objective(source)
    return complete_finetune_config(tree)


def check_lm_objective(source: RunFolder) -> None:
    """Reject a source whose language-model loss cannot be computed on labelled rows."""
    tree = source.config()
    if "transfer" in tree or not TASKS.get(objective_of(tree)).is_auxiliary:
        names = ", ".join(name for name in TASKS.names() if TASKS.get(name).is_auxiliary)
        raise UserError(
            f"transfer.lm_loss: {source} was trained for {objective_of(tree)!r}; expected a run with a language-model "
            f"head (objectives: {names})"
        )


def source_tree(source: RunFolder, task: str) -> Tree:
    """Settings that a fine-tuned run takes over from its source."""
    settings = source.config()
    model, task_settings = settings["model"], settings["task"]
    if labelled_task(task).needs_encoder_decoder and BACKBONES.get(family_of(settings)).starts_encoder_decoder:
        model = config_from_transformer(model)
    bos_role = task_settings.get("opening") or TASKS.get(task_settings["name"]).bos_role
    special = {"opening": bos_role, "closed": task_settings.get("closed", False)}
    special |= {"decoder_start": task_settings["decoder_start"]} if "decoder_start" in task_settings else {}
    names = setting_names(labelled_task(task).Config)
    return {
        "model": model,
        "task": {"name": task} | {name: value for name, value in special.items() if name in names},
        "data": {},
        "transfer": {"run": str(source)},
        "train": {} if model.get("context") else {"length": settings["train"].get("length")},
    }


def preset_tree(preset: str | None, task: str, settings: Tree, options: Tree) -> Tree:
    """Settings of a model trained from scratch: the preset's model and tokenizer, without its pretraining."""
    labelled_task(task)
    preset = preset or settings.get("transfer", {}).get("preset")
    if preset is None:
        raise UserError("no model to train: name a run, or a --preset for a new model")
    if options.get("transfer.init", "scratch") != "scratch":
        raise UserError(f"--init {options['transfer.init']}: a preset has no weights; name a run")
    base = read_preset(preset)
    model, causal = base["model"], TASKS.get(objective_of(base)).causal
    if causal is not None and fixed_direction(family_of(base)) is None:
        model = {"causal": causal} | model  # the direction of the preset's objective
    return {
        "model": model,
        "tokenizer": base.get("tokenizer", {}),
        "task": {"name": task},
        "data": {},
        "transfer": {"run": "", "init": "scratch", "preset": preset},
        "train": {},
    }


def complete_finetune_config(tree: Tree) -> RunConfig:
    """Add the defaults of the task and initialization, and check that the parts fit together."""
    transfer, train = tree["transfer"], tree["train"]
    config.from_dict(TransferSettings, transfer, prefix="transfer")  # checks the types of what is used below
    init = kind_of_transfer(transfer)
    task = labelled_task(tree["task"]["name"])
    check_task(tree, task, init)
    defaults = FINETUNE_DEFAULTS | DEFAULTS_BY_INIT.get(init, {}) | task.training_defaults
    if train.get("batch"):
        defaults.pop("batch_tokens", None)
    if train.get("steps") or train.get("minutes"):
        defaults.pop("epochs", None)
    if train.get("epochs"):  # an explicit number of epochs is not extended
        tree = config.merge({"transfer": {"least_steps": 0}}, tree)
    tree = config.merge(tree, {"train": defaults | train})
    if transfer.get("bidirectional") is not None:
        tree = override_direction(tree, causal=not transfer["bidirectional"])
    fixed, names = fixed_direction(family_of(tree)), setting_names(task.Config)
    causal = tree["model"].get("causal", True) if fixed is None else fixed
    if "pool" in names:
        tree["task"] = {"pool": "last" if causal else "mean"} | tree["task"]
    run_config = make_config(tree)
    settings = run_config.train
    if run_config.transfer.method == "setfit":
        check_logistic_head(run_config, task, option="--method setfit")
    if run_config.transfer.linear_probe:
        check_logistic_head(run_config, task, option="transfer.linear_probe")
    if "layers" in names:
        check_layers(run_config.task.layers, run_config.model.depth)
    if transfer.get("freeze") and (settings.unfreeze or settings.layer_decay != 1):
        name = "unfreeze" if settings.unfreeze else "layer_decay"
        raise UserError(f"train.{name}: has no effect with --freeze, which trains the head alone")
    if "pool" in names and run_config.task.pool == "cls" and causal:
        raise UserError("task.pool: the first token of a causal model sees no text; use last, mean or bidirectional")
    check_regularization(run_config, task)
    check_adapters(run_config)
    check_length(run_config)
    return run_config


def check_regularization(run_config: RunConfig, task: type[LabelledTask]) -> None:
    """Reject R-Drop without classes or dropout, token dropout in translation, and more new layers than there are."""
    transfer, model = run_config.transfer, run_config.model
    if transfer.r_drop and not task.predicts_classes:
        raise UserError(f"transfer.r_drop: compares probabilities of classes, which {task.name} does not predict")
    dropouts = [getattr(run_config.task, "dropout", 0.0), 0.0 if transfer.freeze else getattr(model, "dropout", 0.0)]
    if transfer.token_dropout and not task.can_freeze_backbone:
        raise UserError(f"transfer.token_dropout: needs a task with a head of its own, which {task.name} does not have")
    if transfer.r_drop and not any([*dropouts, transfer.token_dropout]):
        raise UserError("transfer.r_drop: without dropout both readings of a row are the same; set dropout above 0")
    if transfer.reinit_layers > model.depth:
        raise UserError(f"transfer.reinit_layers: {transfer.reinit_layers} is more than the {model.depth} of the model")


def check_adapters(run_config: RunConfig) -> None:
    """Reject LoRA for a model without suitable matrices, and training settings that need whole matrices."""
    adapters, settings = run_config.transfer.adapters, run_config.train
    if adapters is None:
        return
    conflicts = {
        "unfreeze": (settings.unfreeze, "the backbone stays frozen"),
        "optimizer": (settings.optimizer == "muon", "muon orthogonalizes whole matrices; use adamw"),
        "dtype": (settings.dtype == "float8", "adapters are too narrow for 8-bit products; use bfloat16 or auto"),
    }
    if problems := [(f"train.{name}", f"with LoRA, {why}") for name, (value, why) in conflicts.items() if value]:
        raise ConfigError(problems)
    with torch.device("meta"):
        check_lora(BACKBONES.get(run_config.family)(run_config.model), adapters)


def check_task(tree: Tree, task: type[LabelledTask], init: str) -> None:
    """Reject models and initializations that a task does not support."""
    family, needed = family_of(tree), task.needs_encoder_decoder
    if BACKBONES.get(family).is_encoder_decoder != needed:
        families = [name for name in BACKBONES.names() if BACKBONES.get(name).is_encoder_decoder == needed]
        tasks = [name for name in labelled_task_names() if TASKS.get(name).needs_encoder_decoder != needed]
        raise UserError(
            f"--task {task.name}: a model of the family {family!r} cannot learn it (families that can: "
            f"{', '.join(families)}; tasks for {family!r}: {', '.join(tasks)})"
        )
    if init == "frozen" and not task.can_freeze_backbone:
        raise UserError(f"--freeze: {task.name} has no head that could be trained alone")
    if tree["transfer"].get("ensemble", 1) > 1 and not task.can_ensemble:
        raise UserError(f"transfer.ensemble: the outputs of {task.name} models cannot be averaged")


def check_logistic_head(run_config: RunConfig, task: type[LabelledTask], *, option: str) -> None:
    """Reject tasks and heads that an option which fits the head by logistic regression does not apply to."""
    settings, transfer = run_config.task, run_config.transfer
    if not task.predicts_classes or getattr(settings, "separator", None) is not None:
        raise UserError(f"{option}: needs one class per row, which {task.name} rows do not have")
    if not task.linear_classes:
        raise UserError(f"{option}: its logistic regression does not apply to {task.name}; use classify")
    if not settings.head_bias:
        raise UserError(f"task.head_bias: false conflicts with {option}, whose logistic regression has a bias")
    if transfer.freeze:
        raise UserError(f"{option}: fine-tunes the backbone, so it conflicts with --freeze")
    for name, plain in (("layers", "mix"), ("dense", "none")):
        value = getattr(settings, name, plain)
        if (value == plain) == (name == "layers"):
            raise UserError(f"task.{name}: {value} conflicts with {option}, whose head is a plain linear layer")


def override_direction(tree: Tree, *, causal: bool) -> Tree:
    """Set whether attention is causal, where the family leaves that to a setting."""
    family = family_of(tree)
    fixed = fixed_direction(family)
    if fixed is None:
        return config.merge(tree, {"model": {"causal": causal}})
    if fixed != causal:
        direction = "causal" if fixed else "bidirectional"
        raise UserError(f"transfer.bidirectional: models of the family {family!r} are always {direction}")
    return tree


def resolve_with_data(run_config: RunConfig, records: Records) -> RunConfig:
    """Add what depends on the labelled rows: the classes, their weights, and the length of an epoch."""
    task = labelled_task(run_config.objective).infer_settings(run_config.task, records)
    return replace(run_config, task=task, train=with_epochs(run_config, records))


def with_epochs(run_config: RunConfig, records: Records) -> TrainSettings:
    """Enough epochs for the minimum number of steps, and a validation after each.

    With `batch_tokens` the steps per epoch are only estimated here, and validations are a tenth of the run apart.
    """
    settings = run_config.train
    if settings.batch_tokens is None:
        steps = math.ceil(len(records) / settings.batch)
    else:
        steps = math.ceil(sum(map(len, records.documents)) / CHARACTERS_PER_TOKEN / settings.batch_tokens)
    if settings.steps is None and settings.minutes is None:
        epochs = max(settings.epochs or 1.0, math.ceil(run_config.transfer.least_steps / steps))
        settings = replace(settings, epochs=float(epochs))
    by_epoch = settings.batch_tokens is None and run_config.transfer.method != "setfit"  # which selects no epoch
    every = settings.validate_every or (steps if by_epoch else None)
    return replace(settings, validate_every=every)


# Both


def read_file(file: str | Path | None) -> Tree:
    return config.read_settings(Path(file), tables=config.SECTIONS) if file else {}


def check_length(run_config: RunConfig) -> None:
    length, context = run_config.train.length, getattr(run_config.model, "context", None)
    if length and context and length > context:
        raise UserError(f"train.length: {length} is longer than model.context {context}")


def with_preliminary_vocabulary(tree: Tree) -> Tree:
    """The model's vocabulary is at most the tokenizer's; final once the tokenizer exists."""
    vocabulary = tree.get("tokenizer", {}).get("vocabulary", DEFAULT_VOCABULARY)
    return config.merge({"model": {"vocabulary": vocabulary}}, tree)


def with_vocabulary(run_config: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """The model's vocabulary is the tokenizer's, padded as set, unless a larger one was set."""
    vocabulary, tokens = run_config.model.vocabulary, tokenizer.vocabulary
    explicit = vocabulary != run_config.tokenizer.vocabulary
    if explicit and vocabulary < tokens:
        raise UserError(f"model.vocabulary: {vocabulary} is smaller than the tokenizer's {tokens}")
    multiple = run_config.train.vocabulary_multiple
    model = run_config.model if explicit else replace(run_config.model, vocabulary=-(-tokens // multiple) * multiple)
    if tokenizer.source_tokenizer is not None:
        model = replace(model, source_vocabulary=tokenizer.source_tokenizer.vocabulary)
    return replace(run_config, model=model)
