"""Measures the broker path alone: prompt out, trajectory in, header scored. Starts a real Redis for it.

    python benchmarks/broker_path.py [--groups 1000] [--samples 8] [--tokens 512] [--repeats 3]

Rollout and reward are fakes that handle messages as the services do, but do not sample or score: they decode,
validate, fetch blobs, encode, append and acknowledge. Both run as tasks of one process, then as two
processes.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import records
import redis
from rich.console import Console
from rich.table import Table

from paceline import wire
from paceline.broker import Broker, Mailbox, Outgoing, append_when_room, names, open_broker
from paceline.broker.redis.redis_server import RedisServer
from paceline.core.ids import Purpose, TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.core.samples.trajectory import (
    FinishReason,
    PromptGroup,
    RewardContext,
    SamplingSpec,
    ScoredHeader,
    Trajectory,
    TrajectoryHeader,
)

RUN_ID = "bench"
POLICY = PolicyTag(version=1, digest="0123456789abcdef")
NUM_PROMPT_TOKENS = 64
URL_VARIABLE = "PACELINE_BROKER_URL"
STALL_S = 60.0


class Timing(NamedTuple):
    """Wall seconds of a run, and CPU seconds of the services and Redis together."""

    seconds: float
    cpu_s: float


def prompt_group(prompt_id: int, num_samples: int, num_tokens: int) -> bytes:
    """Returns an encoded prompt group."""
    return wire.encode_prompt_group(
        PromptGroup(
            run_id=RUN_ID,
            step=1,
            purpose=Purpose.TRAIN,
            prompt_id=prompt_id,
            prompt_token_ids=np.arange(NUM_PROMPT_TOKENS, dtype=np.int32),
            sampling=SamplingSpec(temperature=1.0, max_tokens=num_tokens),
            seeds=tuple(range(num_samples)),
            policy=POLICY,
            context=RewardContext(ground_truth="42", data_source="bench", prompt_text="What is 40 + 2?"),
        )
    )


def answer(group: PromptGroup) -> list[Outgoing]:
    """Returns all samples of a group, with random arrays instead of a model's."""
    messages = []
    stream = names.trajectories(RUN_ID)
    rng = np.random.default_rng(group.prompt_id)
    num_tokens = group.sampling.max_tokens
    tokens = rng.integers(0, 150_000, (group.num_samples, num_tokens), dtype=np.int32)
    log_probs = -rng.random((group.num_samples, num_tokens), dtype=np.float32)
    for index, seed in enumerate(group.seeds):
        trajectory_id = group.trajectory_id(index)
        key = names.blob(RUN_ID, str(trajectory_id), "bench-0", "0")
        blob = wire.encode_trajectory(
            Trajectory(
                run_id=RUN_ID,
                trajectory_id=trajectory_id,
                policy=group.policy,
                prompt_token_ids=group.prompt_token_ids,
                response_token_ids=tokens[index],
                response_log_probs=log_probs[index],
                response_mask=np.ones(num_tokens, dtype=np.uint8),
                finish_reason=FinishReason.LENGTH,
                sampling=group.sampling,
                seed=seed,
            )
        )
        header = wire.encode_trajectory_header(
            TrajectoryHeader(
                run_id=RUN_ID,
                trajectory_id=trajectory_id,
                policy=group.policy,
                blob_key=key,
                blob_digest=wire.blob_digest(blob),
                num_prompt_tokens=NUM_PROMPT_TOKENS,
                num_response_tokens=num_tokens,
                num_sampled_tokens=num_tokens,
                finish_reason=FinishReason.LENGTH,
                server_id="bench-0",
                seconds=0.0,
                context=group.context,
            )
        )
        messages.append(Outgoing(stream=stream, payload=header, blobs={key: blob}))
    return messages


async def rollout(broker: Broker, ready: asyncio.Event) -> None:
    """Answers prompt groups until cancelled, with one append per group like the rollout server."""
    stream = names.prompts(RUN_ID, POLICY.version)
    async with Mailbox(broker, stream, names.ROLLOUT_GROUP, "bench-0", max_entries=8) as box:
        ready.set()
        while True:
            entries = await box.take()
            for entry in entries:
                await broker.append(answer(wire.decode_prompt_group(entry.payload)))
                await box.done([entry])


