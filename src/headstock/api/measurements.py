"""Functions that measure before or beside a run: `compare`, `sweep`, `ensemble`, `lr_find` and `plan`."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Unpack

from headstock.api.data import CorpusData, LabelledData, corpus_paths, split_files
from headstock.api.keywords import CompareKeywords, LRFindKeywords, SweepKeywords
from headstock.api.progress import show_progress
from headstock.api.reports import finish_experiment
from headstock.api.results import Comparison, EnsembleResult, LRCurve, Plan, SweepResult
from headstock.api.settings import merged_settings
from headstock.config import flatten_tables
from headstock.data.corpus import DocumentUnit
from headstock.errors import UserError
from headstock.experiments import compare as comparing
from headstock.experiments import ensemble as ensembles
from headstock.experiments import sweep as sweeping
from headstock.option_names import names_keywords
from headstock.planner import planner
from headstock.train import lr_finder
from headstock.train.callbacks import Callback


@names_keywords
def compare(
    runs: str | Path | Sequence[str | Path] = (),
    *,
    train: LabelledData | None = None,
    valid: LabelledData | None = None,
    test: LabelledData | None = None,
    out: str | Path,
    task: str | None = None,
    arms: Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    prompt: str | None = None,
    label_words: Sequence[str] | None = None,
    labels: int | Sequence[int] | None = None,
    seeds: int | None = None,
    seed: int | None = None,
    columns: Mapping[str, str] | None = None,
    skip_blank: bool | None = None,
    leakage: Literal["exclude", "keep", "skip"] | None = None,
    rows: int | None = None,
    slices: Sequence[str] | None = None,
    config_file: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    device: str = "auto",
    on: str | None = None,
    gpus_per_trial: float | None = None,
    cpus_per_trial: float | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    report: bool | None = None,
    **keywords: Unpack[CompareKeywords],
) -> Comparison:
    """Does pretraining help? Compares pretrained runs with training from scratch and TF-IDF on the same labelled rows.

    `labels` are numbers of training rows; every arm is trained with each of them and with `seeds` seeds. `features`
    adds a frozen arm for each choice of layers, such as ["last", "mix"]. `prompt` and `label_words` are the template
    and the words of prompt arms, such as ["negative=bad|awful", ...]. The result of every trial is saved in `out`:
    repeating the call continues an interrupted comparison. With `on="ray"` trials run on a Ray cluster.
    """
    values = merged_settings(compare, settings, keywords)
    files = split_files(
        task or "classify", train=train, valid=valid, test=test, columns=columns, skip_blank=bool(skip_blank)
    )
    with show_progress(progress, many_runs=True) as shown:
        comparing.compare(
            runs,
            out=out,
            task=task,
            arms=arms,
            features=features,
            prompt=prompt,
            label_words=label_words,
            labels=[labels] if isinstance(labels, int) else labels,
            seeds=seeds,
            seed=seed,
            columns=None if columns is None else dict(columns),
            skip_blank=skip_blank,
            leakage=leakage,
            rows=rows,
            slices=slices,
            config_file=config_file,
            settings=values,
            device=device,
            on=on,
            gpus_per_trial=gpus_per_trial,
            cpus_per_trial=cpus_per_trial,
            callbacks=[*shown, *callbacks],
            **files,
        )
        return Comparison(Path(out), finish_experiment(out, report=report))


@names_keywords
def sweep(
    corpus: CorpusData | None = None,
    *,
    grid: Mapping[str, Any] | None = None,
    out: str | Path,
    run: str | Path | None = None,
    task: str | None = None,
    train: LabelledData | None = None,
    valid: LabelledData | None = None,
    columns: Mapping[str, str] | None = None,
    preset: str | None = None,
    objective: str | None = None,
    tokenizer: str | Path | None = None,
    sample: int | None = None,
    method: Literal["auto", "grid", "random", "tpe", "asha"] | None = None,
    reduction: int | None = None,
    seeds: int | None = None,
    folds: int | None = None,
    repeats: int | None = None,
    out_of_fold: Literal["best", "all"] | None = None,
    seed: int | None = None,
    by: Literal["auto", "loss", "bits_per_byte"] | None = None,
    keep: bool | None = None,
    config_file: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    device: str = "auto",
    on: str | None = None,
    gpus_per_trial: float | None = None,
    cpus_per_trial: float | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    report: bool | None = None,
    **keywords: Unpack[SweepKeywords],
) -> SweepResult:
    """Train every point of a grid such as {"depth": [2, 4], "lr": [1e-3, 3e-3]} with several seeds and rank them.

    With text it pretrains and ranks by validation loss; with `run` and `train` it fine-tunes and ranks by the task's
    metric on the validation rows. `sample` draws that many points, also from ranges such as {"lr": "1e-4..1e-2"};
    `method` says how. With `folds`, fine-tuning is cross-validated instead of repeated with several seeds. The result
    of every trial is saved in `out`: repeating the call continues an interrupted sweep.
    """
    values = merged_settings(sweep, settings, keywords)
    column = values.get("column", values.get("data.column", "text"))
    valid_files: list[str] | None = None
    files: dict[str, str | None] = {"train": None}
    if run is not None:
        files = split_files(
            task or "classify", train=train, valid=valid, columns=columns, skip_blank=skips_blank(values)
        )
        valid_files = None if files["valid"] is None else [files["valid"]]
    elif train is not None:
        raise UserError("sweep: train needs run, the run that is fine-tuned")
    elif valid is not None:
        valid_files = corpus_paths(valid, name="valid", column=column)  # type: ignore[arg-type]
    with show_progress(progress, many_runs=True) as shown:
        sweeping.sweep(
            () if corpus is None else corpus_paths(corpus, column=column),
            grid=grid,
            out=out,
            run=run,
            task=task,
            train=files["train"],
            valid=valid_files,
            columns=None if columns is None else dict(columns),
            preset=preset,
            objective=objective,
            tokenizer=tokenizer,
            sample=sample,
            method=method,
            reduction=reduction,
            seeds=seeds,
            folds=folds,
            repeats=repeats,
            out_of_fold=out_of_fold,
            seed=seed,
            by=by,
            keep=keep,
            config_file=config_file,
            settings=values,
            device=device,
            on=on,
            gpus_per_trial=gpus_per_trial,
            cpus_per_trial=cpus_per_trial,
            callbacks=[*shown, *callbacks],
        )
        return SweepResult(Path(out), finish_experiment(out, report=report))


@names_keywords
def ensemble(
    members: Sequence[str | Path],
    *,
    train: LabelledData,
    out: str | Path,
    valid: LabelledData | None = None,
    test: LabelledData | None = None,
    tfidf: bool = False,
    columns: Mapping[str, str] | None = None,
    skip_blank: bool = False,
    seed: int = 0,
    device: str = "auto",
    progress: bool | None = None,
    report: bool | None = None,
) -> EnsembleResult:
    """Combine fine-tuned classifiers, and TF-IDF, into one with fitted weights.

    The weights are fitted on the validation rows, which no member may be trained on. Members that are folders of
    cross-validated sweeps have out-of-fold predictions of all rows instead, and are trained on all of them.
    """
    files = split_files("classify", train=train, valid=valid, test=test, columns=columns, skip_blank=skip_blank)
    with show_progress(progress, many_runs=True):
        ensembles.ensemble(
            members,
            train=files["train"] or "",
            out=out,
            valid=files["valid"],
            test=files["test"],
            tfidf=tfidf,
            columns=None if columns is None else dict(columns),
            skip_blank=skip_blank,
            seed=seed,
            device=device,
        )
        return EnsembleResult(Path(out), finish_experiment(out, report=report))


@names_keywords
def lr_find(
    corpus: CorpusData | None = None,
    *,
    run: str | Path | None = None,
    task: str = "classify",
    train: LabelledData | None = None,
    columns: Mapping[str, str] | None = None,
    preset: str | None = None,
    objective: str | None = None,
    tokenizer: str | Path | None = None,
    min_lr: float = 1e-6,
    max_lr: float = 1.0,
    steps: int = 100,
    seed: int | None = None,
    config_file: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    device: str = "auto",
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    **keywords: Unpack[LRFindKeywords],
) -> LRCurve:
    """Suggest a learning rate: train for up to `steps` steps while it rises from `min_lr` to `max_lr`.

    With text, a new model is pretrained; with `run` and `train`, the run is fine-tuned. Nothing is written. The test
    stops early when the loss diverges.
    """
    values = merged_settings(lr_find, settings, keywords, seed=seed)
    column = values.get("column", values.get("data.column", "text"))
    with show_progress(progress, many_runs=True) as shown:
        result = lr_finder.lr_find(
            () if corpus is None else corpus_paths(corpus, column=column),
            run=run,
            task=task,
            train=split_files(task, train=train, columns=columns, skip_blank=skips_blank(values))["train"],
            columns=None if columns is None else dict(columns),
            preset=preset,
            objective=objective,
            tokenizer=tokenizer,
            config_file=config_file,
            settings=values,
            min_lr=min_lr,
            max_lr=max_lr,
            steps=steps,
            device=device,
            callbacks=[*shown, *callbacks],
        )
    return LRCurve(**{part.name: getattr(result, part.name) for part in fields(result)})


@names_keywords
def plan(
    corpus: CorpusData,
    *,
    minutes: float | None = None,
    objective: str | None = None,
    probe: bool = False,
    documents: DocumentUnit | None = None,
    column: str | None = None,
    seed: int | None = None,
    device: str = "auto",
    progress: bool | None = None,
) -> Plan:
    """Propose a model for a text and estimate its cost; `probe` measures real steps and corrects the estimate."""
    with show_progress(progress):
        proposal = planner.plan(
            corpus_paths(corpus, column=column or "text"),
            device=device,
            minutes=minutes,
            objective=objective,
            probe=probe,
            documents=documents,
            column=column,
            seed=seed,
        )
    return Plan(
        settings=flatten_tables(proposal.config),
        parameters=proposal.costs.parameters,
        steps=proposal.steps,
        tokens=proposal.tokens,
        epochs=proposal.epochs,
        seconds=proposal.seconds,
        peak_bytes=proposal.costs.peak_bytes,
        flops=float(proposal.costs.flops_per_token * proposal.tokens),
        tokens_per_second=proposal.tokens_per_second,
        device=proposal.machine.name,
        probed=bool(proposal.costs.probed),
        content=proposal.to_dict(),
    )


def skips_blank(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("data.skip_blank", settings.get("skip_blank", False)))
