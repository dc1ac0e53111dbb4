"""Checks that every relative link and anchor of the repository's Markdown pages leads somewhere.

python scripts/links.py
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?P<before>!?\[[^\]]*\]\(|\b(?:href|src|srcset)=\")(?P<target>[^)\s\"]+)(?=[)\s\"])")
HEADING = re.compile(r"^#{1,6} (.+?)\s*$")
FENCE = re.compile(r"^\s*(```|~~~)")
ANCHOR = re.compile(r"<[^>]*\b(?:id|name)=\"([^\"]+)\"")
SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def main() -> None:
    problems = broken_links(markdown_pages())
    if problems:
        sys.exit("\n".join(problems))


def markdown_pages() -> list[Path]:
    """The pages of docs/ and of the repository's root."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """The numbered lines outside code blocks; inline code keeps its length but not its characters."""
    fence, after_blank = "", True
    for number, line in enumerate(text.splitlines(), start=1):
        if match := FENCE.match(line):
            fence = "" if fence == match[1] else fence or match[1]
        elif not fence and not (after_blank and line.startswith("    ") and not line.lstrip().startswith(("-", "*"))):
            yield number, line
            after_blank = not line.strip()


def mask_code(line: str) -> str:
    return re.sub(r"`[^`]*`", lambda match: "x" * len(match[0]), line)


def links(text: str) -> Iterator[tuple[int, str]]:
    """The relative targets of a page's links, with their lines."""
    for number, line in prose_lines(text):
        for match in LINK.finditer(mask_code(line)):
            if not SCHEME.match(match["target"]):
                yield number, line[match.start("target") : match.end("target")]


def anchors(text: str) -> set[str]:
    """The anchors of a page as GitHub makes them: of its headings, and ids of HTML elements."""
    found, seen = set(), Counter[str]()
    for _, line in prose_lines(text):
        found |= set(ANCHOR.findall(line))
        if match := HEADING.match(line):
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1])
            name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            found.add(f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1
    return found


def broken_links(pages: list[Path]) -> list[str]:
    """One line per link of these pages whose file or anchor does not exist."""
    problems = []
    for page in pages:
        for number, link in links(page.read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            target = Path(os.path.normpath(page.parent / name)) if name else page
            if not target.exists():
                problems.append(f"{page}:{number}: {link}: no such file")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
                problems.append(f"{page}:{number}: {link}: no such heading")
    return problems


if __name__ == "__main__":
    main()
