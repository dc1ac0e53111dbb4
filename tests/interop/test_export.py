"""Exported Hugging Face folders give the run's outputs in transformers, and are imported bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headstock.data.mask_gaps import SurfaceForms
from headstock.errors import UserError
from headstock.inference.pipeline import load
from headstock.interop import export_run, import_run
from headstock.interop.huggingface.exporter import auto_class
from headstock.train.tensors import read_tensors
from tests.interop.small import scores, small_run, some_texts, tokenizer_of

transformers = pytest.importorskip("transformers")

GPT = {"norm": "pre", "positions": "learned", "activation": "gelu"}
MODERN = {"norm": "pre", "norm_kind": "rms", "positions": "rotary", "activation": "swiglu", "bias": False}
BOTH = MODERN | {"causal": False}
NORMED = BOTH | {"qk_norm": True}
BERT = {"norm": "post", "positions": "learned", "embed_norm": True, "segments": 2, "causal": False}
PAIR = {"family": "seq2seq", "encoder_depth": 3}
T5 = PAIR | {"norm": "pre", "norm_kind": "rms", "positions": "relative", "activation": "relu", "bias": False}
WAVES = {"positions": "sinusoidal", "activation": "relu", "embed_scale": True}
NAMES = ["no", "yes", "may be"]
CLASSES = {"name": "classify", "classes": NAMES}
LAST = CLASSES | {"pool": "last", "head_bias": False}
TAGS = {"name": "tag", "classes": NAMES, "opening": "cls"}
MASKED = {"name": "masked", "transform": True}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # expected class, model settings, task settings
    "gpt": ("GPT2LMHeadModel", GPT, {"name": "causal"}),
    "gpt otherwise": (
        "GPT2LMHeadModel",
        GPT | {"bias": False, "activation": "relu", "positions": "sinusoidal", "tied": False, "norm_epsilon": 1e-3},
        {"name": "causal"},
    ),
    "gpt classes": ("GPT2ForSequenceClassification", GPT, LAST),
    "gpt pairs": ("GPT2ForSequenceClassification", GPT, LAST | {"name": "pair"}),
    "gpt tags": ("GPT2ForTokenClassification", GPT, TAGS | {"opening": "start"}),
    "gpt answers": ("GPT2ForQuestionAnswering", GPT, {"name": "answer"}),
    "gpt headless": ("GPT2Model", GPT, {"name": "headless", "opening": "start"}),
    "modern": ("LlamaForCausalLM", MODERN, {"name": "causal"}),
    "modern with biases": (
        "LlamaForCausalLM",
        MODERN | {"bias": True, "rotary_base": 500.0, "norm_epsilon": 1e-6},
        {"name": "causal"},
    ),
    "modern normed": ("Qwen3ForCausalLM", MODERN | {"qk_norm": True, "tied": False}, {"name": "causal"}),
    "modern hybrid": ("Qwen3ForCausalLM", NORMED, {"name": "hybrid"}),
    "modern normed masked": ("Qwen3ForCausalLM", NORMED, {"name": "masked"}),
    "modern normed classes": ("Qwen3ForSequenceClassification", NORMED, LAST | {"opening": "cls"}),
    "modern normed tags": ("Qwen3ForTokenClassification", NORMED, TAGS),
    "modern normed answers": ("Qwen3ForQuestionAnswering", NORMED, {"name": "answer", "opening": "cls"}),
    "modern masked": ("EuroBertForMaskedLM", BOTH, {"name": "masked"}),
    "modern masked untied": ("EuroBertForMaskedLM", BOTH | {"bias": True, "tied": False}, {"name": "masked"}),
    "modern masked biased": ("EuroBertForMaskedLM", BOTH | {"bias": True}, {"name": "masked"}),
    "modern mean": (
        "EuroBertForSequenceClassification",
        BOTH,
        CLASSES | {"pool": "mean", "opening": "cls", "separator": ","},
    ),
    "modern first": ("EuroBertForSequenceClassification", BOTH, CLASSES | {"pool": "cls", "dense": "gelu"}),
    "modern tags": ("EuroBertForTokenClassification", BOTH, TAGS),
    "modern answers": ("LlamaForQuestionAnswering", BOTH, {"name": "answer"}),
    "bert": ("BertForMaskedLM", BERT, MASKED),
    "bert otherwise": ("BertForMaskedLM", BERT | {"segments": 0, "tied": False, "bias": False}, MASKED),
    "bert next sentence": ("BertForPreTraining", BERT, MASKED | {"nsp": True}),
    "bert pooled": (
        "BertForSequenceClassification",
        BERT,
        CLASSES | {"pool": "cls", "dense": "tanh", "opening": "cls", "closed": True},
    ),
    "bert classes": ("ElectraForSequenceClassification", BERT, CLASSES | {"pool": "cls", "opening": "cls"}),
    "bert pairs": (
        "ElectraForSequenceClassification",
        BERT,
        CLASSES | {"name": "pair", "pool": "cls", "opening": "cls"},
    ),
    "bert tags": ("BertForTokenClassification", BERT, TAGS),
    "bert answers": ("BertForQuestionAnswering", BERT, {"name": "answer", "opening": "cls"}),
    "bert headless": ("BertModel", BERT, {"name": "headless", "closed": True}),
    "bart": (
        "BartForConditionalGeneration",
        PAIR | {"norm": "post", "embed_norm": True, "tied": False, "embed_scale": True},
        {"name": "denoise"},
    ),
    "mbart": (
        "MBartForConditionalGeneration",
        PAIR | {"norm": "pre", "embed_norm": True, "bias": False},
        {"name": "translate"},
    ),
    "marian": ("MarianMTModel", PAIR | WAVES | {"norm": "post"}, {"name": "translate"}),
    "pegasus": ("PegasusForConditionalGeneration", PAIR | WAVES | {"norm": "pre"}, {"name": "translate"}),
    "t5": ("T5ForConditionalGeneration", T5, {"name": "denoise"}),
    "t5 1.1": (
        "T5ForConditionalGeneration",
        T5 | {"activation": "geglu", "tied": False, "relative_buckets": 8, "relative_distance": 16},
        {"name": "translate", "decoder_start": "pad"},
    ),
    "blenderbot": ("BlenderbotForConditionalGeneration", PAIR | {"norm": "pre"}, {"name": "translate"}),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No network access and no progress bars."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


def kind_for(model: dict[str, Any]) -> str:
    return "wordpiece" if model is BERT else "bpe"


def texts_for(task: dict[str, Any]) -> tuple[list[str], list[str] | None]:
    is_pair = task["name"] in ("pair", "answer") or task.get("nsp", False)
    return some_texts(6, seed=3), some_texts(6, seed=4) if is_pair else None


@torch.no_grad()
def their_scores(folder: Path, inputs: Any, targets: torch.Tensor | None) -> Any:
    head = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, report = getattr(transformers, auto_class(head)).from_pretrained(folder, output_loading_info=True)
    poolers = {"pooler.dense.weight", "pooler.dense.bias"} if head == "BertModel" else set()
    assert set(report["missing_keys"]) == poolers and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert type(model).__name__ == head
    output = model.eval()(**inputs, **({} if targets is None else {"decoder_input_ids": targets}))
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], -1)
    return next(output[name] for name in ("logits", "prediction_logits", "last_hidden_state") if name in output)


def distance(actual: torch.Tensor, expected: torch.Tensor, real: torch.Tensor | None) -> float:
    """The largest absolute difference at positions that are not padding."""
    difference = actual - expected
    return float((difference if real is None or difference.dim() < 3 else difference[real]).abs().max())


@pytest.mark.parametrize("name", CASES)
def test_an_export_has_the_same_outputs_and_is_imported_exactly(name, tmp_path):
    head, model, task = CASES[name]
    run = small_run(tmp_path / "run", model, task, kind=kind_for(model))
    assert export_run(run, tmp_path / "exported")["architecture"] == head
    pipeline = load(run.path, device="cpu")
    first, second = texts_for(task)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    inputs = tokenizer(first, second, padding=True, truncation=True, max_length=24, return_tensors="pt")
    targets = inputs["input_ids"].flip(0) if pipeline.task.needs_encoder_decoder else None
    real = None if pipeline.task.needs_encoder_decoder else inputs["attention_mask"].bool()
    ours, theirs = scores(pipeline, inputs, targets), their_scores(tmp_path / "exported", inputs, targets)
    assert ours.shape == theirs.shape and ours.std() > 0.05
    assert distance(ours, theirs, real) < 1e-4
    # the control: the inputs of other rows
    shuffled = inputs["input_ids"].roll(1, 0) if targets is None else targets.roll(1, 0)
    shuffled_scores = (
        scores(pipeline, inputs | {"input_ids": shuffled}) if targets is None else scores(pipeline, inputs, shuffled)
    )
    assert distance(shuffled_scores, theirs, real) > 1e-2
    imported = import_run(tmp_path / "exported", out=tmp_path / "imported")
    weights, imported_weights = run.weights(), imported.weights()
    assert weights.keys() == imported_weights.keys() and all(
        torch.equal(weights[key], imported_weights[key]) for key in weights
    )
    assert {part: imported.config()[part] for part in ("model", "task")} == {
        part: run.config()[part] for part in ("model", "task")
    }
    assert imported.data()["tokenizer"] == run.data()["tokenizer"]
    # without our own section of config.json, the import gives the same outputs from the standard fields
    settings = json.loads((tmp_path / "exported" / "config.json").read_text())
    del settings["headstock"]
    (tmp_path / "exported" / "config.json").write_text(json.dumps(settings))
    reimported = load(import_run(tmp_path / "exported", out=tmp_path / "read").path, device="cpu")
    assert distance(scores(reimported, inputs, targets), ours, real) < 1e-5


def test_the_classes_of_the_next_sentence_head_are_swapped(tmp_path):
    run = small_run(tmp_path / "run", BERT, MASKED | {"nsp": True}, kind="wordpiece")
    export_run(run, tmp_path / "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    inputs = tokenizer(
        some_texts(3), some_texts(3, seed=2), padding=True, truncation=True, max_length=24, return_tensors="pt"
    )
    assert inputs["token_type_ids"].max() == 1
    model = transformers.AutoModelForNextSentencePrediction.from_pretrained(tmp_path / "exported").eval()
    pipeline = load(run.path, device="cpu")
    with torch.no_grad():
        theirs = model(**inputs).logits
        hidden = hidden_states(pipeline, inputs)
        ours = pipeline.model.heads["next"](hidden[:, 0])
    assert torch.allclose(ours.flip(1), theirs, atol=1e-4)
    assert not torch.allclose(ours, theirs, atol=1e-2)


def hidden_states(pipeline, inputs):
    from headstock.model.batch import Batch

    padding = inputs["attention_mask"] == 0
    return pipeline.model(Batch(inputs["input_ids"], padding, segments=inputs["token_type_ids"])).hidden


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word", "char"])
def test_a_thousand_texts_are_tokenized_identically(kind, tmp_path):
    run = small_run(tmp_path / "run", GPT, {"name": "causal"}, kind=kind)
    export_run(run, tmp_path / "exported")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    ours, texts = tokenizer_of(kind), some_texts(1000)
    assert len(set(texts)) > 990
    rows = ours.encode_batch(texts)
    assert theirs(texts)["input_ids"] == [[ours.bos, *row] for row in rows]
    assert theirs(texts, add_special_tokens=False)["input_ids"] == rows
    assert theirs(texts[::-1], add_special_tokens=False)["input_ids"] != rows  # the control
    roles = ("bos", "eos", "pad", "unk", "cls", "sep", "mask")
    assert [getattr(theirs, f"{role}_token_id") for role in roles] == [getattr(ours, role) for role in roles]
    literal = "a <eos> b"  # a special token's name within a text is plain text
    assert theirs(literal, add_special_tokens=False)["input_ids"] == ours.encode(literal)
    assert theirs.decode(rows[0], skip_special_tokens=True) == ours.decode(rows[0])


@pytest.mark.parametrize(
    ("model", "task", "single", "pair"),
    [
        (GPT, {"name": "causal"}, ["<sos>", "A"], None),
        (BERT, MASKED, ["[CLS]", "A"], None),
        (BERT, MASKED | {"nsp": True}, ["[CLS]", "A", "[SEP]"], ["[CLS]", "A", "[SEP]", "B", "[SEP]"]),
        (BERT, {"name": "headless", "closed": True}, ["[CLS]", "A", "[SEP]"], None),
        (BERT, {"name": "answer", "opening": "cls"}, None, ["[CLS]", "A", "[SEP]", "B", "[SEP]"]),
        (GPT, LAST | {"name": "pair"}, None, ["<sos>", "A", "[SEP]", "B", "[SEP]"]),
        (PAIR | WAVES, {"name": "translate"}, ["A", "<eos>"], None),
    ],
)
def test_texts_get_the_special_tokens_of_the_run(model, task, single, pair, tmp_path):
    export_run(small_run(tmp_path / "run", model, task, kind="char"), tmp_path / "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    letters = {"A": "a", "B": "b"}
    if single is not None:
        assert tokenizer.convert_ids_to_tokens(tokenizer("a")["input_ids"]) == [
            letters.get(part, part) for part in single
        ]
    if pair is not None:
        inputs = tokenizer("a", "b")
        assert tokenizer.convert_ids_to_tokens(inputs["input_ids"]) == [letters.get(part, part) for part in pair]
        if "token_type_ids" in inputs:
            assert inputs["token_type_ids"] == [0, 0, 0, 1, 1]


def test_the_classification_pipeline_predicts_as_the_run_does(tmp_path):
    run = small_run(tmp_path / "run", BOTH, CLASSES | {"pool": "mean", "opening": "cls"})
    export_run(run, tmp_path / "exported")
    classify = transformers.pipeline("text-classification", str(tmp_path / "exported"), top_k=None)
    texts = some_texts(4, seed=5)
    for output, prediction in zip(
        classify(texts, truncation=True), load(run.path, device="cpu").predict(texts), strict=True
    ):
        assert {row["label"]: pytest.approx(row["score"], abs=1e-5) for row in output} == prediction["probabilities"]
        assert output[0]["label"] == prediction["label"]


def test_the_multilabel_pipeline_gives_independent_probabilities(tmp_path):
    run = small_run(tmp_path / "run", BOTH, CLASSES | {"pool": "mean", "opening": "cls", "separator": ","})
    export_run(run, tmp_path / "exported")
    classify = transformers.pipeline("text-classification", str(tmp_path / "exported"), top_k=None)
    (prediction,), (output,) = load(run.path, device="cpu").predict("Zoë, 42"), classify(["Zoë, 42"])
    assert {row["label"]: pytest.approx(row["score"], abs=1e-5) for row in output} == prediction["probabilities"]
    assert sum(row["score"] for row in output) != pytest.approx(1, abs=1e-3)


def test_the_generation_pipeline_continues_as_the_run_does(tmp_path):
    run = small_run(tmp_path / "run", MODERN | {"qk_norm": True, "context": 64}, {"name": "causal"})
    export_run(run, tmp_path / "exported")
    generate = transformers.pipeline("text-generation", str(tmp_path / "exported"))
    (generated,) = generate("abc", max_new_tokens=12, do_sample=False)
    (ours,) = load(run.path, device="cpu").generate("abc", max_tokens=12, temperature=0)
    assert generated["generated_text"] == ours.text and len(ours.text) > 5


def test_the_fill_mask_pipeline_ranks_as_the_run_does(tmp_path):
    run = small_run(tmp_path / "run", BERT, MASKED, kind="wordpiece")
    export_run(run, tmp_path / "exported")
    fill = transformers.pipeline("fill-mask", str(tmp_path / "exported"), top_k=3)
    pipeline, tokenizer = load(run.path, device="cpu"), fill.tokenizer
    inputs = tokenizer("ab [MASK] cd", return_tensors="pt")
    position = int((inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero())
    expected = scores(pipeline, inputs)[0, position].softmax(-1).topk(3)
    output = fill("ab [MASK] cd")
    assert [row["token"] for row in output] == expected.indices.tolist()
    assert [row["score"] for row in output] == pytest.approx(expected.values.tolist(), abs=1e-5)


@pytest.mark.parametrize(("kind", "model"), [("bpe", BOTH), ("wordpiece", BERT)])
def test_a_mask_is_tokenized_as_fill_does(tmp_path, kind, model):
    run = small_run(tmp_path / "run", model, MASKED if kind == "wordpiece" else {"name": "masked"}, kind=kind)
    export_run(run, tmp_path / "exported")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    surface = SurfaceForms(load(run.path, device="cpu").tokenizer)
    for text in ("ab [MASK] cd", "ab[MASK]cd", "[MASK] cd"):
        ids, _ = surface.tokenize(text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids, text


def test_the_feature_pipeline_gives_the_vectors_of_embed(tmp_path):
    run = small_run(tmp_path / "run", BERT, {"name": "headless", "closed": True}, kind="wordpiece")
    export_run(run, tmp_path / "exported")
    (vectors,) = transformers.pipeline("feature-extraction", str(tmp_path / "exported"))("ab cd")
    ours = load(run.path, device="cpu").embed("ab cd", pool="mean")[0]
    assert torch.tensor(vectors).mean(0).tolist() == pytest.approx(ours.tolist(), abs=1e-5)


def test_the_token_classification_pipeline_names_the_tags(tmp_path):
    run = small_run(tmp_path / "run", BERT, TAGS, kind="wordpiece")
    export_run(run, tmp_path / "exported")
    tag = transformers.pipeline("token-classification", str(tmp_path / "exported"), ignore_labels=[])
    (prediction,) = load(run.path, device="cpu").predict([["ab"]])
    assert tag("ab")[0]["entity"] == prediction["tags"][0]
    assert tag("ab")[0]["score"] == pytest.approx(prediction["probabilities"][0], abs=1e-5)


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_translates_as_the_run_does(beams, tmp_path):
    task = {"name": "translate", "beams": beams, "max_tokens": 12}
    run = small_run(tmp_path / "run", PAIR | WAVES | {"norm": "pre"}, task, spread=0.8)
    export_run(run, tmp_path / "exported")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "exported").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    texts = [text[:10] for text in some_texts(3, seed=7)]
    generated = model.generate(**tokenizer(texts, padding=True, return_tensors="pt"), max_new_tokens=12)
    output = tokenizer.batch_decode(generated, skip_special_tokens=True)
    assert output == load(run.path, device="cpu").translate(texts)
    assert len(set(output)) > 1


def test_the_folder_has_a_card_with_front_matter(tmp_path):
    run = small_run(tmp_path / "run", BOTH, CLASSES | {"pool": "mean"})
    export_run(run, tmp_path / "exported")
    text = (tmp_path / "exported" / "README.md").read_text()
    front_matter = text.split("---\n")[1]
    assert "pipeline_tag: text-classification" in front_matter and "library_name: transformers" in front_matter
    assert "AutoModelForSequenceClassification.from_pretrained" in text
    settings = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert settings["id2label"] == {"0": "no", "1": "yes", "2": "may be"}
    assert settings["label2id"] == {"no": 0, "yes": 1, "may be": 2}


@pytest.mark.parametrize(
    ("model", "task", "facts"),
    [
        (GPT, CLASSES | {"pool": "last"}, ["GPT-2", "task.head_bias is true", "head_bias=false"]),
        (GPT, LAST | {"pool": "mean"}, ["task.pool is 'mean', not 'last'", "--pool last"]),
        (GPT | {"tied": False}, {"name": "causal"}, ["model.tied is false and model.bias true"]),
        (
            GPT | {"norm": "post", "embed_scale": True},
            {"name": "causal"},
            ["model.norm is 'post', not 'pre'", "embed_scale"],
        ),
        (BERT, {"name": "masked"}, ["BERT", "task.transform is false, not true"]),
        (BERT, CLASSES | {"pool": "mean"}, ["task.pool is 'mean', not 'cls'", "--pool cls"]),
        (BERT, TAGS | {"layers": "mix"}, ["task.layers is 'mix', not 'last'"]),
        (BERT | {"norm": "pre"}, MASKED, ["model.norm is 'pre', not 'post'"]),
        (NORMED, CLASSES | {"pool": "mean"}, ["task.pool is 'mean', not 'last'"]),
        (NORMED | {"bias": True}, {"name": "masked"}, ["model.bias is true, not false"]),
        (BOTH, MASKED, ["task.transform is true, not false"]),
        (PAIR | {"positions": "rotary"}, {"name": "translate"}, ["positions 'rotary'", "known combinations"]),
        (PAIR | {"norm": "pre", "shared": False}, {"name": "translate"}, ["model.shared is false"]),
        ({"family": "recurrent"}, {"name": "causal"}, ["'recurrent'"]),
    ],
)
def test_an_inexact_export_is_refused_with_every_reason(model, task, facts, tmp_path):
    run = recurrent(tmp_path) if model.get("family") == "recurrent" else small_run(tmp_path / "run", model, task)
    with pytest.raises(UserError) as error:
        export_run(run, tmp_path / "exported")
    assert all(fact in str(error.value) for fact in facts), str(error.value)
    assert not (tmp_path / "exported").exists()


def recurrent(folder: Path):
    from headstock.interop.imported_run import imported_config, write_imported_run
    from headstock.train.models import build_model, build_task

    tokenizer = tokenizer_of("char")
    model = {"family": "recurrent", "vocabulary": tokenizer.vocabulary, "depth": 1, "width": 8}
    config = imported_config(model, {"name": "causal"}, source="a test")
    tensors = build_model(config, build_task(config, tokenizer)).tensors()
    return write_imported_run(folder / "run", config, tokenizer, tensors, source="a test", notes=())


def test_an_existing_folder_is_not_replaced(tmp_path):
    run = small_run(tmp_path / "run", GPT, {"name": "causal"})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="exists already"):
        export_run(run, tmp_path / "mine")
    with pytest.raises(UserError, match="not replaced"):
        export_run(run, tmp_path / "mine", overwrite=True)
    with pytest.raises(UserError, match="is a run folder"):
        export_run(run, run.path, overwrite=True)
    export_run(run, tmp_path / "exported")
    export_run(run, tmp_path / "exported", overwrite=True)
    assert read_tensors(tmp_path / "exported" / "model.safetensors")
    with pytest.raises(UserError, match="did you mean 'huggingface'"):
        export_run(run, tmp_path / "other", to="hugginface")
    with pytest.raises(UserError, match="--int8"):
        export_run(run, tmp_path / "other", int8=True)


def test_a_folder_trained_further_is_imported_by_its_own_config(tmp_path):
    """The constant zero biases have changed, so the original run's settings no longer apply."""
    run = small_run(tmp_path / "run", GPT | {"bias": False}, {"name": "causal"})
    export_run(run, tmp_path / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    model.save_pretrained(tmp_path / "exported")
    imported = import_run(tmp_path / "exported", out=tmp_path / "imported")
    assert imported.config()["model"]["bias"] is True
    tokens = torch.arange(12)[None]
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    with torch.no_grad():
        assert torch.allclose(scores(load(imported.path, device="cpu"), inputs), model(**inputs).logits, atol=1e-4)


CUSTOM: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # heads that transformers lacks: model and task settings
    "qwen3 mean": (NORMED, CLASSES | {"pool": "mean", "opening": "cls"}),
    "gpt concat": (GPT, CLASSES | {"pool": "concat"}),
    "llama max": (MODERN, CLASSES | {"pool": "max", "dense": "gelu"}),
    "eurobert concat": (BOTH, CLASSES | {"pool": "concat", "opening": "cls", "separator": ","}),
    "bert mean": (BERT, CLASSES | {"pool": "mean", "dense": "tanh", "opening": "cls", "closed": True}),
    "bert pair": (BERT, CLASSES | {"name": "pair", "pool": "max", "opening": "cls", "head_bias": False}),
    "qwen3 last": (NORMED, CLASSES | {"pool": "last", "opening": "cls"}),
    "qwen3 cls": (NORMED, CLASSES | {"pool": "cls", "opening": "cls"}),
    "number": (NORMED, {"name": "regress", "pool": "mean", "opening": "cls", "mean": 3.0, "std": 2.0}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CUSTOM)
def test_a_head_that_transformers_lacks_is_exported_as_code(name, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model, task = CUSTOM[name]
    run = small_run(tmp_path / "run", model, task, kind=kind_for(model))
    with pytest.raises(UserError, match=r"no exact export.* with --custom-code"):
        export_run(run, tmp_path / "exported")
    exported = export_run(run, tmp_path / "exported", custom_code=True)
    assert exported["architecture"] == "HeadstockForSequenceClassification"
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported")
    theirs, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "exported", trust_remote_code=True, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    first, second = texts_for(task)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    inputs = tokenizer(first, second, padding=True, truncation=True, max_length=24, return_tensors="pt")
    pipeline = load(run.path, device="cpu")
    ours, logits = scores(pipeline, inputs), theirs.eval()(**inputs).logits
    assert ours.shape == logits.shape and ours.std() > 0.05
    assert distance(ours, logits, None) < 1e-4
    shuffled = inputs | {"input_ids": inputs["input_ids"].roll(1, 0)}
    assert distance(scores(pipeline, shuffled), logits, None) > 1e-2  # the control
    if not model.get("segments") and model.get("positions") == "rotary":  # relative positions: padding on the left
        left = tokenizer(
            first, second, padding=True, truncation=True, max_length=24, return_tensors="pt", padding_side="left"
        )
        assert not left["attention_mask"][:, 0].all()
        assert distance(theirs(**left).logits, logits, None) < 1e-4
    imported = import_run(tmp_path / "exported", out=tmp_path / "imported")
    weights = imported.weights()
    for key, tensor in run.weights().items():  # those of a number's head were in the units of the label
        assert torch.equal(weights[key], tensor) or ("std" in task and torch.allclose(weights[key], tensor))
    assert {part: imported.config()[part] for part in ("model", "task")} == {
        part: run.config()[part] for part in ("model", "task")
    }


def test_an_export_with_code_is_fine_tuned_and_saved_by_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    run = small_run(tmp_path / "run", NORMED, CLASSES | {"pool": "mean", "opening": "cls"})
    export_run(run, tmp_path / "exported", custom_code=True)
    load_model = transformers.AutoModelForSequenceClassification.from_pretrained
    model = load_model(tmp_path / "exported", trust_remote_code=True).train()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    inputs = tokenizer(some_texts(6, seed=3), padding=True, truncation=True, max_length=24, return_tensors="pt")
    labels, optimizer = torch.tensor([0, 1, 2, 0, 1, 2]), torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.2
    model.eval().save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again = load_model(tmp_path / "saved", trust_remote_code=True).eval()
    imported = load(import_run(tmp_path / "saved", out=tmp_path / "imported").path, device="cpu")
    with torch.no_grad():
        expected = model(**inputs).logits
        assert torch.equal(again(**inputs).logits, expected)
    assert distance(scores(imported, inputs), expected, None) < 1e-4


def test_the_pipeline_of_an_export_with_code_predicts_as_the_run_does(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    run = small_run(tmp_path / "run", NORMED, CLASSES | {"pool": "mean", "opening": "cls"})
    exported = export_run(run, tmp_path / "exported", custom_code=True)
    (call,) = exported["try"]
    classify = eval(call, {"pipeline": transformers.pipeline})
    prediction = load(run.path, device="cpu").predict("Zoë, 42")[0]
    (output,) = classify(["Zoë, 42"], top_k=None)
    assert {row["label"]: pytest.approx(row["score"], abs=1e-5) for row in output} == prediction["probabilities"]


def test_custom_code_is_only_used_where_it_is_needed(tmp_path):
    run = small_run(tmp_path / "run", BOTH, CLASSES | {"pool": "mean", "opening": "cls"})
    exported = export_run(run, tmp_path / "exported", custom_code=True)
    assert exported["architecture"] == "EuroBertForSequenceClassification"
    assert not (tmp_path / "exported" / "modeling_headstock.py").exists()
    layers = small_run(tmp_path / "layers", NORMED, CLASSES | {"layers": "mix"})
    with pytest.raises(UserError, match=r"task\.layers is 'mix', not 'last'"):
        export_run(layers, tmp_path / "refused", custom_code=True)
    with pytest.raises(UserError, match="--custom-code: requires --to huggingface, not --to onnx"):
        export_run(run, tmp_path / "refused", to="onnx", custom_code=True)
