"""Draws a curve with braille characters for the terminal."""

from collections.abc import Sequence

BRAILLE_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # a cell is 2 dots wide and 4 high


def terminal_chart(curve: Sequence[tuple[float, float]], *, width: int = 60, height: int = 10, name: str = "") -> str:
    """One line with its range of y at the left, and its range of x and `name` below."""
    xs, ys = [x for x, _ in curve], [y for _, y in curve]
    x_min, x_max, y_min, y_max = min(xs), max(xs), min(ys), max(ys)
    x_span, y_span = (x_max - x_min) or 1.0, (y_max - y_min) or 1.0
    cells = [[0] * width for _ in range(height)]
    dots = [
        (round((x - x_min) / x_span * (2 * width - 1)), round((y_max - y) / y_span * (4 * height - 1)))
        for x, y in curve
    ]
    for (x1, y1), (x2, y2) in zip(dots, dots[1:] or dots, strict=False):
        steps = max(abs(x2 - x1), abs(y2 - y1), 1)
        for i in range(steps + 1):
            x, y = round(x1 + (x2 - x1) * i / steps), round(y1 + (y2 - y1) * i / steps)
            cells[y // 4][x // 2] |= BRAILLE_DOTS[y % 4][x % 2]
    lines = []
    for row, line in enumerate(cells):
        label = {0: f"{y_max:7.3f}", height - 1: f"{y_min:7.3f}"}.get(row, " " * 7)
        lines.append(f"{label} ┤{''.join(chr(0x2800 + cell) for cell in line)}")
    first, last = f"{x_min:,.0f}", f"{x_max:,.0f}"
    lines.append(f"{' ' * 8}└{'─' * width}")
    lines.append(f"{' ' * 9}{first}{name.center(width - len(last) - len(first))}{last}")
    return "\n".join(lines)
