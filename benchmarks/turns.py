"""Measures how learner ranks and engines take turns on the same GPUs: sleep, wake, push, first token.

    python benchmarks/turns.py --shape 0.5B --learners 1 --engines 1x1      # 1 GPU
    python benchmarks/turns.py --shape 7B --learners 4 --engines 4x1,2x2    # 4 GPUs
    python benchmarks/turns.py --shape tiny --learners 2 --engines 2x1 --device cpu

In each turn, all engines sleep; the weights change; engines wake their weights; a push goes through shared
memory; engines wake their KV caches and draw one token, then 16 more. Every push compares the digests of all
ranks. At the end the last weights are also pushed over gloo and once more over shared memory; the tokens
drawn after the three pushes must be equal. Prints medians in milliseconds without the first turn; `free GiB`
is the free memory of the first GPU while the engines sleep and while they are awake.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPES
from weights_fleet import HEAD_START_S, Fleet, answers, order
from weights_sides import Case

COLUMNS = ("sleep", "wake weights", "transfer", "push", "wake KV", "first token", "switch")
NUM_TOKENS = 16


def turn(fleet: Fleet, version: int) -> dict[str, float]:
    """Gives the learner and the engines one turn each; returns milliseconds."""

    def slowest(method: str, *args: Any) -> float:
        began = time.perf_counter()
        order(fleet.servers, method, *args)
        answers(fleet.servers)
        return 1e3 * (time.perf_counter() - began)

    times = {"sleep": slowest("sleep"), "free asleep": free_gib(fleet)}
    times["wake weights"] = slowest("wake", "weights")
    times["transfer"], times["push"], _, _ = fleet.push(version, HEAD_START_S)
    times["push"] -= 1e3 * HEAD_START_S
    times["wake KV"] = slowest("wake", "kv_cache")
    times["first token"] = slowest("draw", 1)
    times["switch"] = sum(times[name] for name in COLUMNS[:-1] if name != "transfer")
    return times | {"free awake": free_gib(fleet)}


def free_gib(fleet: Fleet) -> float:
    """Returns the free memory of the first learner rank's GPU."""
    order(fleet.learners[:1], "free")
    return float(answers(fleet.learners[:1])[0]) / 2**30


def tokens(fleet: Fleet) -> list[list[int]]:
    """Returns the same greedy tokens of every engine."""
    order(fleet.servers, "draw", NUM_TOKENS)
    return [drawn for _, drawn in answers(fleet.servers)]


def measure(fleet: Fleet, round_bytes: int, turns: int) -> dict[str, float]:
    """Returns the medians of one case."""
    fleet.describe(round_bytes, "never", "shared")
    joined_ms = fleet.form()
    fleet.push(1, HEAD_START_S)
    rows = [turn(fleet, version) for version in range(2, turns + 3)][1:]
    through_memory = check_equal(fleet, round_bytes)
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return medians | {"join": joined_ms, "gloo": through_memory}


def check_equal(fleet: Fleet, round_bytes: int) -> float:
    """Exits unless engines draw equal tokens after pushes of equal weights; returns gloo's milliseconds."""
    drawn, gloo_ms = [tokens(fleet)], 0.0
    for backend in ("gloo", "shared"):
        fleet.describe(round_bytes, "never", backend)
        fleet.form()
        pause_ms = fleet.push(99, HEAD_START_S, change=False)[1]
        gloo_ms = gloo_ms or pause_ms
        drawn.append(tokens(fleet))
    if len({tuple(sample) for samples in drawn for sample in samples}) != 1:
        raise SystemExit(f"engines draw different tokens from equal weights: {drawn}")
    return gloo_ms


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="0.5B", choices=sorted(SHAPES))
    parser.add_argument("--learners", type=int, default=1)
    parser.add_argument(
        "--engines", default="1x1", help="engines x tensor-parallel size, for example 4x1,2x2"
    )
    parser.add_argument("--staging-mib", type=int, default=1024, help="value of weights.staging_mib")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    gpus = [str(gpu) for gpu in range(torch.cuda.device_count())]
    table = Table(title=f"taking turns, {options.shape}, medians of {options.turns} turns, ms")
    for heading in ("case", *COLUMNS, "join", "gloo", "free GiB asleep", "awake"):
        table.add_column(heading, justify="right", no_wrap=True)
    for engines in options.engines.split(","):
        count, size = map(int, engines.split("x"))
        case = Case(
            shape=options.shape,
            num_learners=options.learners,
            num_engines=count,
            parallel_size=size,
            device=options.device,
            colocated=True,
        )
        fleet = Fleet(case)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[options.shape]), encoding="utf-8")
            try:
                fleet.start(folder, gpus)
                fleet.ready()
                row = measure(fleet, options.staging_mib << 19, options.turns)
            finally:
                fleet.stop()
        names = (*COLUMNS, "join", "gloo", "free asleep", "free awake")
        table.add_row(case.name, *(f"{row[name]:.1f}" for name in names))
    console = Console(width=160)
    console.print(table)
    device = torch.cuda.get_device_name() if gpus else f"{os.cpu_count()} cores"
    console.print(f"{device}, torch {torch.__version__}; command: python {' '.join(sys.argv)}")


if __name__ == "__main__":
    main()
