"""The run's README.md: what it was made from, what came out and how to use it, taken from the run itself."""

from headstock.train.run import Run

CARD = """# {name}

A {objective} language model ({family}, {total:,} parameters), grown by Headstock {version}.

| | |
|---|---|
| text | {files}; {documents:,} documents, {bytes:,} bytes for training ({how}) |
| held out | {valid_documents:,} documents, {valid_bytes:,} bytes |
| tokenizer | {kind}, {vocabulary:,} entries |
| model | {model} |
| training | {steps:,} steps, {tokens:,} tokens in {seconds:,.0f} s on {device}, seed {seed} |
| validation loss | {loss:.4f} nats a token (perplexity {perplexity:.2f}), {bits:.4f} bits per byte |

The held-out text was split off by document before training; the numbers above are over all of it.

    headstock generate {name} "..."
    headstock evaluate {name} FILE
    headstock pretrain --config {name}/config.json --out ANOTHER     # the same again
"""


def write_card(run: Run) -> None:
    settings, data, results = run.config(), run.data(), run.results()
    model = {key: value for key, value in settings["model"].items() if key not in ("family", "vocabulary")}
    files = data["corpus"]
    run.write_card(
        CARD.format(
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
            loss=results["valid_loss"],
            perplexity=results["perplexity"],
            bits=results["bits_per_byte"],
        )
    )
