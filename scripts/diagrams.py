"""Draws the diagrams of the how-to pages in docs/figures (`make pictures`): what goes where, as boxes and arrows.

Boxes stand in columns, from left to right, at a row of their own choice; arrows join them.
"""

from dataclasses import dataclass
from pathlib import Path

from headstock.explain.svg import PADDING, Box, Diagram

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
ROW = 30  # height of a row; a box covers one row per line of text, about
GAP = 44  # between two columns, where no arrow has a label
CHARACTER = 6.7  # mean width of one at 12 px

DATA, RUN, WORK, RESULT = "embedding", "feed", "attention", "head"  # the colours of four kinds of boxes


@dataclass(frozen=True)
class Node:
    column: int
    row: float  # of its centre
    box: Box

    @property
    def width(self) -> float:
        title, lines = 1.27 * len(self.box.name), (len(line) for line in self.box.lines)
        return max(title, *lines, 10) * CHARACTER + 2 * PADDING


@dataclass(frozen=True)
class Edge:
    start: str
    end: str
    label: str = ""
    both: bool = False  # arrow tips at both ends


@dataclass(frozen=True)
class Flow:
    """A diagram: a sentence for readers who do not see it, boxes by name, and arrows."""

    label: str
    nodes: dict[str, Node]
    edges: list[Edge]


def node(column: int, row: float, kind: str, name: str, *lines: str) -> Node:
    return Node(column, row, Box(name, kind, lines=lines))


def column_places(flow: Flow) -> dict[int, tuple[float, float]]:
    """The left and right edges of each column; gaps leave room for the labels of their arrows."""
    places, x = {}, 0.0
    for column in sorted({node.column for node in flow.nodes.values()}):
        right = x + max(node.width for node in flow.nodes.values() if node.column == column)
        places[column] = x, right
        labels = [edge.label for edge in flow.edges if min(columns(flow, edge)) == column]
        x = right + max(GAP, *(len(label) * CHARACTER + 42 for label in labels)) if labels else right + GAP
    return places


def columns(flow: Flow, edge: Edge) -> tuple[int, int]:
    return flow.nodes[edge.start].column, flow.nodes[edge.end].column


def svg(flow: Flow) -> str:
    """The diagram as a file of its own, which follows light and dark colour schemes."""
    drawing, places = Diagram(), column_places(flow)
    for edge in flow.edges:
        draw_edge(drawing, flow, edge, places)
    for box in flow.nodes.values():
        left, right = places[box.column]
        drawing.box((left + right) / 2, box.row * ROW + box.box.height / 2, box.box, right - left)
    return drawing.svg(flow.label, page=False) + "\n"


def draw_edge(drawing: Diagram, flow: Flow, edge: Edge, places: dict[int, tuple[float, float]]) -> None:
    start, end = flow.nodes[edge.start], flow.nodes[edge.end]
    if start.column == end.column:
        sign = 1 if end.row > start.row else -1
        x = sum(places[start.column]) / 2
        y1, y2 = (box.row * ROW + side * sign * box.box.height / 2 for box, side in ((start, 1), (end, -1)))
        drawing.line((x, y1), (x, y2))
        drawing.text(x + 8, (y1 + y2) / 2 + 4, edge.label, "soft")
    else:
        forward = start.column < end.column
        x1, x2 = places[start.column][forward], places[end.column][not forward]
        y1, y2 = start.row * ROW, end.row * ROW
        turn = x2 + (-22 if forward else 22)  # arrows to one box meet before it
        points = [(x1, y1), (x2, y2)] if y1 == y2 else [(x1, y1), (turn, y1), (turn, y2), (x2, y2)]
        drawing.line(*points)
        drawing.text((x1 + turn) / 2, y1 - 6, edge.label, "soft", "middle")
        if edge.both:
            drawing.tip(points[1], points[0])


