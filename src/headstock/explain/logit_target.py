"""The logit that an analysis follows: of a class, a next token, a masked word, or a token of a translation.

B rows, T tokens, D width, C classes or vocabulary entries.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from headstock.errors import UserError
from headstock.explain.hooks import need_block_stacks
from headstock.explain.prediction_cases import ClassCase, TokenCase, TranslationCase, case_of
from headstock.explain.subject import check_texts, row_tokens
from headstock.inference.pipeline import Pipeline
from headstock.inference.translate import display_tokens
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.model import Model
from headstock.tasks.labelled import LabelledTask


@dataclass(frozen=True)
class LogitTarget:
    """A logit of one text, or the difference of two."""

    kind: str  # "class", "next token", "masked word" or "translation"
    batch: Batch  # one row
    answers: list[int]  # the class or token; of a translation, all its tokens
    names: dict[int, str]  # of the answers
    index: int = 0  # of the answer that is followed
    position: int | None = None  # of the vector that predicts it; None: the class of the row
    versus: int | None = None  # the answer whose logit is subtracted
    task: LabelledTask | None = None  # that predicts the class
    notes: list[str] = field(default_factory=list)

    @property
    def answer(self) -> int:
        return self.answers[self.index]

    @property
    def name(self) -> str:
        """`logit of good`, or `logit of good minus that of bad`."""
        minus = "" if self.versus is None else f" minus that of “{self.names[self.versus]}”"
        return f"logit of “{self.names[self.answer]}”{minus}"

    def logits(self, model: Model, hidden: Tensor) -> Tensor:
        """(B, C) from the vectors (B, T, D) that the heads read."""
        if self.position is not None:
            return model.heads["token"](hidden[:, self.position])
        assert self.task is not None
        return self.task.lens_scores(model, hidden, None)

    def value(self, model: Model, hidden: Tensor) -> Tensor:
        """(B,) the logit, or the difference of both."""
        logits = self.logits(model, hidden)
        return logits[:, self.answer] - (0 if self.versus is None else logits[:, self.versus])


def logit_target(
    pipeline: Pipeline,
    texts: Sequence[str],
    *,
    label: str | None = None,
    versus: str | None = None,
    at: int | None = None,
) -> LogitTarget:
    """The logit of `label`, or of the run's prediction; `at` is the number of a [MASK] or of a translated token."""
    need_block_stacks(pipeline.model.backbone, pipeline.run)
    check_texts(pipeline, texts)
    case = case_of(pipeline, list(texts), None if pipeline.task.translates else at, label)
    if isinstance(case, TranslationCase):
        return translation_target(pipeline, case, versus, at or 1)
    (probabilities,) = case.probabilities([texts])
    answer = case.top(probabilities, 1)[0] if label is None else case.select(label, probabilities)
    other = None if versus is None else case.select(versus, probabilities, option="--versus")
    names = {number: case.name(number) for number in (answer, other) if number is not None}
    if answer == other:
        raise UserError(f"--versus {versus}: is the answer that is explained; name another one")
    if isinstance(case, ClassCase):
        layers = case.task.config.layers
        if layers != "last":
            raise UserError(f"{pipeline.run}: its head reads other layers than the last (task.layers {layers})")
        batch = case.task.examples(case.data, length=case.length).batch([0]).to(pipeline.model.device)
        return LogitTarget(case.kind, batch, [answer], names, versus=other, task=case.task, notes=case.notes)
    assert isinstance(case, TokenCase)
    tokens, position = case.row(texts[0])
    batch = case.batch([tokens])
    return LogitTarget(case.kind, batch, [answer], names, position=position, versus=other, notes=case.notes)


def translation_target(pipeline: Pipeline, case: TranslationCase, versus: str | None, at: int) -> LogitTarget:
    """A token of a translation, given those before it."""
    batch = case.task.examples(case.source, length=case.length).batch([0]).to(pipeline.model.device)
    answers = [token for token in batch.labels["token"][0].tolist() if token != IGNORE_INDEX]
    tokenizer = pipeline.tokenizer
    if not 1 <= at <= len(answers):
        raise UserError(f"--at {at}: the translation has {len(answers)} tokens, counted from 1")
    other = None
    if versus is not None:
        if not (tokens := tokenizer.encode(versus if at == 1 else f" {versus}")):
            raise UserError(f"{pipeline.run}: --versus {versus!r}: this tokenizer cannot encode it")
        other = tokens[0]
    token_ids = {*answers, *([] if other is None else [other])}
    names = {token: display_tokens(tokenizer, [token])[0] for token in token_ids}
    notes = [f"the translation is “{case.target}”"]
    return LogitTarget(case.kind, batch, answers, names, at - 1, position=at - 1, versus=other, notes=notes)


def contrast_targets(
    pipeline: Pipeline, clean: Sequence[str], corrupted: Sequence[str], *, label: str | None, versus: str | None
) -> tuple[LogitTarget, LogitTarget]:
    """The logit difference of two answers in two texts: that of the first text minus that of the second.

    Of two translations these are the first tokens that differ, given those before them.
    """
    first, second = logit_target(pipeline, clean, label=label), logit_target(pipeline, corrupted, label=versus)
    same = [a == b for a, b in zip(first.answers, second.answers, strict=False)]
    index = same.index(False) if False in same else None
    if index is None:
        problem = f"both texts give “{first.names[first.answer]}”; name two answers with --label and --versus"
        raise UserError(f"{pipeline.run}: {problem}")
    if first.kind == "translation":
        first, second = (
            replace(target, batch=first_targets(target.batch, index + 1), index=index, position=index)
            for target in (first, second)
        )
    contrast = replace(first, names=first.names | second.names, versus=second.answer)
    pair = contrast, replace(contrast, batch=second.batch)
    for part in ("row", "source"):
        sizes = [len(tokens_of(pipeline, target)[part == "source"]) for target in pair]
        if sizes[0] != sizes[1]:
            hint = "give texts with the same number of tokens, so that positions correspond"
            raise UserError(f"{pipeline.run}: the texts have {sizes[0]} and {sizes[1]} tokens; {hint}")
    if first.position != second.position:
        raise UserError(f"{pipeline.run}: the texts are masked at different positions")
    return pair


def first_targets(batch: Batch, count: int) -> Batch:
    """The first target tokens of one row, without labels."""
    return Batch(batch.tokens[:, :count], source=batch.source)


def tokens_of(pipeline: Pipeline, target: LogitTarget) -> tuple[list[str], list[str]]:
    """The tokens of the row, and those of the source of an encoder-decoder."""
    source = target.batch.source
    return row_tokens(pipeline, target.batch), [] if source is None else row_tokens(pipeline, source, source=True)


def double_copy(model: Model) -> Model:
    """A copy in double precision, on the CPU where the device has none; the model itself is left unchanged."""
    copied = copy.deepcopy(model).eval()
    return (copied.to("cpu") if copied.device.type == "mps" else copied).double()
