"""A member whose bytes to the controller vanish for a while is back as soon as they arrive again."""

from __future__ import annotations

import asyncio
import time
from statistics import median

import pytest

from paceline.chaos.proxy import Proxy
from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.errors import PeerLostError
from paceline.core.members import MemberKind, RolloutState
from paceline.core.run_record.run_events import StepEvent
from paceline.runs.controller_client import ControllerClient
from paceline.service.identity.credentials import Credentials
from paceline.service.member.controller_link import ControllerLink, MemberReport
from support.fake_controller import FakeController, serve, step_event

pytestmark = pytest.mark.timeout(900)

CONFIG = {
    "data": {"train_files": ["x.parquet"]},
    "model": {"path": "m"},
    "reward": {"functions": [{"name": "exact_match"}]},
    "trainer": {"total_steps": 2},
}
STALE = MemberReport(state=RolloutState.STALE)
# The last one is longer than the keep-alive allows: both ends give the connection up.
HOLES_S = (5.0, 5.0, 5.0, 17.0)


async def test_heartbeats_come_again_within_seconds_of_a_hole() -> None:
    fake = FakeController(config_json=parse(RunConfig, CONFIG).model_dump_json())
    server = await serve(fake)
    host, _, port = server.address.rpartition(":")
    told: list[float] = []

    async def heard(count: int) -> None:
        wanted = len(fake.heartbeats) + count
        async with asyncio.timeout(120):
            while len(fake.heartbeats) < wanted:
                fake.heard.clear()
                await fake.heard.wait()

    async with Proxy() as proxy:
        proxy.target = (host, int(port))
        address = f"127.0.0.1:{proxy.port}"
        link = ControllerLink(address, kind=MemberKind.ROLLOUT, member_id="r", address="127.0.0.1:1")
        await link.register(5, STALE)
        running = asyncio.create_task(link.run(lambda: STALE))
        try:
            for seconds in HOLES_S:
                await heard(2)
                proxy.swallow()
                await asyncio.sleep(seconds)
                proxy.release()
                released = time.monotonic()
                # The first may be one of those that were swallowed.
                await heard(2)
                told.append(round(time.monotonic() - released, 2))
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await link.close()
            await server.stop(0)
    print("seconds from the end of each hole to the second heartbeat:", told)
    # After a few tenths of a second, even on a busy machine; a silent connection is given up after 15 s.
    assert median(told) < 10, told


async def test_who_follows_a_run_notices_that_nothing_arrives_any_more() -> None:
    """A stream has no deadline: only the keep-alive ends it, after about 15 s."""
    fake = FakeController()
    server = await serve(fake)
    host, _, port = server.address.rpartition(":")
    fake.script = [step_event(1)]
    async with Proxy() as proxy, ControllerClient(f"127.0.0.1:{proxy.port}", Credentials()) as client:
        proxy.target = (host, int(port))
        events = client.watch(from_step=0)
        assert await anext(events) == StepEvent(step=1, metrics={})
        # Else gRPC's probe of the bandwidth, which follows data, would notice in place of the keep-alive.
        await asyncio.sleep(1.0)
        proxy.swallow()
        began = time.monotonic()
        with pytest.raises(PeerLostError, match="went away"):
            async with asyncio.timeout(200):
                await anext(events)
        assert time.monotonic() - began > 3
        proxy.release()
    await server.stop(0)
