"""`headstock pretrain` and `headstock finetune`."""

from dataclasses import dataclass
from typing import Annotated, Any, Unpack

import typer

from headstock.cli.command import Common, command
from headstock.cli.options import (
    TASK_HELP,
    Columns,
    ConfigOptions,
    Corpus,
    FolderOptions,
    LabelledFileOptions,
    ModelOptions,
    PretrainSettings,
    RunOut,
    Setting,
    SettingOptions,
    SkipBlank,
)


@dataclass(frozen=True)
class PretrainRunSettings(PretrainSettings):
    nsp: Annotated[
        bool | None, Setting("task.nsp", "Masked: also learn next-sentence prediction.", "--nsp/--no-nsp")
    ] = None
    valid: Annotated[list[str] | None, Setting("data.valid", "Held-out text for validation.")] = None


STORE_HELP = "Build the token store on a Ray cluster; the model is trained here. Addresses as in compare --on."


class PretrainOptions(ModelOptions, FolderOptions):
    start: Annotated[str | None, "Continue from the model and weights of this run."]
    on: Annotated[str | None, typer.Option("--on", metavar="ray[:ADDRESS]", help=STORE_HELP)]


@command("Train", distributed=True)
def pretrain(
    common: Common,
    out: RunOut,
    settings: PretrainRunSettings,
    columns: Columns,
    corpus: Corpus = None,
    **options: Unpack[PretrainOptions],
) -> dict[str, Any]:
    """Pretrain a language model on text.

    Example: headstock pretrain corpus.txt --out runs/mine --preset gpt-nano --minutes 5
    """
    from headstock.errors import shell_quote
    from headstock.planner.model_size import with_planned_size
    from headstock.report.pages import write_report
    from headstock.tasks.base import TASKS
    from headstock.tasks.samples import sample_lines
    from headstock.train import pretrain as training
    from headstock.train.callbacks import terminal_progress
    from headstock.train.metrics import format_metrics
    from headstock.train.mirror import finish_mirror, requested_mirror
    from headstock.train.run_folder import RunFolder, open_run
    from headstock.train.session import check_resumable

    values = settings.to_dict()
    values |= {"train.seed": common.seed} if common.seed is not None else {}
    values |= {"data.column": column} if (column := columns.text()) is not None else {}
    if options["resume"]:
        check_resumable(RunFolder(out), requested_mirror(values, options["config_file"]))
    values = with_planned_size(
        values,
        corpus or (),
        out=out,
        named=any(options[name] for name in ("preset", "config_file", "start", "tokenizer")),
        objective=options["objective"],
        resume=options["resume"],
        overwrite=options["overwrite"],
        device=common.device,
    )
    with terminal_progress(quiet=common.quiet) as callbacks:
        results = training.pretrain(
            corpus or (), out=out, settings=values, device=common.device, callbacks=callbacks, **options
        )
    results |= {"run": str(out)}  # a run that was copied here after training records its old path
    if common.prints:
        write_report(out)
        results |= finish_mirror(RunFolder(out))
    common.show_prose(
        f"{results['run']}: {results['steps']:,} steps in {results['seconds']:.0f} s, "
        f"{results['tokens_per_second']:,.0f} tokens/s | {format_metrics(results['metrics'])}"
    )
    for line in sample_lines(results.get("samples", [])):
        common.show(f"  {line}")
    task = TASKS.get(open_run(out).config()["task"]["name"])
    if task.generates:
        common.show(f'try: headstock generate {shell_quote(out)} "Once"')
    if task.fills_masks:
        common.show(f'try: headstock fill {shell_quote(out)} "Once [MASK] a time"')
    return results


