"""Draws masks: a square for every two places, filled where the one may look at the other."""

from collections.abc import Iterator

from headstock.errors import UserError
from headstock.explain.masks import MaskFacts
from headstock.report.heatmap import squares
from headstock.report.render import render

MOST = 64  # places a picture can show
WRITTEN = 20  # places up to which the squares say what is added to the score
INFINITY = "−∞"


def picture(found: MaskFacts) -> str:
    """A square is filled where its row may look at its column; the others are minus infinity."""
    longest = max(len(found.tokens), len(found.keys))
    if longest > MOST:
        raise UserError(f"a mask of {longest} places is too fine to draw, {MOST} are the most; --json has the numbers")

    def told(row: int, column: int) -> str:
        way = "looks at" if found.allowed[row][column] else "does not see"
        return f"{found.tokens[row]} ({row + 1}) {way} {found.keys[column]} ({column + 1})"

    def written(row: int, column: int) -> str:
        return "0" if found.allowed[row][column] else INFINITY

    shares = [[0.55 if seen else 0.0 for seen in row] for row in found.allowed]
    return squares(
        found.tokens,
        found.keys,
        shares,
        title=f"{found.name}: {found.masked} of {found.entries} entries are masked",
        told=told,
        written=written if longest <= WRITTEN else None,
    )


def pictures(masks: list[MaskFacts]) -> str:
    """The picture for a file of its own, which can hold one mask."""
    if len(masks) > 1:
        names = ", ".join(found.name for found in masks)
        raise UserError(f"--out: an .svg holds one mask, and these are {len(masks)} ({names}); choose with --where")
    return picture(masks[0])


def page(masks: list[MaskFacts]) -> str:
    parts = [
        {
            "found": found,
            "picture": picture(found),
            "rows": list(seen_by(found)),
            "size": max(420, 30 * len(found.keys)),
        }
        for found in masks
    ]
    return render("headstock.explain", "mask.html", parts=parts)


def seen_by(found: MaskFacts) -> Iterator[tuple[str, int, int]]:
    """Each place with how many it sees, and how many it does not."""
    for word, row in zip(found.tokens, found.allowed, strict=True):
        yield word, sum(row), len(row) - sum(row)


def as_text(found: MaskFacts) -> str:
    """The table as a terminal shows it."""
    widest = max(map(len, found.tokens))
    lines = []
    for word, row in zip(found.tokens, found.allowed, strict=True):
        lines.append(f"{word:>{widest}}  " + " ".join(f"{0 if seen else '-inf':>4}" for seen in row))
    return "\n".join(lines)
