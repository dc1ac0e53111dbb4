"""OpenAI's API: /v1/models, /v1/completions and /v1/embeddings, as OpenAI's clients speak it."""

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from headstock.decoding.continuous_batching import DecodedToken
from headstock.decoding.sampling import Sampling
from headstock.errors import HeadstockError, UserError
from headstock.inference.pipeline import Pipeline
from headstock.rng import derive_seed
from headstock.serve.generation import Generation, TextUpdate
from headstock.serve.request_models import CompletionRequest, EmbeddingRequest
from headstock.serve.responses import SERVER, error_body, event
from headstock.serve.routes import RESPONSES, JsonResponse, add_route, unless_disconnected
from headstock.serve.served_models import ServedModel, ServedModels
from headstock.serve.settings import ServeSettings
from headstock.tasks.special_tokens import special_tokens_for

FINISH_REASONS = {"end": "stop", "stop": "stop", "length": "length"}


def openai_router(models: ServedModels, settings: ServeSettings) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["OpenAI"])

    @router.get("/models", summary="List the served runs")
    async def list_models() -> JsonResponse:
        return JsonResponse({"object": "list", "data": [describe_model(model) for model in models]})

    @router.get("/models/{name:path}", summary="Describe a served run", responses={404: RESPONSES[404]})
    async def show_model(name: str) -> JsonResponse:
        return JsonResponse(describe_model(models.get(name)))

    async def completions(request: Request, body: CompletionRequest) -> Response:
        completion = Completion(models.find_for("completions", body.model), body, settings)
        generation = completion.start()
        if body.stream:
            events = completion_events(models, completion, generation)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        try:
            return JsonResponse(await unless_disconnected(request, completion.response(generation)))
        finally:
            count_tokens(models, completion)

    async def embeddings(request: Request, body: EmbeddingRequest) -> JsonResponse:
        model = models.find_for("embeddings", body.model)
        rows = token_rows(model.pipeline, body.input, settings)
        options = {"layers": body.layers, "pool": body.pool}

        def compute(rows: list[list[int]]) -> list[np.ndarray]:
            return list(model.pipeline.embed_tokens(rows, layers=body.layers, pool=body.pool))

        work = model.compute("embed", compute, rows, timeout=settings.timeout, **options)
        vectors = await unless_disconnected(request, work)
        as_base64 = body.encoding_format == "base64"
        values = [encode_base64(vector) if as_base64 else vector.tolist() for vector in vectors]
        data = [{"object": "embedding", "index": i, "embedding": value} for i, value in enumerate(values)]
        tokens = sum(map(len, rows))
        models.metrics.prompt_tokens.labels(model.name).inc(tokens)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JsonResponse({"object": "list", "data": data, "model": model.name, "usage": usage})

    add_route(router, "/completions", CompletionRequest, completions, settings, summary="Continue texts")
    add_route(router, "/embeddings", EmbeddingRequest, embeddings, settings, summary="Embed texts")
    return router


def describe_model(model: ServedModel) -> dict[str, Any]:
    """OpenAI's fields, and what the run can be asked for."""
    task = model.pipeline.task
    known = {"id": model.name, "object": "model", "created": model.weights_time, "owned_by": "headstock"}
    return known | {"task": task.name, "title": task.title, "endpoints": [f"/v1/{name}" for name in model.endpoints]}


def encode_base64(vector: np.ndarray) -> str:
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()


def token_rows(pipeline: Pipeline, inputs: Any, settings: ServeSettings) -> list[list[int]]:
    """The tokens of a text, of texts, or of token ids, without special tokens."""
    items = [inputs] if isinstance(inputs, str) or isinstance(inputs[0], int) else inputs
    texts = [item for item in items if isinstance(item, str)]
    if texts:
        if len(texts) < len(items):
            raise UserError("give texts or lists of token ids, not both")
        return pipeline.tokenizer.encode_batch(texts)
    vocabulary = pipeline.tokenizer.vocabulary
    for row in items:
        if max(row) >= vocabulary:
            problem = f"token id {max(row)} is beyond this run's vocabulary of {vocabulary:,}"
            raise UserError(f"{problem}; send texts, or ids of the run's own tokenizer")
    return [list(row) for row in items]


# Completions


