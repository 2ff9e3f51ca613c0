"""Runs twenty colocated steps, and kills a rollout server in one and a learner rank in another.

    python benchmarks/turn_faults.py --shape 0.5B --learners 2 --engines 2x1      # 2 GPUs
    python benchmarks/turn_faults.py --shape tiny --learners 2 --engines 2x1 --device cpu

Runs `paceline train` with random weights on shared GPUs. Kills all processes of the last server while the
engines sleep and the learner trains, and later all processes of the last learner rank; the launcher restarts
them. `free after` is the time from the kill to the next commit. The run must succeed, each step must be
committed with equal digests on all servers, audits must measure the ratio 1, and `paceline verify` must
find no breach.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from push_faults import follow, processes_of
from rich.console import Console
from rich.table import Table
from step import ROOT, environment, write_inputs

RUN_TIMEOUT_S = 570.0
SHOWN = ("rollout/mismatch_kl", "actor/first_ppo_kl")


@dataclass(kw_only=True)
class Kill:
    """Victim and step of a kill, and the times of the kill and the next commit in the journal."""

    victim: str
    step: int
    killed: float = 0.0
    free: float = 0.0


async def main(argv: Sequence[str] | None = None) -> int:
    """Runs the steps and prints the table."""
    args = parse_args(argv)
    work = Path(args.work or tempfile.mkdtemp(prefix="paceline-turn-faults-"))
    kills = [
        Kill(victim=f"rollout-{args.engines[0] - 1}", step=args.steps // 4),
        Kill(victim=f"learner-{args.learners - 1}", step=args.steps * 2 // 3),
    ]
    config = write_inputs(args, work)
    command = [sys.executable, "-m", "paceline.cli.main", "train", str(config), "--plain", *args.overrides]
    run = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment(args))
    try:
        async with asyncio.timeout(RUN_TIMEOUT_S):
            await kill_in_turns(work / "run" / "events.jsonl", kills, run)
            code = await run.wait()
    finally:
        if run.returncode is None:
            run.terminate()
            await run.wait()
    return report(args, kills, work / "run", code)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the command line: the options of `step.py` that matter here."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--shape", default="0.5B")
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument(
        "--engines", type=lambda text: tuple(int(word) for word in text.split("x")), default=(2, 1)
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--work", help="folder for inputs and the run; default: a temporary one")
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value")
    args = parser.parse_args(argv)
    cuda = args.device == "cuda"
    small = {
        "placement": "colocated",
        "lengths": "mixed" if cuda else "equal",
        "prompts": 16 if cuda else 4,
        "samples": 8 if cuda else 4,
        "mini_batches": 2,
        "prompt_tokens": 256 if cuda else 32,
        "response_tokens": 256 if cuda else 16,
        "micro_batch_tokens": 16384,
        "max_num_seqs": 64,
        "recompute": "auto",
    }
    for name, value in small.items():
        setattr(args, name, value)
    args.overrides = ["trainer.save_freq=5", *args.overrides]
    return args


async def kill_in_turns(path: Path, kills: Sequence[Kill], run: asyncio.subprocess.Process) -> None:
    """Follows the journal, kills each victim during the learner's turn, and records the next commit."""
    pending, waiting = list(kills), list[Kill]()
    async for event in follow(path, run):
        if event["event"] == "commit":
            for kill in waiting:
                kill.free = event["time"]
            waiting.clear()
        learning = event["event"] == "phase" and event["to"] == "learn"
        if learning and pending and event["step"] == pending[0].step:
            kill = pending.pop(0)
            family = processes_of(kill.victim, path.parent)
            kill.killed = time.time()
            for process in family:
                process.kill()
            waiting.append(kill)


def report(args: argparse.Namespace, kills: Sequence[Kill], run_dir: Path, code: int) -> int:
    """Prints the table; returns 0 if all requirements hold."""
    from paceline.controller.verify.check import verify

    console = Console(width=110)
    table = Table(title=f"{args.shape}, colocated, {args.learners} learner ranks, {args.engines[0]} servers")
    for column in ("kill", "step", "free after s"):
        table.add_column(column, justify="right")
    for kill in kills:
        seconds = f"{kill.free - kill.killed:.1f}" if kill.free and kill.killed else "never"
        table.add_row(kill.victim, str(kill.step), seconds)
    console.print(table)
    metrics, events = read(run_dir / "metrics.jsonl"), read(run_dir / "events.jsonl")
    for name in SHOWN:
        values = [line[name] for line in metrics if line.get(name) is not None]
        console.print(f"{name}: {min(values):.3g} to {max(values):.3g} in {len(values)} steps")
    committed = {event["version"] for event in events if event["event"] == "commit"}
    problems = [str(breach) for breach in verify(run_dir).breaches]
    console.print(
        f"exit code {code}, {len(committed)} versions committed, `paceline verify`: {problems or 'sound'}"
    )
    audits = [abs(line["actor/first_ppo_kl"]) for line in metrics if "actor/first_ppo_kl" in line]
    complete = committed == set(range(args.steps + 1)) and len(metrics) >= args.steps
    recovered = all(kill.free for kill in kills)
    return 0 if code == 0 and complete and recovered and max(audits, default=1) == 0 and not problems else 1


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a JSON file, without those that only report a validation."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if "event" in line or "timing_s/step" in line]


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
