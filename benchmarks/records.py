"""Records rows of docs/measurements.md: `--record WHAT` writes a row to the section's file in results/."""

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
        "--record", metavar="WHAT", help="record the result as this row of docs/measurements.md"
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
    """Writes a row into `results/SECTION.json`, and replaces an earlier row of the same name.

    Args:
        section: name of an existing file.
        what: name of the row; None records nothing.
        number: the result in the section's unit.
        beside: name and result of a baseline in the same run.
        ratio: ratio to print; default: the quotient of `number` and the baseline.
        gpus: the names of the GPUs that the run used; empty on CPUs.
    """
    if what is None:
        return
    row: dict[str, Any] = {
        "what": what,
        "number": _rounded(number),
        "machine": machine(gpus),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": command(sys.argv),
    }
    if beside is not None:
        row["beside"] = {"what": beside[0], "number": _rounded(beside[1])}
    if ratio is not None:
        row["ratio"] = float(f"{ratio:.3g}")
    path = RESULTS / f"{section}.json"
    page = json.loads(path.read_text(encoding="utf-8"))
    places = [place for place, other in enumerate(page["rows"]) if other["what"] == what]
    page["rows"][slice(places[0], places[0] + 1) if places else slice(len(page["rows"]), None)] = [row]
    path.write_text(json.dumps(page, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _rounded(number: float) -> float:
    """Returns four digits of a number; an int if it has no others."""
    rounded = float(f"{number:.4g}")
    return int(rounded) if rounded >= 1000 else rounded


def machine(gpus: Sequence[str]) -> str:
    """Describes the hardware of a run."""
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
