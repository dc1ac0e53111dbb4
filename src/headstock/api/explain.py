"""`headstock.explain_*`: what a model consists of and what it computes, as an `Explanation`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headstock.api.explanation import (
    Explanation,
    Run,
    Texts,
    assignments,
    check_text_or_file,
    list_of_texts,
    name_of,
    one_of,
    pipeline_in_double,
    pipeline_of,
    subject_of,
)
from headstock.errors import UserError
from headstock.explain import masks
from headstock.explain.attention import explain_attention as attention_facts
from headstock.explain.attention import explain_file_attention, need_attention, select_heads
from headstock.explain.attention_document import attention_document
from headstock.explain.context import explain_context as context_facts
from headstock.explain.context_document import context_document
from headstock.explain.diagram import model_document
from headstock.explain.gradients import block_settings, depth_study
from headstock.explain.gradients import explain_gradients as gradient_facts
from headstock.explain.gradients_document import gradient_document, recurrence_document
from headstock.explain.head_ablation import METHODS, head_document
from headstock.explain.head_ablation import explain_heads as head_facts
from headstock.explain.hooks import hook_document, need_block_stacks
from headstock.explain.induction import explain_induction as induction_facts
from headstock.explain.induction import induction_document
from headstock.explain.inputs import encode_file, encode_input, file_target, training_target
from headstock.explain.layer_walkthrough import explain_layer as layer_facts
from headstock.explain.layer_walkthrough_document import layer_document
from headstock.explain.logit_attribution import explain_logits as logit_facts
from headstock.explain.logit_attribution import logit_document
from headstock.explain.parameters import explain_parameters as parameter_facts
from headstock.explain.parameters_document import parameter_document
from headstock.explain.patching import explain_patch as patch_facts
from headstock.explain.patching import patch_document
from headstock.explain.positions import POSITION_KINDS, explain_model_positions, position_document
from headstock.explain.positions import explain_positions as position_facts
from headstock.explain.prediction import explain_prediction as prediction_facts
from headstock.explain.prediction import prediction_document
from headstock.explain.recurrence import explain_recurrence, recurrent_stacks
from headstock.explain.relative_positions import explain_relative_positions, relative_position_document
from headstock.explain.residual import explain_residual as residual_facts
from headstock.explain.residual_document import residual_document
from headstock.inference.evaluation import evaluation_store
from headstock.inference.pipeline import Pipeline
from headstock.option_names import names_keywords
from headstock.train.loop import sequence_length

if TYPE_CHECKING:
    from headstock.data.token_store import TokenStore

AttentionKind = Literal["encoder", "decoder", "cross", "forward", "backward"]
ATTENTION_KINDS: tuple[AttentionKind, ...] = ("encoder", "decoder", "cross", "forward", "backward")


# A model


@names_keywords
def explain_parameters(
    run: Run | None = None,
    *,
    preset: str | None = None,
    settings: Mapping[str, Any] | Sequence[str] | None = None,
    task: str | None = None,
    classes: int | None = None,
    batch: int | None = None,
    length: int | None = None,
) -> Explanation:
    """Every parameter beside its formula, and the cost of a token and of a training step.

    The subject is a run, or a preset with other `settings`; `task` and `classes` give it new heads.
    """
    subject = subject_of(run, preset, settings, task=task, classes=classes)
    return Explanation(parameter_document(parameter_facts(subject, classes=classes, batch=batch, length=length)))


@names_keywords
def explain_model(
    run: Run | None = None,
    *,
    preset: str | None = None,
    settings: Mapping[str, Any] | Sequence[str] | None = None,
    task: str | None = None,
    classes: int | None = None,
) -> Explanation:
    """The architecture: the modules a text passes through, with shapes and parameter counts."""
    subject = subject_of(run, preset, settings, task=task, classes=classes)
    return Explanation(model_document(subject, parameter_facts(subject)))


@names_keywords
def explain_hooks(
    run: Run | None = None,
    *,
    preset: str | None = None,
    settings: Mapping[str, Any] | Sequence[str] | None = None,
    task: str | None = None,
    classes: int | None = None,
) -> Explanation:
    """The named points at which activations can be read and replaced."""
    subject = subject_of(run, preset, settings, task=task, classes=classes)
    return Explanation(hook_document(subject.model, subject.name))


# Attention


@names_keywords
def explain_mask(
    run: Run | None = None,
    text: Texts | None = None,
    *,
    preset: str | None = None,
    settings: Mapping[str, Any] | Sequence[str] | None = None,
    kind: Literal["causal", "none", "padding", "document", "prefix"] | None = None,
    length: int | None = None,
    tokens: str | None = None,
    padding: int = 2,
    documents: str | None = None,
    prefix: int = 2,
    both_ways: bool = False,
    where: AttentionKind | None = None,
    target: str | None = None,
    left_to_right: bool = False,
    device: str = "auto",
) -> Explanation:
    """An attention mask of a kind, or those of a run on a text, with the number of its masked entries.

    `tokens` names the tokens, separated by spaces; `documents` are the lengths of packed documents, such as "2,3".
    """
    one_of(where, ATTENTION_KINDS, "--where")
    names, texts = masks.token_names(tokens, length), list_of_texts(text)
    if run is None and preset is None:
        if texts or where or target or left_to_right:
            raise UserError("a text, --where, --target and --left-to-right need a run or a preset")
        mask_kind = one_of(kind or "causal", masks.MASK_KINDS, "--kind")
        lengths = masks.parse_lengths(documents, len(names))
        options: dict[str, Any] = {"padding": padding, "documents": lengths, "prefix": prefix, "causal": not both_ways}
        return Explanation(masks.mask_document([masks.explain_mask(mask_kind, names, **options)]))
    if kind is not None:
        raise UserError("--kind does not go with a run or a preset, which has its own mask")
    reading: dict[str, Any] = {"device": device, "target": target, "left_to_right": left_to_right}
    model, row, name = masks.open_input(name_of(run), preset, assignments(settings), texts, names, **reading)
    return Explanation(masks.mask_document(masks.explain_model_masks(model, row, name, where=where)))


@names_keywords
def explain_positions(
    run: Run | None = None,
    *,
    preset: str | None = None,
    settings: Mapping[str, Any] | Sequence[str] | None = None,
    kind: Literal["sinusoidal", "learned", "rotary", "relative"] | None = None,
    length: int | None = None,
    width: int | None = None,
    where: Literal["encoder", "decoder"] | None = None,
    device: str = "auto",
) -> Explanation:
    """The position encodings, their similarity by distance, and that no two are the same."""
    one_of(kind, (*POSITION_KINDS, "relative"), "--kind")
    one_of(where, ("encoder", "decoder"), "--where")
    if run is None and preset is None:
        if where is not None:
            raise UserError("--where needs an encoder-decoder: name a run or a preset")
        if kind == "relative":
            raise UserError("relative positions belong to a model: name a run, or a preset with --preset")
        size = (128 if length is None else length, 64 if width is None else width)
        return Explanation(position_document([position_facts(kind or "sinusoidal", *size)]))
    if width is not None:
        raise UserError("--width does not go with a run or a preset, which has its own width")
    subject = subject_of(run, preset, settings, device=device, weights=True)
    own = getattr(subject.config.model, "positions", None)
    tables: list[Any]
    if own == "relative":
        tables = explain_relative_positions(subject.model, subject.name, length=length, trained=run is not None)
    else:
        trained_length = sequence_length(subject.model, subject.config.train) if run is not None else None
        tables = explain_model_positions(
            subject.model, subject.name, length=length, trained=run is not None, trained_length=trained_length
        )
        own = tables[0].kind
    if kind not in (None, own):
        raise UserError(f"--kind {kind}: the positions of {subject.name} are {own}")
    tables = [facts for facts in tables if where is None or facts.where in (None, where)]
    return Explanation((relative_position_document if own == "relative" else position_document)(tables))


@names_keywords
def explain_attention(
    run: Run,
    text: Texts | None = None,
    *,
    file: str | Path | None = None,
    rows: int | None = None,
    where: AttentionKind | None = None,
    layer: int | None = None,
    head: int | None = None,
    target: str | None = None,
    left_to_right: bool = False,
    device: str = "auto",
) -> Explanation:
    """The attention weights of every head on a text, and how they are distributed, there or over a file."""
    texts = list_of_texts(text)
    one_of(where, ATTENTION_KINDS, "--where")
    check_text_or_file(texts, file)
    if file and (target is not None or left_to_right):
        raise UserError("--target and --left-to-right go with a text, not with --file")
    if rows is not None and (not file or rows < 1):
        raise UserError("--rows goes with --file" if not file else f"--rows {rows}: must be 1 or more")
    pipeline, name = pipeline_of(run, device), str(name_of(run))
    need_attention(pipeline.model, name, None if left_to_right else where)
    if file:
        batches = encode_file(pipeline, str(file), rows=rows)
        facts = explain_file_attention(pipeline.model, batches, name, where=where)
    else:
        encoded = encode_input(pipeline, texts, target=target, left_to_right=left_to_right)
        facts = attention_facts(pipeline.model, encoded, name, where=where)
    facts = select_heads(facts, layer=layer, head=head)
    return Explanation(attention_document(facts, str(file) if file else " / ".join(texts)))


# One text


@names_keywords
def explain_layer(
    run: Run,
    text: Texts,
    *,
    layer: int = 1,
    head: int = 1,
    word: str | None = None,
    steps: Sequence[str] = (),
    way: Literal["forward", "backward"] | None = None,
    where: Literal["encoder", "decoder"] | None = None,
    label: str | None = None,
    device: str = "auto",
) -> Explanation:
    """One token through one layer: every formula with its values, forward and backward.

    `word` is a token or its position, from 1; the last one by default. `steps` selects some steps, such as "scores".
    """
    texts, pipeline = list_of_texts(text), pipeline_in_double(run, device)
    facts = layer_facts(pipeline, texts, layer=layer, head=head, word=word, where=where, label=label)
    return Explanation(layer_document(facts, str(name_of(run)), " / ".join(texts), steps=steps, direction=way))


@names_keywords
def explain_gradients(
    run: Run,
    text: Texts | None = None,
    *,
    file: str | Path | None = None,
    columns: dict[str, str] | None = None,
    label: str | None = None,
    depths: bool = True,
    device: str = "auto",
) -> Explanation:
    """The gradients of one backward pass in every layer, residual connection and group of parameters.

    With `depths`, fresh models of 2 to 48 layers are studied as well.
    """
    texts, name = list_of_texts(text), str(name_of(run))
    check_text_or_file(texts, file)
    if file and label is not None:
        raise UserError("--label goes with a text; the rows of a --file have their own labels")
    pipeline = pipeline_in_double(run, device)
    if file:
        target = file_target(pipeline, str(file), columns=columns)
    else:
        target = training_target(pipeline, texts, label=label)
    title = " / ".join(texts)
    if recurrent_stacks(pipeline.model.backbone):
        return Explanation(recurrence_document(explain_recurrence(pipeline.model, target), name, title))
    need_block_stacks(pipeline.model.backbone, name)
    facts = gradient_facts(pipeline.model, target)
    if depths:
        facts = replace(facts, depths=depth_study(block_settings(pipeline.model.backbone.config)))
    return Explanation(gradient_document(facts, name, title))


@names_keywords
def explain_residual(run: Run, text: Texts, *, label: str | None = None, device: str = "auto") -> Explanation:
    """The residual stream after each sublayer, what is added to it, and its predictions (logit lens)."""
    texts = list_of_texts(text)
    facts = residual_facts(pipeline_of(run, device), texts, label=label)
    return Explanation(residual_document(facts, str(name_of(run)), " / ".join(texts)))


@names_keywords
def explain_prediction(
    run: Run, text: Texts, *, label: str | None = None, at: int | None = None, device: str = "auto"
) -> Explanation:
    """A class, next token, masked word or translation, explained by gradients and by leaving out each word."""
    facts = prediction_facts(pipeline_of(run, device), list_of_texts(text), label=label, at=at)
    return Explanation(prediction_document(facts, str(name_of(run))))


# What the parts of a Transformer do for its answer


@names_keywords
def explain_logits(
    run: Run,
    text: Texts,
    *,
    label: str | None = None,
    versus: str | None = None,
    at: int | None = None,
    device: str = "auto",
) -> Explanation:
    """A logit, split into what the embedding, each head, each feed-forward layer and the biases add to it."""
    texts = list_of_texts(text)
    facts = logit_facts(pipeline_of(run, device), texts, label=label, versus=versus, at=at)
    return Explanation(logit_document(facts, str(name_of(run)), " / ".join(texts)))


@names_keywords
def explain_heads(
    run: Run,
    *,
    file: str | Path,
    columns: dict[str, str] | None = None,
    rows: int = 64,
    method: Literal["zero", "mean", "both"] = "both",
    device: str = "auto",
) -> Explanation:
    """How the loss over a file changes when each attention head is ablated in turn."""
    methods = list(METHODS) if method == "both" else [method]
    facts = head_facts(pipeline_of(run, device), str(file), columns=columns, rows=rows, methods=methods)
    return Explanation(head_document(facts, str(name_of(run)), str(file)))


@names_keywords
def explain_patch(
    run: Run,
    text: Texts,
    corrupted: Texts,
    *,
    label: str | None = None,
    versus: str | None = None,
    device: str = "auto",
) -> Explanation:
    """Activations of a clean text put into a corrupted one: which bring its answer back?"""
    clean, other = list_of_texts(text), list_of_texts(corrupted)
    if len(other) != len(clean):
        raise UserError(f"--corrupted: found {len(other)} texts; expected as many as the clean ones, {len(clean)}")
    facts = patch_facts(pipeline_of(run, device), clean, other, label=label, versus=versus)
    return Explanation(patch_document(facts, str(name_of(run)), " / ".join(clean), " / ".join(other)))


@names_keywords
def explain_induction(
    run: Run, *, length: int | None = None, rows: int = 16, seed: int = 0, device: str = "auto"
) -> Explanation:
    """The score of each head on repeated random tokens: does it look up what followed the current token before?"""
    facts = induction_facts(pipeline_of(run, device), length=length, rows=rows, seed=seed)
    return Explanation(induction_document(facts, str(name_of(run))))


@names_keywords
def explain_context(
    runs: Run | Iterable[Run],
    *,
    data: str | Path | Sequence[str | Path] = (),
    documents: str = "auto",
    column: str | None = None,
    by: Literal["position", "context"] | None = None,
    length: int | None = None,
    max_context: int | None = None,
    targets: int = 2000,
    tokens: int = 200_000,
    bos: bool = False,
    device: str = "auto",
) -> Explanation:
    """The loss of language models by position and by context length: how far back do their predictions reach?

    `data` is held-out text, by default the validation text of the first run.
    """
    several = [runs] if isinstance(runs, str | Path | Pipeline) else list(runs)
    files = [str(data)] if isinstance(data, str | Path) else [str(path) for path in data]
    pipelines = [pipeline_of(run, device) for run in several]
    for pipeline in pipelines:
        pipeline.require("generates", "predict a token from those before it")
    facts = context_facts(
        pipelines,
        read_stores(pipelines, files, documents=documents, column=column),
        text=", ".join(files) or f"validation text of {pipelines[0].run}",
        by=by,
        row_length=length,
        max_context=max_context,
        targets=targets,
        max_tokens=tokens,
        bos=bos,
    )
    return Explanation(context_document(facts))


def read_stores(
    pipelines: list[Pipeline], data: list[str], *, documents: str, column: str | None
) -> "list[TokenStore]":
    """The same text as tokens of each run; runs with the same tokenizer share them."""
    stores: dict[str, TokenStore] = {}
    for pipeline in pipelines:
        key = pipeline.tokenizer.fingerprint
        if stores and key not in stores and not data:
            raise UserError(f"{pipeline.run}: has another tokenizer than {pipelines[0].run}; name the text with --data")
        if key not in stores:
            stores[key] = evaluation_store(
                pipeline.run, pipeline.config, pipeline.task, data, documents=documents, column=column
            )
    return [stores[pipeline.tokenizer.fingerprint] for pipeline in pipelines]
