"""ONNX exports have the outputs of the run for any shape; the script in the card reproduces them without torch."""

import json
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import headstock
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.errors import UserError, WorkError
from headstock.interop import onnx as onnx_export
from headstock.interop.onnx import check_parity, export_onnx, open_session
from headstock.interop.onnx_graph import CausalGraph, make_graph, write_graph
from headstock.model.backbones.recurrent import Recurrent, RecurrentConfig
from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.batch import Batch, pad
from headstock.model.model import Model
from headstock.tasks.causal import CausalConfig, CausalLM
from headstock.train.run_folder import RunFolder
from tests.conftest import TINY

WHO, WHAT, WHERE = ["Anne", "Ben", "Zoë"], ["sees", "likes", "finds"], ["home", "the sea", "Paris"]
SMALL = TINY | {"steps": 20, "lr": 0.02, "depth": 1}  # tracing time grows with depth
QUICK = {"least_steps": 0, "epochs": 2, "lr": 1e-2}
WITHOUT = "import sys; sys.modules.update(dict.fromkeys(['torch', 'headstock', 'transformers', '{}']))\n"
LONG = "Anne likes Paris. Ben sees the sea. Zoë finds home. " * 4  # longer than the context


def story(generator):
    return f"{generator.choice(WHO)} {generator.choice(WHAT)} {generator.choice(WHERE)}."


