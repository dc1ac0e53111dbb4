"""T5: the numbers, tokens and texts of transformers, and further training."""

import json
from typing import Any

import pytest
import sentencepiece
import torch

from headstock.decoding.sampling import suppressed_tokens
from headstock.errors import UserError
from headstock.inference.pipeline import load
from headstock.interop import export_run, import_run
from headstock.model.batch import Batch
from headstock.model.positions import relative_position_buckets
from headstock.train.finetune import finetune
from headstock.train.pretrain import pretrain
from headstock.train.tensors import read_tensors, write_tensors
from tests.interop.small import scores, some_texts, tokenizer_of
from tests.interop.test_export import distance
from tests.model.small import stir

transformers = pytest.importorskip("transformers")

TOKENIZER = tokenizer_of("bpe")
BASE: dict[str, Any] = {
    "vocab_size": TOKENIZER.vocabulary,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "pad_token_id": TOKENIZER.pad,
    "eos_token_id": TOKENIZER.eos,
    "decoder_start_token_id": TOKENIZER.pad,
}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
MODELS = {
    "1.0": BASE,
    "1.1": BASE | GATED,
    "fewer heads": BASE | GATED | {"num_heads": 3, "num_decoder_layers": 3},  # as in Flan-T5 small
}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def saved(folder, name, *, spread=0.2):
    """A tiny T5 with random weights as transformers loads it."""
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**MODELS[name])).eval()
    stir(model, spread=spread)
    if name != "1.0":
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.save_pretrained(folder)
    TOKENIZER.save(folder / "tokenizer.json")
    return transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_an_import_computes_what_transformers_computes(name, tmp_path):
    theirs = saved(tmp_path / "saved", name)
    assert (theirs.lm_head.weight is theirs.shared.weight) == (name == "1.0")
    pipeline = load(import_run(tmp_path / "saved", out=tmp_path / "run").path, device="cpu")
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(7, TOKENIZER.vocabulary, (3, 30), generator=draw)
    targets = torch.randint(7, TOKENIZER.vocabulary, (3, 40), generator=draw)  # longer than the farthest bucket
    mask = torch.arange(30)[None] < torch.tensor([30, 9, 5])[:, None]
    inputs = {"input_ids": torch.where(mask, tokens, TOKENIZER.pad), "attention_mask": mask.long()}
    expected = theirs(**inputs, decoder_input_ids=targets).logits
    assert distance(scores(pipeline, inputs, targets), expected, None) < 1e-5 * expected.abs().max()
    exact = theirs.double()(**inputs, decoder_input_ids=targets).logits
    pipeline.model.double()
    # transformers normalizes in float32 all the same
    assert distance(scores(pipeline, inputs, targets), exact, None) < 3e-6 * exact.abs().max()
    pipeline.model.backbone.decoder.relative.weight.mul_(-1)  # the control
    assert distance(scores(pipeline, inputs, targets), exact, None) > 1e-2


@pytest.mark.parametrize("name", ["1.0", "1.1"])
@torch.no_grad()
def test_greedy_generation_has_the_same_tokens(name, tmp_path):
    theirs = saved(tmp_path / "saved", name, spread=1.0)
    pipeline = load(import_run(tmp_path / "saved", out=tmp_path / "run").path, device="cpu")
    assert pipeline.task.bos == TOKENIZER.pad
    suppressed = sorted(suppressed_tokens(TOKENIZER, TOKENIZER.vocabulary))
    outputs = []
    for seed in range(4):
        source = torch.randint(7, TOKENIZER.vocabulary, (1, 9), generator=torch.Generator().manual_seed(seed))
        batch = Batch(torch.full((1, 1), pipeline.task.bos), source=Batch(source))
        outputs += pipeline.task.search(pipeline.model, batch, beams=1)
        length = len(outputs[-1])
        generated = theirs.generate(source, max_new_tokens=length, num_beams=1, suppress_tokens=suppressed)
        assert generated[0, 1 : length + 1].tolist() == outputs[-1]
    assert len(set(map(tuple, outputs))) > 1
    pipeline.task.bos = TOKENIZER.eos  # the control: another first token
    assert pipeline.task.search(pipeline.model, batch, beams=1) != outputs[-1:]


@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (8, 16), (4, 9)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_distances_fall_into_the_same_buckets(buckets, longest, bidirectional):
    distance = torch.arange(-300, 301)
    bucket = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket
    expected = bucket(distance, bidirectional=bidirectional, num_buckets=buckets, max_distance=longest)
    options = {"buckets": buckets, "longest": longest}
    assert torch.equal(relative_position_buckets(distance, **options, bidirectional=bidirectional), expected)
    assert not torch.equal(relative_position_buckets(distance, **options, bidirectional=not bidirectional), expected)


