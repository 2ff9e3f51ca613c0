"""Runs the guessing game under faults while its environment is killed repeatedly.

    python benchmarks/episode_faults.py --seed 1 --faults 20
    python benchmarks/episode_faults.py --seed 2 --faults 40 --alive 3 8 learner.threads=1
    python benchmarks/episode_faults.py --seed 3 --kills --attached --limit-s 420

`paceline chaos` kills, pauses and cuts off two rollout servers, the reward service, the learner, the
controller and Redis; with --kills it only kills rollout servers, their engines and the reward
service. The environment is a separate process that gets SIGKILL after a random time and is restarted: a
server, or with --attached a client of the rollout servers. Steps have 16 games of up to 8 turns.

Prints the faults, the findings of `paceline verify`, the kills of each process, the number of games trained,
and the number that the environment still has open. Makes the starting model of `benchmarks/episodes.py` if it
is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
from attached_guess import NAME
from episodes import EXAMPLES, folder_of, prepare
from recipes import ROOT, json_lines, paceline

from paceline.rpc.v1 import environment_pb2 as pb
from paceline.rpc.v1 import environment_pb2_grpc
from paceline.runs.run_dir import read_note
from paceline.service.grpc import channels
from paceline.service.identity.credentials import ENVIRONMENT_TOKEN, Credentials
from paceline.sizing.machine import free_port

NUM_SERVERS = 2
SMALL = (
    f"rollout.replicas={NUM_SERVERS}",
    "rollout.n=2",
    "rollout.max_num_seqs=16",
    "rollout.episode.max_turns=8",
    "rollout.episode.retries=20",
    # The model has room for only 64 tokens.
    "data.max_prompt_length=8",
    "data.max_response_length=56",
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=4",
    "actor.ppo_max_token_len_per_gpu=1024",
    "guard.throughput.warn=null",
    "trainer.save_freq=4",
)
ONLY_KILLS = ("--only", "kill rollout-*", "--only", "kill reward")
COUNTS = ("steps", "rows_trained", "dropped_groups", "lost", "twice", "off_policy", "sound")
STOP_S = 60.0
CLOSING_S = 30.0


@dataclass
class Killed:
    """Runs the environment, and kills and restarts it from a separate thread.

    Attributes:
        num_kills: number of kills after the run's first step.
        num_open: open episodes of the last environment at the end of the run; None if unknown.
    """

    ports: tuple[int, ...]
    alive_s: tuple[float, float]
    rng: np.random.Generator
    run_dir: Path
    is_attached: bool = False
    num_kills: int = 0
    num_open: int | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Kills and restarts the environment until the run is over."""
        while not self.over.is_set():
            process = self._start()
            if process is None:
                continue
            try:
                if not self.is_attached:
                    self._until_it_listens(process)
                if self.over.wait(self.rng.uniform(*self.alive_s)) or self._run_is_over():
                    self.num_open = self._ask(process)
                    self.over.wait()
                else:
                    self.num_kills += (self.run_dir / "metrics.jsonl").is_file()
            finally:
                process.kill()
                process.wait()

    def overrides(self) -> list[str]:
        """Returns the environment's part of the configuration."""
        if self.is_attached:
            return [
                "rollout.environment.address=null",
                f"rollout.environment.attached={NAME}",
                f"service.rollout_port={self.ports[0]}",
            ]
        return [f"rollout.environment.address=127.0.0.1:{self.ports[0]}"]

    def _start(self) -> subprocess.Popen[str] | None:
        """Starts the environment's process; returns None if the run to attach to does not exist yet."""
        env = {**os.environ, "PORT": str(self.ports[0])}
        command = [sys.executable, str(EXAMPLES / "guess" / "environment.py")]
        if self.is_attached:
            note = read_note(self.run_dir)
            if note is None or not note.token:
                self.over.wait(0.5)
                return None
            env[ENVIRONMENT_TOKEN] = note.token
            client = str(ROOT / "benchmarks" / "attached_guess.py")
            command = [sys.executable, client, *(f"127.0.0.1:{port}" for port in self.ports)]
        return subprocess.Popen(
            command, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def _run_is_over(self) -> bool:
        note = read_note(self.run_dir)
        return note is not None and note.state == "ended"

    def _until_it_listens(self, process: subprocess.Popen[str]) -> None:
        while not self.over.wait(0.1):
            if process.poll() is not None:
                raise RuntimeError(f"the environment did not start at port {self.ports[0]}")
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.ports[0]), timeout=5.0).close()
                return

    def _ask(self, process: subprocess.Popen[str]) -> int | None:
        """Waits, up to a limit, until no episode is open; returns the number still open."""
        if self.is_attached:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                said, _ = process.communicate(timeout=CLOSING_S)
                return int(said.rpartition("open: ")[2]) if "open: " in said else None
            return None
        deadline = time.monotonic() + CLOSING_S
        while (count := asyncio.run(num_open_at(self.ports[0]))) and time.monotonic() < deadline:
            time.sleep(1.0)
        return count


