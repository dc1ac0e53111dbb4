"""Executes the notebooks of docs/notebooks at full size and writes their outputs back (`make notebooks`).

    python scripts/notebooks.py [NAME ...]

Each runs in a scratch folder, so that the runs it trains are not left in the repository. Progress bars are removed from
the outputs. An output that a reader should not see (an error, a warning, an absolute path) is refused, and the
notebook stays as it was.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
MAX_BYTES = 400_000
TIMEOUT = 3600  # seconds of one cell
PROGRESS = "headstock-progress"  # the class of a progress bar
# of Unix and Windows; web addresses and closing tags of HTML do not match
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<~-])/(?:home|root|tmp|usr|var|opt|mnt|work|Users|private)/[\w.-]|\b[A-Z]:\\\\")


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute notebooks and write their outputs back.")
    parser.add_argument("names", nargs="*", help="such as first-model; all by default")
    names = parser.parse_args().names
    for path in [FOLDER / f"{name}.ipynb" for name in names] or notebooks():
        start = time.monotonic()
        write(path, execute(path))
        print(f"{path.relative_to(ROOT)}: {time.monotonic() - start:.0f} s, {path.stat().st_size:,} bytes")


def notebooks() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def execute(path: Path) -> Any:
    """The notebook with the outputs of a run in an empty folder."""
    import nbclient
    import nbformat

    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # the kernel's debugger would warn in the first output
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(notebook, timeout=TIMEOUT, resources={"metadata": {"path": folder}})
        client.execute()
    return clean(notebook)


def clean(notebook: Any) -> Any:
    """Remove progress bars, timestamps and versions of this machine."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if PROGRESS not in str(output.get("data"))]
    return notebook


def write(path: Path, notebook: Any) -> None:
    import nbformat

    text = nbformat.writes(notebook) + "\n"
    if found := [*problems(notebook)] + ([f"has {len(text):,} bytes"] if len(text) > MAX_BYTES else []):
        sys.exit("\n".join(f"{path.name}: {problem}" for problem in found))
    path.write_text(text, encoding="utf-8")


def problems(notebook: Any) -> Iterator[str]:
    """What is wrong with the outputs of a notebook."""
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in codes] != list(range(1, len(codes) + 1)):
        yield "its cells were not executed once, in order"
    if not any(cell.outputs for cell in codes):
        yield "has no outputs"
    for number, cell in enumerate(codes, start=1):
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                yield f"cell {number}: {output.get('ename', 'stderr')}: {output.get('evalue', output.get('text'))}"
            content = str(output.get("text", "")) + str(output.get("data", ""))
            if match := ABSOLUTE_PATH.search(content):
                yield f"cell {number}: an absolute path: {content[match.start() : match.start() + 60]}"
            if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
                yield f"cell {number}: a widget, which is empty outside a running notebook"
            if PROGRESS in content:
                yield f"cell {number}: a progress bar"


if __name__ == "__main__":
    main()
