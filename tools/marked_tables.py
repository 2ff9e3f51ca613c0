"""Tables that tools write into pages that are otherwise written by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def page_with_tables(page: Path, tables: Mapping[str, str]) -> str:
    """The page's text with its tables written anew.

    Args:
        tables: by the name that stands in the page: `<!-- NAME: generated -->` ... `<!-- NAME: end -->`.

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
