"""The runs that a server has loaded, each with its worker."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headstock.errors import UserError, did_you_mean
from headstock.inference.pipeline import Pipeline, load
from headstock.serve.settings import ServeSettings
from headstock.serve.worker import Compute, TimeLimitError, Worker
from headstock.train.run_folder import open_run


@dataclass
class ServedModel:
    """A loaded run under the name by which clients ask for it."""

    name: str
    pipeline: Pipeline
    worker: Worker

    async def compute(
        self, operation: str, compute: Compute, rows: Sequence[Any], *, timeout: float, **options: Any
    ) -> list[Any]:
        """Results of an operation for rows, batched with those of other requests that have the same options."""
        key = operation, tuple(sorted(options.items()))
        future = asyncio.wrap_future(self.worker.submit(key, compute, rows, timeout=timeout))
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            raise TimeLimitError(f"the request took longer than {timeout:g} seconds") from None


class ServedModels:
    """Loaded runs by name; the first one is the default."""

    def __init__(self, models: Sequence[ServedModel]):
        self.by_name = {model.name: model for model in models}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self.by_name.values())

    def get(self, name: str | None) -> ServedModel:
        if name is None:
            return next(iter(self))
        if name not in self.by_name:
            names = ", ".join(self.by_name)
            raise UserError(f"model: no run named {name!r} is served{did_you_mean(name, self.by_name)} (have: {names})")
        return self.by_name[name]

    def close(self) -> None:
        for model in self:
            model.worker.close()


def model_names(runs: Sequence[str]) -> list[str]:
    """The names by which clients ask for runs. Two runs of one name are told apart by a number."""
    names: list[str] = []
    for run in runs:
        title = open_run(run).title
        candidates = itertools.chain([title], (f"{title}-{number}" for number in itertools.count(2)))
        names.append(next(name for name in candidates if name not in names))
    return names


def load_models(runs: Sequence[str], settings: ServeSettings, **options: Any) -> ServedModels:
    """Load runs; options are those of `headstock.load`. Two runs of one name are told apart by a number."""
    models: list[ServedModel] = []
    for run in runs:
        pipeline = load(run, **options)
        name, number = pipeline.run.title, 1
        while name in {model.name for model in models}:
            number += 1
            name = f"{pipeline.run.title}-{number}"
        models.append(ServedModel(name, pipeline, Worker(name, max_queue=settings.max_queue)))
    return ServedModels(models)
