"""Imported Hugging Face models have the outputs that transformers computes; unused tensors are reported."""

import contextlib
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from headstock.errors import UserError
from headstock.inference.pipeline import load
from headstock.interop import export_run, import_run
from headstock.interop.huggingface.tokenizer import read_tokenizer
from headstock.train.finetune import finetune
from headstock.train.tensors import read_tensors, write_tensors
from tests.interop.small import scores, small_run, some_texts, tokenizer_of
from tests.interop.test_export import BERT, distance
from tests.model.small import stir

transformers = pytest.importorskip("transformers")

VOCABULARY = tokenizer_of("bpe").vocabulary
BASE = {"vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
SQUARE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
LLAMA = BASE | SQUARE | {"max_position_embeddings": 32}
SIDES = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 24))
}
SEQ2SEQ = BASE | SIDES | {"d_model": 16, "max_position_embeddings": 32, "decoder_start_token_id": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", BASE | {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}),
    "bert": ("BertForMaskedLM", LLAMA),
    "bert pretraining": ("BertForPreTraining", LLAMA),
    "bert classes": ("BertForSequenceClassification", LLAMA | {"num_labels": 3}),
    "bert answers": ("BertForQuestionAnswering", LLAMA),
    "electra classes": ("ElectraForSequenceClassification", LLAMA | {"embedding_size": 16}),
    "roberta": ("RobertaForMaskedLM", LLAMA | {"type_vocab_size": 1}),
    "roberta classes": ("RobertaForSequenceClassification", LLAMA | {"type_vocab_size": 1}),
    "roberta tags": ("RobertaForTokenClassification", LLAMA | {"type_vocab_size": 1}),
    "distilbert": (
        "DistilBertForMaskedLM",
        BASE | {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24, "max_position_embeddings": 32},
    ),
    "distilbert classes": (
        "DistilBertForSequenceClassification",
        BASE | {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24, "max_position_embeddings": 32},
    ),
    "llama": ("LlamaForCausalLM", LLAMA | {"num_key_value_heads": 2}),
    "llama rope_theta": ("LlamaForCausalLM", LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA | {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | {"num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", LLAMA | {"num_key_value_heads": 2, "sliding_window": None}),
    "bart": ("BartForConditionalGeneration", SEQ2SEQ),
    "marian": ("MarianMTModel", SEQ2SEQ | {"decoder_vocab_size": VOCABULARY, "activation_function": "swish"}),
    "pegasus": ("PegasusForConditionalGeneration", SEQ2SEQ),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


def saved(folder: Path, head: str, settings: dict[str, Any]) -> Any:
    """Save a tiny transformers model; returns it as transformers loads it."""
    model_class = getattr(transformers, head)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings)).eval()
    stir(model, spread=0.2)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    for name, table in model.named_parameters():  # rows before the first position are never read
        if head.startswith("Roberta") and "position_embeddings" in name:
            table.data[:2] = 7
    model.save_pretrained(folder)
    tokenizer_of("bpe").save(folder / "tokenizer.json")
    return model_class.from_pretrained(folder).eval()  # Marian does not save its positions


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_an_import_has_the_same_outputs(name, tmp_path):
    theirs = saved(tmp_path / "saved", *MODELS[name])
    pipeline = load(import_run(tmp_path / "saved", out=tmp_path / "run").path, device="cpu")
    tokens = torch.randint(7, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(12)[None] < torch.tensor([12, 9, 5])[:, None]
    inputs = {"input_ids": torch.where(mask, tokens, 1), "attention_mask": mask.long()}
    targets = tokens.flip(0) if pipeline.task.needs_encoder_decoder else None
    output = theirs(**inputs, **({} if targets is None else {"decoder_input_ids": targets}))
    if "start_logits" in output:
        expected = torch.stack([output.start_logits, output.end_logits], -1)
    else:
        expected = output["prediction_logits" if "prediction_logits" in output else "logits"]
    ours = scores(pipeline, inputs, targets)
    assert ours.std() > 0.05
    assert distance(ours, expected, None if targets is not None else mask) < 1e-4
    assert distance(ours.roll(1, 0), expected, None if targets is not None else mask) > 1e-2


@pytest.mark.parametrize("name", ["gpt2", "bert", "roberta"])
@torch.no_grad()
def test_dropout_in_training_matches_transformers(name, tmp_path):
    """With the same seed, the same features are dropped."""
    theirs = saved(tmp_path / "saved", *MODELS[name])
    pipeline = load(import_run(tmp_path / "saved", out=tmp_path / "run").path, device="cpu")
    tokens = torch.randint(7, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    eval_logits = theirs(**inputs).logits
    pipeline.model.train()
    theirs.train()
    torch.manual_seed(1)
    ours = scores(pipeline, inputs)
    torch.manual_seed(1)
    assert distance(ours, theirs(**inputs).logits, None) < 1e-4
    assert distance(ours, eval_logits, None) > 1e-2


@pytest.mark.parametrize(
    ("name", "activation_dropout", "inner_dropout"),
    [
        ("distilbert", None, False),
        ("llama", None, False),
        ("bart", 0.0, False),
        ("bart", 0.1, True),
        ("marian", 0, False),
    ],
)
def test_feed_forward_dropout_is_imported_and_exported(name, activation_dropout, inner_dropout, tmp_path):
    head, settings = MODELS[name]
    saved(
        tmp_path / "saved",
        head,
        settings | ({} if activation_dropout is None else {"activation_dropout": activation_dropout}),
    )
    run = import_run(tmp_path / "saved", out=tmp_path / "run")
    assert run.config()["model"]["inner_dropout"] is inner_dropout
    if activation_dropout is not None:
        export_run(run, tmp_path / "exported")
        assert (
            json.loads((tmp_path / "exported" / "config.json").read_text())["activation_dropout"] == activation_dropout
        )


def test_the_position_offset_of_roberta_is_removed(tmp_path):
    """The rows before the offset have large values in this model."""
    saved(tmp_path / "saved", *MODELS["roberta"])
    run = import_run(tmp_path / "saved", out=tmp_path / "run")
    assert run.config()["model"]["context"] == 30
    assert run.weights()["backbone.positions.weight"].abs().max() < 6


def test_unused_tensors_are_logged_and_refused_within_the_backbone(tmp_path, caplog):
    saved(tmp_path / "saved", *MODELS["bert"])
    file = tmp_path / "saved" / "model.safetensors"
    tensors = read_tensors(file)
    caplog.set_level("INFO", logger="headstock")
    write_tensors(file, tensors | {"cls.seq_relationship.weight": torch.ones(2, 16), "adapter.up": torch.ones(3)})
    run = import_run(tmp_path / "saved", out=tmp_path / "run")
    assert any("adapter.up" in line and "cls.seq_relationship.weight" in line for line in caplog.messages)
    assert any("adapter.up" in note for note in run.data()["notes"])
    write_tensors(file, tensors | {"bert.encoder.layer.0.attention.lora_A": torch.ones(3)})
    with pytest.raises(UserError, match=r"bert\.encoder\.layer\.0\.attention\.lora_A"):
        import_run(tmp_path / "saved", out=tmp_path / "run", overwrite=True)


def test_missing_and_misshapen_tensors_are_reported_together(tmp_path):
    saved(tmp_path / "saved", *MODELS["bert"])
    file = tmp_path / "saved" / "model.safetensors"
    tensors = read_tensors(file)
    del tensors["bert.encoder.layer.1.output.dense.bias"]
    tensors["bert.encoder.layer.0.intermediate.dense.weight"] = torch.ones(5, 16)
    write_tensors(file, tensors)
    with pytest.raises(UserError) as error:
        import_run(tmp_path / "saved", out=tmp_path / "run")
    message = str(error.value)
    assert "bert.encoder.layer.1.output.dense.bias is missing" in message
    assert "bert.encoder.layer.0.intermediate.dense.weight has shape (5, 16), expected (24, 16)" in message
    assert not (tmp_path / "run").exists()


class Trap:
    def __reduce__(self):
        return os.system, (f"touch {os.environ['TRAP']}",)


def test_code_in_a_pickle_is_never_run(tmp_path, monkeypatch):
    theirs = saved(tmp_path / "saved", *MODELS["gpt2"])
    file = tmp_path / "saved" / "model.safetensors"
    file.unlink()
    torch.save(theirs.transformer.state_dict(), tmp_path / "saved" / "pytorch_model.bin")  # as GPT-2's own, no prefix
    run = import_run(tmp_path / "saved", out=tmp_path / "run")
    assert torch.equal(run.weights()["backbone.tokens.weight"], theirs.transformer.wte.weight)
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    (tmp_path / "saved" / "pytorch_model.bin").write_bytes(pickle.dumps({"wte.weight": Trap()}, protocol=2))
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        import_run(tmp_path / "saved", out=tmp_path / "other")
    torch.save({"wte.weight": Trap()}, tmp_path / "saved" / "pytorch_model.bin")
    with pytest.raises(UserError, match="more than tensors"):
        import_run(tmp_path / "saved", out=tmp_path / "other")
    assert not (tmp_path / "sprung").exists() and not (tmp_path / "other").exists()


def test_sharded_weights(tmp_path):
    theirs = saved(tmp_path / "whole", *MODELS["llama"])
    theirs.save_pretrained(tmp_path / "parts", max_shard_size="4KB")
    tokenizer_of("bpe").save(tmp_path / "parts" / "tokenizer.json")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    single, sharded = (
        import_run(tmp_path / name, out=tmp_path / f"{name}-run").weights() for name in ("whole", "parts")
    )
    assert all(torch.equal(single[name], sharded[name]) for name in single)
    next((tmp_path / "parts").glob("*.safetensors")).unlink()
    with pytest.raises(UserError, match="does not exist"):
        import_run(tmp_path / "parts", out=tmp_path / "again")


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type is 'linear'",
        ),
        ("llama", {"head_dim": 8}, "head_dim is 8"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("mistral", {"sliding_window": 8}, "sliding_window is 8"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
        ("gpt2", {"activation_function": "quick_gelu"}, "activation 'quick_gelu'"),
        ("bert", {"is_decoder": True}, "is_decoder is true"),
    ],
)
def test_unsupported_settings_are_refused_by_name(name, overrides, message, tmp_path):
    head, settings = MODELS[name]
    saved(tmp_path / "saved", head, settings | overrides)
    with pytest.raises(UserError, match=message):
        import_run(tmp_path / "saved", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


READ = ("model_type", "architectures", "hidden_size", "num_hidden_layers", "hidden_act", "id2label", "type_vocab_size")


@pytest.mark.parametrize("value", [-1, "x", [], {"a": 1}, True, 10**20, None, "left out"])
def test_malformed_settings_end_in_a_user_error(tmp_path, value):
    """Any config.json gives a run or a UserError."""
    saved(tmp_path / "saved", *MODELS["bert classes"])
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    for key in READ:
        malformed = config | {key: value}
        if value == "left out":
            del malformed[key]
        (tmp_path / "saved" / "config.json").write_text(json.dumps(malformed))
        with contextlib.suppress(UserError):
            import_run(tmp_path / "saved", out=tmp_path / key)


@pytest.mark.parametrize(("name", "key"), [("llama", "num_hidden_layers"), ("distilbert", "n_layers")])
def test_more_layers_than_tensors_are_refused(name, key, tmp_path):
    saved(tmp_path / "saved", *MODELS[name])
    file = tmp_path / "saved" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: 10**9}))
    with pytest.raises(UserError, match=r"1000000000 layers"):
        import_run(tmp_path / "saved", out=tmp_path / "run")


