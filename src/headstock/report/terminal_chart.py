"""Curves drawn with characters, for a terminal."""

from collections.abc import Sequence

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # a braille cell is two dots wide and four high

Curve = Sequence[tuple[float, float]]


def terminal_chart(curve: Curve, *, width: int = 60, height: int = 10, name: str = "") -> str:
    """One falling or rising line with its scale at the left and its range of x below."""
    xs, ys = [x for x, _ in curve], [y for _, y in curve]
    low, high = min(ys), max(ys)
    span, reach = (high - low) or 1.0, (max(xs) - min(xs)) or 1.0
    cells = [[0] * width for _ in range(height)]
    places = [
        (round((x - min(xs)) / reach * (2 * width - 1)), round((high - y) / span * (4 * height - 1))) for x, y in curve
    ]
    for (x1, y1), (x2, y2) in zip(places, places[1:] or places, strict=False):
        steps = max(abs(x2 - x1), abs(y2 - y1), 1)
        for i in range(steps + 1):
            x, y = round(x1 + (x2 - x1) * i / steps), round(y1 + (y2 - y1) * i / steps)
            cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    lines = []
    for row, line in enumerate(cells):
        label = {0: f"{high:7.3f}", height - 1: f"{low:7.3f}"}.get(row, " " * 7)
        lines.append(f"{label} ┤{''.join(chr(0x2800 + cell) for cell in line)}")
    lines.append(f"{' ' * 8}└{'─' * width}")
    last = f"{max(xs):,.0f}"
    lines.append(f"{' ' * 9}{min(xs):,.0f}{name.center(width - len(last) - len(f'{min(xs):,.0f}'))}{last}")
    return "\n".join(lines)
