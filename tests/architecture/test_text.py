"""Prose: how long its lines are, and that the code it points at is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from support import source

LONGEST = 120
MOST_WORDS = 1500
PAGES = sorted(
    path
    for path in source.ROOT.rglob("*.md")
    if not {".venv", ".carry", "runs", "node_modules", ".pytest_cache"}
    & set(path.relative_to(source.ROOT).parts)
)
_TABLE = re.compile(r"<!-- (.*?): generated -->.*?<!-- \1: end -->", re.DOTALL)
_NAMING = {".py", ".yaml", ".yml", ".sh", ".proto", ".tpl"}
_WRITERS = [*source.ROOT.glob("tools/*.py"), source.ROOT / "tests" / "support" / "architectures.py"]
# `path/to/...` stands for a user's own file.
_POINTER = re.compile(r"`(?!path/to/)([\w/]+\.py):([\w.]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(source.ROOT)))
def test_lines_fit(page: Path) -> None:
    """A row of a table cannot be wrapped, and is left out."""
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
    long = [number for number, line in lines if len(line) > LONGEST and not line.lstrip().startswith("|")]
    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(source.ROOT)))
def test_code_that_a_page_points_at_exists(page: Path) -> None:
    """`file.py:name`, the file by the end of its path."""
    missing = [
        f"{file}:{name}"
        for file, name in _POINTER.findall(page.read_text(encoding="utf-8"))
        if not _is_defined(file, name)
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(source.ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_pages_that_code_and_messages_name_exist() -> None:
    roots = ("src", "services", "deploy", "tools", "proto", "examples", "tests/support")
    files = [path for root in roots for path in (source.ROOT / root).rglob("*.*") if path.suffix in _NAMING]
    named = {
        (name, str(path.relative_to(source.ROOT)))
        for path in files
        for name in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 30
    assert [pair for pair in sorted(named) if not (source.ROOT / pair[0]).exists()] == []


@pytest.mark.parametrize("page", sorted((source.ROOT / "docs").rglob("*.md")), ids=lambda path: path.stem)
def test_a_page_is_read_in_one_sitting(page: Path) -> None:
    """Exempt are pages that a tool writes, whose code names the page, and the tables that one writes."""
    text = page.read_text(encoding="utf-8")
    tool = re.match(r"# .*\n\n\*Generated .*?`(tools/\w+\.py)`", text)
    if tool and page.name in (source.ROOT / tool[1]).read_text(encoding="utf-8"):
        return
    text, num_tables = _TABLE.subn("", text)
    assert num_tables == 0 or any(page.name in path.read_text(encoding="utf-8") for path in _WRITERS)
    assert len(re.findall(r"\S*[A-Za-z0-9]\S*", text)) <= MOST_WORDS


def test_the_readme_says_what_matters_in_sixty_lines() -> None:
    """What it is, how to begin, a picture, a run of the reader's own, what was measured with links to it."""
    lines = (source.ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    fold = "\n".join(lines[:60])
    assert all(
        part in fold for part in ("make demo", "page-desktop.png", "paceline train run.yaml", "## Measured")
    )
    anchors = re.findall(r"\]\(docs/measurements\.md#([\w-]+)\)", fold)
    titles = (source.ROOT / "docs" / "measurements.md").read_text(encoding="utf-8").lower().splitlines()
    known = {
        re.sub(r"[^\w -]", "", title.lstrip("# ")).replace(" ", "-") for title in titles if title[:1] == "#"
    }
    assert len(anchors) >= 4
    assert set(anchors) <= known
    cells = [cell for line in lines if line[:1] == "|" for cell in line.split("|")]
    assert max(len(cell.split()) for cell in cells) <= 40


def test_the_way_of_the_data_is_written_down() -> None:
    """Without pointers in the architecture page the test above would prove nothing."""
    assert len(_POINTER.findall((source.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))) >= 20


def _is_defined(file: str, name: str) -> bool:
    everything = [*source.modules().values(), *source.ROOT.glob("tests/**/*.py")]
    paths = [path for path in everything if f"/{path}".endswith(f"/{file}")]
    return any(name in _definitions(path) for path in paths)


def _definitions(path: Path) -> set[str]:
    """Functions, classes, and members, both as Class.member and alone."""
    defined: set[str] = set()
    for node in source.tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = [n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            defined.update(members, (f"{node.name}.{member}" for member in members))
    return defined
