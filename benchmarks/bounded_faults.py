"""Injects random faults into runs with a bound on staleness.

    python benchmarks/bounded_faults.py --faults 1000
    python benchmarks/bounded_faults.py --faults 100 --k 4 --in-flight keep --seed 5000
    python benchmarks/bounded_faults.py --faults 100 --replays

Runs the controller's loop with journal, barrier, collector and `paceline verify` over services that compute
nothing, in one process. The faults: the controller is killed, servers and learner exit, the broker loses its
messages, samples arrive twice or exceed the bound. Each run must complete within its bound and train every
step once; a run that does not is listed with its seed and faults. Prints a row per bound and the number of
faults of each kind.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from rich.console import Console
from rich.table import Table

from support.bounded_faults import faulty_run, quick


@dataclass(kw_only=True)
class Outcome:
    """The outcomes of the runs of one kind."""

    runs: int = 0
    mixed: int = 0
    again: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    struck: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def run(self, k: int, in_flight: str, seed: int, *, replays: bool) -> None:
        """Makes one run and records its failure, if any."""
        cpu, began = time.process_time(), time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                struck = asyncio.run(faulty_run(k, in_flight, seed, Path(folder) / "run", replays=replays))
            self.again += struck.pop("again", 0)
            self.mixed += struck.pop("mixed", 0)
            self.struck += struck
        except AssertionError as error:
            self.failures.append(str(error))
        self.runs += 1
        self.cpu_s += time.process_time() - cpu
        self.wall_s += time.monotonic() - began


def main() -> int:
    """Injects the faults, and prints the tables; returns 1 if a run was not sound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--faults", type=int, default=100, help="number of faults, over all kinds of runs")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 4], help="bounds")
    parser.add_argument(
        "--in-flight", nargs="+", default=["wait", "keep"], help="values of rollout.in_flight"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first runs; it increases by 1 per round of runs"
    )
    parser.add_argument("--replays", action="store_true", help="let steps replay groups of earlier steps")
    asked = parser.parse_args()
    outcomes = {kind: Outcome() for kind in itertools.product(asked.k, asked.in_flight)}
    with quick():
        for seed in itertools.count(asked.seed):
            for (k, in_flight), outcome in outcomes.items():
                outcome.run(k, in_flight, seed, replays=asked.replays)
            if sum(outcome.struck.total() for outcome in outcomes.values()) >= asked.faults:
                break
    _print(outcomes)
    failures = [failure for outcome in outcomes.values() for failure in outcome.failures]
    for failure in failures:
        print(failure)
    return int(bool(failures))


def _print(outcomes: dict[tuple[int, str], Outcome]) -> None:
    console = Console(width=110)
    columns = (
        "bound",
        "pushes",
        "runs",
        "faults",
        "samples of 2 versions or more",
        "not sound",
        "CPU s",
        "s",
    )
    table = Table(*columns, title="Runs of 7 steps with a bound on staleness")
    for (k, in_flight), it in outcomes.items():
        numbers = [it.runs, it.struck.total(), it.mixed, len(it.failures), round(it.cpu_s), round(it.wall_s)]
        table.add_row(str(k), in_flight, *map(str, numbers))
    total = list(outcomes.values())
    struck = sum((it.struck for it in total), Counter[str]())
    seconds = [round(sum(it.cpu_s for it in total)), round(sum(it.wall_s for it in total))]
    numbers = [sum(it.runs for it in total), struck.total(), sum(it.mixed for it in total)]
    table.add_row("all", "", *map(str, [*numbers, sum(len(it.failures) for it in total), *seconds]))
    console.print(table)
    if again := sum(it.again for it in total):
        console.print(f"{again} samples were trained again, each with its permission")
    faults = Table("fault", "times")
    for name, times in struck.most_common():
        faults.add_row(name, str(times))
    console.print(faults)


if __name__ == "__main__":
    sys.exit(main())
