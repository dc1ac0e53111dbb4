"""The seven special tokens of our tokenizers, and the names that other tokenizers give them."""

from collections.abc import Callable

# The first four have the ids of the course lab. Every tokenizer has all seven, because all model families share it.
SPECIAL_TOKENS = {
    "bos": "<sos>",
    "pad": "<pad>",
    "eos": "<eos>",
    "unk": "<unk>",
    "cls": "[CLS]",
    "sep": "[SEP]",
    "mask": "[MASK]",
}

# In order of preference. GPT-2's one token is both bos and eos; RoBERTa's and CamemBERT's <s> and </s> are also cls and
# sep.
COMMON_NAMES = {
    "bos": ("<sos>", "<s>", "<bos>", "[BOS]", "<|startoftext|>", "<|begin_of_text|>", "<|endoftext|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>"),
    "eos": ("<eos>", "</s>", "[EOS]", "<|end_of_text|>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]", "<oov>", "<|unk|>"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
}


def find_special_ids(token_to_id: Callable[[str], int | None]) -> dict[str, int]:
    """The special tokens of a vocabulary, by role."""
    special_ids = {}
    for role, names in COMMON_NAMES.items():
        ids = (token_to_id(name) for name in names)
        number = next((i for i in ids if i is not None), None)
        if number is not None:
            special_ids[role] = number
    return special_ids
