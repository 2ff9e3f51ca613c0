"""Kills rollout servers before, during and after a weight push, and measures the learner's waits.

    python benchmarks/push_faults.py --shape 0.5B --learners 1 --engines 3x1 --kill before,during    # 4 GPUs
    python benchmarks/push_faults.py --shape 0.5B --learners 1 --engines 3x1 --kill during,after
    python benchmarks/push_faults.py --shape tiny --learners 1 --engines 3x1 --kill before,during --device cpu

Runs `paceline train` with random weights. In every second step all processes of the last live server are
killed at once: before the push (the learner is training), during it (with small rounds, to make it longer) or
after it (the version is committed, the server already samples). `free after` is the time from the kill until
the next commit or, for kills after a push, until the step's batch is complete. The run must succeed, every
commit must have one digest on all remaining servers, and `paceline verify` must find nothing.

    python benchmarks/push_faults.py --shape 0.5B --learners 1 --engines 3x1 --kill hang             # 4 GPUs

    python benchmarks/push_faults.py --shape 0.5B --engines 1x1 --kill after --steps-after 20        # 2 GPUs

If every server is killed, the run waits until the launcher has restarted one. `free after` then includes the
start of an engine, and the server gets its weights as a newcomer.

`hang` stops the victim's engine processes (SIGSTOP) at the beginning of a push. The server's own process
continues and sends heartbeats. Only this server may be excluded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from step import ROOT, write_inputs

MOMENTS = {"before": (0, "learn"), "during": (0, "publish"), "after": (1, "dispatch"), "hang": (0, "publish")}
"""Moments of kills: the beginning of a phase, in the step of the kill (0) or the next step (1)"""

PUSH_TIMEOUT_S = 10.0
"""Deadline of a push with a hang; the hung engine's server answers 10 s after the deadline"""

LIMIT_S = 15.0
RESTART_LIMIT_S = 150.0
"""Limit if no server is left, including the start, compilation and CUDA graphs of an engine"""

_PUT_OUT = ("dead", "expelled")
RUN_TIMEOUT_S = 540.0
POLL_S = 0.002


@dataclass(kw_only=True)
class Kill:
    """A server to kill, when to kill it, and what happened. Times are the journal's, in seconds."""

    moment: str
    step: int
    victim: str
    killed: float = 0.0
    free: float = 0.0

    @property
    def phase(self) -> tuple[int, str]:
        """Step and phase; the server is killed when they begin."""
        later, phase = MOMENTS[self.moment]
        return self.step + later, phase


