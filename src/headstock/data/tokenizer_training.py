"""Trains tokenizers of five kinds, deterministically: the same text always gives the same vocabulary."""

import io
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from headstock.data import urls
from headstock.data.tokenizer_backends import SPECIAL_TOKENS
from headstock.errors import ConfigError, UserError

NAMES = list(SPECIAL_TOKENS.values())
# Hyphens stay inside a word (avant-hier); any other punctuation mark and every line break is a token of its own.
WORDS = r"\w+(?:-\w+)*|\n|[^\w\s]"
WORD_PARTS = r"\w+|\n|[^\w\s]"
# A piece never spans these: line breaks, and the first characters of special tokens, so that none can be spelled.
BARRIERS = r"[\n\t\r<\[]"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MAX_VOCABULARY = 1 << 22  # several times the largest in use; the library allocates memory for every id
LONG_TEXT = 1 << 20  # characters; longer texts are split, so that memory does not grow with their length
MAX_SENTENCE = 100_000  # characters; SentencePiece ignores sentences above a limit in bytes


@dataclass(frozen=True)
class TokenizerSettings:
    """How to train a tokenizer of at most `vocabulary` tokens, or the `file` of an existing one."""

    kind: Literal["bpe", "unigram", "wordpiece", "word", "char"] = "bpe"  # algorithm
    vocabulary: int = 8000  # maximum size, with special tokens
    min_frequency: int = 2  # minimum count of pairs (bpe, wordpiece) or words (word); not used by unigram and char
    lowercase: bool = False  # lowercase the text
    strip_accents: bool = False  # remove accents
    file: str | None = None  # an existing tokenizer.json, SentencePiece .model or fairseq dict.txt

    def __post_init__(self) -> None:
        if self.file is not None:
            object.__setattr__(self, "file", urls.redact(self.file))
        problems = []
        minimum = len(NAMES) + {"bpe": 256, "unigram": 257}.get(self.kind, 1)
        if self.vocabulary < minimum:
            contents = f"{len(NAMES)} special tokens" + (" and 256 bytes" if self.kind in ("bpe", "unigram") else "")
            problems.append(("vocabulary", _too_small(self.kind, self.vocabulary, minimum, contents)))
        if self.vocabulary > MAX_VOCABULARY:
            problems.append(("vocabulary", f"must be at most {MAX_VOCABULARY:,}, not {self.vocabulary:,}"))
        if self.min_frequency < 1:
            problems.append(("min_frequency", f"must be at least 1, not {self.min_frequency}"))
        if problems:
            raise ConfigError(problems)


def train_library_tokenizer(texts: Iterable[str], settings: TokenizerSettings) -> Tokenizer:
    """Train a tokenizer of the `tokenizers` library in one pass over `texts`."""
    trainers_by_kind = {"bpe": _bpe, "unigram": _unigram, "wordpiece": _wordpiece, "word": _word, "char": _char}
    parts = (part for text in texts if not text.isspace() and text for part in _split_long(text))
    first = next(parts, None)
    if first is None:
        raise UserError("no text to train a tokenizer on: there is no document, or none with a letter in it")
    return trainers_by_kind[settings.kind](itertools.chain([first], parts), settings)


def _split_long(text: str) -> Iterator[str]:
    """Split a long text before a line break or a space that follows a word, where no word is split."""
    begin = 0
    while len(text) - begin > LONG_TEXT:
        end = begin + LONG_TEXT
        for space in ("\n", " "):
            boundary = text.rfind(space, begin + 1, end)
            while boundary > 0 and text[boundary - 1].isspace():
                boundary = text.rfind(space, begin + 1, boundary)
            if boundary > 0:
                end = boundary
                break
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _too_small(kind: str, size: int, minimum: int, contents: str) -> str:
    return f"{size} is too small for a {kind} tokenizer, which needs at least {minimum} ({contents})"


def _options(settings: TokenizerSettings) -> dict[str, Any]:
    """The options that all trainers share."""
    sizes = {"vocab_size": settings.vocabulary, "min_frequency": settings.min_frequency}
    return sizes | {"special_tokens": NAMES, "show_progress": False}


def _normalizer(settings: TokenizerSettings, *last: normalizers.Normalizer) -> normalizers.Sequence:
    steps: list[normalizers.Normalizer] = [normalizers.NFC()]
    if settings.lowercase:
        steps.append(normalizers.Lowercase())
    if settings.strip_accents:
        steps += [normalizers.NFD(), normalizers.StripAccents(), normalizers.NFC()]
    return normalizers.Sequence([*steps, *last])


