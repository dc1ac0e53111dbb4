"""Plain text from a dump of Wikipedia: MediaWiki's XML with wikitext markup."""

import html
import re
from collections.abc import Iterator

PAGE = re.compile(r"<page>.*?<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", re.DOTALL)
NAMESPACE = re.compile(
    r"(Media|Special|Talk|User|Wikipedia|Image|File|MediaWiki|Template|Help|Category|Portal)( talk)?:", re.IGNORECASE
)
REDIRECT = re.compile(r"\s*#redirect", re.IGNORECASE)
# the rest of an article from here on is lists of links and sources
APPENDIX = re.compile(
    r"^=+\s*(See also|References|External links?|Notes|Further reading|Bibliography|Footnotes|Sources)\s*=+\s*$",
    re.IGNORECASE | re.MULTILINE,
)
REMOVED = [
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"<(ref|math|gallery|timeline|table|pre|code|nowiki)\b[^>]*?/>", re.IGNORECASE),
    re.compile(r"<(ref|math|gallery|timeline|table|pre|code|sup|sub)\b.*?</\1\s*>", re.IGNORECASE | re.DOTALL),
]
INNERMOST = [re.compile(r"\{\{[^{}]*\}\}"), re.compile(r"\{\|(?:(?!\{\||\|\}).)*\|\}", re.DOTALL)]  # templates, tables
LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
# of pictures, categories and articles in other languages, which are not part of the text
LINK_PREFIX = re.compile(r"\s*(Image|File|Category|[a-z]{2,3}(-[a-z]+)?)\s*:", re.IGNORECASE)
WEB_LINK = re.compile(r"\[(?:https?|ftp|mailto):[^\s\]]*\s*([^\]]*)\]")
REMAINS = re.compile(r"\[\[|\]\]|\{\{|\}\}|\||<\w|&\w+;|https?:")  # of markup that is not closed
MAX_NESTING = 8
MIN_LINE = 40  # characters; shorter lines are items of lists and remains of tables
MIN_ARTICLE = 300


def read_articles(dump: str) -> Iterator[str]:
    """The articles of a dump as plain text, one paragraph a line, without redirects, lists and short ones."""
    for title, wikitext in PAGE.findall(dump):
        if NAMESPACE.match(title) or REDIRECT.match(wikitext):
            continue
        text = plain_text(html.unescape(wikitext))
        if len(text) >= MIN_ARTICLE:
            yield text


def plain_text(wikitext: str) -> str:
    """The paragraphs of an article, without headings, templates, tables, references and markup."""
    text = APPENDIX.split(wikitext)[0]
    for pattern in REMOVED:
        text = pattern.sub("", text)
    for pattern in INNERMOST:
        text = remove_nested(text, pattern)
    text = replace_links(text)
    text = WEB_LINK.sub(r"\1", text)
    text = re.sub(r"<br\s*/?>", " ", text, flags=re.IGNORECASE)
    text = html.unescape(re.sub(r"<[^<>]*>", "", text)).replace("\xa0", " ")
    text = re.sub(r"'{2,}", "", text)
    lines = (re.sub(r"\s+", " ", line.lstrip("*#:; ")).strip() for line in text.split("\n") if not is_markup(line))
    kept = (line for line in lines if len(line) >= MIN_LINE and not REMAINS.search(line))
    return "\n".join(re.sub(r" ?\([\s,;]*\)", "", line) for line in kept)  # parentheses that had a template


def is_markup(line: str) -> bool:
    """Headings, and rows of tables that are not closed."""
    return line.lstrip().startswith(("=", "|", "{|", "!", "__"))


def remove_nested(text: str, innermost: re.Pattern[str]) -> str:
    for _ in range(MAX_NESTING):
        text, count = innermost.subn("", text)
        if not count:
            break
    return text


def replace_links(text: str) -> str:
    """Links as their text. Captions of pictures contain links, so the innermost ones come first."""

    def shown(match: re.Match[str]) -> str:
        link = match[1]
        return "" if LINK_PREFIX.match(link) else link.rsplit("|", 1)[-1].lstrip(":")

    for _ in range(MAX_NESTING):
        text, count = LINK.subn(shown, text)
        if not count:
            break
    return text
