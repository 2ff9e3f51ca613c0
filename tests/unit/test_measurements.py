"""Rows that benchmarks keep for docs/measurements.md, and the page that is made of them."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from support import source

FOLDER = source.ROOT / "benchmarks"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    rows = [{"what": "one", "number": 1.0}, {"what": "two", "number": 2.0}]
    path = tmp_path / "pushes.json"
    path.write_text(json.dumps({"title": "Pushes", "unit": "ms", "says": "", "rows": rows}))
    return path


@pytest.fixture
def keep(results: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = runpy.run_path(str(FOLDER / "records.py"))
    keep = module["keep"]
    monkeypatch.setitem(keep.__globals__, "RESULTS", results.parent)
    monkeypatch.setattr(sys, "argv", ["benchmarks/weights.py", "--record", "one", "--shapes", "7B,0.5B"])
    return keep


def test_a_row_takes_the_place_of_the_one_that_measured_the_same(keep: Any, results: Path) -> None:
    keep("pushes", "one", 25.4012, beside=("plain", 20.7), ratio=1.2271, gpus=["NVIDIA H200"] * 2)
    rows = json.loads(results.read_text())["rows"]
    assert [row["what"] for row in rows] == ["one", "two"]
    assert (rows[0]["number"], rows[0]["beside"], rows[0]["ratio"]) == (
        25.4,
        {"what": "plain", "number": 20.7},
        1.23,
    )
    assert rows[0]["command"] == "python benchmarks/weights.py --shapes 7B,0.5B"
    assert rows[0]["machine"].startswith("2 x H200, ")


def test_a_new_row_comes_last_and_none_is_kept_without_a_name(keep: Any, results: Path) -> None:
    keep("pushes", None, 5.0)
    keep("pushes", "three", 3.0)
    assert "3.0" in results.read_text()
    keep("pushes", "three", 17_544.2)
    assert '"number": 17540\n' in results.read_text().replace(",\n", "\n")
    assert [row["what"] for row in json.loads(results.read_text())["rows"]] == ["one", "two", "three"]


def test_the_page_is_short_and_says_of_each_number_where_it_is_from() -> None:
    page = (source.ROOT / "docs" / "measurements.md").read_text(encoding="utf-8")
    assert len(page.encode()) <= 12 * 1024
    rows = [
        row for path in (FOLDER / "results").glob("*.json") for row in json.loads(path.read_text())["rows"]
    ]
    assert len(rows) > 30
    for row in rows:
        assert row["machine"]
        assert row["command"]
        assert row["date"] >= "2026-11-21"
        assert f"| {row['what']} | **{row['number']:,}**" in page
