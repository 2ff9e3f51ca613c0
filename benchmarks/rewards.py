"""Measures a reward service's throughput (items per second) and latency for each kind of scorer.

    python benchmarks/rewards.py [--items 4096] [--model examples/arithmetic/judge]

The function is trivial, so this measures the overhead of a child process, a gRPC service, and an attached
client, with one function call per item and with batches. A given reward model is measured, too; `paceline rm
examples/arithmetic/rm.yaml` trains one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from paceline.config.reward import RewardConfig
from paceline.core.scoring import ScoreItem
from paceline.reward.attached.servicer import GatewayServicer
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.weighted_sum import WeightedSum
from paceline.rpc.v1 import reward_pb2_grpc
from paceline.sdk import attach_reward, serve_reward
from paceline.service.grpc.server import start_server

HERE = Path(__file__).resolve()
CALL_ITEMS = 128  # entries that the mailbox delivers at a time
WAIT_S = 60.0


def length(response: str, ground_truth: str, **_: object) -> float:
    """Returns a trivial reward."""
    return float(len(response) % 2)


def lengths(items: Sequence[ScoreItem]) -> list[float]:
    """Returns trivial rewards for a batch."""
    return [float(len(item.response) % 2) for item in items]


FORMS: dict[str, tuple[Callable[..., Any], bool]] = {"each": (length, False), "batch": (lengths, True)}


def free_port() -> int:
    """Returns a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def scorer(config: dict[str, Any], port: int, command: Sequence[str]) -> AsyncIterator[WeightedSum]:
    """Yields the run's scorer, with the process of the other side, if any."""
    process = None
    total = WeightedSum.configured(ScorerSettings(config=RewardConfig.model_validate(config)))
    gateways = GatewayServicer()
    server = await start_server(
        reward_pb2_grpc.add_RewardGatewayServicer_to_server,
        gateways,
        port=0 if config.get("services") else port,
    )
    try:
        if command:
            # One thread for a model, as in `paceline train`: on busy cores, two threads wait for each other.
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL, env=env)
        await total.start()
        gateways.gateways = {attached.names[0]: attached.gateway for attached in total.attached}
        yield total
    finally:
        await total.close()
        await server.stop(0)
        if process is not None:
            process.terminate()
            await asyncio.wait_for(process.wait(), WAIT_S)


async def rate(total: WeightedSum, items: Sequence[ScoreItem]) -> tuple[float, float]:
    """Returns items per second with concurrent calls, and the median seconds of single calls."""
    for _ in range(3):  # the first waits for the client to attach
        await total.score(items[:1])
    alone = []
    for _ in range(10):
        began = time.perf_counter()
        await total.score(items[:CALL_ITEMS])
        alone.append(time.perf_counter() - began)
    calls = [items[first : first + CALL_ITEMS] for first in range(0, len(items), CALL_ITEMS)]
    slots = asyncio.Semaphore(8)

    async def make(call: Sequence[ScoreItem]) -> None:
        async with slots:
            scores = await total.score(call)
        assert all(score.reward is not None for score in scores), scores[0].error

    began = time.perf_counter()
    await asyncio.gather(*(make(call) for call in calls))
    return len(items) / (time.perf_counter() - began), statistics.median(alone)


def cases(model: str | None) -> list[tuple[str, dict[str, Any], int, list[str]]]:
    """Returns each case's name, configuration, port, and command of the other side."""
    me = [sys.executable, str(HERE)]
    function = {"name": f"{HERE}:length"}
    rows = [
        ("function, 1 process", {"functions": [function]}, 0, []),
        ("function, 2 processes", {"functions": [function], "num_processes": 2}, 0, []),
    ]
    for form in FORMS:
        port = free_port()
        service = {"name": "s", "address": f"127.0.0.1:{port}"}
        rows.append(
            (f"gRPC service, {form}", {"services": [service]}, port, [*me, "--serve", str(port), form])
        )
        port = free_port()
        attached = {"attached": [{"name": "a"}]}
        rows.append((f"attached client, {form}", attached, port, [*me, "--attach", str(port), form]))
    if model is not None:
        port = free_port()
        command = [sys.executable, "-m", "paceline.reward.models", model]
        command += ["--attach", f"127.0.0.1:{port}", "--name", "a"]
        rows.append((f"reward model, {Path(model).name}", {"attached": [{"name": "a"}]}, port, command))
    return rows


async def measure(num_items: int, model: str | None) -> None:
    """Prints a row for each kind of scorer."""
    items = [
        ScoreItem(
            trajectory_id=f"t{number}",
            prompt="What is 17 + 35?",
            response=f"units 12: {number % 100}",
            ground_truth="52",
        )
        for number in range(num_items)
    ]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {num_items} items")
    print(f"| scorer | items/s | ms for {CALL_ITEMS} items alone |\n|---|---|---|")
    for name, config, port, command in cases(model):
        async with scorer(config, port, command) as total:
            per_s, seconds = await rate(total, items)
        print(f"| {name} | {per_s:,.0f} | {1000 * seconds:.1f} |", flush=True)


def main() -> None:
    """Measures, or runs the other side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=4096)
    parser.add_argument("--model", help="folder of a reward model")
    parser.add_argument("--serve", nargs=2, metavar=("PORT", "FORM"), help=argparse.SUPPRESS)
    parser.add_argument("--attach", nargs=2, metavar=("PORT", "FORM"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        function, batch = FORMS[args.serve[1]]
        serve_reward(function, port=int(args.serve[0]), batch=batch)
    elif args.attach:
        function, batch = FORMS[args.attach[1]]
        attach_reward(function, address=f"127.0.0.1:{args.attach[0]}", name="a", batch=batch)
    else:
        asyncio.run(measure(args.items, args.model))


if __name__ == "__main__":
    main()
