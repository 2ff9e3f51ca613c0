"""The parts of `paceline chaos`: the faults of a seed, the proxy, what is written down."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path

import pytest
from rich.console import Console

from paceline.chaos.faults import Fault, FaultKind, all_faults, deck, draw
from paceline.chaos.inject import Injector
from paceline.chaos.proxy import Proxy
from paceline.chaos.record import FaultRecovery, Record, summary, table
from paceline.chaos.roster import Roster
from paceline.cli.main import main
from paceline.config.services import BrokerConfig
from paceline.core.errors import ConfigError
from paceline.rpc.v1 import controller_pb2
from paceline.runs import run_dir as run_dirs
from paceline.runs.run_dir import RunNote
from paceline.show.live.view import PlainView
from paceline.show.live.wrapping_views import WatchedView
from support.cli_configs import config
from support.fake_controller import FakeController, serve

TWO = config(rollout={"replicas": 2}, learner={"world_size": 2, "device": "cpu"})


def test_every_service_gets_every_fault_of_its_kind() -> None:
    targets: dict[FaultKind, set[str]] = {}
    for kind, target in all_faults(TWO):
        targets.setdefault(kind, set()).add(target)
    processes = {"controller", "rollout-0", "rollout-1", "learner-0", "learner-1", "reward", "redis"}
    processes |= {"rollout-0/engine", "rollout-1/engine", "reward/child"}
    assert targets[FaultKind.KILL] == targets[FaultKind.PAUSE] == targets[FaultKind.LONG_PAUSE] == processes
    for kind in (FaultKind.DELAY, FaultKind.CUT, FaultKind.HOLE, FaultKind.LONG_HOLE):
        assert targets[kind] == {"redis", "controller"}
    assert set(targets) == set(FaultKind)
    stores = {("kill", "blob-store-0"), ("kill", "blob-store-1"), ("pause", "blob-store-0")}
    with_stores = all_faults(TWO.model_copy(update={"broker": BrokerConfig(blob_stores=2)}))
    assert stores <= {(kind.value, target) for kind, target in with_stores}


def test_a_seed_gives_the_same_faults_and_each_kind_in_every_round() -> None:
    number = len(deck(TWO))
    faults = list(islice(draw(TWO, seed=3), 2 * number))
    assert faults == list(islice(draw(TWO, seed=3), 2 * number))
    assert faults != list(islice(draw(TWO, seed=4), 2 * number))
    first, second = (Counter((f.kind, f.target) for f in part) for part in (faults[:number], faults[number:]))
    assert first == second
    assert set(first) == set(all_faults(TWO))


def test_what_costs_the_start_of_an_engine_or_a_long_silence_is_rarer() -> None:
    times = Counter(deck(TWO))
    once = {kind_and_target for kind_and_target, count in times.items() if count == 1}
    kills = {target for kind, target in once if kind is FaultKind.KILL}
    assert kills == {
        *("rollout-0", "rollout-1", "rollout-0/engine", "rollout-1/engine", "learner-0", "learner-1")
    }
    assert {kind for kind, _ in once} == {FaultKind.KILL, FaultKind.LONG_PAUSE, FaultKind.LONG_HOLE}
    assert set(times.values()) == {1, 3}


def test_patterns_choose_the_faults_that_may_come() -> None:
    only = ("kill rollout-*", "kill reward")
    drawn = list(islice(draw(TWO, seed=5, only=only), 40))
    servers = {"rollout-0", "rollout-1", "rollout-0/engine", "rollout-1/engine"}
    assert {fault.target for fault in drawn} == {*servers, "reward"}
    assert {fault.kind for fault in drawn} == {FaultKind.KILL}
    assert Counter(target for _, target in deck(TWO, only)) == {**dict.fromkeys(servers, 1), "reward": 3}


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="'kill rollout' matches no fault.*kill rollout-0"):
        deck(TWO, ("kill reward", "kill rollout"))


def test_long_faults_last_longer_than_a_silent_member_lives() -> None:
    for fault in islice(draw(TWO, seed=0), 200):
        match fault.kind:
            case FaultKind.LONG_PAUSE | FaultKind.LONG_HOLE:
                assert TWO.service.dead_after_s + 3 <= fault.seconds <= TWO.service.dead_after_s + 8
            case FaultKind.PAUSE | FaultKind.HOLE | FaultKind.DELAY | FaultKind.FULL:
                assert 1 <= fault.seconds <= 8
            case _:
                assert fault.seconds == 0


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    """The port of a server that sends back what it gets."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_the_proxy_delays_swallows_and_cuts(echo: int) -> None:
    async with asyncio.timeout(60), Proxy() as proxy:
        proxy.target = ("127.0.0.1", echo)
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        assert proxy.num_connections == 1

        proxy.delay_s, began = 0.1, time.monotonic()
        writer.write(b"b")
        assert await reader.readexactly(1) == b"b"
        assert time.monotonic() - began >= 0.2, "there and back"
        proxy.delay_s = 0.0

        proxy.swallow()
        writer.write(b"c")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.2)
        proxy.release()
        assert await reader.readexactly(1) == b"c", "nothing is lost"

        proxy.cut()
        assert await _end_of(reader)
        writer.close()
        again, second = await asyncio.open_connection("127.0.0.1", proxy.port)
        second.write(b"d")
        assert await again.readexactly(1) == b"d", "new connections are taken"
        second.close()


