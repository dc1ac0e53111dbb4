"""Which tokens play which part: the seven every tokenizer trained here has, and the names others give them."""

from collections.abc import Callable

# The first four stand where the course lab has them; all families share one tokenizer, so all seven are always there.
SPECIALS = {
    "start": "<sos>",
    "padding": "<pad>",
    "end": "<eos>",
    "unknown": "<unk>",
    "cls": "[CLS]",
    "separator": "[SEP]",
    "mask": "[MASK]",
}

# Names in the order they are looked for. GPT-2's one token serves as start and end; RoBERTa's and CamemBERT's <s> and
# </s> serve as [CLS] and [SEP].
USUAL_NAMES = {
    "start": ("<sos>", "<s>", "<bos>", "[BOS]", "<|startoftext|>", "<|begin_of_text|>", "<|endoftext|>"),
    "padding": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>"),
    "end": ("<eos>", "</s>", "[EOS]", "<|end_of_text|>", "<|endoftext|>"),
    "unknown": ("<unk>", "[UNK]", "<oov>", "<|unk|>"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "separator": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
}


def find_roles(id_of: Callable[[str], int | None]) -> dict[str, int]:
    """The roles whose token a vocabulary has, by the usual names."""
    roles = {}
    for role, names in USUAL_NAMES.items():
        ids = (id_of(name) for name in names)
        found = next((i for i in ids if i is not None), None)
        if found is not None:
            roles[role] = found
    return roles
