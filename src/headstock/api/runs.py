"""Functions that make runs: `pretrain`, `finetune`, `distil`, `export_run` and `import_run`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

from headstock.api.data import CorpusData, LabelledData, corpus_paths, split_files
from headstock.api.keywords import FinetuneKeywords, Init, PretrainKeywords
from headstock.api.progress import show_progress
from headstock.api.reports import finish_run
from headstock.api.results import Export, ImportedRun, RunResult
from headstock.api.settings import merged_settings
from headstock.experiments import distil as distillation
from headstock.option_names import names_keywords
from headstock.planner.model_size import with_planned_size
from headstock.train import finetune as finetuning
from headstock.train import pretrain as pretraining
from headstock.train.callbacks import Callback
from headstock.train.run_folder import RunFolder, open_run

ExportFormat = Literal["huggingface", "onnx", "gguf", "lab"]


@names_keywords
def pretrain(
    corpus: CorpusData | None = None,
    *,
    out: str | Path,
    preset: str | None = None,
    objective: str | None = None,
    tokenizer: str | Path | None = None,
    valid: CorpusData | None = None,
    start: str | Path | None = None,
    seed: int | None = None,
    config_file: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    on: str | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    report: bool | None = None,
    **keywords: Unpack[PretrainKeywords],
) -> RunResult:
    """Train a tokenizer and a language model on text.

    Settings come from the preset, then `config_file`, then `settings`, then keywords (`depth=4`, `lr=1e-3`); the later
    wins. With `minutes` and no preset, file, tokenizer or size, the planner chooses the model (see `plan`). With
    `resume`, an interrupted run continues, and a run that does not exist is started. `start` is a finished
    run whose model, tokenizer and weights this run starts from. With `on="ray"` a Ray cluster builds the token store.
    `callbacks` are called with an `Event` after each step, log line and validation.
    """
    values = merged_settings(pretrain, settings, keywords, seed=seed)
    column = values.get("column", values.get("data.column", "text"))
    paths = [] if corpus is None else corpus_paths(corpus, column=column)
    values |= {} if valid is None else {"data.valid": corpus_paths(valid, name="valid", column=column)}
    with show_progress(progress) as shown:
        values = with_planned_size(
            values,
            paths,
            out=out,
            named=any((preset, config_file, start, tokenizer)),
            objective=objective,
            resume=resume,
            overwrite=overwrite,
            device=device,
        )
        results = pretraining.pretrain(
            paths,
            out=out,
            preset=preset,
            objective=objective,
            tokenizer=tokenizer,
            start=start,
            config_file=config_file,
            settings=values,
            resume=resume,
            overwrite=overwrite,
            device=device,
            on=on,
            callbacks=[*shown, *callbacks],
        )
        return RunResult(Path(out), finish_run(out, results, report=report, device=device))


@names_keywords
def finetune(
    run: str | Path | None = None,
    *,
    train: LabelledData | None = None,
    out: str | Path,
    task: str = "classify",
    valid: LabelledData | None = None,
    test: LabelledData | None = None,
    columns: Mapping[str, str] | None = None,
    skip_blank: bool = False,
    preset: str | None = None,
    init: Init | None = None,
    freeze: bool | None = None,
    seed: int | None = None,
    config_file: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    report: bool | None = None,
    **keywords: Unpack[FinetuneKeywords],
) -> RunResult:
    """Train a new head on a run's backbone, and the backbone with it, on labelled rows.

    `columns` names the columns of the data, such as {"text": "review", "label": "stars"}. `init="scratch"` uses the
    architecture without the weights; `freeze` trains the head alone. Without a run, the model is new and follows
    `preset`. Without `valid`, some training rows are held out.
    """
    values = merged_settings(finetune, settings, keywords, seed=seed)
    files = split_files(task, train=train, valid=valid, test=test, columns=columns, skip_blank=skip_blank)
    with show_progress(progress) as shown:
        results = finetuning.finetune(
            run,
            preset=preset,
            out=out,
            task=task,
            columns=None if columns is None else dict(columns),
            skip_blank=skip_blank,
            init=init,
            freeze=freeze,
            config_file=config_file,
            settings=values,
            resume=resume,
            overwrite=overwrite,
            device=device,
            callbacks=[*shown, *callbacks],
            **files,
        )
        return RunResult(Path(out), finish_run(out, results, report=report, device=device))


@names_keywords
def distil(
    student: str | Path,
    *,
    teachers: Sequence[str | Path],
    text: CorpusData,
    train: LabelledData,
    out: str | Path,
    valid: LabelledData | None = None,
    test: LabelledData | None = None,
    tfidf: bool = True,
    equal_weights: bool = False,
    rows: int | None = None,
    columns: Mapping[str, str] | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    report: bool | None = None,
    **keywords: Unpack[FinetuneKeywords],
) -> RunResult:
    """Fine-tune `student`, a pretrained run, on what fine-tuned `teachers` and TF-IDF predict on unlabelled text.

    The student reads the labelled rows, and the `rows` texts of `text` that are most like them, ten per labelled row
    unless given. The teachers' weights are fitted on the validation rows unless `equal_weights` is set.
    """
    values = merged_settings(distil, settings, keywords, seed=seed)
    files = split_files("classify", train=train, valid=valid, test=test, columns=columns)
    with show_progress(progress) as shown:
        results = distillation.distil(
            student,
            teachers=teachers,
            text=corpus_paths(text, name="text"),
            train=files["train"] or "",
            valid=files["valid"],
            test=files["test"],
            out=out,
            tfidf=tfidf,
            equal_weights=equal_weights,
            rows=rows,
            columns=None if columns is None else dict(columns),
            settings=values,
            resume=resume,
            overwrite=overwrite,
            device=device,
            callbacks=[*shown, *callbacks],
        )
        return RunResult(Path(out), finish_run(out, results, report=report, device=device))


@names_keywords
def export_run(
    run: str | Path | RunFolder,
    folder: str | Path | None = None,
    *,
    to: ExportFormat = "huggingface",
    int8: bool = False,
    measure: LabelledData | None = None,
    embedding: bool = False,
    custom_code: bool = False,
    overwrite: bool = False,
    push: str | None = None,
    private: bool = False,
    dry_run: bool = False,
) -> Export:
    """Export a finished run with identical outputs; a run that the format cannot represent exactly is refused.

    `int8`, `measure` and `embedding` are for ONNX: quantized weights, the labelled rows on which their loss of accuracy
    is measured, and a graph that returns text embeddings. `custom_code` is for Hugging Face: a classification head that
    transformers does not have becomes a module in the folder. `push` uploads the export to the repository ORG/NAME of
    the Hugging Face Hub; with `dry_run` it is only listed.
    """
    from headstock import interop

    source = run if isinstance(run, RunFolder) else open_run(run)
    file = None
    if measure is not None:
        file = split_files(source.config()["task"]["name"], test=measure)["test"]
    content = interop.export_run(
        source,
        folder,
        to=to,
        int8=int8,
        measure=file,
        embedding=embedding,
        custom_code=custom_code,
        overwrite=overwrite,
        push=push,
        private=private,
        dry_run=dry_run,
    )
    return Export(source.path, None if folder is None else Path(folder), to, content)


@names_keywords
def import_run(
    path: str | Path,
    *,
    out: str | Path,
    dictionary: str | Path | None = None,
    sentencepiece: str | Path | None = None,
    overwrite: bool = False,
) -> ImportedRun:
    """Import a Hugging Face folder, a model of the Hub (hf://ORG/NAME[@REVISION]) or a lab checkpoint as a run.

    `dictionary` and `sentencepiece` are the lab's dict.txt and model, if they are not in the checkpoint's folder.
    """
    from headstock import interop

    run = interop.import_run(path, out=out, dictionary=dictionary, sentencepiece=sentencepiece, overwrite=overwrite)
    config = run.config()
    return ImportedRun(run.path, config["task"]["name"], config["model"]["family"])
