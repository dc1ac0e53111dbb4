"""Escapes text for Markdown, so that names and labels from users' files are shown as they are and never as markup."""

import re

# a letter or digit on both sides keeps an underscore from being emphasis
SPECIAL = re.compile(r"[\\`*\[\]~$]|(?<![^\W_])_|_(?![^\W_])")
ENTITY = re.compile(r"&(?=#?\w+;)")


def escape_markdown(text: object) -> str:
    """Text as one line of Markdown that reads the same, also as a cell of a table."""
    line = " ".join(str(text).split())
    line = SPECIAL.sub(lambda match: f"\\{match[0]}", line)
    line = ENTITY.sub("&amp;", line)
    return line.replace("<", "&lt;").replace(">", "&gt;").replace("|", "&#124;")
