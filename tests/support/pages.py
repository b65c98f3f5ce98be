"""The README and the pages of docs/ as text: their code, commands, tables and names."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
}


def fences(text: str) -> list[tuple[str, str]]:
    """Language and content of each fenced block, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    """The blocks of a page in one language."""
    return [content for named, content in fences(PAGES[page]) if named == language]


def prose(page: str) -> str:
    """The page without its blocks."""
    return re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """The words of every command in the shell blocks, without comments and settings of the environment."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [_without_settings(words) for line in lines if (words := shlex.split(line, comments=True))]


def _without_settings(command: list[str]) -> list[str]:
    first = next(i for i, word in enumerate(command) if not re.fullmatch(r"[A-Z_]+=.*", word))
    return command[first:]


def tables(page: str) -> list[list[list[str]]]:
    """The cells of every table, its header first.

    >>> [header for header, *_ in tables("docs/evaluation.md")]
    [['of several answers', 'K thoughts with M answers each']]
    """
    found = re.findall(r"^\|.*(?:\n\|.*)*", prose(page), re.MULTILINE)
    rows = [[[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()] for table in found]
    return [[header, *rest] for header, _, *rest in rows]


def table(page: str, *heading: str) -> list[list[str]]:
    """The rows of the one table of the page whose header begins with these cells."""
    [found] = [rows for header, *rows in tables(page) if header[: len(heading)] == [*heading]]
    return found


def names(text: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", text)


def section(page: str, title: str) -> str:
    """What stands below a heading, up to the next of its depth."""
    marks, _, _ = title.partition(" ")
    return PAGES[page].partition(f"\n{title}\n")[2].partition(f"\n{marks} ")[0]


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as the site and the usual viewers make them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
