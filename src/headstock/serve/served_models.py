"""The runs that a server has loaded, each with its worker."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headstock.decoding.continuous_batching import ContinuousBatch
from headstock.errors import HeadstockError, UserError, did_you_mean
from headstock.inference.pipeline import Pipeline, load
from headstock.serve.generation import Generation
from headstock.serve.prometheus import Metrics
from headstock.serve.settings import ServeSettings
from headstock.serve.worker import Compute, TimeLimitError, Worker
from headstock.tasks.labelled import is_labelled
from headstock.train.run_folder import open_run


class ModelNotFoundError(HeadstockError):
    """No served run has the name that was asked for, or can do what was asked for."""


@dataclass
class ServedModel:
    """A loaded run under the name by which clients ask for it."""

    name: str
    pipeline: Pipeline
    worker: Worker

    def compute(
        self, operation: str, compute: Compute, rows: Sequence[Any], *, timeout: float, **options: Any
    ) -> "asyncio.Future[list[Any]]":
        """Results of an operation for rows, batched with those of other requests that have the same options."""
        key = operation, tuple(sorted(options.items()))
        future = self.worker.submit(key, compute, rows, timeout=timeout)
        timer = future.get_loop().call_later(timeout, expire, future, timeout)
        future.add_done_callback(lambda _: timer.cancel())
        return future

    def generate(self, generation: Generation) -> None:
        self.worker.generate(generation)

    @property
    def endpoints(self) -> list[str]:
        """What clients can ask of this run, as paths below /v1."""
        named = [name for name, (able, _) in ABILITIES.items() if able(self.pipeline)]
        return [self.pipeline.task.name, *named] if is_labelled(self.pipeline.task) else named

    @property
    def weights_time(self) -> int:
        """When the weights were written, in seconds since 1970; 0 where there is no such file."""
        file = self.pipeline.run.weights_file
        return int(file.stat().st_mtime) if file.exists() else 0


def expire(future: "asyncio.Future[Any]", timeout: float) -> None:
    if not future.done():
        future.set_exception(TimeLimitError(f"the request took longer than {timeout:g} seconds"))


def generates(pipeline: Pipeline) -> bool:
    return pipeline.task.generates and not pipeline.model.backbone.is_encoder_decoder


def is_single(pipeline: Pipeline) -> bool:
    return len(pipeline.models) == 1


# By endpoint: whether a run can answer it, and what that is called
Ability = tuple[Callable[[Pipeline], bool], str]
ABILITIES: Mapping[str, Ability] = {
    "predict": (lambda pipeline: is_labelled(pipeline.task), "predict labels"),
    "completions": (generates, "generate text"),
    "fill": (lambda pipeline: pipeline.task.fills_masks, "fill masks"),
    "score": (lambda pipeline: generates(pipeline) or pipeline.task.fills_masks, "score texts"),
    "embeddings": (
        lambda pipeline: is_single(pipeline) and not pipeline.model.backbone.is_encoder_decoder,
        "embed texts",
    ),
    "explain": (is_single, "be explained"),
}


class ServedModels:
    """Loaded runs by name; the first one that can do what is asked is the default."""

    def __init__(self, models: Sequence[ServedModel], metrics: Metrics | None = None):
        self.by_name = {model.name: model for model in models}
        self.metrics = metrics or Metrics()
        for model in models:
            self.metrics.watch(model.name, model.worker)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self.by_name.values())

    def get(self, name: str) -> ServedModel:
        if name not in self.by_name:
            hint = f"{did_you_mean(name, self.by_name)} (have: {', '.join(self.by_name)})"
            raise ModelNotFoundError(f"model: no run named {name!r} is served{hint}")
        return self.by_name[name]

    def find(self, name: str | None, able: Callable[[Pipeline], bool], action: str) -> ServedModel:
        """The run of a name, or the first that is able to do what is asked."""
        candidates = [model.name for model in self if able(model.pipeline)]
        if name is None:
            if not candidates:
                raise ModelNotFoundError(f"no served run can {action}")
            return self.by_name[candidates[0]]
        model = self.get(name)
        if not able(model.pipeline):
            others = ", ".join(candidates) or "none"
            title = model.pipeline.task.title
            raise UserError(f"model: {name!r} is a {title}, so it cannot {action} (served runs that can: {others})")
        return model

    def find_for(self, endpoint: str, name: str | None) -> ServedModel:
        """The run for one of `ABILITIES`."""
        return self.find(name, *ABILITIES[endpoint])

    def public_message(self, error: BaseException) -> str:
        """The message of an error with names in place of the folders of runs."""
        message = str(error)
        for model in self:
            for path in (str(model.pipeline.run), str(model.pipeline.run.path)):
                message = message.replace(path, model.name)
        return message

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
    """Load runs; options are those of `headstock.load`."""
    models: list[ServedModel] = []
    metrics = Metrics()
    for name, run in zip(model_names(runs), runs, strict=True):
        pipeline = load(run, **options)
        decoder, observe = make_decoder(pipeline), metrics.batch_observer(name)
        worker = Worker(name, max_queue=settings.max_queue, decoder=decoder, on_batch=observe)
        models.append(ServedModel(name, pipeline, worker))
    return ServedModels(models, metrics)


def make_decoder(pipeline: Pipeline) -> ContinuousBatch | None:
    """The batch in which a language model continues texts."""
    if not generates(pipeline):
        return None
    return ContinuousBatch(pipeline.model, end=pipeline.tokenizer.eos, suppress_tokens=pipeline.suppressed_tokens())
