"""A whole run of the guessing game under faults, while its environment is killed again and again.

    python benchmarks/episode_faults.py --seed 1 --faults 20
    python benchmarks/episode_faults.py --seed 2 --faults 40 --alive 3 8 learner.threads=1

`paceline chaos` kills, pauses and cuts off two rollout servers, the reward service, the learner, the
controller and Redis; the environment is a process of its own that gets SIGKILL after a random time and is
started again. Steps of 16 games. Prints the faults, what `paceline verify` finds, how often the environment
was killed, and how many games were trained. The starting model is that of `benchmarks/episodes.py`, made if
it is not there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
from episodes import EXAMPLES, folder_of, prepare
from recipes import ROOT, json_lines, paceline

from paceline.cli.launch.machine import free_port

SMALL = (
    "rollout.replicas=2",
    "rollout.n=2",
    "rollout.max_num_seqs=16",
    "rollout.episode.retries=20",
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=4",
    "actor.ppo_max_token_len_per_gpu=1024",
    "guard.throughput.warn=null",
    "trainer.save_freq=4",
)
COUNTS = ("steps", "rows_trained", "dropped_groups", "lost", "twice", "off_policy", "sound")


@dataclass
class Killed:
    """The environment, killed and started again by a thread of its own."""

    port: int
    alive_s: tuple[float, float]
    rng: np.random.Generator
    num_kills: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Until it is over."""
        while not self.over.is_set():
            process = subprocess.Popen(
                [sys.executable, str(EXAMPLES / "guess" / "environment.py")],
                env={**os.environ, "PORT": str(self.port)},
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                self._until_it_listens(process)
                if not self.over.wait(self.rng.uniform(*self.alive_s)):
                    self.num_kills += 1
            finally:
                process.kill()
                process.wait()

    def _until_it_listens(self, process: subprocess.Popen[bytes]) -> None:
        while not self.over.wait(0.1):
            if process.poll() is not None:
                raise RuntimeError(f"the environment does not start at port {self.port}")
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=5.0).close()
                return


def main(argv: Sequence[str] | None = None) -> int:
    """Runs and prints; 0 if the run recovered from everything and is sound."""
    args = parse_args(argv)
    start = folder_of(args.start.resolve(), "guess", 0)
    prepare(start, "guess", 0, args.overrides)
    killed = Killed(free_port(), tuple(args.alive), np.random.default_rng(args.seed))
    thread = threading.Thread(target=killed.run)
    thread.start()
    run_dir = args.run_dir.resolve()
    values = [
        f"trainer.run_dir={run_dir}",
        f"trainer.seed={args.seed}",
        f"model.path={start}/start",
        f"data.train_files={start}/data/train.parquet",
        f"rollout.environment.address=127.0.0.1:{killed.port}",
        *SMALL,
        *args.overrides,
    ]
    config = str(EXAMPLES / "guess" / "grpo.yaml")
    options = ["--seed", str(args.seed), "--faults", str(args.faults), "--rate", str(args.rate), "--plain"]
    began = time.monotonic()
    try:
        code = subprocess.run(
            [*paceline(), "chaos", config, *options, *values], check=False, cwd=ROOT
        ).returncode
    finally:
        killed.over.set()
        thread.join()
    report(run_dir, killed.num_kills, time.monotonic() - began)
    return code


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--faults", type=int, default=20, help="of paceline chaos, beside the environment's kills"
    )
    parser.add_argument("--rate", type=float, default=12.0, help="of them per minute")
    parser.add_argument(
        "--alive",
        type=float,
        nargs=2,
        default=(3.0, 8.0),
        help="seconds that the environment lives: from, to",
    )
    parser.add_argument("--start", type=Path, default=ROOT / "runs" / "episodes", help="where the model is")
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "episode-faults")
    return parser.parse_args(argv)


def report(run_dir: Path, num_kills: int, seconds: float) -> None:
    """Prints what the run directory says."""
    turns = [
        line["episode/turns/mean"]
        for line in json_lines(run_dir / "metrics.jsonl")
        if "episode/turns/mean" in line
    ]
    chaos = run_dir / "chaos.json"
    told = json.loads(chaos.read_text()) if chaos.is_file() else {}
    counts = {name: told.get(name) for name in COUNTS}
    print(
        f"environment killed {num_kills} times in {seconds:.0f} s; "
        f"{fmean(turns) if turns else 0:.1f} turns per game; {counts}"
    )


if __name__ == "__main__":
    sys.exit(main())
