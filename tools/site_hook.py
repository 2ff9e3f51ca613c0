"""For mkdocs: a navigation with every page, outward links as plain text, the theme's licences."""

from __future__ import annotations

import importlib.metadata
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
    """Called by mkdocs for each page; a search finds decisions after the pages that say how."""
    folder = posixpath.dirname(page.file.src_uri)
    if folder == "decisions":
        page.meta["search"] = {"boost": 0.2}

    def plain(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if not target.startswith(".."):
            return link[0]
        return f"{link[1]} (`{target.removeprefix('../')}` in the repository)"

    return _LINK.sub(plain, markdown)


def on_post_build(config: Any) -> None:
    """Called by mkdocs at the end: writes licenses/PACKAGE/PART.txt, the texts of what the site brings."""
    for package in ("mkdocs", "mkdocs-material"):
        for file in importlib.metadata.files(package) or ():
            if file.name.startswith("LICENSE"):
                text = Path(config.site_dir, "licenses", package, f"{file.parent.name}.txt")
                text.parent.mkdir(parents=True, exist_ok=True)
                text.write_text(file.read_text(), encoding="utf-8")
