"""A run by reference: what pickled estimators and functions contain in place of a model."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

from headstock.errors import UserError
from headstock.inference.pipeline import Pipeline, load
from headstock.io import sha256
from headstock.train.run_folder import RunFolder, open_run

OPEN_PIPELINES = 4  # that stay in memory, so that copies of a reference share them


@dataclass(frozen=True)
class RunReference:
    """The path or name of a run and the sha256 of its weights, or of those of each member of an ensemble."""

    run: str
    weights: tuple[str, ...]

    @classmethod
    def to(cls, run: str | Path) -> Self:
        """A reference to the present weights of a run: a folder, a bundled run or a URL."""
        folder = open_run(run)
        name = str(folder)  # a bundled run or a URL is also found on another machine
        return cls(str(folder.path.resolve()) if name == str(folder.path) else name, weights_hashes(folder))

    def load(self, *, device: str = "auto") -> Pipeline:
        """The run; an error if it is missing or has other weights."""
        return load_reference(self, device)


def weights_hashes(run: RunFolder) -> tuple[str, ...]:
    members = run.model_runs()
    for member in members:
        member.check_weights_exist()
    return tuple(sha256(member.weights_file) for member in members)


@lru_cache(OPEN_PIPELINES)
def load_reference(reference: RunReference, device: str) -> Pipeline:
    run = reference.run
    try:
        weights = weights_hashes(open_run(run))
    except (UserError, OSError) as error:
        raise UserError(f"{run}: the run that this estimator or function refers to is missing ({error})") from None
    if weights != reference.weights:
        raise UserError(f"{run}: has changed since this estimator or function was made: other weights (sha256)")
    return load(run, device=device)
