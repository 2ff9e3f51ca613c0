"""`paceline track`: sends the records of a past run to experiment trackers."""

from __future__ import annotations

import argparse

from paceline.core.errors import DataError
from paceline.runs import run_dir as run_dirs
from paceline.show.report.lines import read_jsonl
from paceline.show.trackers.adapters import TRACKERS, check_installed
from paceline.show.trackers.sink import Sink

_MAX_WAITING = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("run_name", metavar="RUN", help="run directory, or its name under runs/")
    parser.add_argument("trackers", nargs="+", metavar="TRACKER", choices=TRACKERS, help=", ".join(TRACKERS))


def run(args: argparse.Namespace) -> int:
    """Sends every step; returns 1 if a tracker failed."""
    folder = run_dirs.find(args.run_name)
    check_installed(args.trackers)
    faults: list[str] = []
    sink, count = Sink(args.trackers, folder, say=faults.append, max_waiting=_MAX_WAITING), 0
    sent: set[int] = set()
    lines = (line for line in read_jsonl(folder / "metrics.jsonl") if isinstance(line.get("step"), int))
    for line in lines:
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
        step, at = int(numbers.pop("step")), float(numbers.pop("time", 0.0))
        if step in sent:
            sink.validation(step, numbers, at)
            continue
        count += 1
        sent.add(step)
        sink.step(step, numbers, at)
    if not count:
        raise DataError(f"{folder} has no finished step (no metrics.jsonl); give a run directory")
    sink.end(ok=True)
    for fault in faults:
        print(fault)
    print(f"sent {count} steps of {folder.name} to {', '.join(args.trackers)}")
    return 1 if faults else 0
