"""The README.md of an exported folder: Hugging Face metadata, how to load it, and the run's own model card."""

from headstock.interop.huggingface.architecture import ExportSpec
from headstock.markdown import escape_markdown
from headstock.train.run_folder import RunFolder

AUTO_CLASSES = {  # ending of the model class: Auto class
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
EXAMPLES = {
    "text-classification": 'print(pipeline("text-classification", "FOLDER")("..."))',
    "token-classification": 'print(pipeline("token-classification", "FOLDER", aggregation_strategy="first")("..."))',
    "fill-mask": 'print(pipeline("fill-mask", "FOLDER")("... [MASK] ..."))',
    "text-generation": 'print(pipeline("text-generation", "FOLDER")("..."))',
    "feature-extraction": 'print(pipeline("feature-extraction", "FOLDER")("..."))',
}


def auto_class(head: str) -> str:
    return next((name for ending, name in AUTO_CLASSES.items() if head.endswith(ending)), "AutoModel")


def export_card(run: RunFolder, spec: ExportSpec, notes: list[str]) -> str:
    name, auto = escape_markdown(run.path.name), auto_class(spec.head)
    lines = ["---", "library_name: transformers"]
    lines += [f"pipeline_tag: {spec.pipeline}"] if spec.pipeline else []
    lines += ["tags:", "- headstock", f"- {spec.model_type}", "---", "", f"# {name}", ""]
    lines += [f"The Headstock run {name} as `{spec.head}`, with identical weights, tokens and outputs."]
    lines += ["", *(f"- {note}." for note in notes)] if notes else []
    lines += ["", "```python", f"from transformers import AutoTokenizer, {auto}", ""]
    lines += [f'model = {auto}.from_pretrained("FOLDER")', 'tokenizer = AutoTokenizer.from_pretrained("FOLDER")']
    if spec.pipeline in EXAMPLES:
        lines += ["", "from transformers import pipeline", "", EXAMPLES[spec.pipeline]]
    lines += ["```", "", "`headstock import FOLDER --out RUN` restores the run bit for bit.", ""]
    return "\n".join([*lines, *model_card_body(run)])


def model_card_body(run: RunFolder) -> list[str]:
    """The run's own card without its front matter, headings one level down."""
    file = run.path / "README.md"
    if not file.is_file():
        return []
    text = file.read_text(encoding="utf-8")
    if text.startswith("---\n"):
        text = text.partition("\n---\n")[2]
    return [*(f"#{line}" if line.startswith("#") else line for line in text.strip().splitlines()), ""]
