"""The run's README.md: what it was made from, what came out and how to use it, taken from the run itself."""

from typing import Any

from headstock.tasks.task import TASKS
from headstock.train.run import Run
from headstock.train.transfer import labelled_task
from headstock.train.watch import summary

CARD = """# {name}

A {objective} language model ({family}, {total:,} parameters), grown by Headstock {version}.

| | |
|---|---|
| text | {files}; {documents:,} documents, {bytes:,} bytes for training ({how}) |
| held out | {valid_documents:,} documents, {valid_bytes:,} bytes |
| tokenizer | {kind}, {vocabulary:,} entries |
| model | {model} |
| training | {steps:,} steps, {tokens:,} tokens in {seconds:,.0f} s on {device}, seed {seed} |
| on held-out text | {metrics} |

The held-out text was split off by document before training; the numbers above are over all of it.

    {use}
    headstock evaluate {name} FILE
    headstock finetune {name} --train labelled.csv --out ANOTHER      # a classifier on top of it
    headstock pretrain --config {name}/config.json --out ANOTHER     # the same again
"""


FINETUNED = """# {name}

{title}, made by Headstock {version} from {source}: {how}.

| | |
|---|---|
| labelled texts | {train} to train ({rows:,} rows), {valid} to validate |
| model | {total:,} parameters, {trainable:,} of them trained{models}{reads} |
| training | {steps:,} steps, {tokens:,} tokens in {seconds:,.0f} s on {device}, seed {seed}; best epoch {best} |
{measured}

The epoch was chosen on the validation rows, so their numbers flatter; those of test rows do not. Intervals are 95%,
over the rows alone: another seed would give another model.

    headstock {use} {name} {example}
    headstock evaluate {name} FILE
"""


def write_card(run: Run) -> None:
    run.write_card(finetuned_card(run) if run.results().get("kind") == "finetune" else pretrained_card(run))


def finetuned_card(run: Run) -> str:
    settings, data, results = run.config(), run.data(), run.results()
    transfer = settings["transfer"]
    kind = "frozen" if transfer["freeze"] else transfer["init"]
    how = {"pretrained": "all its weights went on learning", "scratch": "its architecture, but none of its weights"}
    measured = [
        f"| on {side} rows | {with_intervals(results[side])} |" for side in ("valid", "test") if side in results
    ]
    task, classes = labelled_task(results["task"]), results["classes"]
    named = ", ".join(classes[:12]) + (f" and {len(classes) - 12} more" if len(classes) > 12 else "")
    pool, layers = settings["task"].get("pool"), settings["task"].get("layers")
    return FINETUNED.format(
        name=run.path.name,
        title=f"A {task.title}" + (f" ({named})" if classes else ""),
        use=task.use,
        example=task.example,
        version=results["versions"]["headstock"],
        source=transfer["run"] or f"the preset {transfer['preset']}",
        how=how.get(kind, "its weights stayed as they were, and a new head learned"),
        train=data["train"]["file"],
        rows=data["train"]["rows"],
        valid=data["valid"]["file"],
        total=results["parameters"]["total"],
        trainable=results["parameters"]["trainable"],
        models=f"; {transfer['ensemble']} models averaged" if transfer["ensemble"] > 1 else "",
        reads=(f"; layers {layers}" if layers else "") + (f", pooling {pool}" if pool else ""),
        steps=results["steps"],
        tokens=results["tokens"],
        seconds=results["seconds"],
        device=results["device"],
        seed=settings["train"]["seed"],
        best=results["best_epoch"],
        measured="\n".join(measured),
    )


def with_intervals(metrics: dict[str, Any]) -> str:
    """`accuracy 81.2% (79.8 to 82.5), macro F1 ...`."""
    told = []
    for name in ("accuracy", "exact_match", "f1", "micro_f1", "macro_f1", "bleu", "chrf"):
        if name in metrics:
            low, high = metrics["intervals"].get(name, (None, None))
            around = f" ({100 * low:.1f} to {100 * high:.1f})" if low is not None else ""
            called = {"bleu": "BLEU", "chrf": "chrF"}.get(name, name.replace("f1", "F1").replace("_", " "))
            unit = "" if name in ("bleu", "chrf") else "%"
            told.append(f"{called} {100 * metrics[name]:.1f}{unit}{around}")
    loss = [f"loss {metrics['loss']:.4f}"] if "loss" in metrics else []
    return ", ".join([*told, *loss, f"{metrics['rows']:,} rows"])


def pretrained_card(run: Run) -> str:
    settings, data, results = run.config(), run.data(), run.results()
    model = {key: value for key, value in settings["model"].items() if key not in ("family", "vocabulary")}
    files = data["corpus"]
    name = run.path.name
    task = TASKS.get(settings["task"]["name"])
    use = [f'headstock generate {name} "..."'] if task.generates else []
    use += [f'headstock fill {name} "... [MASK] ..."'] if task.fills else []
    return CARD.format(
        name=run.path.name,
        objective=settings["task"]["name"],
        family=settings["model"]["family"],
        total=results["parameters"]["total"],
        version=results["versions"]["headstock"],
        files=", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else ""),
        documents=data["train_documents"],
        bytes=data["train_bytes"],
        how=data["how"],
        valid_documents=data["valid_documents"],
        valid_bytes=data["valid_bytes"],
        kind=settings["tokenizer"]["kind"] if not settings["tokenizer"]["file"] else settings["tokenizer"]["file"],
        vocabulary=settings["model"]["vocabulary"],
        model=", ".join(f"{key} {value}" for key, value in model.items()),
        steps=results["steps"],
        tokens=results["tokens"],
        seconds=results["seconds"],
        device=results["device"],
        seed=settings["train"]["seed"],
        metrics=summary(results["metrics"]).replace(" | ", ", "),
        use="\n    ".join(use or [f'headstock embed {name} "..."']),
    )
