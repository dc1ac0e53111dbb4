"""Hugging Face folders as runs: what transformers says of tokens the run says too, and nothing is dropped unsaid."""

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
    "bert for everything": ("BertForPreTraining", LLAMA),
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
    "llama turning slower": (
        "LlamaForCausalLM",
        LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "qwen2": ("Qwen2ForCausalLM", LLAMA | {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | {"num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", LLAMA | {"num_key_value_heads": 2, "sliding_window": None}),
    "bart": ("BartForConditionalGeneration", SEQ2SEQ),
    "marian": ("MarianMTModel", SEQ2SEQ | {"decoder_vocab_size": VOCABULARY, "activation_function": "swish"}),
    "pegasus": ("PegasusForConditionalGeneration", SEQ2SEQ),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


def saved(folder: Path, head: str, settings: dict[str, Any]) -> Any:
    """A tiny model that transformers made, in a folder as transformers writes it."""
    kind = getattr(transformers, head)
    torch.manual_seed(0)
    model = kind(kind.config_class(**settings)).eval()
    stir(model, spread=0.2)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    for name, table in model.named_parameters():  # what no position is ever counted from
        if head.startswith("Roberta") and "position_embeddings" in name:
            table.data[:2] = 7
    model.save_pretrained(folder)
    tokenizer_of("bpe").save(folder / "tokenizer.json")
    return kind.from_pretrained(folder).eval()  # what counts is what they read: Marian leaves its positions out


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_run_says_what_their_model_says(name, tmp_path):
    theirs = saved(tmp_path / "there", *MODELS[name])
    opened = load(import_run(tmp_path / "there", out=tmp_path / "run").path, device="cpu")
    tokens = torch.randint(7, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))
    real = torch.arange(12)[None] < torch.tensor([12, 9, 5])[:, None]
    given = {"input_ids": torch.where(real, tokens, 1), "attention_mask": real.long()}
    targets = tokens.flip(0) if opened.task.needs_encoder_decoder else None
    said = theirs(**given, **({} if targets is None else {"decoder_input_ids": targets}))
    if "start_logits" in said:
        wanted = torch.stack([said.start_logits, said.end_logits], -1)
    else:
        wanted = said["prediction_logits" if "prediction_logits" in said else "logits"]
    ours = scores(opened, given, targets)
    assert ours.std() > 0.05
    assert distance(ours, wanted, None if targets is not None else real) < 1e-4
    assert distance(ours.roll(1, 0), wanted, None if targets is not None else real) > 1e-2


@pytest.mark.parametrize("name", ["gpt2", "bert", "roberta"])
@torch.no_grad()
def test_dropout_in_training_matches_transformers(name, tmp_path):
    """With the same seed, the same features are dropped."""
    theirs = saved(tmp_path / "there", *MODELS[name])
    opened = load(import_run(tmp_path / "there", out=tmp_path / "run").path, device="cpu")
    tokens = torch.randint(7, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    still = theirs(**given).logits
    opened.model.train()
    theirs.train()
    torch.manual_seed(1)
    ours = scores(opened, given)
    torch.manual_seed(1)
    assert distance(ours, theirs(**given).logits, None) < 1e-4
    assert distance(ours, still, None) > 1e-2


@pytest.mark.parametrize(
    ("name", "share", "inner"),
    [
        ("distilbert", None, False),
        ("llama", None, False),
        ("bart", 0.0, False),
        ("bart", 0.1, True),
        ("marian", 0, False),
    ],
)
def test_feed_forward_dropout_is_imported_and_exported(name, share, inner, tmp_path):
    head, settings = MODELS[name]
    saved(tmp_path / "there", head, settings | ({} if share is None else {"activation_dropout": share}))
    run = import_run(tmp_path / "there", out=tmp_path / "run")
    assert run.config()["model"]["inner_dropout"] is inner
    if share is not None:
        export_run(run, tmp_path / "back")
        assert json.loads((tmp_path / "back" / "config.json").read_text())["activation_dropout"] == share


def test_the_position_offset_of_roberta_is_removed(tmp_path):
    """The rows before the offset have large values in this model."""
    saved(tmp_path / "there", *MODELS["roberta"])
    run = import_run(tmp_path / "there", out=tmp_path / "run")
    assert run.config()["model"]["context"] == 30
    assert run.weights()["backbone.positions.weight"].abs().max() < 6


def test_unused_tensors_are_logged_and_refused_within_the_backbone(tmp_path, caplog):
    saved(tmp_path / "there", *MODELS["bert"])
    file = tmp_path / "there" / "model.safetensors"
    known = read_tensors(file)
    caplog.set_level("INFO", logger="headstock")
    write_tensors(file, known | {"cls.seq_relationship.weight": torch.ones(2, 16), "adapter.up": torch.ones(3)})
    run = import_run(tmp_path / "there", out=tmp_path / "run")
    assert any("adapter.up" in line and "cls.seq_relationship.weight" in line for line in caplog.messages)
    assert any("adapter.up" in note for note in run.data()["notes"])
    write_tensors(file, known | {"bert.encoder.layer.0.attention.lora_A": torch.ones(3)})
    with pytest.raises(UserError, match=r"bert\.encoder\.layer\.0\.attention\.lora_A"):
        import_run(tmp_path / "there", out=tmp_path / "run", overwrite=True)


def test_missing_and_misshapen_tensors_are_reported_together(tmp_path):
    saved(tmp_path / "there", *MODELS["bert"])
    file = tmp_path / "there" / "model.safetensors"
    tensors = read_tensors(file)
    del tensors["bert.encoder.layer.1.output.dense.bias"]
    tensors["bert.encoder.layer.0.intermediate.dense.weight"] = torch.ones(5, 16)
    write_tensors(file, tensors)
    with pytest.raises(UserError) as refused:
        import_run(tmp_path / "there", out=tmp_path / "run")
    said = str(refused.value)
    assert "bert.encoder.layer.1.output.dense.bias is missing" in said
    assert "bert.encoder.layer.0.intermediate.dense.weight has shape (5, 16), expected (24, 16)" in said
    assert not (tmp_path / "run").exists()


class Trap:
    def __reduce__(self):
        return os.system, (f"touch {os.environ['TRAP']}",)


def test_code_in_a_pickle_is_never_run(tmp_path, monkeypatch):
    theirs = saved(tmp_path / "there", *MODELS["gpt2"])
    file = tmp_path / "there" / "model.safetensors"
    file.unlink()
    torch.save(theirs.transformer.state_dict(), tmp_path / "there" / "pytorch_model.bin")  # as GPT-2's own, no prefix
    run = import_run(tmp_path / "there", out=tmp_path / "run")
    assert torch.equal(run.weights()["backbone.tokens.weight"], theirs.transformer.wte.weight)
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    (tmp_path / "there" / "pytorch_model.bin").write_bytes(pickle.dumps({"wte.weight": Trap()}, protocol=2))
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        import_run(tmp_path / "there", out=tmp_path / "other")
    torch.save({"wte.weight": Trap()}, tmp_path / "there" / "pytorch_model.bin")
    with pytest.raises(UserError, match="more than tensors"):
        import_run(tmp_path / "there", out=tmp_path / "other")
    assert not (tmp_path / "sprung").exists() and not (tmp_path / "other").exists()


def test_sharded_weights(tmp_path):
    theirs = saved(tmp_path / "whole", *MODELS["llama"])
    theirs.save_pretrained(tmp_path / "parts", max_shard_size="4KB")
    tokenizer_of("bpe").save(tmp_path / "parts" / "tokenizer.json")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    one, other = (import_run(tmp_path / name, out=tmp_path / f"{name}-run").weights() for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    next((tmp_path / "parts").glob("*.safetensors")).unlink()
    with pytest.raises(UserError, match="does not exist"):
        import_run(tmp_path / "parts", out=tmp_path / "again")


@pytest.mark.parametrize(
    ("name", "more", "words"),
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
def test_unsupported_settings_are_refused_by_name(name, more, words, tmp_path):
    head, settings = MODELS[name]
    saved(tmp_path / "there", head, settings | more)
    with pytest.raises(UserError, match=words):
        import_run(tmp_path / "there", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


READ = ("model_type", "architectures", "hidden_size", "num_hidden_layers", "hidden_act", "id2label", "type_vocab_size")


@pytest.mark.parametrize("odd", [-1, "x", [], {"a": 1}, True, 10**20, None, "left out"])
def test_malformed_settings_end_in_a_user_error(tmp_path, odd):
    """Any config.json gives a run or a UserError."""
    saved(tmp_path / "there", *MODELS["bert classes"])
    config = json.loads((tmp_path / "there" / "config.json").read_text())
    for key in READ:
        changed = config | {key: odd}
        if odd == "left out":
            del changed[key]
        (tmp_path / "there" / "config.json").write_text(json.dumps(changed))
        with contextlib.suppress(UserError):
            import_run(tmp_path / "there", out=tmp_path / key)


INDEX = "model.safetensors.index.json"


def test_a_malformed_index_is_named(tmp_path):
    saved(tmp_path / "there", *MODELS["gpt2"])
    (tmp_path / "there" / "model.safetensors").rename(tmp_path / "there" / "part.safetensors")
    maps = ("3", "[]", "{}", '{"a": [3]}', '{"a": "../there/part.safetensors"}', '{"a": "\\u0000"}')
    for content in ("", "[]", "{}", "[" * 100_000, *(f'{{"weight_map": {weights}}}' for weights in maps)):
        (tmp_path / "there" / INDEX).write_text(content)
        with pytest.raises(UserError, match=re.escape(INDEX)):
            import_run(tmp_path / "there", out=tmp_path / "run")


def test_other_folders_and_files_are_refused(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match=r"config\.json"):
        import_run(tmp_path / "there", out=tmp_path / "run")
    (tmp_path / "there" / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UserError, match="'mamba'"):
        import_run(tmp_path / "there", out=tmp_path / "run")
    (tmp_path / "there" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match=r"model\.safetensors"):
        import_run(tmp_path / "there", out=tmp_path / "run")
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
        engine = json.loads(tokenizer_of("bpe").backend.to_json())["model"]
        names = {"<sos>": "<s>", "<eos>": "</s>"}
        vocabulary = {names.get(piece, piece): number for piece, number in engine["vocab"].items()}
        (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in engine["merges"]))
        theirs = transformers.RobertaTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
        texts = some_texts(50)
    ours = read_tokenizer(tmp_path)
    plain = [text for text in texts if "[MASK]" not in text]
    assert ours.encode_batch(plain) == theirs(plain, add_special_tokens=False)["input_ids"]
    assert ours.cls is not None and ours.sep is not None and ours.eos is not None


def test_everything_works_on_an_imported_run(tmp_path):
    """Embedding, filling, scoring and fine-tuning, with the marks that its pretraining put around a text."""
    saved(tmp_path / "there", *MODELS["bert"])
    run = import_run(tmp_path / "there", out=tmp_path / "run")
    opened = load(run.path, device="cpu")
    assert opened.embed(["ab", "cd ef"]).shape == (2, 16)
    assert opened.score("ab cd")[0].log_likelihood < 0
    assert opened.fill("ab [MASK]", pieces=1)
    rows = "\n".join(f"{text},{label}" for text, label in [("ab cd", "up"), ("xy zz", "down")] * 8)
    (tmp_path / "train.csv").write_text(f"text,label\n{rows}\n")
    settings = {"train.steps": 2, "task.pool": "cls", "task.dense": "tanh"}
    finetune(run.path, train=tmp_path / "train.csv", out=tmp_path / "tuned", settings=settings, device="cpu")
    tuned = load(tmp_path / "tuned", device="cpu")
    assert tuned.config.task.closed and tuned.config.task.opening == "cls"
    t = tuned.tokenizer
    assert tuned.task.rows(t.encode("ab"), 24) == [[t.cls, *t.encode("ab"), t.sep]]
    assert export_run(tmp_path / "tuned", tmp_path / "out")["architecture"] == "BertForSequenceClassification"


def test_a_causal_import_goes_on_with_text(tmp_path):
    saved(tmp_path / "there", *MODELS["qwen3"])
    opened = load(import_run(tmp_path / "there", out=tmp_path / "run").path, device="cpu")
    assert opened.generate("ab", max_tokens=4, temperature=0)[0].text.startswith("ab")


def test_a_mean_of_vectors_is_that_of_sentence_transformers(tmp_path):
    """Their definition: the mean over the attention mask of what stands between [CLS] and [SEP] and these two."""
    run = small_run(tmp_path / "run", BERT, {"name": "headless", "closed": True}, kind="wordpiece")
    export_run(run, tmp_path / "there")
    cut = transformers.AutoTokenizer.from_pretrained(tmp_path / "there")
    model = transformers.AutoModel.from_pretrained(tmp_path / "there").eval()
    texts = [text[:12] for text in some_texts(8, seed=9)]
    given = cut(texts, padding=True, truncation=True, max_length=24, return_tensors="pt")
    with torch.no_grad():
        hidden, mask = model(**given).last_hidden_state, given["attention_mask"][..., None]
    means = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
    back = load(import_run(tmp_path / "there", out=tmp_path / "back").path, device="cpu")
    own = torch.nn.functional.normalize(torch.from_numpy(back.embed(texts, pool="mean")))
    assert torch.allclose(own, means, atol=1e-4)
    assert not torch.allclose(torch.nn.functional.normalize(hidden.mean(1)), means, atol=1e-2)  # padding counted too


def test_marians_two_sentencepiece_models_cut_each_its_side(tmp_path):
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
    assert ours.bos == ours.pad == numbers["<pad>"]  # which Marian's decoder begins with
    wanted = [row[:-1] for row in theirs(texts)["input_ids"]]
    assert ours.source_tokenizer is not None and ours.source_tokenizer.encode_batch(texts) == wanted
    assert [row[:-1] for row in theirs(text_target=texts)["input_ids"]] == ours.encode_batch(texts) != wanted