@dataclass
class Choice:
    """One text that grows."""

    prompt: int  # index of its prompt
    text: str = ""
    finish_reason: str | None = None


class Completion:
    """A request for completions: its prompts as tokens, and its answer in OpenAI's form."""

    def __init__(self, model: ServedModel, body: CompletionRequest, settings: ServeSettings):
        self.model, self.body, self.timeout = model, body, settings.timeout
        pipeline = model.pipeline
        self.tokenizer = pipeline.tokenizer
        self.prompts = token_rows(pipeline, body.prompt, settings)
        self.n = body.n or 1
        self.samples = body.best_of or self.n  # generated for each prompt
        self.check(settings)
        self.identity = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion"}
        self.identity |= {"created": int(time.time()), "model": model.name}  # type: ignore[dict-item]
        self.choices = [Choice(prompt) for prompt in range(len(self.prompts)) for _ in range(self.samples)]
        self.tokens: list[list[DecodedToken]] = [[] for _ in self.choices]
        self.prompt_texts = [self.tokenizer.decode(prompt) for prompt in self.prompts]

    def check(self, settings: ServeSettings) -> None:
        if len(self.prompts) * self.samples > settings.max_texts:
            count = len(self.prompts) * self.samples
            raise UserError(f"prompt: {count} completions in one request, more than the limit of {settings.max_texts}")
        if self.samples < self.n:
            raise UserError(f"best_of: must be at least n ({self.n}), not {self.samples}")
        if self.samples > self.n and self.body.stream:
            raise UserError("best_of: cannot be streamed, because the best completion is known only at the end")
        if self.body.stream_options is not None and not self.body.stream:
            raise UserError("stream_options: only with stream")

    def start(self) -> Generation:
        """Submit all rows; they have the seeds of `headstock generate --seed`."""
        body, pipeline = self.body, self.model.pipeline
        special = special_tokens_for(pipeline.task, self.tokenizer, left_to_right=True)
        seed = secrets.randbits(63) if body.seed is None else body.seed
        logprobs = body.logprobs if body.logprobs is not None or self.samples == self.n else 0
        generation = Generation(
            self.tokenizer,
            [self.prompts[choice.prompt] for choice in self.choices],
            wrap=special.wrap,
            max_tokens=body.default_max_tokens if body.max_tokens is None else body.max_tokens,
            sampling=Sampling(
                temperature=1.0 if body.temperature is None else body.temperature,
                top_k=body.top_k,
                top_p=None if body.top_p == 1 else body.top_p,
                min_p=body.min_p,
                repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            ),
            seeds=[derive_seed(seed, index % self.samples, "sample") for index in range(len(self.choices))],
            stop=[body.stop] if isinstance(body.stop, str) else body.stop or (),
            logprobs=logprobs,
            stream=bool(body.stream),
            timeout=self.timeout,
        )
        self.model.generate(generation)
        return generation

    def add(self, update: TextUpdate) -> None:
        choice = self.choices[update.index]
        choice.text += update.text
        self.tokens[update.index] += update.tokens
        choice.finish_reason = FINISH_REASONS.get(update.ended or "", choice.finish_reason)

    async def response(self, generation: Generation) -> dict[str, Any]:
        """The whole answer."""
        async for updates in generation.updates():
            for update in updates:
                self.add(update)
        echoed = await self.prompt_logprobs()
        choices = []
        for number, index in enumerate(self.best()):
            choice = self.choices[index]
            prompt = self.prompt_texts[choice.prompt] if self.body.echo else ""
            logprobs = self.logprobs(index, self.tokens[index], choice.text, echoed)
            choices.append(choice_fields(number, prompt + choice.text, logprobs, choice.finish_reason))
        return self.identity | {"choices": choices, "usage": self.usage()}

    def best(self) -> list[int]:
        """The choices to return: with `best_of`, those whose tokens have the highest mean log-probability."""
        groups = [range(start, start + self.samples) for start in range(0, len(self.choices), self.samples)]
        if self.samples == self.n:
            return [index for group in groups for index in group]
        return [index for group in groups for index in sorted(group, key=self.mean_logprob, reverse=True)[: self.n]]

    def mean_logprob(self, index: int) -> float:
        return float(np.mean([token.logprob or 0.0 for token in self.tokens[index]] or [0.0]))

    def usage(self) -> dict[str, int]:
        prompt, completion = sum(map(len, self.prompts)), sum(map(len, self.tokens))
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    # Log-probabilities

    async def prompt_logprobs(self) -> list[list[float]] | None:
        """The log-probability of every token of the prompts, where they are echoed."""
        if not self.body.echo or self.body.logprobs is None:
            return None
        compute = partial(self.model.pipeline.token_log_probabilities, pseudo=False)
        scores = await self.model.compute("prompt", compute, self.prompts, timeout=self.timeout)
        return [values.tolist() for values in scores]

    def logprobs(
        self, index: int, tokens: Sequence[DecodedToken], text: str, echoed: list[list[float]] | None, *, start: int = 0
    ) -> dict[str, Any] | None:
        """Tokens with their log-probabilities and places in the text, which begins with the prompt.

        `start` is the number of characters of the completion before these tokens.
        """
        if self.body.logprobs is None:
            return None
        prompt = self.choices[index].prompt
        names = TokenNames(self.tokenizer)
        rows: list[tuple[str, float | None, dict[str, float] | None]] = []
        if echoed is not None:
            rows += [(names[id], value, None) for id, value in zip(self.prompts[prompt], echoed[prompt], strict=True)]
        for token in tokens:
            top: dict[str, float] = {}
            for id, value in [*token.top, (token.id, token.logprob or 0.0)]:
                top.setdefault(names[id], value)
            rows.append((names[token.id], token.logprob, top if self.body.logprobs else None))
        offset, offsets = (0 if echoed is not None else len(self.prompt_texts[prompt]) + start), []
        for name, _, _ in rows:
            offsets.append(offset)
            offset += len(name)
        return {
            "tokens": [name for name, _, _ in rows],
            "token_logprobs": [value for _, value, _ in rows],
            "top_logprobs": [top for _, _, top in rows],
            "text_offset": offsets,
        }


