"""Lab checkpoints: the imported run has the outputs of the lab's own modules, and is exported bit for bit."""

import io
import json
import math
import pickle

import pytest
import sentencepiece
import torch
from torch import nn

import headstock
from headstock.errors import UserError
from headstock.interop.lab import export_lab, import_lab
from headstock.model.batch import Batch
from headstock.train.run_folder import RunFolder

WIDTH, HEADS, DEPTH, POSITIONS = 12, 2, 3, 40
TEXTS = ["le livre est bon", "un mauvais livre", "la page est belle et la fin est triste", "bon"] * 30


class Positions(nn.Module):
    """Sinusoids as the lab computes them, in single precision, for batches of shape (T, B)."""

    def __init__(self):
        super().__init__()
        positions = torch.arange(POSITIONS, dtype=torch.float)[:, None]
        frequencies = torch.exp(torch.arange(0, WIDTH, 2).float() * (-math.log(10000.0) / WIDTH))
        table = torch.zeros(POSITIONS, WIDTH)
        table[:, 0::2], table[:, 1::2] = torch.sin(positions * frequencies), torch.cos(positions * frequencies)
        self.register_buffer("pe", table[:, None])  # (positions, 1, width)

    def forward(self, x):
        return x + self.pe[: x.size(0)]


class Base(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.encoder = nn.Embedding(vocabulary, WIDTH)
        self.pos_encoder = Positions()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, dropout=0.2)
        self.transformer_encoder = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)

    def forward(self, rows):
        mask = nn.Transformer.generate_square_subsequent_mask(len(rows))
        return self.transformer_encoder(self.pos_encoder(self.encoder(rows) * math.sqrt(WIDTH)), mask)


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.decoder = nn.Linear(WIDTH, classes)

    def forward(self, vectors):
        return self.decoder(vectors)


