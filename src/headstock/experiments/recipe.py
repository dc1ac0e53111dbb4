"""Settings as a TOML file that people can read and change."""

import json
from collections.abc import Mapping
from typing import Any


def to_toml(tree: Mapping[str, Mapping[str, Any]], heading: str = "") -> str:
    """Sections of plain values; what is not set is left out."""
    parts = ["\n".join(f"# {line}".rstrip() for line in heading.splitlines())] if heading else []
    for section, values in tree.items():
        lines = [f"{key} = {shown(value)}" for key, value in values.items() if value is not None]
        if lines:
            parts.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(parts) + "\n"


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # TOML's strings are JSON's
    return repr(value)
