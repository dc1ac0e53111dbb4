"""Which tokens play which part: the seven every tokenizer trained here has, and the names others give them."""

from collections.abc import Callable

# The first four stand where the course lab has them; all families share one tokenizer, so all seven are always there.
SPECIAL_TOKENS = {
    "bos": "<sos>",
    "pad": "<pad>",
    "eos": "<eos>",
    "unk": "<unk>",
    "cls": "[CLS]",
    "sep": "[SEP]",
    "mask": "[MASK]",
}

# Names in the order they are looked for. GPT-2's one token serves as start and end; RoBERTa's and CamemBERT's <s> and
# </s> serve as [CLS] and [SEP].
USUAL_NAMES = {
    "bos": ("<sos>", "<s>", "<bos>", "[BOS]", "<|startoftext|>", "<|begin_of_text|>", "<|endoftext|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>"),
    "eos": ("<eos>", "</s>", "[EOS]", "<|end_of_text|>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]", "<oov>", "<|unk|>"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
}


def find_special_ids(id_of: Callable[[str], int | None]) -> dict[str, int]:
    """The roles whose token a vocabulary has, by the usual names."""
    roles = {}
    for role, names in USUAL_NAMES.items():
        ids = (id_of(name) for name in names)
        found = next((i for i in ids if i is not None), None)
        if found is not None:
            roles[role] = found
    return roles
