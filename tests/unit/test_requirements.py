"""The lock files: what they pin installs on every Python that the program supports."""

from __future__ import annotations

import importlib.metadata
import re

from packaging.specifiers import SpecifierSet

from support import source

# The first release of each: Debian 12 has 3.11.2, Ubuntu 24.04 has 3.12.3.
PYTHONS = ("3.11.0", "3.12.0")


def pinned() -> dict[str, str]:
    lines = "\n".join((source.ROOT / "requirements" / f"{name}.txt").read_text() for name in ("cpu", "dev"))
    return dict(re.findall(r"^([\w.-]+)==([\w.+]+)\s*$", lines, re.MULTILINE))


def test_every_pinned_package_installs_on_the_first_release_of_each_supported_python() -> None:
    installed = {
        re.sub(r"[-_.]+", "-", package.name).lower(): package
        for package in importlib.metadata.distributions()
    }
    compared, refused = 0, []
    for name, version in pinned().items():
        package = installed.get(re.sub(r"[-_.]+", "-", name).lower())
        if package is None or package.version != version:
            continue
        compared += 1
        allowed = SpecifierSet(package.metadata.get("Requires-Python") or "")
        refused += [f"{name}=={version} on {python}" for python in PYTHONS if python not in allowed]
    assert not refused, "pin an older version"
    assert compared > 150, "run this in the environment of make venv"