def scored(header: TrajectoryHeader, trajectory: Trajectory) -> bytes:
    """Returns a score that depends on one token of the decoded trajectory."""
    return wire.encode_scored_header(
        ScoredHeader(
            run_id=header.run_id,
            trajectory_id=header.trajectory_id,
            policy=header.policy,
            blob_key=header.blob_key,
            blob_digest=header.blob_digest,
            num_prompt_tokens=header.num_prompt_tokens,
            num_response_tokens=header.num_response_tokens,
            num_sampled_tokens=header.num_sampled_tokens,
            finish_reason=header.finish_reason,
            server_id=header.server_id,
            generation_s=header.seconds,
            reward=float(trajectory.response_token_ids[0] % 2),
            components={"parity": 1.0},
            reward_error=None,
            scorer="bench",
            reward_s=0.0,
        )
    )


async def reward(broker: Broker, ready: asyncio.Event) -> None:
    """Scores trajectories as they arrive, until cancelled."""
    stream = names.trajectories(RUN_ID)
    async with Mailbox(broker, stream, names.REWARD_GROUP, "bench-0", max_entries=64) as box:
        ready.set()
        while True:
            entries = await box.take()
            headers = [wire.decode_trajectory_header(entry.payload) for entry in entries]
            blobs = await broker.get_blobs([header.blob_key for header in headers])
            verdicts = [
                scored(header, wire.decode_trajectory(blob))
                for header, blob in zip(headers, blobs, strict=True)
                if blob is not None
            ]
            results = [Outgoing(stream=names.scored(RUN_ID), payload=payload) for payload in verdicts]
            await broker.append(results)
            await box.done(entries)


async def control(broker: Broker, num_groups: int, num_samples: int, num_tokens: int) -> float:
    """Dispatches the prompt groups and collects every scored header; returns the seconds."""
    async with Mailbox(
        broker, names.scored(RUN_ID), names.CONTROLLER_GROUP, "bench-0", max_entries=256
    ) as box:
        started = time.perf_counter()
        stream = names.prompts(RUN_ID, POLICY.version)
        orders = [
            Outgoing(stream=stream, payload=prompt_group(prompt_id, num_samples, num_tokens))
            for prompt_id in range(num_groups)
        ]
        await append_when_room(broker, orders, max_length=100_000, timeout_s=STALL_S)
        seen: set[TrajectoryId] = set()
        while len(seen) < num_groups * num_samples:
            entries = await box.take(block_s=STALL_S)
            if not entries:
                raise SystemExit(f"no scored header for {STALL_S:g} s, {len(seen)} so far")
            scored = [wire.decode_scored(entry.payload) for entry in entries]
            seen.update(header.trajectory_id for header in scored if isinstance(header, ScoredHeader))
            await box.done(entries)
        return time.perf_counter() - started


def cpu_seconds(pids: Sequence[int]) -> float:
    """Returns the CPU time of processes, which other work on the machine does not distort."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def timed(broker: Broker, pids: Sequence[int], arguments: argparse.Namespace) -> Timing:
    """Runs the controller's part, and measures the CPU time of all processes."""
    before = cpu_seconds(pids)
    seconds = await control(broker, arguments.groups, arguments.samples, arguments.tokens)
    return Timing(seconds=seconds, cpu_s=cpu_seconds(pids) - before)


async def in_one_process(server: RedisServer, arguments: argparse.Namespace) -> Timing:
    """Runs rollout, reward and controller as tasks of one event loop."""
    broker = open_broker(server.url)
    tasks = []
    for work in (rollout, reward):
        ready = asyncio.Event()
        tasks.append(asyncio.create_task(work(broker, ready), name=work.__name__))
        await asyncio.wait_for(ready.wait(), STALL_S)
    timing = await timed(broker, [os.getpid(), server.pid], arguments)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await broker.purge(names.prefix(RUN_ID))
    await broker.close()
    return timing


