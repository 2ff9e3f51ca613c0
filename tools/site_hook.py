"""Hooks for mkdocs: navigation with every page, outward links as text, dark pictures, theme licences."""

from __future__ import annotations

import importlib.metadata
import posixpath
import re
from pathlib import Path
from typing import Any

_CELL = re.compile(r"<td.*?</td>", re.DOTALL)
_CODE = re.compile(r"<code>([^<]*)</code>")
_PART_OF_KEY = re.compile(r"[./_-](?=\w)")
_BOOSTS = {"Look up": 0.3, "Understand": 0.3, "Change": 0.3, "Decisions": 0.1}
_PICTURE = re.compile(r"!\[([^\]]*)\]\((\S+)\.png\)")
_LINK = re.compile(r"\[([^\]]+)\]\(([^):#\s]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Adds pages that the navigation does not name; mkdocs calls it at the start."""
    docs = Path(config.docs_dir)
    decisions = sorted(str(path.relative_to(docs)) for path in docs.glob("decisions/*.md"))
    named = str(config.nav)
    others = sorted(path.name for path in docs.glob("*.md") if f"'{path.name}'" not in named)
    config.nav += [{"More": others}] if others else []
    # Inside another section the list of decisions starts collapsed.
    understand = next(part for part in config.nav if "Understand" in part)
    understand["Understand"].append({"Decisions": decisions})
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Called by mkdocs for each page; makes searches rank how-to pages before references and decisions."""
    folder = posixpath.dirname(page.file.src_uri)
    boosts = [_BOOSTS[part.title] for part in page.ancestors if part.title in _BOOSTS]
    if boosts:
        page.meta["search"] = {"boost": min(boosts)}

    def plain(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if not target.startswith(".."):
            return link[0]
        return f"{link[1]} (`{target.removeprefix('../')}` in the repository)"

    def both(picture: re.Match[str]) -> str:
        dark = Path(page.file.abs_src_path).parent / f"{picture[2]}-dark.png"
        if not dark.exists():
            return picture[0]
        words, name = picture[1], picture[2]
        return f"![{words}]({name}.png#only-light)![{words}]({name}-dark.png#only-dark)"

    return _PICTURE.sub(both, _LINK.sub(plain, markdown))


def on_post_page(output: str, **_: object) -> str:
    """Called by mkdocs with each page's HTML: keys in tables break after a dot or slash."""

    def breakable(code: re.Match[str]) -> str:
        return "<code>" + _PART_OF_KEY.sub(lambda sign: f"{sign[0]}<wbr>", code[1]) + "</code>"

    return _CELL.sub(lambda cell: _CODE.sub(breakable, cell[0]), output)


def on_post_build(config: Any) -> None:
    """Writes licenses/PACKAGE/PART.txt for the site's parts; mkdocs calls it at the end."""
    for package in ("mkdocs", "mkdocs-material"):
        for file in importlib.metadata.files(package) or ():
            if file.name.startswith("LICENSE"):
                text = Path(config.site_dir, "licenses", package, f"{file.parent.name}.txt")
                text.parent.mkdir(parents=True, exist_ok=True)
                text.write_text(file.read_text(), encoding="utf-8")
