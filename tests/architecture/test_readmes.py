"""Each service's README has a table that names each of its modules, and no module that is gone."""

from __future__ import annotations

import re

import pytest

from support import source

# Entry points and package markers say what they are by their names.
_UNNAMED = ("__init__", "__main__")


@pytest.mark.parametrize("service", source.SERVICES)
def test_every_module_is_in_the_readme(service: str) -> None:
    folder = source.ROOT / "services" / service
    package = folder / "paceline" / service
    in_package = {
        str(path.relative_to(package).with_suffix(""))
        for path in package.rglob("*.py")
        if path.stem not in _UNNAMED
    }
    rows = [
        line
        for line in (folder / "README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    named = {word for row in rows for word in re.findall(r"`([\w/]+)`", row.split("|")[1])}
    assert in_package - named == set(), f"not in services/{service}/README.md"
    assert named - in_package - set(_UNNAMED) == set(), f"in services/{service}/README.md, but no module"


def test_what_the_page_of_changes_names_is_there() -> None:
    page = source.ROOT / "docs" / "where-to-change-what.md"
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:src|examples|proto)/[\w/.]*)`", text)
    assert len(paths) > 15
    assert [path for path in paths if not (source.ROOT / path).exists()] == []
    for file, anchor in re.findall(r"\]\(([\w-]+\.md)#([\w-]+)\)", text):
        lines = (page.parent / file).read_text(encoding="utf-8").splitlines()
        titles = [line.lstrip("# ").lower().replace(" ", "-") for line in lines if line.startswith("#")]
        assert anchor in titles, f"{file} has no part {anchor}"
