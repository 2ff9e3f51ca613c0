"""Looks up installed packages without importing them; the only place that does, so tests can replace it."""

from __future__ import annotations

import importlib.metadata
import os


def version(package: str) -> str | None:
    """Returns the installed version of a package; None without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def own_version() -> str:
    """Returns Paceline's version; images hold only the source and set PACELINE_VERSION."""
    return os.environ.get("PACELINE_VERSION") or version("paceline") or "from source"