async def test_a_connection_to_a_target_that_is_down_ends() -> None:
    async with asyncio.timeout(60), Proxy() as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        assert await _end_of(reader)
        writer.close()


async def _end_of(reader: asyncio.StreamReader) -> bool:
    """Whether the connection was closed or reset, and nothing came."""
    try:
        return await reader.read(1) == b""
    except ConnectionResetError:
        return True


async def test_services_get_the_proxies_addresses(tmp_path: Path) -> None:
    injector = Injector(tmp_path, ["EngineCore"])
    async with injector.links["redis"] as redis, injector.links["controller"] as controller:
        assert injector.broker_url("redis://:pw@127.0.0.1:7001/0") == f"redis://:pw@127.0.0.1:{redis.port}/0"
        assert redis.target == ("127.0.0.1", 7001)
        assert injector.controller_address("10.0.0.1:7002") == f"127.0.0.1:{controller.port}"
        assert controller.target == ("10.0.0.1", 7002)


def outage(
    number: int, target: str, step_s: float | None, ready_s: float | None, *, alone: bool = True
) -> FaultRecovery:
    return FaultRecovery(
        number=number,
        time=5.0,
        fault=Fault(kind=FaultKind.KILL, target=target),
        step=3,
        phase="learn",
        alone=alone,
        step_s=step_s,
        ready_s=ready_s,
    )


OUTAGES = (
    outage(1, "rollout-0", 2.0, 1.0),
    outage(2, "rollout-1", 2.5, 9.0, alone=False),
    outage(3, "rollout-1/engine", 4.0, 3.0),
    outage(4, "reward", 1.0, None),
)


def test_outages_are_written_down_and_summed_up(tmp_path: Path) -> None:
    record = Record(tmp_path)
    for told in OUTAGES:
        record.add(told)
    lines = [json.loads(line) for line in (tmp_path / "chaos.jsonl").read_text().splitlines()]
    assert [line["recovery_s"] for line in lines] == [2.0, 9.0, 4.0, None]
    assert lines[0] == {
        "n": 1,
        "time": 5.0,
        "fault": "kill",
        "target": "rollout-0",
        "seconds": 0.0,
        "step": 3,
        "phase": "learn",
        "alone": True,
        "step_s": 2.0,
        "ready_s": 1.0,
        "recovery_s": 2.0,
    }
    console = Console(file=io.StringIO(), width=100, color_system=None)
    with console.capture() as captured:
        console.print(table(record.outages))
    rows = [line.split() for line in captured.get().splitlines()]
    assert rows[1:] == [
        ["kill", "engine", "1", "4.0", "4.0", "4.0", "0"],
        ["kill", "reward", "1", "1"],
        ["kill", "rollout", "2", "5.5", "9.0", "2.0", "0"],
        ["all", "4", "4.0", "9.0", "4.0", "1"],
    ]


