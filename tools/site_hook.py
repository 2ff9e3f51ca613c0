"""For mkdocs: links that lead out of docs/ become plain text, as the site holds the docs alone."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(([^):#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Called by mkdocs for each page."""
    folder = posixpath.dirname(page.file.src_uri)

    def plain(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if not target.startswith(".."):
            return link[0]
        return f"{link[1]} (`{target.removeprefix('../')}` in the repository)"

    return _LINK.sub(plain, markdown)
