"""Measures the CPU time of each operation on a long trajectory between engine and batch.

    python benchmarks/long_rows.py [--tokens 32768] [--repeats 100]

Uses one process, a real Redis and the tokenizer of the arithmetic example. Redis has separate rows.
benchmarks/load.py measures the rest (headers, mailboxes, reward functions).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from broker_path import answer, cpu_seconds, prompt_group
from load import prepare

from paceline import wire
from paceline.broker import open_broker
from paceline.broker.redis.redis_blobs import BlobClient
from paceline.broker.redis.redis_server import RedisServer
from paceline.core.text import encodable
from paceline.data.byte_decoder import fast_decoder
from paceline.data.prompts import load_tokenizer


def print_row(part: str, act: Callable[[], object], repeats: int) -> None:
    """Prints the milliseconds of a call."""
    act()
    began = time.process_time()
    for _ in range(repeats):
        act()
    print(f"| {part} | {1e3 * (time.process_time() - began) / repeats:.2f} |", flush=True)


async def print_awaited(part: str, act: Callable[[], Awaitable[object]], repeats: int, pid: int) -> None:
    """Prints the milliseconds of an awaited call, and the CPU milliseconds of Redis during it."""
    await act()
    began, server = time.process_time(), cpu_seconds([pid])
    for _ in range(repeats):
        await act()
    print(f"| {part} | {1e3 * (time.process_time() - began) / repeats:.2f} |")
    print(f"| {part}, Redis | {1e3 * (cpu_seconds([pid]) - server) / repeats:.2f} |", flush=True)


async def store_rows(folder: Path, tokens: int, repeats: int) -> None:
    """Prints the rows of the broker with a blob store; Redis is then the store."""
    message = answer(wire.decode_prompt_group(prompt_group(1, 1, tokens)))[0]
    ((key, blob),) = message.blobs.items()
    key = key.replace(":blob:", ":blob@0:")
    message = replace(message, blobs={key: blob})
    with (
        RedisServer.start(folder / "broker") as server,
        RedisServer.start(folder / "store", is_durable=False) as store,
    ):
        broker = open_broker(server.url, stores=[store.url])
        append = "rollout: append, its blob in a store"
        before = cpu_seconds([server.pid])
        await print_awaited(append, lambda: broker.append([message]), repeats, store.pid)
        used = 1e3 * (cpu_seconds([server.pid]) - before) / (repeats + 1)
        print(f"| {append}, the broker's Redis | {used:.2f} |")
        fetch = "reward: fetch the blob from a store"
        await print_awaited(fetch, lambda: broker.get_blobs([key]), repeats, store.pid)
        with BlobClient(server.url, stores=[store.url]) as client:
            print_row("learner: fetch the blob from a store", lambda: client.get([key]), repeats)
        await broker.close()


async def broker_rows(folder: Path, tokens: int, repeats: int) -> None:
    """Prints the rows of the broker."""
    message = answer(wire.decode_prompt_group(prompt_group(1, 1, tokens)))[0]
    ((key, _),) = message.blobs.items()
    with RedisServer.start(folder / "redis") as server:
        broker = open_broker(server.url)
        await print_awaited(
            "rollout: append with its blob", lambda: broker.append([message]), repeats, server.pid
        )
        await print_awaited("reward: fetch the blob", lambda: broker.get_blobs([key]), repeats, server.pid)
        with BlobClient(server.url) as client:
            print_row("learner: fetch the blob", lambda: client.get([key]), repeats)
        await broker.close()


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=100)
    args = parser.parse_args()
    print(f"$ python {' '.join(sys.argv)}")
    print(
        f"{platform.platform()}, {len(os.sched_getaffinity(0))} cores, python {platform.python_version()}\n"
    )
    message = answer(wire.decode_prompt_group(prompt_group(1, 1, args.tokens)))[0]
    ((_, blob),) = message.blobs.items()
    trajectory = wire.decode_trajectory(blob)
    print(f"{len(blob):,} bytes\n\n| part | ms |\n|---|---|")
    print_row("rollout: encode", lambda: wire.encode_trajectory(trajectory), args.repeats)
    print_row("rollout, reward, learner: decode", lambda: wire.decode_trajectory(blob), args.repeats)
    print_row("rollout, reward, learner: digest", lambda: wire.blob_digest(blob), args.repeats)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(broker_rows(Path(folder), args.tokens, args.repeats))
        asyncio.run(store_rows(Path(folder), args.tokens, args.repeats))
        tokenizer = load_tokenizer(prepare(Path(folder), 8) / "model")
    drawn = np.random.default_rng(0).integers(5, 260, args.tokens, dtype=np.int32)
    ids, decoder = drawn.tolist(), fast_decoder(tokenizer)
    few = max(1, args.repeats // 5)
    print_row("reward: text, by the tokenizer", lambda: tokenizer.decode(ids, skip_special_tokens=True), few)
    print_row("reward: text, by tables", lambda: decoder.decode(drawn, skip_special_tokens=True), few)
    text = decoder.decode(drawn, skip_special_tokens=True)
    print_row("reward: check of the text", lambda: encodable(text), args.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
