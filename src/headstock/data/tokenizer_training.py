"""Learns a vocabulary from a stream of text, five ways; the same text always gives the same vocabulary."""

import io
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from headstock.data.special_tokens import SPECIAL_TOKENS
from headstock.errors import ConfigError, UserError

NAMES = list(SPECIAL_TOKENS.values())
# Hyphens stay inside a word (avant-hier), any other mark and every line break is a token of its own.
WORDS = r"\w+(?:-\w+)*|\n|[^\w\s]"
WORD_PARTS = r"\w+|\n|[^\w\s]"
# A piece may not run across these: line breaks, and what our special tokens begin with, so that none can be spelled.
BARRIERS = r"[\n\t\r<\[]"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MOST_ENTRIES = 1 << 22  # several times the largest vocabulary in use; the library reserves memory for all of them
LONG_TEXT = 1 << 20  # characters; longer texts are learned from in parts, so that memory does not grow with a text
LONGEST_SENTENCE = 100_000  # characters; SentencePiece leaves out sentences above a limit in bytes


@dataclass(frozen=True)
class TokenizerSettings:
    """How to make a tokenizer; `vocabulary` is the most it may have, `file` takes a finished one instead."""

    kind: Literal["bpe", "unigram", "wordpiece", "word", "char"] = "bpe"
    vocabulary: int = 8000
    min_frequency: int = 2  # of pairs (bpe, wordpiece) or words (word); the other two do not count this way
    lowercase: bool = False
    strip_accents: bool = False
    file: str | None = None

    def __post_init__(self) -> None:
        problems = []
        least = len(NAMES) + {"bpe": 256, "unigram": 257}.get(self.kind, 1)
        if self.vocabulary < least:
            kept = f"{len(NAMES)} special tokens" + (" and 256 bytes" if self.kind in ("bpe", "unigram") else "")
            problems.append(("vocabulary", _too_small(self.kind, self.vocabulary, least, kept)))
        if self.vocabulary > MOST_ENTRIES:
            problems.append(("vocabulary", f"must be at most {MOST_ENTRIES:,}, not {self.vocabulary:,}"))
        if self.min_frequency < 1:
            problems.append(("min_frequency", f"must be at least 1, not {self.min_frequency}"))
        if problems:
            raise ConfigError(problems)


def learn(texts: Iterable[str], settings: TokenizerSettings) -> Tokenizer:
    """A tokenizer of the `tokenizers` library, from one pass over `texts`."""
    ways = {"bpe": _bpe, "unigram": _unigram, "wordpiece": _wordpiece, "word": _word, "char": _char}
    spoken = (part for text in texts if not text.isspace() and text for part in _parts(text))
    first = next(spoken, None)
    if first is None:
        raise UserError("no text to train a tokenizer on: there is no document, or none with a letter in it")
    return ways[settings.kind](itertools.chain([first], spoken), settings)


def _parts(text: str) -> Iterator[str]:
    """A long text cut before a line end or a space that follows a word, where no tokenizer's words are cut in two."""
    begin = 0
    while len(text) - begin > LONG_TEXT:
        end = begin + LONG_TEXT
        for space in ("\n", " "):
            at = text.rfind(space, begin + 1, end)
            while at > 0 and text[at - 1].isspace():
                at = text.rfind(space, begin + 1, at)
            if at > 0:
                end = at
                break
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _too_small(kind: str, got: int, least: int, kept: str) -> str:
    return f"{got} is too small for a {kind} tokenizer: the least is {least} ({kept})"


def _spelling(settings: TokenizerSettings, *more: normalizers.Normalizer) -> normalizers.Sequence:
    steps: list[normalizers.Normalizer] = [normalizers.NFC()]
    if settings.lowercase:
        steps.append(normalizers.Lowercase())
    if settings.strip_accents:
        steps += [normalizers.NFD(), normalizers.StripAccents(), normalizers.NFC()]
    return normalizers.Sequence([*steps, *more])


