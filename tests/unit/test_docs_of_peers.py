"""docs/from-verl-and-trl.md names only keys that exist."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel

from paceline.config.run import RunConfig

DOCS = Path(__file__).parents[2] / "docs"


def keys(section: type[BaseModel], prefix: str = "") -> set[str]:
    """The dotted keys of a section and of those below it."""
    names: set[str] = set()
    for name, field in section.model_fields.items():
        names.add(prefix + name)
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names |= keys(kind, f"{prefix}{name}.")
    return names


def test_every_key_of_ours_exists() -> None:
    known, sections = keys(RunConfig), "|".join(RunConfig.model_fields)
    page = (DOCS / "from-verl-and-trl.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| .*`", line)]
    # The last cell is ours; keys in the others are those of the other program.
    ours = [cell for row in rows if not (cell := row.strip("| ").rsplit("| ", 1)[-1]).startswith("with ")]
    named = {
        key for cell in ours for key in re.findall(rf"`((?:{sections})\.[\w.]+|placement)(?=[:`])", cell)
    }
    assert len(named) > 80
    assert {key for key in named if not _is_key(key, known)} == set()


def _is_key(key: str, known: set[str]) -> bool:
    """Whether it is a key, or one of a section that may be left out."""
    return key in known or any(key.startswith(f"{section}.") for section in ("model.lora",))
