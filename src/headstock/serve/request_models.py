"""The requests that the API accepts, with their limits.

Each class says what a request may contain; `limited` tightens it by a server's settings, so that both the validation
and the OpenAPI document name the limits.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from headstock.serve.settings import ServeSettings
from headstock.tasks.labelled import LabelledTask

MAX_STOP = 16  # stop strings of a completion
MAX_NAME = 200  # characters of a model's name, a label or a word
MAX_VOCABULARY = 10_000_000

ModelName = Annotated[str, Field(max_length=MAX_NAME)]
Word = Annotated[str, Field(max_length=MAX_NAME)]
Text = str | list[str]


class ApiRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: Annotated[ModelName | None, Field(description="A served run; by default the first that can do this.")] = None

    @classmethod
    def limits(cls, settings: ServeSettings) -> Mapping[str, Any]:
        """The annotations of fields whose range depends on the server's settings."""
        return {}


def limited(request: type[ApiRequest], settings: ServeSettings) -> type[ApiRequest]:
    """The same request with the limits of a server."""
    fields: dict[str, Any] = {}
    for name, annotation in request.limits(settings).items():
        field = request.model_fields[name]
        fields[name] = annotation, (... if field.is_required() else field.default)
    return create_model(request.__name__, __base__=request, **fields) if fields else request


def one_text(settings: ServeSettings) -> Any:
    return Annotated[str, Field(max_length=settings.max_characters)]


def list_of(item: Any, length: int, *, least: int = 1) -> Any:
    return Annotated[list[item], Field(min_length=least, max_length=length)]


def one_or_more(item: Any, settings: ServeSettings) -> Any:
    """One item or a list of them."""
    return item | list_of(item, settings.max_texts)


def token_ids(settings: ServeSettings) -> Any:
    return list_of(Annotated[int, Field(ge=0, lt=MAX_VOCABULARY)], settings.max_characters)


def row_of_texts(settings: ServeSettings) -> Any:
    """A text, a list of words or texts, or these by the names of columns."""
    value = one_text(settings) | list_of(one_text(settings), settings.max_characters, least=0)
    return value | Annotated[dict[Word, value], Field(min_length=1, max_length=8)]  # type: ignore[valid-type]


def texts_or_tokens(settings: ServeSettings) -> Any:
    """A text, texts, token ids, or lists of token ids."""
    return one_or_more(one_text(settings), settings) | one_or_more(token_ids(settings), settings)


# Labelled tasks

Row = str | list[str] | dict[str, str | list[str]]


class PredictRequest(ApiRequest):
    input: Row | list[Row]
    abstain_below: Annotated[
        float | None, Field(gt=0, le=1, description="Leave the class empty where it is less probable than this.")
    ] = None

    @classmethod
    def limits(cls, settings: ServeSettings) -> Mapping[str, Any]:
        return {"input": one_or_more(row_of_texts(settings), settings)}


def task_request(task: type[LabelledTask]) -> type[PredictRequest]:
    """The request of one task, with the settings that a request may change and an example."""
    fields: dict[str, Any] = {
        name: (Annotated[type(low) | None, Field(ge=low, le=high)], None)
        for name, (low, high) in task.prediction_settings.items()
    }

    class TaskRequest(PredictRequest):
        model_config = ConfigDict(json_schema_extra={"examples": [{"input": [task.example_row]}]})

    return create_model(f"{task.name.title()}Request", __base__=TaskRequest, **fields)


# Language models


class FillRequest(ApiRequest):
    model_config = ConfigDict(json_schema_extra={"examples": [{"input": "The film was [MASK].", "top": 3}]})

    input: Text
    top: int = 5
    pieces: Annotated[int, Field(ge=1, le=5, description="Maximum number of tokens in a word.")] = 3
    among: Annotated[list[Word], Field(max_length=100, description="Rank only these words.")] = []
    normalize: Annotated[bool, Field(description="With `among`: compare log-probabilities per token.")] = False

    @classmethod
    def limits(cls, settings: ServeSettings) -> Mapping[str, Any]:
        top = Annotated[int, Field(ge=1, le=settings.max_top, description="Candidates per mask.")]
        return {"input": one_or_more(one_text(settings), settings), "top": top}