class Lab(nn.Module):
    def __init__(self, vocabulary, classes):
        super().__init__()
        self.base, self.classifier = Base(vocabulary), Classifier(classes)
        for parameter in self.parameters():  # torch copies one layer: here all of them differ, biases and norms too
            nn.init.normal_(parameter, std=0.4)

    def forward(self, rows):
        """(T, B) ids -> (T, B, classes)"""
        return self.classifier(self.base(rows))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A folder with a SentencePiece model and its dict.txt."""
    folder, model = tmp_path_factory.mktemp("pieces"), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=40, hard_vocab_limit=False, minloglevel=3
    )
    (folder / "french.model").write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    lines = [f"{piece} {900 - i}" for i, piece in enumerate(pieces[:-2])]  # two are not in the dictionary
    (folder / "dict.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def vocabulary(pieces):
    return 4 + len((pieces / "dict.txt").read_text(encoding="utf-8").splitlines())


def save_checkpoint(lab, folder, pieces, *, head=True, **entries):
    state = {name: t.clone() for name, t in lab.state_dict().items() if head or not name.startswith("classifier.")}
    torch.save({"model_state_dict": state, **entries}, folder / "lab.pt")
    for file in pieces.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder / "lab.pt", state


def has_tensors(folder, state):
    exported = torch.load(folder / "model.pt", weights_only=True)["model_state_dict"]
    assert set(exported) == set(state)
    return all(torch.equal(exported[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("seed", [0, 1])
def test_a_language_model_has_the_outputs_of_the_labs_modules(pieces, vocabulary, tmp_path, seed, caplog):
    torch.manual_seed(seed)
    lab = Lab(vocabulary, vocabulary).eval()
    file, state = save_checkpoint(lab, tmp_path, pieces, epoch=3, optimizer_state_dict={"step": 1})
    caplog.set_level("INFO", logger="headstock")
    run = import_lab(file, tmp_path / "run")
    assert any("epoch, optimizer_state_dict" in line for line in caplog.messages)
    loaded = headstock.load(run.path)
    tokens = torch.randint(vocabulary, (3, 17))
    with torch.inference_mode():
        theirs = lab(tokens.T).transpose(0, 1)
        ours = loaded.model.heads["token"](loaded.model(Batch(tokens)).hidden)
        other_logits = Lab(vocabulary, vocabulary).eval()(tokens.T).transpose(0, 1)
    assert (ours - theirs).abs().max() < 1e-5
    assert (ours - other_logits).abs().max() > 0.1  # the control
    assert loaded.generate("le livre", max_tokens=3, temperature=0)[0].text.startswith("le livre")
    card = (run.path / "README.md").read_text(encoding="utf-8")
    assert "imported with Headstock" in card
    assert "4 D² + 2 D F" in card
    export_lab(run, tmp_path / "back")
    assert has_tensors(tmp_path / "back", state)
    assert (tmp_path / "back" / "dict.txt").read_bytes() == (pieces / "dict.txt").read_bytes()
    assert (tmp_path / "back" / "sentencepiece.model").read_bytes() == (pieces / "french.model").read_bytes()
    reimported = import_lab(tmp_path / "back" / "model.pt", tmp_path / "again")
    assert all(torch.equal(tensor, run.weights()[name]) for name, tensor in reimported.weights().items())


def test_a_classifier_reads_the_last_token(pieces, vocabulary, tmp_path):
    torch.manual_seed(2)
    lab = Lab(vocabulary, 2).eval()
    file, state = save_checkpoint(lab, tmp_path, pieces)
    run = import_lab(file, tmp_path / "run")
    loaded = headstock.load(run.path)
    for text in ("un livre", "la fin est belle"):
        row = torch.tensor([[0, *loaded.tokenizer.encode(text)]])  # <sos> is 0 in the lab
        with torch.inference_mode():
            expected = lab(row.T)[-1, 0].softmax(-1)
        (prediction,) = loaded.predict([text])
        assert list(prediction["probabilities"].values()) == pytest.approx(expected.tolist(), abs=1e-5)
        assert prediction["label"] == str(int(expected.argmax()))
    export_lab(run, tmp_path / "back")
    assert has_tensors(tmp_path / "back", state)


def test_a_checkpoint_without_head_is_a_backbone_to_finetune(pieces, vocabulary, tmp_path):
    torch.manual_seed(3)
    lab = Lab(vocabulary, 2).eval()
    file, state = save_checkpoint(lab, tmp_path, pieces, head=False)
    run = import_lab(file, tmp_path / "run")
    loaded = headstock.load(run.path)
    with torch.inference_mode():
        expected = lab.base(torch.tensor([[0, *loaded.tokenizer.encode("un livre")]]).T)[-1, 0]
    assert loaded.embed("un livre")[0] == pytest.approx(expected.numpy(), abs=1e-5)
    rows = [f"{text},{'good' if 'bon' in text else 'bad'}" for text in TEXTS[:40]]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    results = headstock.finetune(run.path, train=tmp_path / "rows.csv", out=tmp_path / "tuned", settings={"epochs": 1})
    assert results["metrics"]["rows"] == 4
    export_lab(RunFolder(tmp_path / "tuned"), tmp_path / "tuned-lab")
    tuned = torch.load(tmp_path / "tuned-lab" / "model.pt", weights_only=True)["model_state_dict"]
    assert tuned["classifier.decoder.weight"].shape == (2, WIDTH)
    assert set(tuned) == set(lab.state_dict())
    export_lab(run, tmp_path / "back")
    assert has_tensors(tmp_path / "back", state)


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_checkpoint_is_never_run(pieces, tmp_path, zipped):
    touched, file = tmp_path / "ran", tmp_path / "evil.pt"
    checkpoint = {"model_state_dict": {"base.encoder.weight": Evil(touched)}}
    if zipped:
        torch.save(checkpoint, file)
    else:
        file.write_bytes(pickle.dumps(checkpoint, protocol=2))
    with pytest.raises(UserError, match=r"evil\.pt"):
        import_lab(file, tmp_path / "run", dictionary=pieces / "dict.txt")
    assert not touched.exists()
    assert not (tmp_path / "run").exists()
    if zipped:  # the control: an unsafe loader runs it
        torch.load(file, weights_only=False)
    else:
        pickle.loads(file.read_bytes())
    assert touched.exists()


def test_all_problems_of_a_checkpoint_are_reported(pieces, vocabulary, tmp_path):
    torch.manual_seed(4)
    lab = Lab(vocabulary, 2)
    file, state = save_checkpoint(lab, tmp_path, pieces)

    def check_refused(tensors, *expected):
        torch.save({"model_state_dict": tensors}, file)
        with pytest.raises(UserError) as error:
            import_lab(file, tmp_path / "run")
        assert all(part in str(error.value) for part in expected), error.value
        assert not (tmp_path / "run").exists()

    tensor = "base.transformer_encoder.layers.1.norm1.weight"
    check_refused(
        {name: t for name, t in state.items() if name != tensor} | {"extra": torch.zeros(1)},
        f"{tensor} is missing",
        "extra is unknown",
    )
    check_refused(state | {tensor: torch.zeros(5)}, f"{tensor} has shape (5,), expected ({WIDTH},)")
    check_refused(state | {tensor: torch.zeros(WIDTH).half()}, f"{tensor} is torch.float16")
    check_refused(state | {"base.encoder.weight": torch.zeros(9, WIDTH)}, "has 9 embeddings")
    check_refused({"fc.weight": torch.zeros(1)}, "no lab model")
    torch.save([1, 2], file)
    with pytest.raises(UserError, match="'model_state_dict', found list"):
        import_lab(file, tmp_path / "run")
    file.write_text("no checkpoint")
    with pytest.raises(UserError, match=r"lab\.pt: "):
        import_lab(file, tmp_path / "run")
    (tmp_path / "dict.txt").unlink()
    torch.save({"model_state_dict": state}, file)
    with pytest.raises(UserError, match="--dictionary"):
        import_lab(file, tmp_path / "run")


def test_import_and_export_on_the_command_line(pieces, vocabulary, tmp_path, call):
    lab = Lab(vocabulary, 2)
    file, state = save_checkpoint(lab, tmp_path, pieces)
    out, _ = call("import", file, "--out", tmp_path / "run", "--json")
    output = json.loads(out.splitlines()[-1])
    assert output["parameters"]["total"] == sum(p.numel() for p in lab.parameters())
    call("export", tmp_path / "run", tmp_path / "back", "--to", "lab")
    assert has_tensors(tmp_path / "back", state)
    _, err = call("import", pieces / "dict.txt", "--out", tmp_path / "no", code=2)
    assert "expected a Hugging Face folder or a lab checkpoint" in err


def test_the_vocabulary_may_be_in_another_folder(pieces, vocabulary, tmp_path):
    lab = Lab(vocabulary, 2)
    torch.save({"model_state_dict": lab.state_dict()}, tmp_path / "lab.pt")
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "dict.txt").write_bytes((pieces / "dict.txt").read_bytes())
    files = {"dictionary": tmp_path / "words" / "dict.txt", "sentencepiece": pieces / "french.model"}
    run = import_lab(tmp_path / "lab.pt", tmp_path / "run", heads=3, **files)
    assert run.config()["model"]["heads"] == 3
    assert run.tokenizer().encode("un livre") != []


def test_other_models_are_not_exported_to_the_lab(corpus, tiny, tmp_path):
    headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"steps": 1})
    with pytest.raises(UserError) as error:
        export_lab(RunFolder(tmp_path / "run"), tmp_path / "back")
    facts = ("model.norm is 'pre'", "model.positions is 'learned'", "model.tied is true", "tokenizer is bpe")
    assert all(part in str(error.value) for part in facts), error.value
    assert not (tmp_path / "back").exists()