def test_old_files_and_unsupported_models(tmp_path):
    """transformers 4 says by `tie_word_embeddings` alone whether the output is scaled."""
    theirs = saved(tmp_path / "saved", "1.1")
    file = tmp_path / "saved" / "config.json"
    settings = json.loads(file.read_text())
    tensors = read_tensors(tmp_path / "saved" / "model.safetensors")
    unused = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.zeros(8, 4)}
    copies = {f"{side}.embed_tokens.weight": tensors["shared.weight"].clone() for side in ("encoder", "decoder")}
    write_tensors(tmp_path / "saved" / "model.safetensors", tensors | unused | copies, metadata={"format": "pt"})
    del settings["scale_decoder_outputs"]
    file.write_text(json.dumps(settings | {"tie_word_embeddings": False}))
    pipeline = load(import_run(tmp_path / "saved", out=tmp_path / "run").path, device="cpu")
    tokens = torch.randint(7, TOKENIZER.vocabulary, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    with torch.no_grad():
        assert (
            distance(scores(pipeline, inputs, tokens), theirs(**inputs, decoder_input_ids=tokens).logits, None) < 1e-4
        )
    for change, message in (
        ({"d_kv": 8}, "4 heads of d_kv 8 do not fit into d_model 16"),
        ({"feed_forward_proj": "gated-mish"}, "feed_forward_proj is 'gated-mish'"),
        ({"decoder_start_token_id": 9}, "decoder_start_token_id 9"),
    ):
        file.write_text(json.dumps(settings | change))
        with pytest.raises(UserError, match=message):
            import_run(tmp_path / "saved", out=tmp_path / "other")


def test_a_sentencepiece_model_gives_the_same_tokens(tmp_path):
    theirs = saved(tmp_path / "saved", "1.0")
    (tmp_path / "saved" / "tokenizer.json").unlink()
    texts = [" ".join(text.split()) for text in some_texts(150, seed=2)]
    options = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(tmp_path / "spiece"), vocab_size=400, **options
    )
    (tmp_path / "spiece.model").rename(tmp_path / "saved" / "spiece.model")
    theirs.resize_token_embeddings(510, mean_resizing=False)
    theirs.save_pretrained(tmp_path / "saved")
    settings = json.loads((tmp_path / "saved" / "config.json").read_text())
    settings |= {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    (tmp_path / "saved" / "config.json").write_text(json.dumps(settings))
    run = import_run(tmp_path / "saved", out=tmp_path / "run")
    tokenizer = run.tokenizer()
    assert (tokenizer.pad, tokenizer.eos, tokenizer.unk, tokenizer.mask) == (0, 1, 2, 499)
    reference = transformers.T5Tokenizer.from_pretrained(tmp_path / "saved")
    assert reference.convert_tokens_to_ids("<extra_id_0>") == 499
    plain = [text for text in texts if "<" not in text and "[" not in text]
    assert len(plain) > 50
    assert [[*row, 1] for row in tokenizer.encode_batch(plain)] == reference(plain)["input_ids"]
    assert load(run.path, device="cpu").task.bos == 0


def test_training_continues_with_the_padding_as_first_token(tmp_path):
    saved(tmp_path / "saved", "1.1")
    run = import_run(tmp_path / "saved", out=tmp_path / "run")
    assert run.config()["task"]["decoder_start"] == "pad"
    rows = tmp_path / "rows.csv"
    rows.write_text("source,target\n" + "".join(f"a{n} b,b a{n}\n" for n in range(8)))
    quick = {"steps": 2, "tensorboard": False}
    finetune(run.path, task="translate", train=rows, valid=rows, out=tmp_path / "tuned", settings=quick, device="cpu")
    tuned = load(tmp_path / "tuned", device="cpu")
    assert tuned.task.bos == TOKENIZER.pad and tuned.config.task.decoder_start == "pad"
    before, after = (
        load(path, device="cpu").model.backbone.encoder.relative.weight for path in (run.path, tuned.run.path)
    )
    assert not torch.equal(before, after)  # the biases are trained
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(some_texts(60, seed=5)))
    options = {"length": 24, "batch": 4, "documents": "line"} | quick
    pretrain(corpus, start=run.path, out=tmp_path / "further", settings=options, device="cpu")
    further = load(tmp_path / "further", device="cpu")
    assert further.task.name == "denoise" and further.task.bos == TOKENIZER.pad
    with pytest.raises(UserError, match="fine-tuned run and cannot be pretrained further"):
        pretrain(corpus, start=tmp_path / "tuned", out=tmp_path / "no", settings=options, device="cpu")
    export_run(tuned.run, tmp_path / "exported")
    settings = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert settings["decoder_start_token_id"] == TOKENIZER.pad and settings["scale_decoder_outputs"] is False