class ScoreRequest(ApiRequest):
    model_config = ConfigDict(json_schema_extra={"examples": [{"input": ["The film was good.", "Film the good was."]}]})

    input: Text
    pseudo: Annotated[bool, Field(description="Score each token given all others.")] = False

    @classmethod
    def limits(cls, settings: ServeSettings) -> Mapping[str, Any]:
        return {"input": one_or_more(one_text(settings), settings)}


# OpenAI

Zero = Annotated[float | None, Field(ge=0, le=0, description="Not supported: must be 0. Use `repetition_penalty`.")]
Null = Annotated[None, Field(description="Not supported.")]
TokensOrTexts = str | list[str] | list[int] | list[list[int]]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False  # a client may ask for it; there is nothing to hide from its own machine


class CompletionRequest(ApiRequest):
    """OpenAI's request for completions, with `top_k`, `min_p` and `repetition_penalty` as further settings."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"prompt": "The film was", "max_tokens": 20, "temperature": 0}]}
    )

    prompt: TokensOrTexts = ""
    max_tokens: int | None = None
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: int | None = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    n: int | None = None
    best_of: int | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    logprobs: int | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Zero = None
    frequency_penalty: Zero = None
    suffix: Null = None
    logit_bias: Annotated[dict[str, float] | None, Field(max_length=0, description="Not supported.")] = None
    user: Annotated[str | None, Field(max_length=MAX_NAME)] = None

    default_max_tokens: ClassVar[int] = 16  # as in OpenAI's API

    @classmethod
    def limits(cls, settings: ServeSettings) -> Mapping[str, Any]:
        samples = Annotated[int | None, Field(ge=1, le=settings.max_samples)]
        stop = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
        return {
            "prompt": texts_or_tokens(settings),
            "max_tokens": Annotated[int | None, Field(ge=0, le=settings.max_tokens)],
            "top_k": Annotated[int | None, Field(ge=1, le=settings.max_top)],
            "n": samples,
            "best_of": samples,
            "stop": stop | list_of(stop, MAX_STOP, least=0) | None,
            "logprobs": Annotated[int | None, Field(ge=0, le=settings.max_top)],
        }


class EmbeddingRequest(ApiRequest):
    """OpenAI's request for embeddings, with `layers` and `pool` as further settings."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": "The film was good."}]})

    input: TokensOrTexts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[None, Field(description="Not supported: vectors have the width of the model.")] = None
    user: Annotated[str | None, Field(max_length=MAX_NAME)] = None
    layers: Annotated[Word, Field(description="last, sum4, concat4 or a layer's number.")] = "last"
    pool: Annotated[Literal["mean", "cls", "last"] | None, Field(description="By default that of the model.")] = None

    @classmethod
    def limits(cls, settings: ServeSettings) -> Mapping[str, Any]:
        return {"input": texts_or_tokens(settings)}


# Explanations


class ExplainRequest(ApiRequest):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"kind": "attention", "input": "A dull film with a great ending."}]}
    )

    kind: Word = "prediction"
    input: Row | None = None
    format: Annotated[Literal["json", "html"], Field(description="Facts, or the page that shows them.")] = "json"
    label: Annotated[Word | None, Field(description="The class, token or translation to explain.")] = None
    versus: Annotated[Word | None, Field(description="logits, patch: the other answer.")] = None
    at: Annotated[int | None, Field(ge=1, le=10_000, description="Which [MASK], from 1.")] = None
    layer: Annotated[int | None, Field(ge=1, le=1000, description="attention, layer: one layer, from 1.")] = None
    head: Annotated[int | None, Field(ge=1, le=1000, description="attention, layer: one head, from 1.")] = None
    word: Annotated[Word | None, Field(description="layer: a token or its position, from 1.")] = None
    where: Annotated[
        Literal["encoder", "decoder", "cross", "forward", "backward"] | None, Field(description="One of the stacks.")
    ] = None
    target: Annotated[str | None, Field(description="Decoder input of an encoder-decoder.")] = None
    left_to_right: Annotated[bool, Field(description="Run a hybrid model with a causal mask.")] = False
    corrupted: Annotated[Row | None, Field(description="patch: the text to patch.")] = None
    depths: Annotated[bool, Field(description="gradients: also study fresh models of 2 to 48 layers.")] = False

    @classmethod
    def limits(cls, settings: ServeSettings) -> Mapping[str, Any]:
        row = row_of_texts(settings) | None
        return {"input": row, "corrupted": row, "target": one_text(settings) | None}
