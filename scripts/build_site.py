"""Builds the documentation site into build/site (`make docs`).

    python scripts/build_site.py

Zensical reads one folder. The pages are staged there: those of docs/, CONTRIBUTING and CHANGELOG, notebooks as
Markdown, and the files of the repository that pages link to.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import links

ROOT = links.ROOT
DOCS, STAGED, NOTEBOOKS = ROOT / "docs", ROOT / "build" / "docs", ROOT / "docs" / "notebooks"
# pages of the repository's root that have a place in the site; docs/index.md takes that of README
ROOT_PAGES = {
    ROOT / "README.md": "index.md",
    ROOT / "CONTRIBUTING.md": "contributing.md",
    ROOT / "CHANGELOG.md": "changelog.md",
}
WARNING = re.compile(r"\bwarning\b", re.IGNORECASE)
LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.) ")
INDENT = "    "


def main() -> None:
    links.main()
    stage()
    build = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=ROOT, text=True, capture_output=True
    )
    print(build.stdout + build.stderr, end="")
    if build.returncode or WARNING.search(build.stdout + build.stderr):
        sys.exit("the site has warnings")


def stage() -> None:
    """Fill build/docs with all pages and what they refer to."""
    shutil.rmtree(STAGED, ignore_errors=True)
    for path in sorted(DOCS.rglob("*")):
        if path.is_file() and path.suffix not in (".md", ".ipynb"):
            copy(path)
    for page in [*DOCS.rglob("*.md"), *(page for page in ROOT_PAGES if page.name != "README.md")]:
        write(page, page.read_text(encoding="utf-8"))
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        write(notebook, notebook_page(notebook))
        offer_download(notebook)


def staged_path(path: Path) -> Path:
    """Where a file of the repository is in the staged folder."""
    if path in ROOT_PAGES:
        return STAGED / ROOT_PAGES[path]
    if path.is_relative_to(DOCS):
        return (STAGED / path.relative_to(DOCS)).with_suffix(".md" if path.suffix == ".ipynb" else path.suffix)
    return STAGED / "files" / path.relative_to(ROOT)


def copy(path: Path) -> None:
    target = staged_path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, target)


def write(page: Path, text: str) -> None:
    target = staged_path(page)
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = text.splitlines()
    for number, line in links.prose_lines(text):
        lines[number - 1] = stage_links(line, page)
    target.write_text(fence_blocks("\n".join(lines) + "\n"), encoding="utf-8")


def stage_links(line: str, page: Path) -> str:
    """A line with its links as they are in the staged folder."""
    for match in reversed(list(links.LINK.finditer(links.mask_code(line)))):
        link = line[match.start("target") : match.end("target")]
        name, hash_sign, anchor = link.partition("#")
        if links.SCHEME.match(link) or not name:
            continue
        target = Path(os.path.normpath(page.parent / name))
        if not target.is_relative_to(DOCS) and target not in ROOT_PAGES and target.is_file():
            copy(target)
        new = os.path.relpath(staged_path(target), staged_path(page).parent) + hash_sign + anchor
        line = line[: match.start("target")] + new + line[match.end("target") :]
    return line


def fence_blocks(text: str) -> str:
    """Indented code as fenced blocks, which are highlighted: sessions with their prompts as `console`."""
    result: list[str] = []
    block: list[str] = []
    fence, in_list = "", False

    def flush() -> None:
        code = "\n".join(block).rstrip("\n").splitlines()
        if code:
            first = next((line for line in code if not line.startswith("# ")), "")
            kind = "console" if any(line.startswith("$ ") for line in code) else "bash" if is_command(first) else "text"
            result.extend([f"```{kind}", *code, "```", ""])
        block.clear()

    for line in text.splitlines():
        if match := links.FENCE.match(line):
            fence = "" if fence == match[1] else fence or match[1]
        starts = block or not result or not result[-1].strip()
        if line.startswith(INDENT) and line.strip() and starts and not (fence or in_list):
            block.append(line.removeprefix(INDENT))
        elif block and not line.strip():
            block.append("")
        else:
            flush()
            in_list = bool(LIST_ITEM.match(line)) or (in_list and (not line.strip() or line.startswith(" ")))
            result.append(line)
    flush()
    return "\n".join(result).rstrip("\n") + "\n"


def is_command(line: str) -> bool:
    return line.startswith(("headstock ", "make ", "pip ", "python ", "torchrun ", "source ", "docker "))


def notebook_page(notebook: Path) -> str:
    import nbformat

    return notebook_text(nbformat.read(notebook, as_version=4), notebook)


def notebook_text(notebook: Any, path: Path) -> str:
    """A notebook with its outputs as Markdown; its pictures are written beside the page."""
    from nbconvert import MarkdownExporter

    folder = staged_path(path).parent
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "text/html" in output.get("data", {}):
                output.data["text/html"] = html_output(output.data["text/html"])
    text, resources = MarkdownExporter().from_notebook_node(
        notebook, resources={"output_files_dir": f"{path.stem}_files"}
    )
    for name, content in resources["outputs"].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return text.lstrip()


def offer_download(notebook: Path) -> None:
    """Put the notebook beside its page, and a link to it below the title."""
    page = staged_path(notebook)
    shutil.copy(notebook, page.with_suffix(notebook.suffix))
    title, _, body = page.read_text(encoding="utf-8").partition("\n")
    link = f"[Download this notebook]({notebook.name}){{ .md-button download }}"
    page.write_text(f"{title}\n\n{link}\n{body}", encoding="utf-8")


def html_output(html: str) -> str:
    """The HTML of an output as one block of Markdown, which ends at a blank line."""
    html = re.sub(r"\n\s*\n", "\n", html)
    # notebook.js adapts the pages in frames to the theme, for which these need the origin of the site
    html = html.replace('sandbox="allow-scripts"', 'sandbox="allow-scripts allow-same-origin"')
    html = html.replace("<use href=", "<use xlink:href=")  # the theme's scripts take every href for that of a link
    return f'<div class="notebook-output">{html}</div>'


if __name__ == "__main__":
    main()
