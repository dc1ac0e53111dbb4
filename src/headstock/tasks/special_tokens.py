"""Which special tokens a task puts around a text."""

from headstock.data.tokenizer import Tokenizer
from headstock.data.windowing import SpecialTokens
from headstock.tasks.base import Task, bos_id, closing_ids


def special_tokens_for(task: Task, tokenizer: Tokenizer, *, left_to_right: bool = False) -> SpecialTokens:
    """The special tokens around a single text, as the task saw them in training.

    With `left_to_right` the text starts with the BOS token and is left open, since it may be continued. Tasks trained
    on pairs of texts also close a single text.
    """
    pad = tokenizer.pad or 0
    if left_to_right:
        return SpecialTokens((bos_id(tokenizer, "start"),), (), pad)
    first = bos_id(tokenizer, getattr(task.config, "opening", task.bos_role))
    closed = task.needs_sentences or getattr(task.config, "closed", False)
    return SpecialTokens((first,), closing_ids(tokenizer) if closed else (), pad)
