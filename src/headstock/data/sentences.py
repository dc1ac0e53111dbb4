"""Splits French and English text into sentences by rules.

A sentence ends at . ! ? … (and closing quotes and brackets) before white space and something that can begin a
sentence: a capital, a digit or a currency sign, after any opening quotes, brackets and dashes. A lower-case letter
continues the sentence: `« Oui ? » dit-il.` is one sentence. Only in a text without any capital does a single mark
suffice.

A blank line always ends a sentence, as does a line break before a list item (`- `, `• `, `2. `, `b) `). Any other line
break without a final mark ends one only before a capital, and only if the line is not a wrapped one: it is shorter than
MIN_WRAPPED (a title) or longer than MAX_WRAPPED (a paragraph), and does not end with a comma, a colon or the like.
"""

import re

MIN_WRAPPED, MAX_WRAPPED = 50, 100  # length of lines that a program may have wrapped
LOOKBEHIND = 14  # characters in which an abbreviation and the word before it are searched
CONTINUES_LINE = frozenset(",;:-–—&/(«“")  # a line that ends with one of these continues

# Possessive quantifiers (++ and *+) prevent backtracking, so the time is linear in the length of the text.
CANDIDATE = re.compile(
    r"""(?P<stop>[.!?…] (?:[.!?…"'”’»)\]]++ | [\ \u00a0\u202f]++(?=[»”)\]]))*+) (?P<space>\s*+) | \n\s*+""", re.VERBOSE
)
BEGINNING = re.compile(r"""[«“"'‘(\[{¿¡*_—–\-\ \u00a0\u202f]*+ (?P<word>[^\W_]{1,14}+['’]?+ | [$€£@\#])""", re.VERBOSE)
ITEM = re.compile(r"(?:[-*•·–—‣▪]|\(?(?:\d{1,3}|[a-zA-Z]|[ivx]{2,5})\)|\d{1,3}\.)[ \t\u00a0\u202f]")
WORD = re.compile(r"[^\W_]")
NUMBERING = re.compile(r"\s*+[(\[*]*(?:\d{1,3}(?:\.\d{1,3})*|[IVXLC]{1,6}|[a-zA-Z])$")
INITIALS = re.compile(r"(?:[^\W\d_]\.-?)*[^\W\d_]$")  # J, J.-C, U.S
ERA = re.compile(r"\ba[vp]\.\s*J\.-C$")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TITLES = _words(  # never end a sentence
    "M MM Mme Mlle Mmes Mlles Mgr Mr Mrs Ms Messrs Mx Dr Dre Drs Pr Prof Rev Hon Gen Gén Col Capt Lt Sgt Cdt Sen "
    "Rep Gov Pres Supt cf Cf vs Vs av ap apr env resp e.g i.e E.g I.e viz St Ste Sts Mt Ft"
)
AMBIGUOUS = _words("Jr Sr Inc Co Corp Ltd Cie Bros bd boul Ave Blvd éd ed dir trad approx Ph.D")
BEFORE_NUMBER = _words(
    "No Nos no nos n N p pp P art Art al Fig Figs fig figs vol Vol chap Chap ch Ch sect Sect Sec sec eq Eq tab Tab liv "
    "tél Tél tel Tel Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec jan janv févr fév avr juil sept oct nov déc"
)
SENTENCE_STARTERS = _words(  # begin sentences far more often than names
    "The This That These Those There He She It They We You His Her Its Their Our My In On At As But And Or So If When "
    "While After Before Then However What Who Why How Where Not No Yes For From With To By Le La Les Un Une Des Ce Cet "
    "Cette Ces Il Elle Ils Elles On Nous Vous Je Tu Mais Et Ou Or Donc Car Ni Dans En Au Aux Du Pour Par Sur Avec Sans "
    "Quand Lorsque Si Comme Son Sa Ses Leur Leurs Mon Ma Mes Qui Que Quel Quelle Où Puis Alors Après Avant Depuis Tout "
    "C' J' S' N' Qu' C’ J’ S’ N’ Qu’"
)
SPEECH_TAG = re.compile(  # `"Really?" John asked.`
    r"\s+(?:I|[^\W\d_]\w*+(?:\s[^\W\d_]\w*+){0,2}?)\s"
    r"(?:said|asked|replied|cried|answered|shouted|whispered|exclaimed|added|wondered|demanded|yelled|muttered)\b"
)
QUOTES = frozenset("\"'”’»")


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences, which join to exactly `text`.

    White space between two sentences belongs to the second. No sentence is blank, unless the whole text is.

    >>> split_sentences("« Tu viens ? » dit M. Jourdain. Il était 3.14 heures...")
    ['« Tu viens ? » dit M. Jourdain.', ' Il était 3.14 heures...']
    """
    slices: list[str] = []
    start, line = 0, 0  # where the current sentence and line begin
    first, length = len(text) - len(text.lstrip()), len(text)
    uncased = text.islower()
    for match in CANDIDATE.finditer(text):
        end = match.end()
        if end == length:
            break
        if (space := match["space"]) == "":  # as in 3.14 and www.example.org
            continue
        position = match.start()
        if space is None:
            space = text[position:end]
            ends = position > first and (_ends_line(text, line, position, end) or space.count("\n") > 1)
        else:
            ending = match["stop"]
            ends = _ends(text, start, position, ending, end, uncased) or ("\n" in space and _breaks(text, space, end))
            position += len(ending)
        if ends:
            while text[position - 1].isspace():
                position -= 1
            slices.append(text[start:position])
            start = position
        if "\n" in space:
            line = end
    if start < length:
        slices.append(text[start:])
    return slices


def _breaks(text: str, space: str, end: int) -> bool:
    """Whether the line breaks in `space` end a sentence regardless of the text around them."""
    return space.count("\n") > 1 or ITEM.match(text, end) is not None


def _ends_line(text: str, line: int, position: int, end: int) -> bool:
    """Whether a line without a final mark ends a sentence."""
    if ITEM.match(text, end):
        return True
    content = text[line:position].rstrip()
    if MIN_WRAPPED <= len(content) <= MAX_WRAPPED or content[-1:] in CONTINUES_LINE:
        return False
    begins = BEGINNING.match(text, end)
    return begins is not None and begins["word"][0].isupper()


def _ends(text: str, start: int, position: int, ending: str, end: int, uncased: bool) -> bool:
    """Whether the punctuation at `position` ends the sentence that began at `start`; the next would begin at `end`."""
    begins = BEGINNING.match(text, end)
    if begins is None:
        return False
    word = begins["word"]
    if word[0].islower() and not (uncased and len(ending) == 1 and ending != "…"):
        return False
    if ending[0] == "." and ending[1:2] not in (".", "!", "?", "…") and _is_abbreviation(text, start, position, word):
        return False
    if len(ending) > 1 and ending[0] in "!?" and ending[-1] in QUOTES and SPEECH_TAG.match(text, end - 1):
        return False
    return WORD.search(text, start, position) is not None


def _is_abbreviation(text: str, start: int, position: int, following: str) -> bool:
    """Whether the full stop at `position` belongs to an abbreviation or a number, so that the sentence continues."""
    before = text[max(start, position - LOOKBEHIND) : position]
    words = before.split()
    if not words:
        return False
    word = words[-1].lstrip("(«“\"'‘[-–—")
    if word in TITLES:
        return True
    if word in BEFORE_NUMBER and following[0].isdigit():
        return True
    if word in AMBIGUOUS:
        return following not in SENTENCE_STARTERS
    if word == "ex" and len(words) > 1 and words[-2] in ("p.", "par", "Par", "P."):
        return True
    if position - start <= LOOKBEHIND and NUMBERING.match(before):
        return True
    if word == "I" and len(words) > 1 and words[-2] in ("and", "or", "than", "as", "am", "do", "did"):
        return False  # the English pronoun
    if word[-1:].isupper() and INITIALS.match(word):
        starters = {following, following.rstrip("'’")} & SENTENCE_STARTERS
        return not starters and not ERA.search(before)
    return False