async def num_open_at(port: int) -> int:
    """Returns the number of episodes that an environment has open."""
    channel = channels.connect(f"127.0.0.1:{port}", credentials=Credentials(), role="environment")
    try:
        describe = environment_pb2_grpc.EnvironmentServiceStub(channel).Describe
        answer = await describe(pb.DescribeEnvironmentRequest(), timeout=CLOSING_S, wait_for_ready=True)
        return int(answer.num_open)
    finally:
        await channel.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the run and prints its results; returns 0 if it recovered from every fault and is sound."""
    args = parse_args(argv)
    start = folder_of(args.start.resolve(), "guess", 0)
    prepare(start, "guess", 0, args.overrides)
    run_dir = args.run_dir.resolve()
    shutil.rmtree(run_dir, ignore_errors=True)
    first = args.port or free_port()
    killed = Killed(
        tuple(range(first, first + (NUM_SERVERS if args.attached else 1))),
        tuple(args.alive),
        np.random.default_rng(args.seed),
        run_dir,
        is_attached=args.attached,
    )
    values = [
        f"trainer.run_dir={run_dir}",
        f"trainer.seed={args.seed}",
        f"model.path={start}/start",
        f"data.train_files={start}/data/train.parquet",
        *killed.overrides(),
        *SMALL,
        *args.overrides,
    ]
    config = str(EXAMPLES / "guess" / "grpo.yaml")
    options = ["--seed", str(args.seed), "--faults", str(args.faults), "--rate", str(args.rate), "--plain"]
    options += ONLY_KILLS if args.kills else ()
    thread = threading.Thread(target=killed.run)
    thread.start()
    began = time.monotonic()
    try:
        code = chaos([*paceline(), "chaos", config, *options, *values], args.limit_s)
    finally:
        killed.over.set()
        thread.join()
    report(args, run_dir, killed, time.monotonic() - began)
    return code


def chaos(command: Sequence[str], limit_s: float | None) -> int:
    """Runs `paceline chaos`, and ends it after the limit; it still prints its results."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(limit_s)
        process.send_signal(signal.SIGTERM)
        return process.wait(STOP_S)
    finally:
        process.kill()


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--faults",
        type=int,
        default=20,
        help="faults of paceline chaos, in addition to the environment's kills",
    )
    parser.add_argument("--rate", type=float, default=12.0, help="faults per minute")
    parser.add_argument(
        "--kills", action="store_true", help="only kill servers, engines and the reward service"
    )
    parser.add_argument(
        "--attached", action="store_true", help="use an environment that attaches to the rollout servers"
    )
    parser.add_argument(
        "--alive",
        type=float,
        nargs=2,
        default=(3.0, 8.0),
        help="shortest and longest seconds until the environment is killed",
    )
    parser.add_argument("--limit-s", type=float, help="end the run after this many seconds")
    parser.add_argument(
        "--port", type=int, help="port of the environment or the first server; default: a free one"
    )
    parser.add_argument("--start", type=Path, default=ROOT / "runs" / "episodes", help="folder of the model")
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "episode-faults")
    return parser.parse_args(argv)


def report(args: argparse.Namespace, run_dir: Path, killed: Killed, seconds: float) -> None:
    """Prints the results in the run directory, the last line as JSON."""
    metrics = [line for line in json_lines(run_dir / "metrics.jsonl") if "episode/turns/mean" in line]
    file = run_dir / "chaos.json"
    if not file.is_file():  # the run did not reach its end
        subprocess.run([*paceline(), "verify", str(run_dir)], check=False, cwd=ROOT)
    told = json.loads(file.read_text()) if file.is_file() else {}
    faults = Counter(
        f"{line['fault']} {kind_of(line['target'])}" for line in json_lines(run_dir / "chaos.jsonl")
    )
    faults["kill client of Attach" if args.attached else "kill environment"] += killed.num_kills
    result = {
        "seed": args.seed,
        "seconds": round(seconds),
        "faults": dict(sorted(faults.items())),
        "turns": round(fmean(line["episode/turns/mean"] for line in metrics), 1) if metrics else None,
        "most_turns": max((line["episode/turns/max"] for line in metrics), default=None),
        **{name: told.get(name) for name in COUNTS},
        "left_open": killed.num_open,
    }
    print(json.dumps(result))


def kind_of(target: str) -> str:
    """Returns a target without its number: rollout-1/engine is an engine, rollout-1 a rollout server."""
    name, _, part = target.partition("/")
    return part or name.partition("-")[0]


if __name__ == "__main__":
    sys.exit(main())
