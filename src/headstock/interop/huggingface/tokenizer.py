"""Writes a run's tokenizer for Hugging Face, with its special tokens, and reads Hugging Face tokenizers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from headstock.config import malformed_as_user_error, quote, read_settings
from headstock.data.mask_gaps import SurfaceForms
from headstock.data.tokenizer import Tokenizer, open_tokenizer
from headstock.data.tokenizer_backends import SPECIAL_TOKENS, SentencePieceBackend, TokenizersBackend, rust_errors
from headstock.data.tokenizer_training import MAX_VOCABULARY
from headstock.errors import UserError
from headstock.tasks.base import Task
from headstock.tasks.special_tokens import separator_id, special_tokens_for

ROLES = {  # ours: theirs
    "bos": "bos_token",
    "eos": "eos_token",
    "pad": "pad_token",
    "unk": "unk_token",
    "cls": "cls_token",
    "sep": "sep_token",
    "mask": "mask_token",
}

MASK_SPACE = "mask_includes_space"  # in tokenizer_config.json: set by an export, undone by an import


def tokenizer_problems(tokenizer: Tokenizer) -> list[str]:
    if tokenizer.source_tokenizer is not None:
        return ["source and target have different tokenizers, but transformers expects one"]
    if not isinstance(tokenizer.backend, TokenizersBackend):
        return [
            f"its tokenizer ({tokenizer.kind}) runs in SentencePiece, which tokenizer.json cannot reproduce exactly"
        ]
    return []


def tokenizer_files(tokenizer: Tokenizer, task: Task, *, length: int, segments: bool) -> dict[str, str]:
    """The contents of tokenizer.json and its companion files, by file name."""
    text = tokenizer.backend.to_json()
    if mask_space := mask_includes_space(tokenizer, task):
        text = with_mask_space(text, includes_space=True)
    library = tokenizers.Tokenizer.from_str(text)
    library.post_processor = template(tokenizer, task)
    names = ["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"]
    special = special_tokens(tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "padding_side": "right",
        "truncation_side": "left" if getattr(task.config, "long", None) == "tail" else "right",
        "clean_up_tokenization_spaces": False,
        "model_input_names": names,
        # [MASK] in a text is a special token only for models that fill masks
        "split_special_tokens": not task.fills_masks,
        **special,
        **({MASK_SPACE: True} if mask_space else {}),
    }
    return {
        "tokenizer.json": library.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
        "special_tokens_map.json": json.dumps(special, indent=2, ensure_ascii=False) + "\n",
    }


def mask_includes_space(tokenizer: Tokenizer, task: Task) -> bool:
    """Whether a mask stands for words that include the space before them, which it must then include as well."""
    return task.fills_masks and tokenizer.mask is not None and SurfaceForms(tokenizer).words_include_space


def with_mask_space(library: str, *, includes_space: bool) -> str:
    """A tokenizer.json whose mask token includes the space before it, or does not."""
    tree = json.loads(library)
    for token in tree["added_tokens"]:
        if token["content"] == SPECIAL_TOKENS["mask"]:
            token["lstrip"] = includes_space
    return json.dumps(tree, ensure_ascii=False)


def special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    return {
        theirs: tokenizer.id_to_token(number)
        for role, theirs in ROLES.items()
        if (number := getattr(tokenizer, role)) is not None
    }


def template(tokenizer: Tokenizer, task: Task) -> processors.PostProcessor:
    """The special tokens around one text and around a pair of texts, as in training."""
    if task.needs_encoder_decoder:
        assert tokenizer.eos is not None
        single, pair, used = ["$A", tokenizer.eos], ["$A", "$B", tokenizer.eos], {tokenizer.eos}
    else:
        special = special_tokens_for(task, tokenizer, left_to_right=task.generates)
        first = special.prefix[0] if task.generates else getattr(task, "bos", special.prefix[0])
        suffix = getattr(task, "suffix", special.suffix)
        separator = separator_id(tokenizer)
        single = [first, "$A", *suffix]
        pair = [first, "$A:0", separator, "$B:1", f"{tokenizer.id_to_token(separator)}:1"]
        used = {first, separator, *suffix}

    def names(parts: list[Any]) -> list[str]:
        return [tokenizer.id_to_token(part) if isinstance(part, int) else part for part in parts]

    return processors.TemplateProcessing(
        single=names(single),
        pair=names(pair),
        special_tokens=[(tokenizer.id_to_token(number), number) for number in sorted(used)],
    )


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, from tokenizer.json or from the files of older versions."""
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if file.is_file():
        tokenizer = open_tokenizer(file)
        if settings.is_file() and read_settings(settings).get(MASK_SPACE):  # as the run had it
            text = with_mask_space(tokenizer.backend.to_json(), includes_space=False)
            tokenizer = Tokenizer(TokenizersBackend(tokenizers.Tokenizer.from_str(text)))
        return tokenizer
    try:
        with malformed_as_user_error(folder, "a tokenizer"), rust_errors():
            return read_legacy_files(folder)
    except (RuntimeError, OSError) as error:
        raise UserError(f"{folder}: its tokenizer cannot be read ({error})") from None


