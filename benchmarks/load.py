"""Measures the load on controller, reward service and Redis; only engines and learner are simulated.

    python benchmarks/load.py [--servers 10 50 200] [--trajectories 1000 10000 100000] [--tokens 16]
        [--stores 0 1] [--staleness 1]

Makes a run of a few steps per size: real controller, reward service with a trivial function, Redis, and
rollout servers (apps, samplers, mailboxes; in a few processes) with engines that draw words at once.
The learner reads each `TrainOrder`, fetches its trajectories, checks their digests and answers. The rest of a
step is the cost of services and broker. With --staleness, the servers draw samples of the next steps
meanwhile. With --kill-store, a blob store is killed in the middle of step 2, and started again without its
data, as the launcher does.

Prints medians of the steps after the first: seconds from dispatch to commit, CPU seconds of controller,
reward service and Redis, peak memory of Redis, and bytes of the journal. Also prints the seconds from the
controller's start to the first dispatch, when all members have registered and formed a group, and the
controller's CPU seconds until then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis

from paceline.broker.redis.redis_server import RedisServer
from paceline.config.load import dump_yaml, parse
from paceline.config.run import RunConfig
from paceline.service.process import BLOB_STORES, BROKER_URL

HERE = Path(__file__).parent
ROOT = HERE.parent
PROMPT_TOKENS = 32
POLL_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The size of a run: a line of the table."""

    servers: int
    trajectories: int
    tokens: int
    samples: int
    stores: int = 0

    @property
    def prompts(self) -> int:
        """Prompt groups per step."""
        return max(1, self.trajectories // self.samples)


@dataclass(kw_only=True, slots=True)
class Step:
    """The costs of one step."""

    seconds: float
    controller_s: float
    reward_s: float
    redis_s: float
    stores_s: float
    members_s: float
    redis_mib: float
    journal_bytes: int


@dataclass(kw_only=True, slots=True)
class Watched:
    """The processes whose CPU time is measured, and their last readings."""

    controller: psutil.Process
    reward: psutil.Process
    redis: psutil.Process
    stores: Sequence[RedisServer]
    members: Sequence[psutil.Process]
    clients: Sequence[Any]
    kill_in: int = -1
    peak_mib: float = 0.0
    start_s: float = 0.0
    start_cpu_s: float = 0.0
    steps: list[Step] = field(default_factory=list)
    _before: tuple[float, ...] = (0.0,) * 6

    def look(self) -> None:
        """Records how much memory the servers use now."""
        used = sum(client.info("memory")["used_memory"] for client in self.clients) / 2**20
        self.peak_mib = max(self.peak_mib, used)

    def kill_store(self, num_lines: int, least: int) -> None:
        """Kills the first store in its step, once it has `least` blobs, and starts it again, empty."""
        if num_lines == self.kill_in and self.clients[-1].dbsize() >= least:
            os.kill(self.stores[-1].pid, signal.SIGKILL)
            self.stores[-1].restart()
            self.kill_in = -1

    def note_start(self, journal: Path) -> None:
        """Records the time of the first dispatch, once there is one."""
        if self.start_s or not journal.exists():
            return
        events = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()[:5000]]
        times = {event["event"]: event["time"] for event in reversed(events)}
        if "dispatch" in times:
            self.start_s = times["dispatch"] - self.controller.create_time()
            self.start_cpu_s = _cpu_s(self.controller)

    def note(self, metrics: Mapping[str, float], journal: Path) -> None:
        """Records the costs of a completed step."""
        now = (
            *(_cpu_s(process) for process in (self.controller, self.reward, self.redis)),
            sum(_cpu_s(psutil.Process(store.pid)) for store in self.stores),
            sum(_cpu_s(process) for process in self.members),
            journal.stat().st_size,
        )
        before, self._before = self._before, now
        self.steps.append(
            Step(
                seconds=float(metrics.get("timing_s/step") or 0.0),
                controller_s=now[0] - before[0],
                reward_s=now[1] - before[1],
                redis_s=now[2] - before[2],
                stores_s=now[3] - before[3],
                members_s=now[4] - before[4],
                redis_mib=self.peak_mib,
                journal_bytes=int(now[5] - before[5]),
            )
        )
        self.peak_mib = 0.0


def _cpu_s(process: psutil.Process) -> float:
    """Returns the CPU seconds of a process and its children."""
    total = 0.0
    for part in (process, *process.children(recursive=True)):
        times = part.cpu_times()
        total += times.user + times.system
    return total