async def in_processes(server: RedisServer, arguments: argparse.Namespace) -> Timing:
    """Runs rollout and reward as processes, and the controller in this process."""
    broker = open_broker(server.url)
    pids = [os.getpid(), server.pid]
    async with AsyncExitStack() as stack:
        for role in ("rollout", "reward"):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                __file__,
                "--role",
                role,
                env={**os.environ, URL_VARIABLE: server.url},
                stdout=asyncio.subprocess.PIPE,
            )
            stack.push_async_callback(process.wait)
            stack.callback(process.terminate)
            assert process.stdout is not None
            await asyncio.wait_for(process.stdout.readline(), STALL_S)
            pids.append(process.pid)
        timing = await timed(broker, pids, arguments)
    await broker.purge(names.prefix(RUN_ID))
    await broker.close()
    return timing


async def run_role(role: str) -> None:
    """Runs a role in its own process: prints "ready", then works until terminated."""
    ready = asyncio.Event()
    work = {"rollout": rollout, "reward": reward}[role]
    task = asyncio.create_task(work(open_broker(os.environ[URL_VARIABLE]), ready), name=role)
    await ready.wait()
    print("ready", flush=True)
    await task


def machine(url: str) -> str:
    """Describes the machine in a line."""
    with redis.Redis.from_url(url) as client:
        info = client.info("server")
    parser = "with hiredis" if importlib.util.find_spec("hiredis") else "without hiredis"
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    load = os.getloadavg()[0]
    return (
        f"{model}, {os.cpu_count()} cores, load {load:.1f} at the start, Python {platform.python_version()}, "
        f"Redis {info['redis_version']}, AOF everysec, redis-py {redis.__version__} {parser}"
    )


def report(arguments: argparse.Namespace, where: str, results: Mapping[str, Sequence[Timing]]) -> None:
    """Prints the table."""
    num_trajectories = arguments.groups * arguments.samples
    table = Table(title="Broker path: prompt out, trajectory in, header scored", title_justify="left")
    for column in (
        "layout",
        "median s",
        "runs s",
        "trajectories/s",
        "us each",
        "CPU us each",
        "MB/s of tokens",
    ):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for layout, runs in results.items():
        seconds = [run.seconds for run in runs]
        median = statistics.median(seconds)
        cpu = statistics.median(run.cpu_s for run in runs)
        num_bytes = num_trajectories * arguments.tokens * 9
        table.add_row(
            layout,
            f"{median:.2f}",
            " ".join(f"{value:.2f}" for value in sorted(seconds)),
            f"{num_trajectories / median:,.0f}",
            f"{1e6 * median / num_trajectories:.0f}",
            f"{1e6 * cpu / num_trajectories:.0f}",
            f"{num_bytes / median / 1e6:.0f}",
        )
    console = Console(width=130)
    console.print(f"command: python {' '.join(sys.argv)}")
    console.print(f"machine: {where}")
    console.print(
        f"load: {arguments.groups} prompt groups x {arguments.samples} samples x {arguments.tokens} tokens, "
        f"median of {arguments.repeats}"
    )
    console.print(table)


def main() -> None:
    """Runs both layouts."""
    parser = argparse.ArgumentParser(description="throughput of the broker path")
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    records.add_option(parser)
    parser.add_argument("--role", choices=("rollout", "reward"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        asyncio.run(run_role(arguments.role))
        return
    layouts = {"one process": in_one_process, "a process each": in_processes}
    with tempfile.TemporaryDirectory() as folder, RedisServer.start(Path(folder)) as server:
        where = machine(server.url)
        results = {
            layout: [asyncio.run(run(server, arguments)) for _ in range(arguments.repeats)]
            for layout, run in layouts.items()
        }
    report(arguments, where, results)
    seconds = statistics.median(timing.seconds for timing in results["a process each"])
    records.keep("cpus", arguments.record, arguments.groups * arguments.samples / seconds)


if __name__ == "__main__":
    main()
