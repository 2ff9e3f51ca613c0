"""For mkdocs: the navigation has every page, and links that lead out of docs/ become plain text."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(([^):#\s]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Called by mkdocs at the start: adds the pages that the navigation does not name."""
    docs = Path(config.docs_dir)
    decisions = sorted(str(path.relative_to(docs)) for path in docs.glob("decisions/*.md"))
    named = str(config.nav)
    others = sorted(path.name for path in docs.glob("*.md") if f"'{path.name}'" not in named)
    config.nav += [{"More": others}] if others else []
    config.nav.append({"Decisions": decisions})
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Called by mkdocs for each page."""
    folder = posixpath.dirname(page.file.src_uri)

    def plain(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if not target.startswith(".."):
            return link[0]
        return f"{link[1]} (`{target.removeprefix('../')}` in the repository)"

    return _LINK.sub(plain, markdown)