def make_config(size: Size, inputs: Path, run_dir: Path, args: argparse.Namespace) -> RunConfig:
    """Returns the configuration of a run of this size."""
    length = PROMPT_TOKENS + size.tokens
    return parse(
        RunConfig,
        {
            "data": {
                "train_files": str(inputs / "data/train.parquet"),
                "max_prompt_length": PROMPT_TOKENS,
                "max_response_length": size.tokens,
                "train_batch_size": size.prompts,
            },
            "model": {"path": str(inputs / "model")},
            "algorithm": {"adv_estimator": "grpo" if size.samples > 1 else "gae"},
            "actor": {"ppo_mini_batch_size": size.prompts, "ppo_max_token_len_per_gpu": length},
            "rollout": {"n": size.samples, "replicas": size.servers},
            "reward": {"functions": [{"name": f"{HERE / 'load_rewards.py'}:length"}]},
            "trainer": {
                "total_steps": args.steps,
                "run_dir": str(run_dir),
                "save_trajectories": not args.no_texts,
                "val_before_train": False,
            },
            "barrier": {"mode": "bounded", "max_staleness": args.staleness} if args.staleness else {},
            "guard": {"enabled": False},
            "service": {"startup_timeout_s": 600.0},
            "learner": {"device": "cpu"},
        },
    )


def prepare(folder: Path, num_prompts: int) -> Path:
    """Makes the arithmetic example's rows and tokenizer; returns their folder."""
    command = [sys.executable, str(ROOT / "examples/arithmetic/prepare.py")]
    command += ["--out", str(folder / "data"), "--model-out", str(folder / "model")]
    command += ["--num-train", str(num_prompts), "--num-val", "1", "--num-sft", "1"]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return folder


def measure(size: Size, folder: Path, args: argparse.Namespace) -> Watched:
    """Runs the services at one size and measures them."""
    inputs = prepare(folder / "inputs", size.prompts)
    run_dir = folder / "run"
    (run_dir / "logs").mkdir(parents=True)
    config = make_config(size, inputs, run_dir, args)
    resolved = run_dir / "config.resolved.yaml"
    resolved.write_text(dump_yaml(config))
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer.start(folder / "redis"))
        stores = [
            stack.enter_context(RedisServer.start(folder / f"store-{number}", is_durable=False))
            for number in range(size.stores)
        ]
        environment = _environment(server, stores, args.train_s)
        services = _Services(stack=stack, logs=run_dir / "logs", environment=environment)
        controller, address = services.start_controller(resolved, run_dir, folder / "address")
        watched = Watched(
            controller=controller,
            reward=services.start_reward(address),
            redis=psutil.Process(server.pid),
            stores=stores,
            members=services.start_members(address, size.servers, args.processes),
            clients=[redis.Redis.from_url(each.url, socket_timeout=30.0) for each in (server, *stores)],
            kill_in=2 if args.kill_store else -1,
        )
        follow(watched, run_dir, args.steps, args.timeout_s)
        if args.verify:
            command = [sys.executable, "-m", "paceline.controller.verify", str(run_dir)]
            subprocess.run(command, env=environment, check=True, timeout=args.timeout_s)
        if args.kill_store:
            _print_losses(run_dir / "events.jsonl")
    return watched