def choice_fields(index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class TokenNames:
    """The text of each token as it stands inside a text; tokens that are parts of a character keep their own name."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.lead = tokenizer.encode("a")
        self.lead_text = tokenizer.decode(self.lead)

    def __getitem__(self, token: int) -> str:
        text = self.tokenizer.decode([*self.lead, token])
        if not text.startswith(self.lead_text) or "\ufffd" in text or text == self.lead_text:
            return self.tokenizer.id_to_token(token)
        return text[len(self.lead_text) :]


async def completion_events(models: ServedModels, completion: Completion, generation: Generation) -> AsyncIterator[str]:
    """Server-sent events: one chunk per text and step, the usage if asked for, then [DONE]."""
    body, lengths = completion.body, [0] * len(completion.choices)
    options = body.stream_options
    usage = {"usage": None} if options is not None and options.include_usage else {}

    def chunk(choices: list[dict[str, Any]], **fields: Any) -> str:
        return event(completion.identity | {"choices": choices} | usage | fields)

    try:
        if body.echo:
            echoed = await completion.prompt_logprobs()
            for index, choice in enumerate(completion.choices):
                text, logprobs = completion.prompt_texts[choice.prompt], completion.logprobs(index, [], "", echoed)
                yield chunk([choice_fields(index, text, logprobs, None)])
        async for updates in generation.updates():
            for update in updates:
                index = update.index
                completion.add(update)
                logprobs = completion.logprobs(index, update.tokens, update.text, None, start=lengths[index])
                lengths[index] += len(update.text)
                reason = completion.choices[index].finish_reason
                yield chunk([choice_fields(index, update.text, logprobs, reason)])
        if usage:
            yield chunk([], usage=completion.usage())
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        message = models.public_message(error) if isinstance(error, HeadstockError) else "internal error"
        yield event(error_body(message, SERVER))
        return
    finally:
        generation.cancel()
        count_tokens(models, completion)
    yield "data: [DONE]\n\n"


def count_tokens(models: ServedModels, completion: Completion) -> None:
    usage = completion.usage()
    models.metrics.prompt_tokens.labels(completion.model.name).inc(usage["prompt_tokens"])
    models.metrics.generated_tokens.labels(completion.model.name).inc(usage["completion_tokens"])
