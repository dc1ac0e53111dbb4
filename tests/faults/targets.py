"""The readers that are fuzzed, and a valid input for each."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from headstock.cli.command import Common
from headstock.cli.experiments import report
from headstock.config import read_settings
from headstock.data.labelled_texts import read_records
from headstock.data.minimal_pairs import read_minimal_pairs
from headstock.data.parallel import read_parallel
from headstock.data.qa import read_questions
from headstock.data.tagged import read_tagged
from headstock.data.token_shards import TokenStore, verify_store
from headstock.data.tokenizer import open_tokenizer
from headstock.inference.pipeline import load
from headstock.interop import export_run, import_run
from headstock.interop.huggingface.tokenizer import read_tokenizer
from headstock.interop.imported_run import load_checkpoint
from headstock.train.checkpoint import Checkpoint, TrainState, newest_valid
from headstock.train.resolve import resolve_pretrain_config
from headstock.train.run_folder import open_run
from headstock.train.tensors import read_shapes, read_tensors, write_tensors
from tests.faults.fuzzing import Target
from tests.interop.small import small_run, tokenizer_of

RUNS = Path(__file__).parent.parent / "compatibility" / "before_redesign"
TEXT = "Anne sees the café, 42 <b>times</b>."
GPT = {"norm": "pre", "positions": "learned"}
BERT = {"norm": "post", "positions": "learned", "embed_norm": True, "segments": 2, "causal": False}
LLAMA = {"norm": "pre", "norm_kind": "rms", "positions": "rotary", "activation": "swiglu", "bias": False}
KINDS = ("bpe", "unigram", "wordpiece", "word", "char")


# Readers


def read_safetensors(folder: Path) -> None:
    read_shapes(folder / "model.safetensors")
    read_tensors(folder / "model.safetensors")


def read_tokenizers(folder: Path) -> None:
    for file in (folder / "tokenizer.json", folder / "sentencepiece.model", folder / "dict.txt"):
        if file.is_file():
            tokenizer = open_tokenizer(file)
            tokenizer.decode(tokenizer.encode(TEXT))


def read_huggingface_tokenizer(folder: Path) -> None:
    tokenizer = read_tokenizer(folder)
    tokenizer.decode(tokenizer.encode(TEXT))


def read_run(folder: Path) -> None:
    load(folder, device="cpu")
    open_run(folder).results()


def read_checkpoint(folder: Path) -> None:
    """Without the manifest, which would refuse all of these files."""
    newest_valid(folder)
    TrainState.from_dict(Checkpoint.read(folder / "step-4").state)


def read_huggingface_folder(folder: Path) -> None:
    shutil.rmtree(folder.parent / "run", ignore_errors=True)
    import_run(folder, out=folder.parent / "run")


def read_torch_file(folder: Path) -> None:
    load_checkpoint(folder / "model.pt")


def read_report(folder: Path) -> None:
    report(Common(quiet=True, prints=False), folder, samples=0)


def read_recipe(folder: Path) -> None:
    resolve_pretrain_config("gpt-nano", folder / "recipe.toml", {})
    resolve_pretrain_config("gpt-nano", folder / "recipe.json", {})


def read_store(folder: Path) -> None:
    verify_store(folder)
    store = TokenStore(folder, "train")
    if store.documents:
        store.document(0)
        store.location(0)


def read_labelled(folder: Path) -> None:
    readers: dict[str, Any] = {"rows": read_records, "tags": read_tagged, "answers": read_questions}
    readers |= {"pairs": read_parallel, "minimal": lambda path: read_minimal_pairs([path])}
    for file in sorted(folder.iterdir()):
        readers[file.stem](file)


# Valid inputs


def make_targets(home: Path) -> dict[str, list[Target]]:
    """The targets by kind, with their valid inputs in folders of `home`."""
    return {
        "safetensors": safetensors_targets(home),
        "tokenizers": tokenizer_targets(home),
        "configs": config_targets(home),
        "reports": report_targets(home),
        "data": data_targets(home),
    }


def safetensors_targets(home: Path) -> list[Target]:
    folder = home / "safetensors"
    folder.mkdir()
    tensors = {"a": torch.randn(3, 4), "b": torch.zeros(5, dtype=torch.int64), "c": torch.ones(2, 2).half()}
    tensors |= {"d": torch.ones(3).bool(), "e": torch.tensor(1.5), "f": torch.zeros(0, 3)}
    write_tensors(folder / "model.safetensors", tensors, metadata={"lora": "{}"})
    return [Target("safetensors", folder, ("model.safetensors",), read_safetensors)]


def tokenizer_targets(home: Path) -> list[Target]:
    targets = []
    for kind in KINDS:
        folder = home / f"tokenizer-{kind}"
        folder.mkdir()
        tokenizer_of(kind).save(folder / "tokenizer.json")
        targets.append(Target(f"tokenizer {kind}", folder, ("tokenizer.json",), read_tokenizers))
    lab, folder = home / "lab-vocabulary", home / "sentencepiece"
    for place in (lab, folder):
        place.mkdir()
    make_sentencepiece(lab / "sentencepiece.model", lab / "dict.txt")
    targets.append(Target("lab vocabulary", lab, ("sentencepiece.model", "dict.txt"), read_tokenizers))
    open_tokenizer(lab / "dict.txt").save(folder / "tokenizer.json")
    targets.append(Target("sentencepiece json", folder, ("tokenizer.json",), read_tokenizers))
    legacy = home / "legacy"
    legacy.mkdir()
    write_legacy_tokenizers(legacy)
    for kind, files in (("wordpiece", ("vocab.txt",)), ("bpe", ("vocab.json", "merges.txt"))):
        place = home / f"legacy-{kind}"
        place.mkdir()
        for name in (*files, "tokenizer_config.json"):
            shutil.copyfile(legacy / name, place / name)
        names = (*files, "tokenizer_config.json")
        targets.append(Target(f"legacy {kind}", place, names, read_huggingface_tokenizer))
    t5, marian = home / "legacy-t5", home / "legacy-marian"
    for place in (t5, marian):
        place.mkdir()
        shutil.copyfile(legacy / "tokenizer_config.json", place / "tokenizer_config.json")
    make_sentencepiece(t5 / "spiece.model", home / "dict.txt", pad_id=3)
    (t5 / "config.json").write_text('{"model_type": "t5"}', encoding="utf-8")
    files = ("spiece.model", "tokenizer_config.json", "config.json")
    targets.append(Target("legacy t5", t5, files, read_huggingface_tokenizer))
    for side in ("source.spm", "target.spm"):
        shutil.copyfile(lab / "sentencepiece.model", marian / side)
    lines = (lab / "dict.txt").read_text(encoding="utf-8").splitlines()
    pieces = ["</s>", "<unk>", *(line.rpartition(" ")[0] for line in lines), "<pad>"]
    ids = {piece: number for number, piece in enumerate(pieces)}
    (marian / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    files = ("vocab.json", "source.spm", "target.spm", "tokenizer_config.json")
    targets.append(Target("legacy marian", marian, files, read_huggingface_tokenizer))
    return targets


def make_sentencepiece(model: Path, dictionary: Path, **options: Any) -> None:
    import io

    import sentencepiece

    stream = io.BytesIO()
    texts = ["le livre est bon", "un mauvais livre", "la page est belle et la fin est triste"] * 30
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=stream,
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=3,
        **options,
    )
    model.write_bytes(stream.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=stream.getvalue())
    pieces = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    dictionary.write_text("".join(f"{piece} 1\n" for piece in pieces), encoding="utf-8")


def write_legacy_tokenizers(folder: Path) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "##a", "##b", "##e", "Anne", "the"]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    vocabulary = json.loads(tokenizer_of("bpe").backend.to_json())["model"]
    (folder / "vocab.json").write_text(json.dumps(vocabulary["vocab"]), encoding="utf-8")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in vocabulary["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    settings = {"do_lower_case": True, "unk_token": "[UNK]", "add_prefix_space": False, "extra_ids": 3}
    settings |= {"strip_accents": None, "tokenize_chinese_chars": True, "tokenizer_class": "BertTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def config_targets(home: Path) -> list[Target]:
    targets = []
    run_files = ("config.json", "config.json", "config.json", "data.json", "results.json")
    for name in ("causal", "masked", "classify", "hybrid", "rotary", "elmo", "gru", "seq2seq", "tag", "answer"):
        folder = home / f"run-{name}"
        shutil.copytree(RUNS / name, folder, ignore=shutil.ignore_patterns("checkpoints", "manifest.json"))
        targets.append(Target(f"run {name}", folder, run_files, read_run))
    checkpoints = next(path for path in (RUNS / "causal-interrupted" / "checkpoints").glob("step-*"))
    folder = home / "checkpoints"
    shutil.copytree(checkpoints, folder / "step-4")
    files = ("step-4/progress.json", "step-4/manifest.json", "step-4/model.safetensors", "step-4/optimizer.safetensors")
    targets.append(Target("checkpoint", folder, files, read_checkpoint))
    models = {
        "gpt2": (GPT, {"name": "causal"}),
        "bert": (BERT, {"name": "masked", "transform": True}),
        "llama": (LLAMA, {"name": "causal"}),
    }
    for name, (model, task) in models.items():
        folder = home / f"hf-{name}"
        write_huggingface(home / f"hf-{name}-source", folder, model, task)
        files = ("config.json", "config.json", "config.json", "tokenizer_config.json", "model.safetensors")
        targets.append(Target(f"Hugging Face {name}", folder, files, read_huggingface_folder))
    folder = home / "torch"
    folder.mkdir()
    torch.save({"model_state_dict": {"a": torch.randn(3), "b": torch.zeros(2, 2)}}, folder / "model.pt")
    targets.append(Target("torch file", folder, ("model.pt",), read_torch_file))
    legacy = home / "torch-legacy"
    legacy.mkdir()
    torch.save({"a": torch.randn(3)}, legacy / "model.pt", _use_new_zipfile_serialization=False)
    targets.append(Target("legacy torch file", legacy, ("model.pt",), read_torch_file))
    recipes = home / "recipes"
    recipes.mkdir()
    text = '[model]\ndepth = 2\nwidth = 16\n[train]\nsteps = 12\nlr = 1e-3\nschedule = "cosine"\n'
    text += '[tokenizer]\nkind = "bpe"\n'
    (recipes / "recipe.toml").write_text(text, encoding="utf-8")
    (recipes / "recipe.json").write_text(json.dumps(read_settings(recipes / "recipe.toml")), encoding="utf-8")
    targets.append(Target("recipe", recipes, ("recipe.toml", "recipe.json"), read_recipe))
    return targets


def write_huggingface(run: Path, folder: Path, model: dict[str, Any], task: dict[str, Any]) -> None:
    """A folder as transformers saves it, without the section by which an export of ours is recognized."""
    export_run(small_run(run, model, task), folder)
    config = read_settings(folder / "config.json")
    config.pop("headstock")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def report_targets(home: Path) -> list[Target]:
    targets = []
    for name in ("causal", "classify", "tag", "compare", "sweep"):
        folder = home / f"report-{name}"
        skipped = shutil.ignore_patterns("checkpoints", "cells", "claims", "leakage", "tokenizers", "*.safetensors")
        shutil.copytree(RUNS / name, folder, ignore=skipped)
        (folder / "manifest.json").unlink(missing_ok=True)
        if name != "causal":  # one chart is enough: they take most of the time
            (folder / "metrics.jsonl").unlink(missing_ok=True)
        if name == "compare":
            results = read_settings(folder / "results.json")
            results["labels"] = results["labels"][:1]
            results["cells"] = [row | {"epochs": []} for row in results["cells"] if row["labels"] in results["labels"]]
            results["summary"] = [row for row in results["summary"] if row["labels"] in results["labels"]]
            results.pop("details", None)
            (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
        names = ("results.json", "results.json", "results.json", "config.json", "data.json", "metrics.jsonl")
        files = tuple(file for file in names if (folder / file).is_file())
        targets.append(Target(f"report {name}", folder, files, read_report))
    return targets


def data_targets(home: Path) -> list[Target]:
    store = home / "store"
    write_store(store)
    targets = [Target("token store", store, ("index.json", "index.json", "train-offsets.bin"), read_store)]
    contents = {
        "rows.csv": 'text,label\n"Anne, sees",a\n"the ""sea""",b\nBen,a\n',
        "rows.tsv": "text\tlabel\nAnne sees\ta\nthe sea\tb\n",
        "rows.jsonl": '{"text": "Anne sees", "label": "a"}\n{"text": "the sea", "label": "b"}\n',
        "tags.jsonl": '{"tokens": ["Anne", "sees"], "tags": ["B-PER", "O"]}\n',
        "tags.conll": "Anne B-PER\nsees O\n\nBen B-PER\n",
        "answers.jsonl": '{"context": "Anne sees Paris.", "question": "Who?", "answers": [{"text": "Anne"}]}\n',
        "answers.json": json.dumps(SQUAD),
        "pairs.tsv": "source\ttarget\nthe sea\tla mer\n",
        "minimal.jsonl": '{"sentence_good": "Anne sees.", "sentence_bad": "Anne see.", "UID": "agreement"}\n',
        "minimal.xml": WINOGRAD,
    }
    for name, content in contents.items():
        folder = home / f"data-{name}"
        folder.mkdir()
        (folder / name).write_text(content, encoding="utf-8")
        targets.append(Target(f"data {name}", folder, (name,), read_labelled))
    folder = home / "data-parquet"
    folder.mkdir()
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": ["Anne sees", "the sea"] * 5, "label": ["a", "b"] * 5})
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    targets.append(Target("data rows.parquet", folder, ("rows.parquet",), read_labelled))
    return targets


SQUAD = {
    "data": [
        {
            "title": "t",
            "paragraphs": [
                {
                    "context": "Anne sees Paris.",
                    "qas": [{"id": "1", "question": "Who?", "answers": [{"text": "Anne", "answer_start": 0}]}],
                }
            ],
        }
    ]
}
WINOGRAD = """<?xml version="1.0"?>
<collection><schema><text><txt1>Anne saw Ben because</txt1><pron>he</pron><txt2>ran.</txt2></text>
<answers><answer>Anne</answer><answer>Ben</answer></answers><correctAnswer>B</correctAnswer></schema></collection>"""


def write_store(folder: Path) -> None:
    from headstock.data.corpus import read_corpus
    from headstock.data.token_store import build_split_stores

    text = folder.parent / "store.txt"
    text.write_text("\n\n".join(f"Story {i}\nAnne sees Paris." for i in range(20)), encoding="utf-8")
    built = build_split_stores(read_corpus([str(text)]), tokenizer_of("bpe"), cache=folder.parent / "built")
    shutil.copytree(built.folder, folder)
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    index = {name: value for name, value in index.items() if name not in ("digest", "files")}  # as the first version
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
