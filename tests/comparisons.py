"""Fixtures of comparisons: a pretrained run, labelled files and one comparison per task."""

import pytest

import headstock
from headstock.experiments import trial_evaluation
from headstock.experiments.arms.tfidf import TfidfClassifier
from headstock.experiments.compare import compare
from tests.conftest import TINY
from tests.experiments.small import GRID, MAKERS, SETTINGS, make_rows, read_rows, write_lines, write_rows


@pytest.fixture(scope="session")
def stock(corpus, tmp_path_factory):
    """A run pretrained for a few steps."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    headstock.pretrain(corpus, out=out, settings=TINY | {"steps": 10})
    return out


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    sizes = {"train": 60, "valid": 20, "test": 40}
    return {name: write_rows(folder / f"{name}.csv", make_rows(count, name=name)) for name, count in sizes.items()}


@pytest.fixture(scope="session")
def done(stock, files, tmp_path_factory):
    """A comparison: its results, its folder, and the rows that each trial trained on."""
    out, rows = tmp_path_factory.mktemp("compare") / "out", []
    fit, fit_tfidf = trial_evaluation.fit, TfidfClassifier.fit

    def record_fit(run_config, task, weights, data, **options):
        rows.append((set(data.train.locations), set(data.valid.locations)))
        return fit(run_config, task, weights, data, **options)

    def record_tfidf(self, texts, labels, valid_texts, valid_labels, *, seed):
        rows.append((locations_of(files["train"], texts), locations_of(files["valid"], valid_texts)))
        return fit_tfidf(self, texts, labels, valid_texts, valid_labels, seed=seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_evaluation, "fit", record_fit)
        patch.setattr(TfidfClassifier, "fit", record_tfidf)
        results = compare(stock, **files, out=out, **GRID)
    trials = [(cell["arm"], cell["labels"], cell["seed"]) for cell in results["cells"]]
    return results, out, dict(zip(trials, rows, strict=True))


def locations_of(path, texts):
    lines = {row["text"]: f"{path}:{line}" for line, row in enumerate(read_rows(path), 2)}
    return {lines[text] for text in texts}


@pytest.fixture(scope="session")
def task_files(tmp_path_factory):
    """The labelled files of each task."""
    folder, sizes = tmp_path_factory.mktemp("tasks"), {"train": 40, "valid": 16, "test": 30}
    return {
        task: {
            name: write_lines(folder / f"{task}-{name}.jsonl", make(count, name=name)) for name, count in sizes.items()
        }
        for task, make in MAKERS.items()
    }


@pytest.fixture(scope="session")
def compared(stock, task_files, tmp_path_factory):
    """A comparison of each task: its results and its folder."""
    comparisons, settings = {}, SETTINGS | {"epochs": 4, "lr": 0.02}
    for task, files in task_files.items():
        out = tmp_path_factory.mktemp("compared") / task
        comparisons[task] = compare(stock, **files, out=out, task=task, labels=[24], seeds=2, settings=settings), out
    return comparisons
