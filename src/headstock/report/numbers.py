"""Formats numbers for people: counts, bytes and durations."""


def compact_number(number: float | None) -> str:
    """`40.3M`, `812.0k`, `96`; empty for None."""
    if number is None:
        return ""
    unit, size = next(((unit, size) for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)) if number >= size), ("", 1))
    return f"{number / size:.1f}{unit}" if unit else f"{number:.0f}"


def format_bytes(count: float) -> str:
    unit, size = next((pair for pair in (("GB", 1e9), ("MB", 1e6)) if count >= pair[1]), ("kB", 1e3))
    return f"{count / size:.1f} {unit}"


def format_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