INDEX = "model.safetensors.index.json"


def test_a_malformed_index_is_named(tmp_path):
    saved(tmp_path / "saved", *MODELS["gpt2"])
    (tmp_path / "saved" / "model.safetensors").rename(tmp_path / "saved" / "part.safetensors")
    maps = ("3", "[]", "{}", '{"a": [3]}', '{"a": "../saved/part.safetensors"}', '{"a": "\\u0000"}')
    for content in ("", "[]", "{}", "[" * 100_000, *(f'{{"weight_map": {weights}}}' for weights in maps)):
        (tmp_path / "saved" / INDEX).write_text(content)
        with pytest.raises(UserError, match=re.escape(INDEX)):
            import_run(tmp_path / "saved", out=tmp_path / "run")


def test_other_folders_and_files_are_refused(tmp_path):
    (tmp_path / "saved").mkdir()
    with pytest.raises(UserError, match=r"config\.json"):
        import_run(tmp_path / "saved", out=tmp_path / "run")
    (tmp_path / "saved" / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UserError, match="'mamba'"):
        import_run(tmp_path / "saved", out=tmp_path / "run")
    (tmp_path / "saved" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match=r"model\.safetensors"):
        import_run(tmp_path / "saved", out=tmp_path / "run")
    with pytest.raises(UserError, match="no such folder or file"):
        import_run(tmp_path / "nowhere", out=tmp_path / "run")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UserError, match=r"\.txt"):
        import_run(tmp_path / "notes.txt", out=tmp_path / "run")


