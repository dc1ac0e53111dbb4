"""Writes docs/reference/json.md: the keys of every command's `--json` object, from real runs of tiny models.

    python scripts/json_keys.py

Takes a few minutes on two cores.
"""

import contextlib
import io
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "json.md"
ANIMALS = Path(__file__).parents[1] / "recipes" / "animals.txt"
TINY = "--set depth=1 --set width=16 --set heads=2 --set hidden=32 --set context=32 --set vocabulary=300 --set batch=8"
FILES = "--train train.csv --valid valid.csv --test valid.csv"
QUICK = "--set epochs=1 --set least_steps=2"
MAX_DEPTH, MAX_NAMES = 3, 30
BY_NAME = ("environment",)  # tables whose names depend on the machine

# in the order in which they are run: later commands use what earlier ones made
COMMANDS = [
    "presets",
    "stocks",
    "data list",
    "data get tiny-shakespeare --to plays",
    "tokenizer train corpus.txt --out tokenizer.json --vocab 300",
    'tokenizer show tokenizer.json "The cat sat."',
    "plan corpus.txt --minutes 1",
    f"pretrain corpus.txt --out gpt --preset gpt-nano --steps 20 {TINY}",
    f"pretrain corpus.txt --out bert --preset modern-nano --objective masked --steps 20 {TINY}",
    f"lr-find corpus.txt --preset gpt-nano --steps 20 {TINY}",
    f"finetune bert {FILES} --out reviews {QUICK}",
    f"finetune --task answer --preset bert-nano --train squad.jsonl --valid squad.jsonl --out squad {TINY} {QUICK}",
    f"finetune --task translate --preset seq2seq-nano --train pairs.csv --valid pairs.csv --out en-fr {TINY} {QUICK}",
    f"distil bert --teacher reviews --text unlabelled.txt {FILES} --out student --rows 20 {QUICK}",
    f"ensemble reviews --tfidf {FILES} --out together",
    f"compare bert {FILES} --labels 16 --seeds 2 --out answer {QUICK}",
    f"sweep corpus.txt --preset gpt-nano --steps 5 --grid lr=1e-3,2e-3 --seeds 2 --out grid {TINY}",
    "report answer",
    "bench --quick --only start",
    f"glue bert glue --tasks rte --out glue-runs {QUICK}",
    "evaluate reviews valid.csv",
    "quality gpt --texts 8 --max-tokens 8 --prompt-tokens 4 --reference corpus.txt",
    "calibrate reviews --data valid.csv",
    'generate gpt "The cat" --max-tokens 5',
    'fill bert "The cat [MASK]."',
    'score gpt "The cat sat."',
    'embed bert "The cat sat." --out vectors.npy',
    'predict reviews "a good film"',
    'answer squad --context article.txt "Who sat?"',
    'translate en-fr "the cat"',
    'search bert --corpus corpus.txt "cat"',
    "suggest reviews --pool pool.csv --count 2",
    "explain params gpt",
    "explain model gpt",
    "explain mask --length 4",
    "explain positions gpt",
    'explain attention bert "The cat sat."',
    'explain layer bert "The cat sat."',
    'explain gradients bert "The cat sat." --no-depths',
    'explain residual bert "The cat [MASK]."',
    'explain prediction reviews "a good film"',
    "explain context gpt --data corpus.txt --tokens 500 --targets 20",
    "explain hooks gpt",
    'explain logits bert "The cat [MASK]."',
    "explain heads bert --file corpus.txt",
    'explain patch reviews-en "A good film. I [MASK] it." --corrupted "A bad film. I [MASK] it." '
    "--label loved --versus hated",
    "explain induction gpt",
    "export gpt --to huggingface gpt-hf",
    "import gpt-hf --out gpt-back",
    "doctor",
    "cache list",
    "cache clear stores --dry-run",
    "completion bash",
]
# commands that are not run here
REFER = {
    "demo": "The keys of [`compare`](#headstock-compare), with `run` (the pretrained run) and `out`.",
    "serve": "`url` and `models` (their names), in one line once requests are answered; the server then runs on.",
}


def main() -> None:
    os.environ |= {"COLUMNS": "100", "PYTHONWARNINGS": "ignore"}
    keys: dict[str, dict[str, str]] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        make_data()
        for command in COMMANDS:
            verb = verb_of(command)
            result = run(command)
            if result.keys() == {"error"}:
                problems.append(f"{command}: {result['error']}")
                continue
            keys[verb] = keys.get(verb, {}) | dict(flatten(result))
            print(f"{verb}: {len(keys[verb])} keys", file=sys.stderr, flush=True)
    PAGE.write_text(page(keys), encoding="utf-8")
    if problems:
        sys.exit("\n".join(problems))