async def main(argv: Sequence[str] | None = None) -> int:
    """Runs the faults and prints the table."""
    args = parse_args(argv)
    work = Path(tempfile.mkdtemp(prefix="paceline-faults-"))
    num_engines = args.engines[0]
    kills = [
        Kill(moment=moment, step=2 * number + 2, victim=f"rollout-{num_engines - 1 - number}")
        for number, moment in enumerate(args.kill)
    ]
    args.steps = kills[-1].step + args.steps_after
    config = write_inputs(args, work)
    command = [sys.executable, "-m", "paceline.cli.main", "train", str(config), "--plain", *args.overrides]
    run = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    try:
        async with asyncio.timeout(RUN_TIMEOUT_S):
            await follow_and_kill(work / "run" / "events.jsonl", kills, run, args.delay_ms / 1e3)
            code = await run.wait()
    finally:
        if run.returncode is None:
            run.terminate()
            await run.wait()
    return report(args, kills, work / "run", code)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the command line: the options of `step.py` that matter here."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kill", type=lambda text: text.split(","), default=["before", "during"])
    parser.add_argument(
        "--delay-ms", type=float, default=20.0, help="time from the beginning of a push to a kill during it"
    )
    parser.add_argument(
        "--steps-after",
        type=int,
        default=2,
        help="steps after the last kill; with about 60 the servers return and get weights",
    )
    parser.add_argument("--shape", default="0.5B")
    parser.add_argument("--learners", type=int, default=1)
    parser.add_argument(
        "--engines", type=lambda text: tuple(int(word) for word in text.split("x")), default=(3, 1)
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value")
    args = parser.parse_args(argv)
    if set(args.kill) - set(MOMENTS) or len(args.kill) > args.engines[0]:
        parser.error(f"--kill takes {', '.join(MOMENTS)}, and at most as many kills as there are engines")
    small = {
        "placement": "split",
        "lengths": "equal",
        "prompts": 16,
        "samples": 4,
        "mini_batches": 1,
        "prompt_tokens": 64,
        "response_tokens": 64,
        "micro_batch_tokens": 8192,
        "max_num_seqs": 64,
        "recompute": "none",
    }
    for name, value in small.items():
        setattr(args, name, value)
    if "hang" in args.kill:
        args.overrides = [f"weights.push_timeout_s={PUSH_TIMEOUT_S}", *args.overrides]
    args.overrides = ["weights.staging_mib=2", "trainer.save_freq=1000", *args.overrides]
    return args


async def follow_and_kill(
    path: Path, kills: Sequence[Kill], run: asyncio.subprocess.Process, delay_s: float
) -> None:
    """Follows the journal, kills servers at their moments, and records when the run continued."""
    waiting: Kill | None = None
    pending, family = list(kills), list[psutil.Process]()
    async for event in follow(path, run):
        step, to = event.get("step"), event.get("to") if event["event"] == "phase" else None
        if waiting is not None:
            done = to == "learn" if waiting.moment == "after" else event["event"] == "commit"
            if done:
                waiting.free, waiting = event["time"], None
        if pending and step == pending[0].step and to == "collect":
            family = processes_of(pending[0].victim, path.parent)  # search early: it takes as long as a push
        if pending and (step, to) == pending[0].phase:
            waiting = pending.pop(0)
            if waiting.moment == "during":
                await asyncio.sleep(delay_s)
            waiting.killed = time.time()
            for process in family[waiting.moment == "hang" :]:
                process.suspend() if waiting.moment == "hang" else process.kill()


async def follow(path: Path, run: asyncio.subprocess.Process) -> AsyncIterator[dict[str, Any]]:
    """Yields events as they are written, until the run has ended."""
    while not path.exists():  # noqa: ASYNC240  a stat of a local file
        if run.returncode is not None:
            return
        await asyncio.sleep(0.1)
    with path.open() as file:
        part = ""
        while True:
            part += file.readline()
            if part.endswith("\n"):
                yield json.loads(part)
                part = ""
            elif run.returncode is not None:
                return
            else:
                await asyncio.sleep(POLL_S)


def processes_of(member: str, run_dir: Path) -> list[psutil.Process]:
    """Returns a member's process, as recorded by the launcher, and all its descendants."""
    from paceline.runs.run_dir import read_note

    note = read_note(run_dir)
    if note is None or member not in note.pids:
        raise RuntimeError(f"{run_dir}/run.json names no process of {member}")
    process = psutil.Process(note.pids[member])
    return [process, *process.children(recursive=True)]


def report(args: argparse.Namespace, kills: Sequence[Kill], run_dir: Path, code: int) -> int:
    """Prints the table; returns 0 if all requirements hold."""
    from paceline.controller.verify.check import verify

    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    table = Table(title=f"{args.shape}, {args.learners} learner rank(s), {args.engines[0]} servers")
    for column in ("kill", "step", "victim", "free after s"):
        table.add_column(column, justify="right")
    fine = code == 0
    for kill in kills:
        seconds = kill.free - kill.killed if kill.free and kill.killed else float("inf")
        none_left = len(kills) == args.engines[0] and kill is kills[-1]
        limit_s = RESTART_LIMIT_S if none_left else LIMIT_S
        limit_s += PUSH_TIMEOUT_S + 10 if kill.moment == "hang" else 0
        fine = fine and seconds <= limit_s
        table.add_row(kill.moment, str(kill.step), kill.victim, f"{seconds:.2f}")
    console = Console(width=110)
    console.print(table)
    problems = [str(breach) for breach in verify(run_dir).breaches]
    reasons = [
        f"{event['member']}: {event['what']}: {event.get('reason', '')}"
        for event in events
        if event["event"] == "member" and event["what"] in ("dead", "expelled", "suspect")
    ]
    for reason in reasons:
        console.print(reason)
    newcomers = [event for event in events if event["event"] == "newcomers"]
    for event in newcomers:
        after = event["time"] - max(kill.killed for kill in kills if kill.killed < event["time"])
        console.print(
            f"newcomers {event['servers']} got version {event['version']}, {after:.1f} s after the kill"
        )
    lost = {event["member"] for event in events if event["event"] == "member" and event["what"] in _PUT_OUT}
    fine = fine and lost == {kill.victim for kill in kills}
    fine = fine and (len(kills) < args.engines[0] or bool(newcomers))
    commits = sum(event["event"] == "commit" for event in events)
    console.print(f"exit code {code}, {commits} commits, `paceline verify`: {problems or 'sound'}")
    return 0 if fine and not problems else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