FLOWS = {
    "flow-distil": Flow(
        "Teachers predict unlabelled texts; the student learns from these probabilities and from the labelled rows",
        {
            "rows": node(0, 0, DATA, "few.csv", "400 labelled rows"),
            "text": node(0, 4.1, DATA, "data/train.csv", "unlabelled texts, those", "most like the labelled rows"),
            "full": node(1, 2, WORK, "runs/full", "all weights trained"),
            "frozen": node(1, 4.1, WORK, "runs/frozen", "the head trained"),
            "tfidf": node(1, 6.2, WORK, "TF-IDF", "a linear classifier"),
            "soft": node(2, 4.1, DATA, "soft labels", "their weighted probabilities"),
            "student": node(3, 4.1, RESULT, "runs/student", "one model, as fast", "as one teacher"),
        },
        [
            Edge("text", "full"),
            Edge("text", "frozen"),
            Edge("text", "tfidf"),
            Edge("full", "soft"),
            Edge("frozen", "soft"),
            Edge("tfidf", "soft"),
            Edge("soft", "student"),
            Edge("rows", "student"),
        ],
    ),
    "flow-onnx": Flow(
        "A run becomes a folder that ONNX Runtime serves without PyTorch",
        {
            "run": node(0, 1.5, RUN, "runs/full", "config.json", "model.safetensors", "tokenizer.json"),
            "export": node(
                1,
                1.5,
                WORK,
                "headstock export",
                "traces the graph, compares",
                "its outputs with the run's",
                "(at most 1e-4 apart)",
            ),
            "folder": node(
                2,
                0,
                DATA,
                "quotes-onnx",
                "model.onnx",
                "model_int8.onnx (--int8)",
                "model.json, tokenizer.json",
                "README.md with a script",
            ),
            "card": node(2, 4.3, WORK, "test.csv", "accuracy of both models", "(--measure)"),
            "use": node(3, 0, RESULT, "onnxruntime + tokenizers", "C++, C#, Java, JavaScript,", "mobile; no PyTorch"),
        },
        [Edge("run", "export"), Edge("export", "folder"), Edge("card", "folder"), Edge("folder", "use")],
    ),
    "flow-gguf": Flow(
        "A causal run becomes one GGUF file with its tokenizer, for llama.cpp",
        {
            "run": node(0, 1, RUN, "runs/bard", "model.safetensors", "tokenizer.json"),
            "gguf": node(
                1,
                1,
                DATA,
                "bard-gguf/model.gguf",
                "weights in float32, tokenizer,",
                "architecture (llama, qwen3, gpt2)",
            ),
            "cli": node(2, 0, RESULT, "llama-cli, llama-server", "and every program", "that builds on llama.cpp"),
            "quantized": node(2, 3, DATA, "llama-quantize", "4 or 8 bits per weight"),
        },
        [
            Edge("run", "gguf", "headstock export"),
            Edge("gguf", "cli"),
            Edge("gguf", "quantized"),
            Edge("quantized", "cli"),
        ],
    ),
    "flow-huggingface": Flow(
        "Runs and Hugging Face folders are converted into each other; the Hub holds folders",
        {
            "commands": node(0, 1, RESULT, "headstock", "finetune, compare,", "explain, serve, ..."),
            "run": node(1, 1, RUN, "a run", "config.json", "model.safetensors", "tokenizer.json"),
            "folder": node(2, 1, DATA, "a Hugging Face folder", "config.json", "model.safetensors", "tokenizer.json"),
            "transformers": node(3, -0.4, RESULT, "transformers", "AutoModel, pipeline", "without custom code"),
            "hub": node(3, 2.6, DATA, "Hugging Face Hub", "hf://ORG/NAME,", "--push ORG/NAME"),
        },
        [
            Edge("commands", "run", both=True),
            Edge("run", "folder", "export, import", both=True),
            Edge("folder", "transformers", both=True),
            Edge("folder", "hub", both=True),
        ],
    ),
    "flow-lab": Flow(
        "The lab's files become a run, and a run becomes the lab's files",
        {
            "lab": node(0, 1, DATA, "the lab's files", "model.pt", "dict.txt", "sentencepiece.model"),
            "run": node(1, 1, RUN, "a run of classic", "4 layers, width 200", "causal or classifier"),
            "commands": node(2, 1, RESULT, "headstock", "finetune, compare,", "generate, explain, ..."),
        },
        [Edge("lab", "run", "import, export", both=True), Edge("run", "commands", both=True)],
    ),
    "flow-glue": Flow(
        "Each task fine-tunes a copy of the run; development rows are scored once",
        {
            "run": node(0, 0, RUN, "reviews-en", "the same weights", "for every task"),
            "train": node(0, 3, DATA, "RTE/train.tsv", "9 of 10 rows train"),
            "tune": node(1, 1.5, WORK, "finetune", "a new head per task", "in runs/glue/runs/rte"),
            "select": node(1, 4.4, DATA, "1 of 10 rows", "selects the epoch"),
            "dev": node(2, -0.9, DATA, "RTE/dev.tsv", "selects nothing"),
            "score": node(2, 1.5, WORK, "metrics of the task", "with 95% intervals"),
            "average": node(3, 1.5, RESULT, "average", "mean over tasks of", "the mean of their metrics"),
        },
        [
            Edge("run", "tune"),
            Edge("train", "tune"),
            Edge("select", "tune"),
            Edge("tune", "score"),
            Edge("dev", "score"),
            Edge("score", "average"),
        ],
    ),
    "flow-regularize": Flow(
        "Where each setting acts: on the weights before fine-tuning, or on its loss",
        {
            "run": node(0, 1, RUN, "pretrained run"),
            "adapt": node(1, 1, WORK, "adapt_steps", "pretrain on the rows' texts", "and adapt_text"),
            "average": node(2, 1, WORK, "adapt_average", "mean of both weights"),
            "reinit": node(3, 1, WORK, "reinit_layers", "new top layers"),
            "loss": node(
                3,
                4.0,
                WORK,
                "fine-tuning loss",
                "cross-entropy of the labels",
                "+ lm_loss x language model",
                "+ r_drop x KL of two passes",
                "token_dropout: masked inputs",
            ),
            "out": node(2, 4.0, RESULT, "fine-tuned run"),
        },
        [
            Edge("run", "adapt"),
            Edge("adapt", "average"),
            Edge("average", "reinit"),
            Edge("reinit", "loss"),
            Edge("loss", "out"),
        ],
    ),
    "flow-distributed": Flow(
        "Each process computes a part of the batch; gradients are summed, and rank 0 writes the run",
        {
            "batch": node(0, 3.3, DATA, "a step's batch", "16 rows, the same as", "with one process"),
            "rank0": node(
                1,
                0.6,
                WORK,
                "rank 0",
                "rows 0 to 7",
                "ddp: all weights",
                "fsdp: half of weights, gradients",
                "and optimizer states",
            ),
            "rank1": node(1, 5.4, WORK, "rank 1", "rows 8 to 15", "ddp: all weights", "fsdp: the other half"),
            "sum": node(2, 3.3, WORK, "gradients", "summed over processes,", "divided by the tokens of all"),
            "run": node(
                3,
                0.6,
                RUN,
                "runs/mine",
                "metrics.jsonl, results.json",
                "and checkpoints by rank 0,",
                "shards by every rank (fsdp)",
            ),
            "update": node(3, 5.4, RESULT, "update", "the same weights", "on every process"),
        },
        [
            Edge("batch", "rank0"),
            Edge("batch", "rank1"),
            Edge("rank0", "sum"),
            Edge("rank1", "sum"),
            Edge("sum", "update"),
            Edge("update", "run"),
        ],
    ),
    "flow-ray": Flow(
        "The command sends rows, settings and the run through Ray's object store; nodes train trials and send results",
        {
            "inputs": node(0, 2.5, DATA, "inputs", "train.csv, valid.csv", "reviews-en"),
            "command": node(
                1, 2.5, RUN, "headstock compare --on ray", "makes the grid of trials,", "writes answer/ and the report"
            ),
            "head": node(2, 2.5, DATA, "Ray object store", "rows, settings, run files;", "results come back"),
            "one": node(3, 0, WORK, "node 1", "frozen, 100 labels, seed 0"),
            "two": node(3, 2.5, WORK, "node 2", "tfidf, 100 labels, seed 0"),
            "more": node(3, 5, WORK, "node N", "a lost trial runs again here"),
        },
        [
            Edge("inputs", "command"),
            Edge("command", "head", both=True),
            Edge("head", "one", both=True),
            Edge("head", "two", both=True),
            Edge("head", "more", both=True),
        ],
    ),
    "flow-remote": Flow(
        "A corpus is downloaded once into the cache; the run is mirrored, and another machine resumes it from there",
        {
            "corpus": node(0, 0, DATA, "s3://corpus/", "part-aa.txt.gz, ..."),
            "cache": node(1, 0, WORK, "cache", "downloaded once,", "checked by ETag and size"),
            "run": node(2, 0, RUN, "runs/k", "trained on local disk"),
            "mirror": node(3, 0, DATA, "s3://models/k", "updated after", "each checkpoint"),
            "resume": node(4, -1.3, RUN, "runs/k elsewhere", "--resume continues", "with the same bits"),
            "use": node(4, 1.3, RESULT, "headstock predict", "s3://models/k"),
        },
        [
            Edge("corpus", "cache"),
            Edge("cache", "run"),
            Edge("run", "mirror", "mirror"),
            Edge("mirror", "resume"),
            Edge("mirror", "use"),
        ],
    ),
}


def main() -> None:
    for name, flow in FLOWS.items():
        (FIGURES / f"{name}.svg").write_text(svg(flow), encoding="utf-8")


if __name__ == "__main__":
    main()