def verb_of(command: str) -> str:
    words = shlex.split(command)
    return " ".join(words[:2] if words[0] in ("data", "tokenizer", "explain", "cache") else words[:1])


def make_data() -> None:
    """Small files for every task."""
    Path("corpus.txt").write_text(ANIMALS.read_text(encoding="utf-8"), encoding="utf-8")
    rows = [
        (f"a {word} film number {n}", label) for n in range(16) for word, label in (("good", "pos"), ("bad", "neg"))
    ]
    for name in ("train", "valid"):
        Path(f"{name}.csv").write_text("text,label\n" + "".join(f"{text} {name},{label}\n" for text, label in rows))
    Path("pool.csv").write_text("text\n" + "".join(f"a new film {n}\n" for n in range(8)))
    Path("unlabelled.txt").write_text(
        "".join(f"a film with a long story, number {n}, and an end\n\n" for n in range(40))
    )
    Path("article.txt").write_text("The cat sat on the mat.")
    question = {"context": "The cat sat on the mat.", "question": "Who sat?", "answers": ["The cat"]}
    Path("squad.jsonl").write_text("".join(json.dumps(question | {"id": str(n)}) + "\n" for n in range(8)))
    Path("pairs.csv").write_text("source,target\n" + "the cat,le chat\nthe dog,le chien\n" * 8)
    Path("glue/RTE").mkdir(parents=True)
    lines = "".join(f"{n}\tA cat {n}.\tAn animal {n}.\t{('entailment', 'not_entailment')[n % 2]}\n" for n in range(20))
    for name in ("train", "dev"):
        Path(f"glue/RTE/{name}.tsv").write_text("index\tsentence1\tsentence2\tlabel\n" + lines)


def run(command: str) -> dict[str, Any]:
    from headstock.cli.app import main as headstock

    out, before = io.StringIO(), sys.argv
    sys.argv = ["headstock", *shlex.split(command), "--json", "--quiet", "--device", "cpu"]
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            headstock()
    finally:
        sys.argv = before
    lines = out.getvalue().strip().splitlines()
    return json.loads(lines[-1]) if lines else {"error": "printed nothing"}


def flatten(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Paths of keys with their kinds; a list is described by its first item, a table of names by its first entry."""
    if isinstance(value, dict) and value and depth < MAX_DEPTH:
        names = list(value)
        by_name = depth > 0 and (path in BY_NAME or len(names) > MAX_NAMES or all(name.isdigit() for name in names))
        for name in names[:1] if by_name else names:
            shown = "NAME" if by_name else name
            yield from flatten(value[name], f"{path}.{shown}" if path else shown, depth + 1)
    elif isinstance(value, list) and value and isinstance(value[0], dict) and depth < MAX_DEPTH:
        merged: dict[str, Any] = {}
        for item in value:
            merged = item | {name: old for name, old in merged.items() if old is not None}
        yield from flatten(merged, f"{path}[]", depth)
    else:
        yield path, kind(value)


def kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    names = {
        int: "integer",
        float: "number",
        str: "text",
        list: "list",
        dict: "object",
        type(None): "null, or a value where known",
    }
    return names[type(value)]


def page(keys: dict[str, dict[str, str]]) -> str:
    lines = [HEADER]
    for verb in sorted([*keys, *REFER]):
        lines.append(f"## headstock {verb}\n")
        if verb in REFER:
            lines.append(REFER[verb] + "\n")
            continue
        rows = [f"| `{path}` | {kind} |" for path, kind in keys[verb].items()]
        lines.append("\n".join(["| key | value |", "|---|---|", *rows]) + "\n")
    return "\n".join(lines)


HEADER = """<!-- written by scripts/json_keys.py from real runs: do not edit -->

# JSON keys

With `--json`, the last line of a command's stdout is one JSON object. These are its keys, as tiny runs returned them:
`cells[].score` is the key `score` of every item of the list `cells`, and `NAME` stands for the names of a table. Keys
of other tasks or options may be missing here. Existing keys stay; new ones may be added. `results.json` of a run,
comparison or sweep has the same keys.

A command that fails prints `{"error": "..."}` and exits with [1 or 2](cli/index.md#exit-codes).
"""


if __name__ == "__main__":
    main()
