"""From a run to a folder that `AutoModel...from_pretrained` and `AutoTokenizer` open, with no code but theirs."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from headstock import __version__, config
from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError
from headstock.interop import LAYOUT
from headstock.interop.huggingface.architecture import ARCHITECTURES, Architecture, Export
from headstock.interop.huggingface.model_card_header import card
from headstock.interop.huggingface.tensor_names import to_theirs
from headstock.interop.huggingface.tokenizer import tokenizer_files, tokenizer_problems
from headstock.io import atomic_folder, write_json, write_text
from headstock.model.model import Model
from headstock.tasks.base import Task
from headstock.train.loop import sequence_length
from headstock.train.pretrain import load_run_model
from headstock.train.run_folder import RunFolder, check_tokenizers, open_run
from headstock.train.settings import RunConfig, make_config
from headstock.train.tensors import write_tensors

Say = Callable[[str], None]
OWN = "headstock"  # the section of their config.json that tells us what their words have no place for


@dataclass(frozen=True)
class Subject:
    """A run that is to be said in other words."""

    run: RunFolder
    chosen: RunConfig
    tokenizer: Tokenizer
    model: Model
    task: Task


def export(run: str | Path | RunFolder, folder: str | Path, *, say: Say = lambda line: None) -> dict[str, Any]:
    """Write a run as a Hugging Face folder; refuses, with every reason, what no architecture there says exactly."""
    source = run if isinstance(run, RunFolder) else open_run(run)
    chosen, tokenizer = make_config(source.config()), source.tokenizer()
    check_tokenizers(source, tokenizer)
    if chosen.transfer and chosen.transfer.ensemble > 1:
        raise UserError(f"{source}: is several models; name one of them, such as {source.member(0)}")
    architecture = choose(source, chosen, tokenizer)
    model, task = load_run_model(source, chosen, tokenizer)
    subject, made = Subject(source, chosen, tokenizer, model, task), architecture.export(chosen)
    say(f"{source}: as {made.head}")
    remarks = remarks_on(chosen, made)
    for line in remarks:
        say(line)
    tensors = to_theirs(architecture.rows(chosen, made), model.tensors())
    with atomic_folder(Path(folder), layout=LAYOUT) as beside:
        write(beside, subject, made, tensors, remarks)
    hint = f'pipeline("{made.pipeline}", "{folder}")' if made.pipeline not in (None, "translation") else ""
    return {
        "architecture": made.head,
        "model_type": made.model_type,
        "pipeline": made.pipeline,
        "tensors": len(tensors),
        "remarks": remarks,
        "try": [hint] if hint else [],
    }


def choose(run: RunFolder, chosen: RunConfig, tokenizer: Tokenizer) -> type[Architecture]:
    """The first architecture that says a run exactly; otherwise the nearest is named with all that is in the way."""
    first = tokenizer_problems(tokenizer)
    near: list[tuple[int, str, type[Architecture], list[str]]] = []
    for name in ARCHITECTURES.names():
        architecture = ARCHITECTURES.get(name)
        problems = architecture.misfits(chosen)
        if not problems and not first:
            return architecture
        near.append((len(problems), name, architecture, problems))
    if chosen.family not in ("transformer", "seq2seq"):
        able = "transformer and seq2seq"
        raise UserError(f"{run}: nothing of Hugging Face's is like the family {chosen.family!r} (exported are {able})")
    fitting = [
        one for one in near if not any("model.family" in problem or "only read" in problem for problem in one[3])
    ]
    _, _, nearest, problems = min(fitting, key=lambda one: one[:2])
    reasons = "; ".join([*first, *problems])
    raise UserError(f"{run}: cannot be said exactly there. Nearest is {nearest.title}, but {reasons}")


def remarks_on(chosen: RunConfig, made: Export) -> list[str]:
    """What a user of the folder should know."""
    remarks = []
    if made.config.get("is_causal") is False:
        remarks.append(
            f"{made.head} reads both ways because config.json says is_causal false; older transformers do not know it"
        )
    if chosen.objective == "masked" and made.pipeline != "fill-mask":
        remarks.append(f"the scores of hidden tokens are those of {made.head}; the fill-mask pipeline does not know it")
    if made.head == "BertModel":
        remarks.append("its pooler has no weights, because the run has none: read last_hidden_state")
    if chosen.objective == "hybrid":
        remarks.append("a hybrid is exported as it reads from left to right")
    long = getattr(chosen.task, "long", None)
    if long in ("head+tail", "windows"):
        remarks.append(f"long texts are read whole here (long is {long!r}); there they are cut at their end")
    return remarks


def write(folder: Path, subject: Subject, made: Export, tensors: dict[str, Tensor], remarks: list[str]) -> None:
    tokenizer, task = subject.tokenizer, subject.task
    write_json(folder / "config.json", describe(subject, made))
    write_tensors(folder / "model.safetensors", tensors, metadata={"format": "pt"})
    length = sequence_length(subject.model, subject.chosen.train)
    segments = bool(getattr(subject.chosen.model, "segments", 0))
    for name, text in tokenizer_files(tokenizer, task, length=length, segments=segments).items():
        write_text(folder / name, text)
    if task.generates or task.needs_encoder_decoder:
        write_json(folder / "generation_config.json", generation(subject))
    write_text(folder / "README.md", card(subject.run, subject.chosen, made, remarks))


def describe(subject: Subject, made: Export) -> dict[str, Any]:
    """Their config.json; what it has no word for stands in a section of ours, which they leave alone."""
    t, chosen = subject.tokenizer, subject.chosen
    tokens = {"bos_token_id": t.bos, "eos_token_id": t.eos, "pad_token_id": t.pad}
    if made.model_type == "eurobert":
        tokens["mask_token_id"] = t.mask
    if subject.task.needs_encoder_decoder:
        tokens |= {"decoder_start_token_id": subject.task.bos, "forced_eos_token_id": None}  # type: ignore[attr-defined]
        tokens["forced_bos_token_id"] = None
    own = {"version": __version__, "model": {"family": chosen.family, **config.to_dict(chosen.model)}}
    own |= {"task": {"name": chosen.objective, **config.to_dict(chosen.task)}}
    return {
        "architectures": [made.head],
        "model_type": made.model_type,
        **made.config,
        **tokens,
        "dtype": "float32",
        OWN: own,
    }


def generation(subject: Subject) -> dict[str, Any]:
    """How to write with it: what ends a text, and which tokens are never part of one."""
    t, task, vocabulary = subject.tokenizer, subject.task, subject.chosen.model.vocabulary
    silent = sorted(number for number in t.all_special_ids if number not in (t.eos, None))
    found: dict[str, Any] = {
        "bos_token_id": t.bos,
        "eos_token_id": t.eos,
        "pad_token_id": t.eos if t.pad is None else t.pad,
        "suppress_tokens": [*silent, *range(t.vocabulary, vocabulary)],
    }
    if task.needs_encoder_decoder:
        found |= {"decoder_start_token_id": task.bos, "max_length": subject.chosen.model.context}  # type: ignore[attr-defined]
        if hasattr(task.config, "beams"):
            found |= {"num_beams": task.config.beams, "length_penalty": task.config.length_penalty}
            found |= {"no_repeat_ngram_size": task.config.no_repeat}
    return found


def as_json(value: Any) -> Any:
    """A value as it comes back from a JSON file."""
    return json.loads(json.dumps(value))