@pytest.mark.parametrize("files", ["bert", "gpt2"])
def test_legacy_tokenizer_files_tokenize_identically(files, tmp_path):
    if files == "bert":
        pieces = [
            "[PAD]",
            "[UNK]",
            "[CLS]",
            "[SEP]",
            "[MASK]",
            *"abcdefghij",
            *(f"##{letter}" for letter in "abcdefghij"),
        ]
        (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
        theirs = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
        texts = ["abc DEF", "àb, jj", "zzz a[MASK]"]
    else:
        bpe = json.loads(tokenizer_of("bpe").backend.to_json())["model"]
        names = {"<sos>": "<s>", "<eos>": "</s>"}
        vocabulary = {names.get(piece, piece): number for piece, number in bpe["vocab"].items()}
        (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in bpe["merges"]))
        theirs = transformers.RobertaTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
        texts = some_texts(50)
    ours = read_tokenizer(tmp_path)
    unmasked = [text for text in texts if "[MASK]" not in text]
    assert ours.encode_batch(unmasked) == theirs(unmasked, add_special_tokens=False)["input_ids"]
    assert ours.cls is not None and ours.sep is not None and ours.eos is not None


def test_everything_works_on_an_imported_run(tmp_path):
    """Embedding, filling, scoring and fine-tuning, with the special tokens of its pretraining."""
    saved(tmp_path / "saved", *MODELS["bert"])
    run = import_run(tmp_path / "saved", out=tmp_path / "run")
    pipeline = load(run.path, device="cpu")
    assert pipeline.embed(["ab", "cd ef"]).shape == (2, 16)
    assert pipeline.score("ab cd")[0].log_likelihood < 0
    assert pipeline.fill("ab [MASK]", pieces=1)
    rows = "\n".join(f"{text},{label}" for text, label in [("ab cd", "up"), ("xy zz", "down")] * 8)
    (tmp_path / "train.csv").write_text(f"text,label\n{rows}\n")
    settings = {"train.steps": 2, "task.pool": "cls", "task.dense": "tanh"}
    finetune(run.path, train=tmp_path / "train.csv", out=tmp_path / "tuned", settings=settings, device="cpu")
    tuned = load(tmp_path / "tuned", device="cpu")
    assert tuned.config.task.closed and tuned.config.task.opening == "cls"
    t = tuned.tokenizer
    assert tuned.task.sequences(t.encode("ab"), 24) == [[t.cls, *t.encode("ab"), t.sep]]
    assert export_run(tmp_path / "tuned", tmp_path / "out")["architecture"] == "BertForSequenceClassification"


