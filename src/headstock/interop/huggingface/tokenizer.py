"""A run's tokenizer as Hugging Face reads it, with the marks that the run puts around texts; and theirs as ours."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from headstock.config import malformed_as_user_error, read_settings
from headstock.data.sentencepiece_tokenizer import SentencePieceBackend
from headstock.data.special_tokens import SPECIAL_TOKENS
from headstock.data.tokenizer import Tokenizer, TokenizersBackend, open_tokenizer, rust_errors
from headstock.errors import UserError
from headstock.tasks.base import Task
from headstock.tasks.labelled import separator_id
from headstock.tasks.special_tokens import special_tokens_for

ROLES = {  # ours: theirs
    "bos": "bos_token",
    "eos": "eos_token",
    "pad": "pad_token",
    "unk": "unk_token",
    "cls": "cls_token",
    "sep": "sep_token",
    "mask": "mask_token",
}


def tokenizer_problems(tokenizer: Tokenizer) -> list[str]:
    if tokenizer.source_tokenizer is not None:
        return ["source and target have tokenizers of their own, and there one cuts both"]
    if not isinstance(tokenizer.backend, TokenizersBackend):
        return [
            f"its tokenizer ({tokenizer.kind}) is run by SentencePiece, whose cuts tokenizer.json does not hold exactly"
        ]
    return []


def tokenizer_files(tokenizer: Tokenizer, task: Task, *, length: int, segments: bool) -> dict[str, str]:
    """tokenizer.json and what stands beside it, by file name."""
    library = tokenizers.Tokenizer.from_str(tokenizer.backend.to_json())
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
        # a text may spell out [MASK] only where that is what it is for
        "split_special_tokens": not task.fills_masks,
        **special,
    }
    return {
        "tokenizer.json": library.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
        "special_tokens_map.json": json.dumps(special, indent=2, ensure_ascii=False) + "\n",
    }


def special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    return {
        theirs: tokenizer.id_to_token(number)
        for role, theirs in ROLES.items()
        if (number := getattr(tokenizer, role)) is not None
    }


def template(tokenizer: Tokenizer, task: Task) -> processors.PostProcessor:
    """The marks around one text and around two, as the run reads them."""
    if task.needs_encoder_decoder:
        assert tokenizer.eos is not None
        single, pair, used = ["$A", tokenizer.eos], ["$A", "$B", tokenizer.eos], {tokenizer.eos}
    else:
        marks = special_tokens_for(task, tokenizer, left_to_right=task.generates)
        opening = getattr(task, "bos", marks.prefix[0]) if not task.generates else marks.prefix[0]
        closing = getattr(task, "suffix", marks.suffix)
        separator = separator_id(tokenizer)
        single = [opening, "$A", *closing]
        pair = [opening, "$A:0", separator, "$B:1", f"{tokenizer.id_to_token(separator)}:1"]
        used = {opening, separator, *closing}

    def spelled(parts: list[Any]) -> list[str]:
        return [tokenizer.id_to_token(part) if isinstance(part, int) else part for part in parts]

    return processors.TemplateProcessing(
        single=spelled(single),
        pair=spelled(pair),
        special_tokens=[(tokenizer.id_to_token(number), number) for number in sorted(used)],
    )


def read_tokenizer(folder: Path) -> Tokenizer:
    """Their tokenizer, from whichever files it is kept in."""
    if (folder / "tokenizer.json").is_file():
        return open_tokenizer(folder / "tokenizer.json")
    try:
        with malformed_as_user_error(folder, "a tokenizer"), rust_errors():
            return _read_parts(folder)
    except (RuntimeError, OSError) as wrong:
        raise UserError(f"{folder}: its tokenizer cannot be read ({wrong})") from None


def _read_parts(folder: Path) -> Tokenizer:
    """A tokenizer that is kept in several files, as older versions of transformers wrote it."""
    settings = read_settings(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    if (folder / "source.spm").is_file():
        return marian_tokenizer(folder, settings)
    if (folder / "vocab.txt").is_file():
        return opened(wordpiece(folder / "vocab.txt", settings))
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return opened(byte_pairs(folder, settings))
    return open_tokenizer(folder)


def opened(library: tokenizers.Tokenizer) -> Tokenizer:
    return (
        Tokenizer(TokenizersBackend(library)) if "eos" in TokenizersBackend(library).special_ids else with_end(library)
    )


def with_end(library: tokenizers.Tokenizer) -> Tokenizer:
    library.add_special_tokens([SPECIAL_TOKENS["eos"]])
    return Tokenizer(TokenizersBackend(library))


def wordpiece(file: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """BERT's, from the list of its pieces."""
    pieces = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    unknown = named(settings, "unk_token", "[UNK]")
    library = tokenizers.Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token=unknown))
    library.normalizer = normalizers.BertNormalizer(
        lowercase=settings.get("do_lower_case", True),
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix="##")
    library.add_special_tokens([one for one in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if one in pieces])
    return library


def byte_pairs(folder: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """GPT-2's, RoBERTa's and BART's, from their vocabulary and merges."""
    model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.get("add_prefix_space", False))
    library.decoder = decoders.ByteLevel()
    usual = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>")
    there = [one for one in usual if library.token_to_id(one) is not None]
    library.add_special_tokens(
        [tokenizers.AddedToken(one, lstrip=one == "<mask>", special=True, normalized=False) for one in there]
    )
    return library


def named(settings: Mapping[str, Any], role: str, usual: str) -> str:
    """A special token's spelling; the settings have it bare or with its ways."""
    found = settings.get(role, usual)
    return found["content"] if isinstance(found, dict) else found


def marian_tokenizer(folder: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """Marian's: one list of pieces, and a SentencePiece model for each side. Its decoder begins with the padding."""
    numbers = read_settings(folder / "vocab.json")
    pieces = sorted(numbers, key=numbers.__getitem__)
    if [numbers[piece] for piece in pieces] != list(range(len(pieces))):
        raise UserError(f"{folder / 'vocab.json'}: its numbers leave some out")
    padding = numbers[named(settings, "pad_token", "<pad>")]
    roles = {"bos": padding, "pad": padding, "eos": numbers["</s>"], "unk": numbers["<unk>"]}
    sides = [
        Tokenizer(SentencePieceBackend(pieces, roles, (folder / name).read_bytes(), kind="sentencepiece"))
        for name in ("target.spm", "source.spm")
    ]
    sides[0].source_tokenizer = sides[1]
    return sides[0]