def _bpe(texts: Iterator[str], settings: TokenizerSettings) -> Tokenizer:
    """Byte-level bpe, as in GPT-2: any text can be written and comes back exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = _normalizer(settings)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(initial_alphabet=alphabet, **_options(settings)))
    return tokenizer


def _word(texts: Iterator[str], settings: TokenizerSettings) -> Tokenizer:
    """Whole words and punctuation marks; words outside the vocabulary are <unk>."""
    tokenizer = Tokenizer(models.WordLevel(unk_token=SPECIAL_TOKENS["unk"]))
    tokenizer.normalizer = _normalizer(settings)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "removed", invert=True)
    tokenizer.decoder = _word_decoder()
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(**_options(settings)))
    return tokenizer


def _char(texts: Iterator[str], settings: TokenizerSettings) -> Tokenizer:
    """Single characters, the most frequent ones if not all fit.

    Implemented as BPE without merges, which is three times as fast as a word-level model of characters.
    """
    normalizer, counts = _normalizer(settings), Counter[str]()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    frequent = sorted(counts, key=lambda character: (-counts[character], character))
    vocabulary = {piece: i for i, piece in enumerate([*NAMES, *frequent][: settings.vocabulary])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=SPECIAL_TOKENS["unk"]))
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(NAMES)
    return tokenizer


def _wordpiece(texts: Iterator[str], settings: TokenizerSettings) -> Tokenizer:
    """WordPiece, as in BERT: all pieces of a word but the first begin with ##.

    The library's WordPiece trainer numbers the ## characters in hash-table order, so its result changes from run to
    run. BPE over words that begin with ▁ finds the same pieces deterministically.
    """
    # ideographs are words of their own, as in BERT
    normalizer = _normalizer(
        settings,
        normalizers.BertNormalizer(clean_text=False, handle_chinese_chars=True, strip_accents=False, lowercase=False),
    )
    split = pre_tokenizers.Split(Regex(WORD_PARTS), "removed", invert=True)
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizer
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.Metaspace(prepend_scheme="always", split=False)])
    bpe.train_from_iterator(texts, trainers.BpeTrainer(**_options(settings)))
    vocabulary = _wordpiece_vocabulary(bpe, settings.vocabulary)
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIAL_TOKENS["unk"], max_input_chars_per_word=100))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = _word_decoder()
    tokenizer.add_special_tokens(NAMES)
    return tokenizer


def _wordpiece_vocabulary(bpe: Tokenizer, size: int) -> dict[str, int]:
    """WordPiece's vocabulary from that of BPE: ▁ marks first pieces there, ## the other pieces here."""
    ids = bpe.get_vocab()
    learned = sorted(ids, key=ids.__getitem__)[len(NAMES) :]
    characters = [piece for piece in learned if len(piece) == 1 and piece != "▁"]
    minimum = len(NAMES) + 2 * len(characters)
    if size < minimum:
        contents = f"{len(NAMES)} special tokens and {len(characters)} characters, each as first and as ## piece"
        raise UserError(f"vocabulary: {_too_small('wordpiece', size, minimum, contents)}")
    longer = [piece[1:] if piece.startswith("▁") else f"##{piece}" for piece in learned if len(piece) > 1]
    pieces = dict.fromkeys([*NAMES, *characters, *(f"##{character}" for character in characters), *longer])
    return {piece: i for i, piece in enumerate(list(pieces)[:size])}


def _word_decoder() -> decoders.Sequence:
    """Joins pieces to words and words to text, without spaces before full stops, in brackets or at apostrophes."""
    rules = [r" (?=[.,;:!?…%)\]}”’'\n])", r"(?<=[(\[{“’'\n]) "]
    remove_spaces = [decoders.Replace(Regex(rule), "") for rule in rules]
    return decoders.Sequence([decoders.WordPiece(prefix="##", cleanup=False), decoders.Fuse(), *remove_spaces])


def _unigram(texts: Iterator[str], settings: TokenizerSettings) -> Tokenizer:
    """Unigram pieces with byte fallback.

    Trained by SentencePiece and run by `tokenizers`, whose own trainer is not deterministic and five times slower.
    """
    normalizer = _normalizer(settings)
    pieces = _train_unigram(texts, normalizer, settings.vocabulary - len(NAMES))
    vocabulary = [(name, 0.0) for name in [*NAMES, *BYTES]] + pieces
    tokenizer = Tokenizer(models.Unigram(vocabulary, NAMES.index(SPECIAL_TOKENS["unk"]), byte_fallback=True))
    # words get the same tokens at the start of a text as inside it
    tokenizer.normalizer = _normalizer(settings, normalizers.Prepend("▁"))
    barriers = pre_tokenizers.Split(Regex(BARRIERS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="never"), barriers])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(NAMES)
    return tokenizer


def _train_unigram(texts: Iterator[str], normalizer: normalizers.Normalizer, size: int) -> list[tuple[str, float]]:
    import sentencepiece

    def sentences() -> Iterator[str]:
        for text in texts:
            for part in re.split(BARRIERS, normalizer.normalize_str(text)):
                for begin in range(0, len(part), MAX_SENTENCE):
                    yield part[begin : begin + MAX_SENTENCE]

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(),
            model_writer=model,
            model_type="unigram",
            vocab_size=size + 1,  # with SentencePiece's own <unk>
            hard_vocab_limit=False,
            bos_id=-1,
            eos_id=-1,
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=4 * MAX_SENTENCE,
            num_threads=4,  # fixed, because the last bits of the scores depend on it
            minloglevel=3,
        )
    except RuntimeError as error:
        if sizes := re.search(r"smaller than required_chars. (\d+) vs (\d+)", str(error)):
            minimum = int(sizes[2]) - 1 + len(NAMES)
            contents = f"{len(NAMES)} special tokens, 256 bytes and {minimum - len(NAMES) - 256} characters"
            raise UserError(f"vocabulary: {_too_small('unigram', size + len(NAMES), minimum, contents)}") from None
        raise UserError(f"SentencePiece cannot train on this text ({error})") from None
    learned = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ordinary = [i for i in range(learned.get_piece_size()) if not (learned.is_unknown(i) or learned.is_byte(i))]
    # the library's JSON parser is exact only for short decimals
    return [(learned.id_to_piece(i), round(learned.get_score(i), 5)) for i in ordinary]
