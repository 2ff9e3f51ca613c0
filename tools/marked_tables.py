"""Writes generated tables into handwritten pages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def page_with_tables(page: Path, tables: Mapping[str, str]) -> str:
    """Returns the page's text with its tables replaced.

    Args:
        page: the page; `<!-- NAME: generated -->` and `<!-- NAME: end -->` mark the place of each table.
        tables: tables by name.

    Raises:
        SystemExit: the page lacks the place of a table.
    """
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        begin, end = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
        if begin not in text or end not in text:
            raise SystemExit(f"{page.name} lacks the place of a table: {begin} ... {end}")
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        text = pattern.sub(lambda _, made=f"{begin}\n\n{table}\n\n{end}": made, text)
    return text