def read_legacy_files(folder: Path) -> Tokenizer:
    """A tokenizer in the files that older versions of transformers wrote."""
    settings = read_settings(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    if (folder / "source.spm").is_file():
        return marian_tokenizer(folder, settings)
    if (folder / "spiece.model").is_file() and read_settings(folder / "config.json").get("model_type") == "t5":
        return t5_tokenizer(folder / "spiece.model", settings)
    if (folder / "vocab.txt").is_file():
        return with_eos(wordpiece(folder / "vocab.txt", settings))
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return with_eos(byte_pairs(folder, settings))
    return open_tokenizer(folder)


def with_eos(library: tokenizers.Tokenizer) -> Tokenizer:
    """The tokenizer, with an end-of-sequence token added if it has none."""
    if "eos" not in TokenizersBackend(library).special_ids:
        library.add_special_tokens([SPECIAL_TOKENS["eos"]])
    return Tokenizer(TokenizersBackend(library))


def wordpiece(file: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """A BERT tokenizer from vocab.txt."""
    pieces = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    unknown = token_name(settings, "unk_token", "[UNK]")
    library = tokenizers.Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token=unknown))
    library.normalizer = normalizers.BertNormalizer(
        lowercase=settings.get("do_lower_case", True),
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix="##")
    library.add_special_tokens([token for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if token in pieces])
    return library


def byte_pairs(folder: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """A GPT-2, RoBERTa or BART tokenizer from vocab.json and merges.txt."""
    check_ids(folder / "vocab.json", read_settings(folder / "vocab.json"))
    model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.get("add_prefix_space", False))
    library.decoder = decoders.ByteLevel()
    special = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>")
    library.add_special_tokens(
        [
            tokenizers.AddedToken(name, lstrip=name == "<mask>", special=True, normalized=False)
            for name in special
            if library.token_to_id(name) is not None
        ]
    )
    return library


def check_ids(file: Path, ids: Mapping[str, Any]) -> None:
    """Refuse ids that are not those of a vocabulary: the library allocates memory up to the largest."""
    largest = max((number for number in ids.values() if isinstance(number, int)), default=0)
    if largest >= MAX_VOCABULARY:
        raise UserError(f"{file}: contains the id {largest:,}, expected ids below {MAX_VOCABULARY:,}")


def token_name(settings: Mapping[str, Any], role: str, default: str) -> str:
    """A special token, which tokenizer_config.json holds as a string or as an object."""
    token = settings.get(role, default)
    return token["content"] if isinstance(token, dict) else token


def marian_tokenizer(folder: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """A Marian tokenizer: one vocabulary and a SentencePiece model per side; decoding starts with the padding."""
    ids = read_settings(folder / "vocab.json")
    pieces = sorted(ids, key=ids.__getitem__)
    if [ids[piece] for piece in pieces] != list(range(len(pieces))):
        raise UserError(f"{folder / 'vocab.json'}: its ids are not consecutive")
    padding = ids[token_name(settings, "pad_token", "<pad>")]
    roles = {"bos": padding, "pad": padding, "eos": ids["</s>"], "unk": ids["<unk>"]}
    sides = [
        Tokenizer(SentencePieceBackend(pieces, roles, (folder / name).read_bytes(), kind="sentencepiece"))
        for name in ("target.spm", "source.spm")
    ]
    sides[0].source_tokenizer = sides[1]
    return sides[0]


def t5_tokenizer(file: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """A T5 tokenizer: a SentencePiece model, then the sentinels from the last to the first."""
    model = file.read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(number) for number in range(processor.get_piece_size())]
    sentinels = settings.get("extra_ids", 100)
    if not isinstance(sentinels, int) or not 0 < sentinels < MAX_VOCABULARY:
        raise UserError(f"{file}: extra_ids is {quote(sentinels)}, expected a number below {MAX_VOCABULARY:,}")
    pieces += [f"<extra_id_{number}>" for number in reversed(range(sentinels))]
    roles = {"pad": processor.pad_id(), "eos": processor.eos_id(), "unk": processor.unk_id()}
    if missing := [role for role, number in roles.items() if number < 0]:
        raise UserError(f"{file}: has no {' and no '.join(missing)} token, which a T5 model needs")
    roles |= {"bos": roles["pad"], "mask": pieces.index("<extra_id_0>")}
    return Tokenizer(SentencePieceBackend(pieces, roles, model, kind="sentencepiece"))
