"""The settings of runs as keywords of the API's functions, with their types.

They are the fields of the settings dataclasses: `TrainSettings`, `TransferSettings`, the configs of backbones, tasks
and so on. They are written out for type checkers; a test holds both equal.
"""

from collections.abc import Sequence
from typing import Literal, TypedDict

Init = Literal["pretrained", "scratch"]
Method = Literal["finetune", "setfit"]


class TrainKeywords(TypedDict, total=False):
    """How to train."""

    epochs: float | None
    minutes: float | None
    batch: int
    batch_tokens: int | None
    micro_batch: int | None
    length: int | None
    optimizer: Literal["adamw", "muon"]
    lr: float
    schedule: Literal["cosine", "linear", "trapezoid", "constant", "inverse_sqrt", "range_test"]
    warmup: float
    cooldown: float
    lr_floor: float
    weight_decay: float
    beta1: float
    beta2: float
    momentum: float
    clip: float
    label_smoothing: float
    layer_decay: float
    unfreeze: float | None
    patience: int | None
    ema: float
    dtype: Literal["auto", "float32", "bfloat16", "float8"]
    compile: Literal["auto", True, False, "replay", "both"]
    parallel: Literal["ddp", "fsdp"]
    reduce_dtype: Literal["float32", "bfloat16"]
    cpu_offload: bool
    activation_checkpointing: bool
    vocabulary_multiple: int
    validate_every: int | None
    valid_tokens: int | None
    checkpoint_every: int | None
    async_save: bool
    keep_every: int | None
    mirror: str | None
    weights: Literal["best", "last"]
    log_every: int | None
    tensorboard: bool
    track: Literal["none", "mlflow", "wandb"]


class ModelKeywords(TypedDict, total=False):
    """Tokenizer and architecture of a new model."""

    kind: Literal["bpe", "unigram", "wordpiece", "word", "char"]
    vocabulary: int
    min_frequency: int
    lowercase: bool
    strip_accents: bool
    width: int
    heads: int
    hidden: int
    inner_dropout: bool
    norm: Literal["pre", "post", "none"]
    norm_kind: Literal["layer", "rms"]
    norm_epsilon: float
    activation: Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"]
    feed_activation: Literal["inner", "outer"]
    residual: bool
    bias: bool
    qk_norm: bool
    context: int | None
    depth: int
    positions: Literal["sinusoidal", "learned", "rotary", "relative", "none"]
    rotary_base: float
    relative_buckets: int
    relative_distance: int
    tied: bool
    segments: int
    embed_scale: bool
    embed_norm: bool
    causal: bool
    cross: bool
    cell: Literal["lstm", "gru", "rnn"]
    dropout_kind: Literal["plain", "locked"]
    source_vocabulary: int | None
    encoder_depth: int | None
    shared: bool
    family: str


class SharedKeywords(TypedDict, total=False):
    """Settings that pretraining and fine-tuning have in common."""

    dropout: float
    valid_fraction: float
    opening: Literal["start", "cls"]
    closed: bool
    decoder_start: Literal["bos", "pad"]


class TextKeywords(TypedDict, total=False):
    """How text is read, and the pretraining objective."""

    documents: Literal["auto", "line", "block", "file"]
    column: str
    split_seed: int
    deduplicate: bool
    stores: str | None
    rows: Literal["packed", "padded"]
    fraction: float
    fraction_start: float | None
    unit: Literal["token", "word", "span"]
    span_mean: float
    span_most: int
    masked: float
    random: float
    causal_share: float
    generator_width: float
    generator_depth: int | None
    detection_weight: float
    transform: bool
    nsp: bool


class HeadKeywords(TypedDict, total=False):
    """How a pretrained model is fine-tuned, and its head."""

    bidirectional: bool | None
    adapt_lr: float | None
    adapt_text: Sequence[str]
    adapt_fraction: float | None
    adapt_average: float
    lm_loss: float
    r_drop: float
    token_dropout: float
    linear_probe: bool
    soup: int
    reinit_layers: int
    least_steps: int
    lora: int
    lora_alpha: float
    lora_dropout: float
    lora_targets: Literal["attention", "all-linear"]
    layers: str
    longest_question: int
    longest_answer: int
    stride: int | None
    unanswerable: bool
    threshold: float
    pool: Literal["last", "cls", "mean", "max", "concat"]
    dense: Literal["none", "tanh", "relu", "gelu"]
    head_bias: bool
    many_classes: bool
    balance: bool
    class_weights: Sequence[float]
    soft_labels: bool
    separator: str | None
    long: Literal["head", "tail", "head+tail", "windows", "cut", "refuse"]
    pair: bool | None
    cutpoints: Sequence[float]
    metric: Literal["pearson", "spearman", "mae", "rmse", "r2"]
    mean: float | None
    std: float | None
    lowest: float | None
    highest: float | None
    integers: bool | None
    beams: int
    length_penalty: float
    no_repeat: int
    max_tokens: int | None
    two_tokenizers: bool
    validate_bleu: bool


class PretrainKeywords(TrainKeywords, ModelKeywords, SharedKeywords, TextKeywords, total=False):
    """The settings of `pretrain`."""

    steps: int | None
    keep: int
    order: int


class CompareKeywords(TrainKeywords, ModelKeywords, SharedKeywords, HeadKeywords, total=False):
    """The settings of `compare`, which apply to all arms that are fine-tuned."""

    steps: int | None
    keep: int
    order: int | Sequence[str]


class FinetuneKeywords(CompareKeywords, total=False):
    """The settings of `finetune` and `distil`."""

    classes: Sequence[str]
    method: Method
    ensemble: int
    adapt_steps: int


class SweepKeywords(TrainKeywords, ModelKeywords, SharedKeywords, TextKeywords, HeadKeywords, total=False):
    """The settings of `sweep`, of pretraining or of fine-tuning."""

    steps: int | None
    order: int | Sequence[str]
    init: Init
    freeze: bool
    skip_blank: bool


class LRFindKeywords(TrainKeywords, ModelKeywords, SharedKeywords, TextKeywords, HeadKeywords, total=False):
    """The settings of `lr_find`, of pretraining or of fine-tuning."""

    keep: int
    order: int | Sequence[str]
    init: Init
    freeze: bool
    skip_blank: bool
    classes: Sequence[str]
    method: Method
    ensemble: int
    adapt_steps: int