def test_the_summary_names_what_was_lost_doubled_and_off_policy(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.add(OUTAGES[1])
    breaches = {"RECORD": 1, "I1": 2, "I2": 3, "I3": 4, "I4": 5, "I5": 6}
    counts = {"rewinds": 7, "prompt groups dropped": 8}
    told = summary(record, {"counts": counts, "breaches": breaches})
    wanted = {"off_policy": 2, "lost": 3, "twice": 4, "other_breaches": 12, "rewinds": 7, "dropped_groups": 8}
    assert {name: told[name] for name in wanted} == wanted
    assert told["by_kind"] == {
        "kill rollout": {
            "count": 1,
            "median_s": 9.0,
            "longest_s": 9.0,
            "longest_alone_s": None,
            "hangs": 0,
        }
    }


@pytest.mark.parametrize(
    ("kind", "target", "members"),
    [
        (FaultKind.KILL, "controller", set()),
        (FaultKind.KILL, "redis", set()),
        (FaultKind.HOLE, "redis", set()),
        (FaultKind.HOLE, "controller", {"learner-0", "rollout-1"}),
        (FaultKind.KILL, "learner-1", {"learner-0"}),
        (FaultKind.PAUSE, "rollout-1/engine", {"rollout-1"}),
        (FaultKind.KILL, "reward/child", {"reward-0"}),
    ],
)
def test_a_recovery_waits_for_the_members_that_a_fault_hits(
    kind: FaultKind, target: str, members: set[str], tmp_path: Path
) -> None:
    """A hole before the controller hits those that work: what starts again is another fault's."""
    roster = Roster(TWO, tmp_path)
    roster._working = frozenset({"learner-0", "rollout-1"})
    assert roster.affected_by(Fault(kind=kind, target=target)) == members


async def test_a_killed_member_works_again_when_its_successor_does(tmp_path: Path) -> None:
    """The controller has heard of it just before the fault, and takes it for working for a while."""
    fake = FakeController()
    server = await serve(fake)
    first, second = [await asyncio.create_subprocess_exec("sleep", "60") for _ in range(2)]

    def note(process: asyncio.subprocess.Process) -> None:
        run_dirs.write_note(
            tmp_path,
            RunNote(
                run_dir=str(tmp_path),
                launcher_pid=os.getpid(),
                launcher_started=0.0,
                controller=server.address,
                pids={"rollout-0": process.pid},
            ),
        )

    def hear(seconds_ago: float) -> None:
        fake.members = [
            controller_pb2.MemberStatus(
                member_id="rollout-0", state="serving", seconds_since_heartbeat=seconds_ago
            )
        ]

    roster = Roster(TWO, tmp_path)
    note(first)
    hear(0.0)
    asking = asyncio.create_task(roster.run())
    try:
        async with asyncio.timeout(60):
            await roster.until_working(["rollout-0"])
        first.kill()
        note(second)
        hear(2.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await roster.until_working(["rollout-0"], service="rollout-0", unlike=first.pid)
        hear(0.0)
        async with asyncio.timeout(60):
            await roster.until_working(["rollout-0"], service="rollout-0", unlike=first.pid)
    finally:
        asking.cancel()
        with contextlib.suppress(ProcessLookupError):
            first.kill()
        second.kill()
        await asyncio.gather(first.wait(), second.wait())
        await server.stop(0)


async def test_the_next_step_is_waited_for_and_the_last_one_does_not_count() -> None:
    clock = WatchedView(PlainView(3))
    clock.step(1, {})
    waiting = [asyncio.create_task(clock.next_step()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    clock.step(2, {})
    await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert clock.finished == 2


def test_chaos_refuses_a_redis_server_of_somebody_else(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", "run.yaml", "broker.url=redis://127.0.0.1:1/0"]) == 2
    assert "leave out broker.url" in capsys.readouterr().err
    assert not (project / "runs").exists()
