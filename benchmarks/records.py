"""Rows of docs/measurements.md: `--record WHAT` keeps one in results/, which has a file for each section."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def add_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--record`."""
    parser.add_argument(
        "--record", metavar="WHAT", help="keep the result as the row of this name of docs/measurements.md"
    )


def keep(
    section: str,
    what: str | None,
    number: float,
    *,
    beside: tuple[str, float] | None = None,
    ratio: float | None = None,
    gpus: Sequence[str] = (),
) -> None:
    """Writes a row into `results/SECTION.json`, in place of the one that measured the same before.

    Args:
        section: a file that is there.
        what: was measured; None keeps nothing.
        number: in the section's unit.
        beside: what was measured in the same run to compare with, and its number.
        ratio: of both, where it is not that of these two numbers, such as the median of several.
        gpus: the name of each that the run used; none for a run on CPUs.
    """
    if what is None:
        return
    row: dict[str, Any] = {
        "what": what,
        "number": float(f"{number:.4g}"),
        "machine": machine(gpus),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": command(sys.argv),
    }
    if beside is not None:
        row["beside"] = {"what": beside[0], "number": float(f"{beside[1]:.4g}")}
    if ratio is not None:
        row["ratio"] = float(f"{ratio:.3g}")
    path = RESULTS / f"{section}.json"
    page = json.loads(path.read_text(encoding="utf-8"))
    places = [place for place, other in enumerate(page["rows"]) if other["what"] == what]
    page["rows"][slice(places[0], places[0] + 1) if places else slice(len(page["rows"]), None)] = [row]
    path.write_text(json.dumps(page, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def machine(gpus: Sequence[str]) -> str:
    """Words for what a run used."""
    cards = [f"{number} x {name.removeprefix('NVIDIA ')}" for name, number in Counter(gpus).items()]
    return ", ".join([*cards, f"{os.cpu_count()} cores"])


def command(argv: Sequence[str]) -> str:
    """Returns the command line without `--record`."""
    words = list(argv)
    for place, word in enumerate(argv):
        if word == "--record":
            words[place : place + 2] = []
        elif word.startswith("--record="):
            del words[place]
    return f"python {shlex.join(words)}"
