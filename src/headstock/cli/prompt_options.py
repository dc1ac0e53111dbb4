"""Options of verbs that can ask a language model for a class."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from headstock.cli.options import LabelWords
from headstock.errors import UserError

if TYPE_CHECKING:
    from headstock.inference.pipeline import Pipeline


class PromptOptions(TypedDict):
    prompt: Annotated[str | None, "Ask a language model instead: '{text} It was [MASK].'"]
    label_words: LabelWords
    examples: Annotated[Path | None, "Prompt: labelled rows to show before each text."]
    prior: Annotated[str | None, "Prompt: divide by the label prior: content-free (default), batch or none."]


def with_prompt(pipeline: "Pipeline", options: PromptOptions) -> "Pipeline":
    """The pipeline itself, or with --prompt a classifier that asks its language model."""
    if options["prompt"] is None:
        for name in ("label_words", "examples", "prior"):
            if options[name] is not None:
                raise UserError(f"--{name.replace('_', '-')} is only for --prompt")
        return pipeline
    from headstock import config
    from headstock.data.labelled_texts import read_records
    from headstock.inference.prompt import PromptSettings

    words = [entry.strip() for entry in (options["label_words"] or "").split(",") if entry.strip()]
    values: dict[str, Any] = {"template": options["prompt"], "label_words": words, "prior": options["prior"]}
    examples: list[tuple[str, str]] = []
    if options["examples"] is not None:
        rows = read_records(options["examples"])
        if rows.labels is None:
            raise UserError(f"{rows.source}: has no labels, which --examples needs")
        examples = list(zip(rows.display_texts, rows.labels, strict=True))
        values |= {"shots": len(examples)}
    values = {name: value for name, value in values.items() if value is not None}
    return pipeline.prompted(config.from_dict(PromptSettings, values, prefix="prompt"), examples=examples)
