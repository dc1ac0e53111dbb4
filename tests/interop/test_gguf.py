"""GGUF files give llama.cpp the run's tokens, logits and greedy continuations."""

import unicodedata

import numpy as np
import pytest
import torch

from headstock.errors import UserError
from headstock.inference.pipeline import load
from headstock.interop import export_run
from headstock.model.batch import Batch
from tests.interop.small import small_run, some_texts

gguf = pytest.importorskip("gguf")

MODERN = {"norm": "pre", "norm_kind": "rms", "positions": "rotary", "activation": "swiglu", "bias": False}
GPT = {"norm": "pre", "positions": "learned", "activation": "gelu_tanh"}
CASES = {  # model settings, the architecture, and how close the logits are
    "llama": (MODERN | {"tied": False, "rotary_base": 500.0}, "llama", 1e-4),
    "qwen3": (MODERN | {"qk_norm": True}, "qwen3", 1e-4),
    "gpt2": (GPT | {"bias": False, "tied": False}, "gpt2", 1e-2),  # llama.cpp's GELU is a table in half precision
}
WIDE = {"width": 64, "hidden": 96}


def greedy(logits, tokens, count):
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(np.argmax(logits(tokens)[-1])))
    return tokens


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_computes_what_the_run_computes(name, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    model, architecture, tolerance = CASES[name]
    run = small_run(tmp_path / "run", model | WIDE, {"name": "causal"}, spread=0.3)
    assert export_run(run, tmp_path / "gguf", to="gguf")["architecture"] == architecture
    pipeline, single = load(run.path, device="cpu"), llama_cpp.GGML_TYPE_F32
    options = {"n_ctx": 64, "n_threads": 1, "logits_all": True, "type_k": single, "type_v": single, "verbose": False}
    llama = llama_cpp.Llama(str(tmp_path / "gguf" / "model.gguf"), **options)

    def theirs(tokens):
        llama.reset()
        llama.eval(tokens)
        return np.array(llama.scores[: len(tokens)])

    @torch.no_grad()
    def ours(tokens):
        return pipeline.model.heads["token"](pipeline.model(Batch(torch.tensor([tokens]))).hidden)[0].numpy()

    tokenizer = pipeline.tokenizer
    texts = [unicodedata.normalize("NFC", text) for text in some_texts(300)]
    rows = [llama.tokenize(text.encode(), add_bos=True, special=False) for text in texts]
    assert rows == [[tokenizer.bos, *row] for row in tokenizer.encode_batch(texts)]
    prompt = rows[0][:8]
    assert np.abs(theirs(prompt) - ours(prompt)).max() < tolerance
    assert np.abs(theirs(prompt) - ours([*prompt[:2], *prompt[3:], prompt[2]])).max() > 0.1  # the control
    continued = greedy(ours, prompt, 8)
    assert greedy(theirs, prompt, 8) == continued and len(set(continued[8:])) > 1


def test_what_a_file_says_and_what_is_refused(tmp_path, call):
    run = small_run(tmp_path / "run", MODERN, {"name": "causal"})
    out, _ = call("export", run.path, "--to", "gguf", tmp_path / "gguf")
    assert "for gguf as llama" in out
    reader = gguf.GGUFReader(tmp_path / "gguf" / "model.gguf")
    assert reader.fields["llama.context_length"].contents() == 24
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == run.config()["model"]["vocabulary"] and tokens[-1].startswith("[UNUSED")
    export_run(run, tmp_path / "gguf", to="gguf", overwrite=True)
    refused = (
        (GPT | {"activation": "gelu"}, {"name": "causal"}, "bpe", "model.activation is 'gelu', not 'gelu_tanh'"),
        (MODERN | {"bias": True}, {"name": "causal"}, "bpe", "model.bias is true, not false"),
        (MODERN, {"name": "causal"}, "unigram", "its tokenizer is unigram, not bpe"),
        (MODERN | {"causal": False}, {"name": "masked"}, "bpe", "is a masked model"),
    )
    for number, (model, task, kind, message) in enumerate(refused):
        other = small_run(tmp_path / str(number), model, task, kind=kind)
        with pytest.raises(UserError, match=message):
            export_run(other, tmp_path / "refused", to="gguf")