def _environment(server: RedisServer, stores: Sequence[RedisServer], train_s: float) -> dict[str, str]:
    """Returns the environment of the services."""
    paths = [*map(str, [ROOT / "src", *(ROOT / "services").iterdir()])]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return os.environ | {
        BROKER_URL: server.url,
        BLOB_STORES: " ".join(store.url for store in stores),
        "PACELINE_TOKEN": secrets.token_hex(8),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "PACELINE_PAPER_TRAIN_S": str(train_s),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Services:
    """Starts the services of a run; they end with the stack."""

    stack: ExitStack
    logs: Path
    environment: Mapping[str, str]

    def start(self, name: str, *command: str) -> psutil.Process:
        log = self.stack.enter_context((self.logs / f"{name}.log").open("w"))
        process = psutil.Popen([sys.executable, *command], env=self.environment, stdout=log, stderr=log)
        self.stack.callback(_end, process)
        return process

    def start_controller(self, config: Path, run_dir: Path, address_file: Path) -> tuple[psutil.Process, str]:
        """Returns its process and its address."""
        controller = self.start(
            "controller",
            *("-m", "paceline.controller", "--config", str(config), "--run-dir", str(run_dir)),
            *("--port", "0", "--address-file", str(address_file)),
        )
        return controller, _wait_for_address(address_file, controller, self.logs / "controller.log")

    def start_reward(self, address: str) -> psutil.Process:
        command = ("-m", "paceline.reward", "--controller", address, "--member-id", "reward-0")
        return self.start("reward", *command)

    def start_members(self, address: str, num_servers: int, num_processes: int) -> list[psutil.Process]:
        """Starts the learner, and the rollout servers in so many processes."""
        members = str(HERE / "load_members.py")
        processes = [self.start("learner", members, "learner", "--controller", address)]
        per_process = -(-num_servers // num_processes)
        for first in range(0, num_servers, per_process):
            count = min(per_process, num_servers - first)
            command = (members, "rollout", "--controller", address, "--first", str(first))
            processes.append(self.start(f"rollout-{first}", *command, "--count", str(count)))
        return processes


def _print_losses(journal: Path) -> None:
    events = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    kinds = Counter(event.get("verdict", event["event"]) for event in events)
    print({kind: kinds[kind] for kind in ("admitted", "lost", "duplicate", "redispatch", "recollect")})


def _wait_for_address(file: Path, controller: psutil.Process, log: Path) -> str:
    deadline = time.monotonic() + 120
    while not file.exists():
        if time.monotonic() > deadline or controller.poll() is not None:
            raise TimeoutError(f"the controller did not come up:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.05)
    return file.read_text(encoding="utf-8")


def follow(watched: Watched, run_dir: Path, num_steps: int, timeout_s: float) -> None:
    """Records each step when its line of metrics appears, until the last step."""
    deadline, num_lines = time.monotonic() + timeout_s, 0
    path = run_dir / "metrics.jsonl"
    while num_lines <= num_steps:
        if time.monotonic() > deadline or watched.controller.poll() is not None:
            log = (run_dir / "logs" / "controller.log").read_text(errors="replace")
            raise TimeoutError(f"step {num_lines} did not end:\n{log[-3000:]}")
        watched.look()
        watched.kill_store(num_lines, least=20)
        watched.note_start(run_dir / "events.jsonl")
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines[num_lines:]:
            watched.note(json.loads(line), run_dir / "events.jsonl")
        num_lines = len(lines)
        time.sleep(POLL_S)
    watched.controller.wait(timeout=60)


def _end(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()
        try:
            process.wait(20)
        except psutil.TimeoutExpired:
            process.kill()


def row(size: Size, watched: Watched) -> str:
    """Returns a line of the table."""
    steps = watched.steps[2:]

    def median(name: str) -> float:
        return statistics.median(float(getattr(step, name)) for step in steps)

    seconds = median("seconds")
    return (
        f"| {size.stores} | {size.servers} | {size.prompts * size.samples:,} | {size.tokens:,} "
        f"| {seconds:.2f} | {size.prompts * size.samples / seconds:,.0f} | {median('controller_s'):.2f} "
        f"| {median('reward_s'):.2f} | {median('redis_s'):.2f} | {median('stores_s'):.2f} "
        f"| {median('members_s'):.2f} | {median('redis_mib'):,.0f} "
        f"| {median('journal_bytes'):,.0f} | {watched.start_s:.1f} | {watched.start_cpu_s:.1f} |"
    )


def main() -> int:
    """Runs all sizes and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=int, nargs="+", default=[10], help="rollout servers")
    parser.add_argument("--trajectories", type=int, nargs="+", default=[10_000], help="per step")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16], help="per response")
    parser.add_argument("--stores", type=int, nargs="+", default=[0], help="blob stores")
    parser.add_argument("--kill-store", action="store_true", help="kill a blob store in the middle of step 2")
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--steps", type=int, default=4, help="steps of each run; the first warms up")
    parser.add_argument("--processes", type=int, default=4, help="processes that the rollout servers share")
    parser.add_argument("--staleness", type=int, default=0, help="barrier.max_staleness; 0: strict")
    parser.add_argument("--train-s", type=float, default=0.0, help="how long the learner takes to answer")
    parser.add_argument("--no-texts", action="store_true", help="trainer.save_trajectories: false")
    parser.add_argument("--verify", action="store_true", help="check each run with `paceline verify`")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="longest duration of a run")
    args = parser.parse_args()
    sizes = [
        Size(servers=servers, trajectories=trajectories, tokens=tokens, samples=args.samples, stores=stores)
        for stores in args.stores
        for servers in args.servers
        for trajectories in args.trajectories
        for tokens in args.tokens
    ]
    print(f"$ python {' '.join(sys.argv)}")
    print(
        f"{platform.platform()}, {len(os.sched_getaffinity(0))} cores, python {platform.python_version()}\n"
    )
    print(
        "| stores | servers | trajectories per step | tokens | seconds per step | trajectories/s "
        "| controller CPU s | reward CPU s | Redis CPU s | stores CPU s | rollout and learner CPU s "
        "| MiB in Redis, most | journal bytes per step "
        "| s to the first dispatch | controller CPU s until then |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            print(row(size, measure(size, Path(folder), args)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
