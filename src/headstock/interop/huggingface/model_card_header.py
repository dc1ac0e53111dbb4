"""The README.md of an exported folder: the run's own card, below what Hugging Face wants to know and how to load it."""

from headstock.interop.huggingface.architecture import Export
from headstock.report.markdown import escape_markdown
from headstock.train.run_folder import RunFolder
from headstock.train.settings import RunConfig

CLASSES = {  # by what a folder's head is called: the class that opens it
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForPreTraining": "AutoModelForPreTraining",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "MTModel": "AutoModelForSeq2SeqLM",
}
USES = {
    "text-classification": 'print(pipeline("text-classification", "{name}")("..."))',
    "token-classification": 'print(pipeline("token-classification", "{name}", aggregation_strategy="first")("..."))',
    "fill-mask": 'print(pipeline("fill-mask", "{name}")("... [MASK] ..."))',
    "text-generation": 'print(pipeline("text-generation", "{name}")("..."))',
    "feature-extraction": 'print(pipeline("feature-extraction", "{name}")("..."))',
}


def opens(head: str) -> str:
    return next((word for ending, word in CLASSES.items() if head.endswith(ending)), "AutoModel")


def card(run: RunFolder, chosen: RunConfig, made: Export, remarks: list[str]) -> str:
    """Front matter, how to load it, what to know, and what the run says of itself."""
    front = ["library_name: transformers"]
    front += [f"pipeline_tag: {made.pipeline}"] if made.pipeline else []
    front += ["tags:", "- headstock", f"- {made.model_type}"]
    name, auto = escape_markdown(run.path.name), opens(made.head)
    load = ["from transformers import AutoTokenizer, " + auto, ""]
    load += [f'model = {auto}.from_pretrained("FOLDER")', 'tokenizer = AutoTokenizer.from_pretrained("FOLDER")']
    if made.pipeline in USES:
        load += ["", "from transformers import pipeline", "", USES[made.pipeline].format(name="FOLDER")]
    told = "".join(f"\n- {remark}." for remark in remarks)
    body = own_words(run)
    return "\n".join(
        [
            "---",
            *front,
            "---",
            "",
            f"# {name}",
            "",
            f"The Headstock run {name} as `{made.head}`, with the same weights, the same tokens and the same answers.",
            *([told] if told else []),
            "",
            "```python",
            *load,
            "```",
            "",
            "`headstock import FOLDER --out RUN` makes a run of it again, to the last bit.",
            "",
            *([body] if body else []),
        ]
    )


def own_words(run: RunFolder) -> str:
    """The run's own card without its front matter, its headings one level down."""
    file = run.path / "README.md"
    if not file.is_file():
        return ""
    text = file.read_text(encoding="utf-8")
    if text.startswith("---\n"):
        text = text.partition("\n---\n")[2]
    lines = [f"#{line}" if line.startswith("#") else line for line in text.strip().splitlines()]
    return "\n".join(lines) + "\n"