def test_an_imported_causal_model_generates(tmp_path):
    saved(tmp_path / "saved", *MODELS["qwen3"])
    pipeline = load(import_run(tmp_path / "saved", out=tmp_path / "run").path, device="cpu")
    assert pipeline.generate("ab", max_tokens=4, temperature=0)[0].text.startswith("ab")


def test_mean_pooling_matches_sentence_transformers(tmp_path):
    """sentence-transformers averages over the attention mask, which includes [CLS] and [SEP]."""
    run = small_run(tmp_path / "run", BERT, {"name": "headless", "closed": True}, kind="wordpiece")
    export_run(run, tmp_path / "saved")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    model = transformers.AutoModel.from_pretrained(tmp_path / "saved").eval()
    texts = [text[:12] for text in some_texts(8, seed=9)]
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=24, return_tensors="pt")
    with torch.no_grad():
        hidden, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
    means = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
    imported = load(import_run(tmp_path / "saved", out=tmp_path / "exported").path, device="cpu")
    ours = torch.nn.functional.normalize(torch.from_numpy(imported.embed(texts, pool="mean")))
    assert torch.allclose(ours, means, atol=1e-4)
    assert not torch.allclose(
        torch.nn.functional.normalize(hidden.mean(1)), means, atol=1e-2
    )  # the control averages over padding too


def test_marian_has_a_sentencepiece_model_per_language(tmp_path):
    import sentencepiece

    texts = [" ".join(text.split()) for text in some_texts(300, seed=2)]
    pieces = ["</s>", "<unk>"]
    for side, lines in (("source", texts[:150]), ("target", texts[150:])):
        with (tmp_path / f"{side}.spm").open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines), model_writer=file, vocab_size=400, hard_vocab_limit=False, minloglevel=3
            )
        model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / f"{side}.spm"))
        names = [model.id_to_piece(number) for number in range(model.get_piece_size())]
        pieces += [name for name in names if name not in (*pieces, "<s>")]
    numbers = {piece: number for number, piece in enumerate([*pieces, "<pad>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(numbers))
    theirs = transformers.MarianTokenizer(
        str(tmp_path / "source.spm"), str(tmp_path / "target.spm"), str(tmp_path / "vocab.json")
    )
    ours = read_tokenizer(tmp_path)
    assert ours.bos == ours.pad == numbers["<pad>"]  # Marian's decoder starts with padding
    expected = [row[:-1] for row in theirs(texts)["input_ids"]]
    assert ours.source_tokenizer is not None and ours.source_tokenizer.encode_batch(texts) == expected
    assert [row[:-1] for row in theirs(text_target=texts)["input_ids"]] == ours.encode_batch(texts) != expected
