"""A file that someone else wrote is named in NOTICE, with its licence's text."""

from __future__ import annotations

import re
import subprocess
from pathlib import PurePath

import pytest

from support import source

# Files of our own that look like those of others: pictures of our page, and what speaks about licences.
OWN = re.compile(r"docs/pictures/page-[\w-]+\.png|LICENSE|NOTICE|tests/architecture/test_licences\.py")
FOLDERS = {"vendor", "vendored", "third_party", "node_modules", "dist"}
CLAIM = re.compile(
    rb"copyright (\(c\)|\xc2\xa9|\d{4})|@licen[sc]e|spdx-license-identifier|licensed under", re.I
)
LONGEST_LINE = 1000  # bytes of a line of a script or style; minified ones have longer lines


def looks_foreign(name: str, content: bytes) -> bool:
    """Whether a file has what only files of others have: a claim, a folder, bytes that nobody types."""
    path = PurePath(name)
    is_minified = path.suffix in {".js", ".mjs", ".css", ".html"} and any(
        len(line) > LONGEST_LINE for line in content.splitlines()
    )
    return bool(b"\0" in content or FOLDERS & set(path.parts) or is_minified or CLAIM.search(content))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("src/paceline/show/report/front/d3.js", b"// Copyright 2010-2023 Mike Bostock\nlet a;\n"),
        ("src/paceline/show/report/front/uplot.js", b"/*! https://github.com/x (v1) @license MIT */"),
        ("src/paceline/show/report/front/plot.js", b"let a=1;" * 200),
        ("src/paceline/show/report/front/inter.woff2", b"wOF2\0\1\0\0"),
        ("src/paceline/models/rotary.py", b"# Licensed under the Apache License, Version 2.0\n"),
        ("src/paceline/third_party/rope.py", b"x = 1\n"),
        ("docs/pictures/logo.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"),
    ],
)
def test_a_vendored_file_is_seen(name: str, content: bytes) -> None:
    assert looks_foreign(name, content)
    assert not OWN.fullmatch(name)


def test_what_others_wrote_is_named_in_the_notice() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=source.ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.splitlines() if (source.ROOT / name).is_file()]
    assert "src/paceline/show/report/front/plot.js" in names
    notice = (source.ROOT / "NOTICE").read_text(encoding="utf-8")
    foreign = [
        name
        for name in names
        if not OWN.fullmatch(name.removeprefix("packaging/sdk/"))
        and looks_foreign(name, (source.ROOT / name).read_bytes())
    ]
    assert [name for name in foreign if name not in notice] == [], (
        "name the file in NOTICE, with its licence's text; if it is ours, add it to OWN"
    )


def test_images_have_our_licence() -> None:
    kept = (source.ROOT / ".dockerignore").read_text().splitlines()
    assert {"!LICENSE", "!NOTICE"} <= set(kept)
    for service in source.SERVICES:
        lines = (source.ROOT / "services" / service / "Dockerfile").read_text().splitlines()
        assert "COPY LICENSE NOTICE /opt/paceline/" in lines, service
