"""The run's own Redis server ends and is started again: with its data, and with a word on how it ended."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import redis

from paceline.launch.own_redis import OwnRedis
from paceline.launch.processes.restarts import RestartHistory, RestartRule


async def test_a_killed_server_comes_back_with_its_data_and_not_for_ever(tmp_path: Path) -> None:
    rule = RestartRule(max_restarts=1, window_s=300, first_pause_s=0.01)
    own, said, ends, restarted = OwnRedis(tmp_path / "redis", RestartHistory(rule)), [], [], asyncio.Event()

    def note_end(name: str, outcome: str, restarts: bool) -> str:
        ends.append((name, outcome, restarts))
        return "in step 3"

    tending = asyncio.create_task(own.tend(say=said.append, changed=restarted.set, note_end=note_end))
    try:
        with redis.Redis.from_url(own.server.url) as client:
            client.set("key", "value")
        first = own.server.pid
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(120):
            await restarted.wait()
        assert own.server.pid != first
        with redis.Redis.from_url(own.server.url) as client:
            assert client.get("key") == b"value"
        (sentence,) = said
        assert "ended unexpectedly (killed by SIGKILL) in step 3; starting it again (1 of at most" in sentence
        os.kill(own.server.pid, signal.SIGKILL)
        async with asyncio.timeout(120):
            reason = await tending
        assert "(killed by SIGKILL) in step 3; it was started again 1 time within 300 s already" in reason
        assert ends == [("redis", "killed by SIGKILL", True), ("redis", "killed by SIGKILL", False)]
    finally:
        tending.cancel()
        own.server.stop()


@pytest.mark.parametrize("keep_data", [True, False])
async def test_the_data_goes_at_the_end_unless_it_is_kept(tmp_path: Path, keep_data: bool) -> None:
    rule = RestartRule(max_restarts=1, window_s=300, first_pause_s=0.01)
    own = OwnRedis(tmp_path / "redis", RestartHistory(rule))
    with redis.Redis.from_url(own.server.url) as client:
        client.set("key", "value" * 100)
    own.end(keep_data=keep_data)
    data = [path for path in (tmp_path / "redis").rglob("*") if path.is_file() and "aof" in path.name]
    assert any(path.stat().st_size > 500 for path in data) == keep_data
    assert bool(data) == keep_data
    assert own.server.log_path.is_file()