@dataclass(frozen=True)
class FinetuneSettings(SettingOptions):
    pool: Annotated[str | None, Setting("task.pool", "Pooling: last, cls, mean, max or concat.")] = None
    lora: Annotated[
        int | None, Setting("transfer.lora", "Train adapters of this rank and the head; the rest is frozen.")
    ] = None
    epochs: Annotated[float | None, Setting("train.epochs", "Epochs over the training rows.")] = None
    lr: Annotated[float | None, Setting("train.lr", "Peak learning rate.")] = None
    layer_decay: Annotated[
        float | None, Setting("train.layer_decay", "Learning rate of each layer relative to the one above.")
    ] = None
    adapt_steps: Annotated[
        int | None, Setting("transfer.adapt_steps", "First pretrain this many steps on the task's own texts.")
    ] = None
    adapt_text: Annotated[
        list[str] | None, Setting("transfer.adapt_text", "With --adapt-steps: further unlabelled text; repeatable.")
    ] = None
    method: Annotated[
        str | None, Setting("transfer.method", "finetune, or setfit: contrastive pairs, for few labels.")
    ] = None
    ensemble: Annotated[int | None, Setting("transfer.ensemble", "Average the predictions of this many models.")] = None
    soup: Annotated[int | None, Setting("transfer.soup", "Average the weights of this many models: a soup.")] = None


class FinetuneOptions(LabelledFileOptions, ConfigOptions, FolderOptions):
    preset: Annotated[str | None, "Without a run: preset of a new model, such as seq2seq-mini."]
    init: Annotated[str | None, "Start from pretrained weights or from scratch."]
    freeze: Annotated[bool | None, "Train only the head."]
    skip_blank: SkipBlank


@command("Train", distributed=True)
def finetune(
    common: Common,
    out: RunOut,
    settings: FinetuneSettings,
    columns: Columns,
    run: Annotated[str | None, typer.Argument(help="Pretrained run, the bundled reviews-en, or hf://ORG/NAME.")] = None,
    task: Annotated[str, TASK_HELP] = "classify",
    **options: Unpack[FinetuneOptions],
) -> dict[str, Any]:
    """Fine-tune a pretrained run on labelled texts.

    Example: headstock finetune reviews-en --train train.csv --valid valid.csv --test test.csv --out runs/mine
    """
    from headstock.errors import shell_quote
    from headstock.experiments.trial_evaluation import add_error_analysis
    from headstock.report.pages import write_report
    from headstock.train import finetune as training
    from headstock.train.callbacks import terminal_progress
    from headstock.train.metrics import labelled_metric_lines
    from headstock.train.mirror import finish_mirror, requested_mirror
    from headstock.train.model_card import describe_lora, describe_soup
    from headstock.train.resolve import labelled_task
    from headstock.train.run_folder import RunFolder
    from headstock.train.session import check_resumable

    values = settings.to_dict() | ({"train.seed": common.seed} if common.seed is not None else {})
    if options["resume"]:
        check_resumable(RunFolder(out), requested_mirror(values, options["config_file"]))
    with terminal_progress(quiet=common.quiet) as callbacks:
        results = training.finetune(
            run,
            out=out,
            task=task,
            columns=columns.names(main=labelled_task(task).input_column),
            settings=values,
            device=common.device,
            callbacks=callbacks,
            **options,
        )
    results |= {"run": str(out)}  # a run that was copied here after training records its old path
    if common.prints:
        add_error_analysis(RunFolder(out), device=common.device)
        write_report(out)
        results |= finish_mirror(RunFolder(out))
    common.show_prose(
        f"{results['run']}: {results['steps']:,} steps in {results['seconds']:.0f} s"
        + ("" if results.get("members") else f", best epoch {results['best_epoch']}")
    )
    for split in ("valid", "test"):
        if split in results:
            for line in labelled_metric_lines(split, results[split]):
                common.show_prose(line)
    if results.get("lora"):
        common.show_prose(f"LoRA: {describe_lora(results)}")
    if results.get("members"):
        common.show_prose(f"soup: {describe_soup(results)}")
    head = labelled_task(results["task"])
    common.show(f"report: {RunFolder(out).report}")
    common.show(f"try: headstock {head.verb} {shell_quote(out)} {head.example}")
    return results