@pytest.fixture(scope="module")
def causal(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("stocks") / "causal"
    headstock.pretrain(corpus, out=out, preset="modern-nano", settings=SMALL)
    return out


@pytest.fixture(scope="module")
def masked(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("stocks") / "masked"
    headstock.pretrain(corpus, out=out, objective="masked", settings=SMALL | {"nsp": True, "norm": "post"})
    return out


def rows_of_stories(path):
    generator = random.Random(1)
    rows = [story(generator) for _ in range(60)]
    lines = [f"{text},{'yes' if 'likes' in text else 'no'}" for text in rows]
    path.write_text("\n".join(["text,label", *lines]), encoding="utf-8")
    return path


def script_of(folder):
    (script,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return script


def run_script(folder, *words, without="sentencepiece"):
    """The output of the card's script in a process without torch and Headstock."""
    script = script_of(folder)
    assert len([line for line in script.splitlines() if line.strip()]) <= 20
    program = [sys.executable, "-c", WITHOUT.format(without) + script, *words]
    result = subprocess.run(program, cwd=folder, capture_output=True, text=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    return result.stdout


def pad_rows(tokens):
    padded, padding = pad(tokens, 0)
    return padded, torch.ones_like(padded) if padding is None else (~padding).long()


def test_a_classifier_is_exported_quantized_and_measured(causal, tmp_path):
    file = rows_of_stories(tmp_path / "rows.csv")
    settings = QUICK | {"epochs": 6, "long": "windows", "pool": "mean"}
    headstock.finetune(causal, train=file, out=tmp_path / "run", settings=settings)
    folder, loaded = tmp_path / "onnx", headstock.load(tmp_path / "run")
    result = export_onnx(loaded.run, folder, int8=True, measure=file)
    assert result["difference"] < 1e-4
    assert sorted(f.name for f in folder.iterdir()) == sorted([*result["files"], "README.md"])

    session = open_session(folder / "model.onnx")
    task, generator = loaded.classification_task(), random.Random(2)
    for count in (1, 2, 5):
        texts = [" ".join(story(generator) for _ in range(generator.randint(1, 2))) for _ in range(count)]
        tokens, mask = pad_rows([[task.bos, *row][:32] for row in loaded.tokenizer.encode_batch(texts)])
        (logits,) = session.run(["logits"], {"input_ids": tokens.numpy(), "attention_mask": mask.numpy()})
        probabilities = torch.from_numpy(logits).softmax(-1).numpy()
        assert probabilities == pytest.approx(loaded.probabilities(texts), abs=1e-4)

    texts = ["Zoë finds Paris.", LONG, "a [MASK] <sos> that is only text", "x"]
    outputs = [json.loads(line) for line in run_script(folder, *texts).splitlines()]
    for output, expected in zip(outputs, loaded.predict(texts), strict=True):
        assert output == pytest.approx(expected["probabilities"], abs=1e-4)

    expected = loaded.evaluate(file)
    assert result["measured"]["float32"]["accuracy"] == expected["accuracy"]
    assert result["measured"]["float32"]["loss"] == pytest.approx(expected["loss"], abs=1e-4)
    assert result["measured"]["int8"]["loss"] != expected["loss"]  # quantization changes the loss
    assert result["measured"]["change"] == result["measured"]["int8"]["accuracy"] - expected["accuracy"]
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"by {100 * result['measured']['change']:+.2f} points" in card
    assert "A classifier (no, yes)" in card
    assert (folder / "model_int8.onnx").stat().st_size < (folder / "model.onnx").stat().st_size
    assert str(tmp_path).encode() not in (folder / "model.onnx").read_bytes()
    assert b"site-packages" not in (folder / "model.onnx").read_bytes()


def test_a_sentencepiece_tokenizer_is_exported(corpus, tmp_path):
    import sentencepiece

    lines = corpus.read_text(encoding="utf-8").splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(tmp_path / "pieces"), vocab_size=80, minloglevel=3
    )
    file = rows_of_stories(tmp_path / "rows.csv")
    settings = QUICK | {f"model.{name}": TINY[name] for name in ("width", "heads", "hidden", "context")}
    settings |= {"model.depth": 1, "long": "tail", "tokenizer.file": str(tmp_path / "pieces.model")}
    headstock.finetune(preset="gpt-nano", train=file, out=tmp_path / "run", settings=settings)
    export_onnx(RunFolder(tmp_path / "run"), tmp_path / "onnx")
    texts = ["Zoë finds Paris.", LONG, "ß"]
    outputs = [json.loads(line) for line in run_script(tmp_path / "onnx", *texts, without="tokenizers").splitlines()]
    for output, expected in zip(outputs, headstock.load(tmp_path / "run").predict(texts), strict=True):
        assert output == pytest.approx(expected["probabilities"], abs=1e-4)


def test_a_pair_classifier_reads_segments(masked, tmp_path):
    generator = random.Random(3)
    pairs = [(story(generator), story(generator)) for _ in range(30)]
    lines = [f"{a},{b},{'same' if a[0] == b[0] else 'other'}" for a, b in pairs]
    (tmp_path / "pairs.csv").write_text("\n".join(["text,text_b,label", *lines]), encoding="utf-8")
    headstock.finetune(masked, task="pair", train=tmp_path / "pairs.csv", out=tmp_path / "run", settings=QUICK)
    result = export_onnx(RunFolder(tmp_path / "run"), tmp_path / "onnx", int8=True)
    assert "--measure" in (tmp_path / "onnx" / "README.md").read_text(encoding="utf-8")
    assert result["int8_difference"] > result["difference"]
    loaded = headstock.load(tmp_path / "run")
    for pair in (("Anne sees Paris.", "Ben likes home."), (LONG, LONG + "Ben")):
        outputs = json.loads(run_script(tmp_path / "onnx", *pair))
        assert outputs == pytest.approx(loaded.predict([pair])[0]["probabilities"], abs=1e-4)


def test_a_tagger_predicts_the_same_tags(causal, tmp_path):
    kinds = {"Anne": "NAME", "Ben": "NAME", "Zoë": "NAME", "sees": "VERB", "likes": "VERB", "finds": "VERB"}
    generator = random.Random(4)
    sentences = [[generator.choice(WHO), generator.choice(WHAT), "Paris", "."] for _ in range(30)]
    tagged = ["\n".join(f"{word}\t{kinds.get(word, 'X')}" for word in words) for words in sentences]
    (tmp_path / "rows.conll").write_text("\n\n".join(tagged) + "\n", encoding="utf-8")
    headstock.finetune(causal, task="tag", train=tmp_path / "rows.conll", out=tmp_path / "run", settings=QUICK)
    result = export_onnx(RunFolder(tmp_path / "run"), tmp_path / "onnx", measure=tmp_path / "rows.conll")
    loaded = headstock.load(tmp_path / "run")
    assert result["measured"]["float32"]["accuracy"] == loaded.evaluate(tmp_path / "rows.conll")["accuracy"]
    text = "Zoë likes Ben, doesn't she?"
    outputs = [line.split("\t") for line in run_script(tmp_path / "onnx", text).splitlines()]
    (expected,) = loaded.predict([text])
    assert outputs == [list(pair) for pair in zip(expected["tokens"], expected["tags"], strict=True)]


def test_question_answering_finds_the_same_answers(masked, tmp_path):
    generator = random.Random(5)
    rows = []
    for number in range(40):
        who, where = generator.choice(WHO), generator.choice(WHERE)
        answers = [] if number % 4 == 0 else [{"text": who, "answer_start": 0}]
        rows.append({"question": "who?", "context": f"{who} sees {where}.", "answers": answers})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    settings = QUICK | {"epochs": 5}
    headstock.finetune(masked, task="answer", train=tmp_path / "rows.jsonl", out=tmp_path / "run", settings=settings)
    result = export_onnx(RunFolder(tmp_path / "run"), tmp_path / "onnx", measure=tmp_path / "rows.jsonl")
    loaded = headstock.load(tmp_path / "run")
    assert result["measured"]["float32"]["f1"] == pytest.approx(loaded.evaluate(tmp_path / "rows.jsonl")["f1"])
    for context in ("Anne sees the sea.", "Story 12 Zoë finds Ben ."):
        outputs = json.loads(run_script(tmp_path / "onnx", "who?", context))
        assert outputs["answer"] == loaded.answer("who?", context=context)[0]["answer"]


def test_embeddings_match_those_of_embed(masked, tmp_path):
    result = export_onnx(RunFolder(masked), tmp_path / "onnx")
    assert result["kind"] == "embedding"
    texts = ["Anne sees Paris.", "home", "Zoë finds the sea. Ben likes home."]
    outputs = [json.loads(line) for line in run_script(tmp_path / "onnx", *texts).splitlines()]
    loaded = headstock.load(masked)
    assert np.array(outputs) == pytest.approx(loaded.embed(texts), abs=1e-4)


def test_a_causal_model_can_be_exported_as_an_embedding_graph(causal):
    loaded = headstock.load(causal)
    kinds = [
        make_graph(loaded.model, loaded.task, source="run", embedding=embedding).spec.kind
        for embedding in (False, True)
    ]
    assert kinds == ["causal", "embedding"]


def test_generation_matches_the_run(causal, tmp_path):
    export_onnx(RunFolder(causal), tmp_path / "onnx")
    loaded, prompt = headstock.load(causal), "Anne sees"
    room = 32 - 1 - len(loaded.tokenizer.encode(prompt))
    (expected,) = loaded.generate(prompt, max_tokens=room, temperature=0)
    assert len(expected.text) > len(prompt)
    assert run_script(tmp_path / "onnx", prompt).rstrip("\n") == expected.text.rstrip("\n")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["some text of letters"] * 2, TokenizerSettings(kind="char", vocabulary=30))


def causal_graph(tokenizer, **settings):
    torch.manual_seed(0)
    sizes = {"vocabulary": 30, "context": 24, "depth": 2, "width": 16, "heads": 2, "hidden": 32}
    backbone = Transformer(TransformerConfig(**sizes, **settings))
    task = CausalLM(CausalConfig(), tokenizer)
    return make_graph(Model(backbone, task.heads(backbone)), task, source="run")


def test_the_exported_kv_cache_matches_the_full_forward_pass(tokenizer, tmp_path):
    graph = causal_graph(tokenizer, positions="sinusoidal")  # the generation test has rotary ones
    assert isinstance(graph, CausalGraph)
    write_graph(graph, tmp_path / "model.onnx")
    session = open_session(tmp_path / "model.onnx")
    texts = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [10]]
    continuations = [[11, 12], [13, 14], [15, 16]]
    tokens, mask = pad_rows(texts)
    past = {name: np.zeros((3, 2, 0, 8), np.float32) for name in graph.inputs[2:]}
    output_names, logits_per_step = list(graph.outputs), []
    for new in (tokens, *torch.tensor(continuations).T[..., None]):  # the prompts, then a token at a time
        if new is not tokens:
            mask = torch.cat([mask, torch.ones_like(new)], 1)
        results = session.run(output_names, {"input_ids": new.numpy(), "attention_mask": mask.numpy(), **past})
        past = dict(zip(past, results[1:], strict=True))
        logits_per_step.append(results[0])
    with torch.inference_mode():
        for row, (text, after) in enumerate(zip(texts, continuations, strict=True)):
            full_logits = graph.model.heads["token"](graph.model(Batch(torch.tensor([text + after]))).hidden)[0].numpy()
            assert logits_per_step[0][row, : len(text)] == pytest.approx(full_logits[: len(text)], abs=1e-4)
            assert logits_per_step[1][row, 0] == pytest.approx(full_logits[len(text)], abs=1e-4)
            assert logits_per_step[2][row, 0] == pytest.approx(full_logits[len(text) + 1], abs=1e-4)
            # the control: the logits of another position
            assert np.abs(logits_per_step[2][row, 0] - full_logits[len(text)]).max() > 1e-2

    check_parity(graph, session)
    with torch.no_grad():  # the control: other weights
        graph.model.backbone.tokens.weight[:, 0] += 0.01
    with pytest.raises(WorkError, match="differ from torch"):
        check_parity(graph, session)


def test_unsupported_exports_are_refused(causal, tokenizer, tmp_path, monkeypatch):
    backbone = Recurrent(RecurrentConfig(vocabulary=30, width=8, hidden=8, depth=1))
    task = CausalLM(CausalConfig(), tokenizer)
    with pytest.raises(UserError, match="recurrent"):
        make_graph(Model(backbone, task.heads(backbone)), task, source="run")
    with pytest.raises(UserError, match="--measure"):
        export_onnx(RunFolder(causal), tmp_path / "onnx", measure=tmp_path / "rows.csv")
    file = rows_of_stories(tmp_path / "rows.csv")
    headstock.finetune(causal, train=file, out=tmp_path / "two", settings=QUICK | {"ensemble": 2, "epochs": 1})
    with pytest.raises(UserError, match="export one of its models"):
        export_onnx(RunFolder(tmp_path / "two"), tmp_path / "onnx")
    monkeypatch.setattr(onnx_export, "find_spec", lambda name: None if name == "onnxruntime" else True)
    with pytest.raises(UserError, match=r"pip install 'headstock\[interop\]'"):
        export_onnx(RunFolder(causal), tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()