def _bpe(texts: Iterator[str], settings: TokenizerSettings) -> Tokenizer:
    """Byte-level pairs, as in GPT-2: any text can be written and comes back exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = _spelling(settings)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocabulary,
        min_frequency=settings.min_frequency,
        special_tokens=NAMES,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _word(texts: Iterator[str], settings: TokenizerSettings) -> Tokenizer:
    """Whole words and marks; those too rare for the vocabulary are <unk>."""
    tokenizer = Tokenizer(models.WordLevel(unk_token=SPECIAL_TOKENS["unk"]))
    tokenizer.normalizer = _spelling(settings)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "removed", invert=True)
    tokenizer.decoder = _joining()
    trainer = trainers.WordLevelTrainer(
        vocab_size=settings.vocabulary,
        min_frequency=settings.min_frequency,
        special_tokens=NAMES,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _char(texts: Iterator[str], settings: TokenizerSettings) -> Tokenizer:
    """Single characters, all that were seen if they fit, the most frequent otherwise.

    Pairs without a single merge: the same as a word for each character, at three times the speed.
    """
    spelling, counts = _spelling(settings), Counter[str]()
    for text in texts:
        counts.update(spelling.normalize_str(text))
    frequent = sorted(counts, key=lambda character: (-counts[character], character))
    vocabulary = {piece: i for i, piece in enumerate([*NAMES, *frequent][: settings.vocabulary])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=SPECIAL_TOKENS["unk"]))
    tokenizer.normalizer = spelling
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(NAMES)
    return tokenizer


def _wordpiece(texts: Iterator[str], settings: TokenizerSettings) -> Tokenizer:
    """BERT's pieces: a word's first piece is bare, the others begin with ##.

    The library's own trainer numbers the ## characters in the order of a hash table, so its result changes from run
    to run. Pairs learned over words that begin with a mark are the same pieces, and always come out the same.
    """
    # the ideographs of Chinese are words of their own, as in BERT
    spelling = _spelling(
        settings,
        normalizers.BertNormalizer(clean_text=False, handle_chinese_chars=True, strip_accents=False, lowercase=False),
    )
    cut = pre_tokenizers.Split(Regex(WORD_PARTS), "removed", invert=True)
    pairs = Tokenizer(models.BPE())
    pairs.normalizer = spelling
    pairs.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.Metaspace(prepend_scheme="always", split=False)])
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocabulary,
        min_frequency=settings.min_frequency,
        special_tokens=NAMES,
        show_progress=False,
    )
    pairs.train_from_iterator(texts, trainer)
    vocabulary = _pieces_of_words(pairs, settings.vocabulary)
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIAL_TOKENS["unk"], max_input_chars_per_word=100))
    tokenizer.normalizer = spelling
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = _joining()
    tokenizer.add_special_tokens(NAMES)
    return tokenizer


def _pieces_of_words(pairs: Tokenizer, size: int) -> dict[str, int]:
    ids = pairs.get_vocab()
    learned = sorted(ids, key=ids.__getitem__)[len(NAMES) :]
    single = [piece for piece in learned if len(piece) == 1 and piece != "▁"]
    least = len(NAMES) + 2 * len(single)
    if size < least:
        kept = f"{len(NAMES)} special tokens and {len(single)} characters, each at the start of and inside a word"
        raise UserError(f"vocabulary: {_too_small('wordpiece', size, least, kept)}")
    longer = [piece for piece in learned if len(piece) > 1]
    spelled = [piece[1:] if piece.startswith("▁") else f"##{piece}" for piece in longer]
    every = dict.fromkeys([*NAMES, *single, *(f"##{piece}" for piece in single), *spelled])
    return {piece: i for i, piece in enumerate(list(every)[:size])}


def _joining() -> decoders.Sequence:
    """Pieces to words, words to text: no space before a full stop, inside brackets, at apostrophes or line breaks."""
    rules = [r" (?=[.,;:!?…%)\]}”’'\n])", r"(?<=[(\[{“’'\n]) "]
    close_up = [decoders.Replace(Regex(rule), "") for rule in rules]
    return decoders.Sequence([decoders.WordPiece(prefix="##", cleanup=False), decoders.Fuse(), *close_up])


def _unigram(texts: Iterator[str], settings: TokenizerSettings) -> Tokenizer:
    """SentencePiece's unigram pieces; characters that are not among them are written as bytes.

    Learned by SentencePiece and run by `tokenizers`, because the latter's trainer gives other scores each time and
    takes five times as long.
    """
    spelling = _spelling(settings)
    pieces = _learn_unigram(texts, spelling, settings.vocabulary - len(NAMES))
    vocabulary = [(name, 0.0) for name in [*NAMES, *BYTES]] + pieces
    tokenizer = Tokenizer(models.Unigram(vocabulary, NAMES.index(SPECIAL_TOKENS["unk"]), byte_fallback=True))
    # a word is spelled the same at the start of a text as inside it
    tokenizer.normalizer = _spelling(settings, normalizers.Prepend("▁"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="never"),
            pre_tokenizers.Split(Regex(BARRIERS), "isolated"),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(NAMES)
    return tokenizer


def _learn_unigram(texts: Iterator[str], spelling: normalizers.Normalizer, size: int) -> list[tuple[str, float]]:
    import sentencepiece

    def sentences() -> Iterator[str]:
        for text in texts:
            for part in re.split(BARRIERS, spelling.normalize_str(text)):
                for begin in range(0, len(part), LONGEST_SENTENCE):
                    yield part[begin : begin + LONGEST_SENTENCE]

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(),
            model_writer=model,
            model_type="unigram",
            vocab_size=size + 1,  # its own <unk>
            hard_vocab_limit=False,
            bos_id=-1,
            eos_id=-1,
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=4 * LONGEST_SENTENCE,
            num_threads=4,  # the last bits of the scores depend on it, so it is not left to the machine
            minloglevel=3,
        )
    except RuntimeError as wrong:
        if sizes := re.search(r"smaller than required_chars. (\d+) vs (\d+)", str(wrong)):
            least = int(sizes[2]) - 1 + len(NAMES)
            kept = f"{len(NAMES)} special tokens, 256 bytes and {least - len(NAMES) - 256} characters"
            raise UserError(f"vocabulary: {_too_small('unigram', size + len(NAMES), least, kept)}") from None
        raise UserError(f"SentencePiece can learn nothing from this text ({wrong})") from None
    learned = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ordinary = [i for i in range(learned.get_piece_size()) if not (learned.is_unknown(i) or learned.is_byte(i))]
    # the library's JSON reader is exact only for short decimals
    return [(learned.id_to_piece(i), round(learned.get_score(i), 5)) for i in ordinary]
