"""Exports a causal language model to GGUF, the file format of llama.cpp."""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from headstock import __version__
from headstock.data.tokenizer import Tokenizer
from headstock.data.tokenizer_backends import TokenizersBackend
from headstock.errors import UserError
from headstock.inference.pipeline import load
from headstock.interop import LAYOUT, MARKER, format_setting, missing_dependency
from headstock.interop.huggingface.exporter import choose_architecture, model_card_body
from headstock.interop.tensor_map import export_tensors
from headstock.io import atomic_folder, write_json, write_text
from headstock.tasks.base import TASKS
from headstock.train.run_folder import RunFolder
from headstock.train.settings import RunConfig, make_config

logger = logging.getLogger(__name__)

FILE = "model.gguf"
REQUIRED: dict[str, dict[str, Any]] = {  # Hugging Face model type: settings that llama.cpp computes
    "llama": {"bias": False},
    "qwen3": {"bias": False},
    "gpt2": {"activation": "gelu_tanh"},
}
CARD = """# {name}, for llama.cpp

The Headstock run {name} as {architecture}, in single precision: tokens and greedy continuations are the same.

```sh
llama-cli -m model.gguf -p "..." --temp 0
```

```python
from llama_cpp import Llama

print(Llama("model.gguf")("...", max_tokens=32, temperature=0)["choices"][0]["text"])
```

llama.cpp does not normalize text: where it has combining characters, pass it in Unicode's NFC form.

"""


def export_gguf(run: RunFolder, folder: Path) -> dict[str, Any]:
    """Write a causal language model as one GGUF file; raises with every reason if llama.cpp cannot compute it."""
    try:
        import gguf
    except ImportError:
        raise missing_dependency("gguf") from None
    run_config = make_config(run.config())
    if not TASKS.get(run_config.objective).generates:
        raise UserError(f"{run}: is a {run_config.objective} model, but llama.cpp needs one that generates text")
    architecture = choose_architecture(run, run_config)
    spec = architecture.export_spec(run_config)
    tokenizer = run.tokenizer()
    if problems := [*unsupported_model(run_config, spec.model_type), *unsupported_tokenizer(tokenizer)]:
        raise UserError(f"{run}: no exact export to GGUF: {'; '.join(problems)}")
    pipeline = load(run.path, device="cpu")
    tensors = export_tensors(architecture.tensor_map(run_config, spec), pipeline.model.tensors())
    with atomic_folder(folder, layout=LAYOUT) as temporary:
        writer = gguf.GGUFWriter(temporary / FILE, spec.model_type)
        write_settings(writer, run, run_config)
        write_tokenizer(writer, tokenizer, run_config.model.vocabulary)
        names = gguf.get_tensor_name_map(architecture_of(spec.model_type), run_config.model.depth)
        for name, tensor in gguf_tensors(tensors, spec.model_type, run_config.model.heads):
            new = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert new is not None, f"GGUF has no name for {name}"
            writer.add_tensor(new, tensor.float().contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        write_json(temporary / MARKER, {"version": __version__, "format": "gguf"})
        card = CARD.format(name=run.title, architecture=spec.model_type)
        write_text(temporary / "README.md", card + "\n".join(model_card_body(run)))
    size = (folder / FILE).stat().st_size
    return {"architecture": spec.model_type, "tensors": len(tensors), "bytes": size, "remarks": []}


def architecture_of(model_type: str) -> Any:
    import gguf

    return next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == model_type)


def unsupported_model(run_config: RunConfig, model_type: str) -> list[str]:
    model = vars(run_config.model)
    return [
        f"model.{name} is {format_setting(model[name])}, not {format_setting(value)}"
        for name, value in REQUIRED[model_type].items()
        if model[name] != value
    ]


def unsupported_tokenizer(tokenizer: Tokenizer) -> list[str]:
    """llama.cpp has byte-level BPE with GPT-2's splitting into words, without a normalizer."""
    if not isinstance(tokenizer.backend, TokenizersBackend) or tokenizer.kind != "bpe":
        return [f"its tokenizer is {tokenizer.kind}, not bpe"]
    description = json.loads(tokenizer.backend.to_json())
    problems, splitter = [], description["pre_tokenizer"] or {}
    if splitter.get("type") != "ByteLevel" or not splitter.get("use_regex") or splitter.get("add_prefix_space"):
        problems.append("its tokenizer does not split words as GPT-2's does")
    normalizer = description["normalizer"] or {"type": "NFC"}
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    if any(step["type"] != "NFC" for step in steps):
        problems.append("its tokenizer changes the text (lowercase or strip_accents)")
    return problems


def write_settings(writer: Any, run: RunFolder, run_config: RunConfig) -> None:
    import gguf

    model = run_config.model
    writer.add_name(run.title)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(model.vocabulary)
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.width)
    writer.add_block_count(model.depth)
    writer.add_feed_forward_length(model.hidden)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.heads)
    if model.norm_kind == "rms":
        writer.add_layer_norm_rms_eps(model.norm_epsilon)
    else:
        writer.add_layer_norm_eps(model.norm_epsilon)
    if model.positions == "rotary":
        writer.add_rope_freq_base(model.rotary_base)
        writer.add_rope_dimension_count(model.width // model.heads)


def write_tokenizer(writer: Any, tokenizer: Tokenizer, vocabulary: int) -> None:
    """The tokens, filled up to the rows of the embedding, with their kinds, and the merges."""
    from gguf import TokenType

    merges = json.loads(tokenizer.backend.to_json())["model"]["merges"]
    names = [tokenizer.id_to_token(number) for number in range(tokenizer.vocabulary)]
    tokens = [name or f"[UNUSED{number}]" for number, name in enumerate(names)]
    tokens += [f"[UNUSED{number}]" for number in range(tokenizer.vocabulary, vocabulary)]
    special = tokenizer.all_special_ids
    kinds = [TokenType.CONTROL if number in special else TokenType.NORMAL for number in range(len(names))]
    kinds = [kind if names[number] else TokenType.UNUSED for number, kind in enumerate(kinds)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([*kinds, *[TokenType.UNUSED] * (vocabulary - len(kinds))])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    for role in ("bos", "eos", "pad", "unk"):
        if (number := getattr(tokenizer, role)) is not None:
            getattr(writer, f"add_{role}_token_id")(number)


def gguf_tensors(tensors: Mapping[str, Tensor], model_type: str, heads: int) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face's tensors in llama.cpp's layout."""
    for name, tensor in tensors.items():
        if model_type == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            tensor = tensor.T
        elif model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp rotates neighbouring features, Hugging Face the two halves of a head
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        yield name, tensor
