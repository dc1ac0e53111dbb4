"""The data that the API accepts: paths, lists, data frames and datasets, as the files that runs are trained on."""

from collections.abc import Mapping

from headstock.data.in_memory import (
    CorpusData,
    Dataset,
    Frame,
    LabelledData,
    corpus_paths,
    labelled_file,
    labelled_files,
)

__all__ = [
    "CorpusData",
    "Dataset",
    "Frame",
    "LabelledData",
    "corpus_paths",
    "labelled_file",
    "labelled_files",
    "split_files",
]


def split_files(
    task: str,
    *,
    train: LabelledData | None = None,
    valid: LabelledData | None = None,
    test: LabelledData | None = None,
    columns: Mapping[str, str] | None = None,
    skip_blank: bool | None = None,
) -> dict[str, str | None]:
    """The files of the splits of a labelled task, by "train", "valid" and "test"; None where there is none."""
    from headstock.train.resolve import labelled_task

    task_class = labelled_task(task)
    inputs, target = task_class.input_columns, task_class.target

    def file_of(name: str, data: LabelledData | None, *, labelled: bool) -> str | None:
        if data is None:
            return None
        return labelled_file(
            data, name=name, inputs=inputs, target=target, columns=columns, labelled=labelled, skip_blank=skip_blank
        )

    return {
        "train": file_of("train", train, labelled=True),
        "valid": file_of("valid", valid, labelled=True),
        "test": file_of("test", test, labelled=False),
    }
