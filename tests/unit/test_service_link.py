"""A member's link against a controller of a few lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError, DeadlineError, PeerLostError, ProtocolError
from paceline.core.members import LearnerState, MemberKind, RolloutState
from paceline.core.policy import PolicyTag
from paceline.service.member.controller_link import ControllerLink, MemberReport
from paceline.sizing.machine import free_port
from support.fake_controller import FakeController, serve

CONFIG = {
    "data": {"train_files": ["x.parquet"]},
    "model": {"path": "m"},
    "reward": {"functions": [{"name": "exact_match"}]},
    "trainer": {"total_steps": 2},
    "service": {"suspect_after_s": 0.1, "dead_after_s": 0.2, "heartbeat_s": 0.05, "recovery_timeout_s": 50},
}

STALE = MemberReport(state=RolloutState.STALE)
SERVING = MemberReport(state=RolloutState.SERVING, policy=PolicyTag(version=3, digest="ab" * 8))


@pytest.fixture
async def controller() -> AsyncIterator[tuple[FakeController, Any]]:
    fake = FakeController(config_json=parse(RunConfig, CONFIG).model_dump_json())
    server = await serve(fake)
    yield fake, server
    await server.stop(0)


def link_to(address: str) -> ControllerLink:
    return ControllerLink(
        address, kind=MemberKind.ROLLOUT, member_id="rollout-0", address="127.0.0.1:1", num_ranks=2
    )


async def test_registration_brings_everything(controller: tuple[FakeController, Any]) -> None:
    fake, server = controller
    link = link_to(server.address)
    fake.checkpoints, fake.policy, fake.term = ["/c/2", "/c/1"], SERVING.policy, 3
    registration = await link.register(30, SERVING)
    assert (registration.run_id, registration.broker_url, registration.term) == (
        "run-1",
        "redis://127.0.0.1:1/0",
        3,
    )
    assert (registration.policy, registration.checkpoints) == (SERVING.policy, ("/c/2", "/c/1"))
    assert registration.config == parse(RunConfig, CONFIG)
    request = fake.registrations[0]
    assert (request.kind, request.member_id, request.num_ranks) == (1, "rollout-0", 2)
    assert request.incarnation == link.incarnation
    assert (request.state, request.policy.version, request.policy.digest) == ("serving", 3, "ab" * 8)
    await link.close()


async def test_a_member_that_the_launcher_started_is_the_incarnation_that_the_launcher_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links = [link_to("127.0.0.1:1"), link_to("127.0.0.1:1")]
    monkeypatch.setenv("PACELINE_STARTED_AS", "rollout-0-ab12")
    links.append(link_to("127.0.0.1:1"))
    assert links[2].incarnation == "rollout-0-ab12"
    assert len({link.incarnation for link in links}) == 3
    for link in links:
        await link.close()


async def test_register_waits_for_a_controller_that_comes_late() -> None:
    port = free_port()
    link = link_to(f"127.0.0.1:{port}")
    registering = asyncio.create_task(link.register(120, STALE))
    await asyncio.sleep(0.4)
    assert not registering.done()
    fake = FakeController(config_json=json.dumps(CONFIG))
    server = await serve(fake, port=port)
    assert (await registering).run_id == "run-1"
    await link.close()
    await server.stop(0)


async def test_register_gives_up_at_its_deadline() -> None:
    link = link_to(f"127.0.0.1:{free_port()}")
    with pytest.raises(DeadlineError, match=r"REGISTER: no answer from the controller at .* within 0.3 s"):
        await link.register(0.3, STALE)
    await link.close()


async def test_a_configuration_of_another_version_is_refused(controller: tuple[FakeController, Any]) -> None:
    fake, server = controller
    fake.config_json = json.dumps({**CONFIG, "new_section": {}})
    link = link_to(server.address)
    with pytest.raises(ConfigError, match="unknown key new_section"):
        await link.register(120, STALE)
    await link.close()


async def test_heartbeats_carry_the_report_until_the_run_is_over(
    controller: tuple[FakeController, Any],
) -> None:
    fake, server = controller
    link = link_to(server.address)
    await link.register(120, STALE)
    report = MemberReport(
        state=RolloutState.SERVING,
        policy=PolicyTag(version=3, digest="ab" * 8),
        in_flight=7,
    )
    link.notify("read me")
    link.notify("me too")
    running = asyncio.create_task(link.run(lambda: report))
    await heard(fake, 3)
    fake.run_over = True
    await asyncio.wait_for(running, 120)
    last = fake.heartbeats[-1]
    assert (last.state, last.policy.version, last.policy.digest, last.in_flight) == (
        "serving",
        3,
        "ab" * 8,
        7,
    )
    assert [beat.notice for beat in fake.heartbeats] == [
        "read me; me too",
        *[""] * (len(fake.heartbeats) - 1),
    ]
    await link.leave("run over")
    assert fake.calls[-1] == "leave run over"
    await link.close()


async def test_a_notice_is_kept_until_the_controller_knows_the_member_again(
    controller: tuple[FakeController, Any],
) -> None:
    fake, server = controller
    link = link_to(server.address)
    await link.register(120, STALE)
    fake.known = False
    link.notify("read me")
    running = asyncio.create_task(link.run(lambda: SERVING))
    await heard(fake, 2)
    fake.known = True
    async with asyncio.timeout(120):
        while fake.heartbeats[-1].notice:  # noqa: ASYNC110  a test's own look
            await asyncio.sleep(0.01)
    assert [beat.notice for beat in fake.heartbeats].count("read me") == len(fake.heartbeats) - 1 >= 2
    fake.run_over = True
    await asyncio.wait_for(running, 120)
    await link.close()


async def test_a_poke_does_not_wait_for_the_next_beat(controller: tuple[FakeController, Any]) -> None:
    fake, server = controller
    fake.config_json = json.dumps(CONFIG)
    link = link_to(server.address)
    registration = await link.register(120, STALE)
    object.__setattr__(registration, "heartbeat_s", 60.0)
    states = iter([LearnerState.LOADING, LearnerState.READY])
    running = asyncio.create_task(link.run(lambda: MemberReport(state=next(states))))
    await heard(fake, 1)
    await asyncio.sleep(0.1)
    assert [beat.state for beat in fake.heartbeats] == ["loading"]
    link.poke()
    await heard(fake, 2)
    assert [beat.state for beat in fake.heartbeats] == ["loading", "ready"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await link.close()


async def reregister(fake: FakeController, address: str, report: MemberReport) -> int:
    """Makes the controller forget the member; returns how often the member was told that it is stale."""
    link = link_to(address)
    await link.register(120, STALE)
    fake.known = False
    told: list[bool] = []
    running = asyncio.create_task(link.run(lambda: report, on_reregistered=lambda: told.append(True)))
    await heard(fake, 3)
    assert fake.calls[:4] == ["register", "heartbeat", "register", "heartbeat"]
    assert fake.registrations[0].incarnation == fake.registrations[1].incarnation
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await link.close()
    return len(told)


@pytest.mark.parametrize(
    ("report", "committed"),
    [
        (SERVING, None),
        (SERVING, PolicyTag(version=3, digest="cd" * 8)),
        (SERVING, PolicyTag(version=4, digest="ab" * 8)),
        (MemberReport(state=RolloutState.SYNCING, policy=SERVING.policy), SERVING.policy),
        (MemberReport(state=RolloutState.SERVING), None),
    ],
)
async def test_a_forgotten_member_that_does_not_serve_the_committed_policy_is_stale(
    controller: tuple[FakeController, Any], report: MemberReport, committed: PolicyTag | None
) -> None:
    fake, server = controller
    fake.policy = committed
    assert await reregister(fake, server.address, report) == 1


async def test_a_forgotten_member_that_serves_the_committed_policy_goes_on(
    controller: tuple[FakeController, Any],
) -> None:
    fake, server = controller
    fake.policy = SERVING.policy
    assert await reregister(fake, server.address, SERVING) == 0
    assert [request.state for request in fake.registrations] == ["stale", "serving"]


async def test_a_controller_of_an_earlier_term_is_not_followed(
    controller: tuple[FakeController, Any],
) -> None:
    fake, server = controller
    fake.term = 3
    link = link_to(server.address)
    await link.register(120, STALE)
    fake.known, fake.term = False, 2
    with pytest.raises(ProtocolError, match="term is 2, and this member follows the controller of term 3"):
        await asyncio.wait_for(link.run(lambda: STALE), 120)
    await link.close()


async def test_another_run_at_the_address_is_not_joined(controller: tuple[FakeController, Any]) -> None:
    fake, server = controller
    link = link_to(server.address)
    await link.register(120, STALE)
    fake.known, fake.run_id = False, "run-2"
    with pytest.raises(ProtocolError, match="leads run run-2, this member belongs to run-1"):
        await asyncio.wait_for(link.run(lambda: MemberReport(state=RolloutState.SERVING)), 120)
    await link.close()


async def test_a_controller_that_is_away_longer_than_the_dead_is_waited_for(
    controller: tuple[FakeController, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "paceline")
    fake, server = controller
    link = link_to(server.address)
    await link.register(120, STALE)
    running = asyncio.create_task(link.run(lambda: MemberReport(state=RolloutState.SERVING)))
    await heard(fake, 1)
    await server.stop(0)
    async with asyncio.timeout(120):
        while "is away" not in caplog.text:  # noqa: ASYNC110  a test's own look
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.6)  # three times as long as until a silent member counts as dead
    again = await serve(fake, port=server.port)
    await heard(fake, len(fake.heartbeats) + 1)
    assert not running.done()
    fake.run_over = True
    await asyncio.wait_for(running, 120)
    said = [record.message for record in caplog.records if "controller" in record.message]
    assert [text.partition(" (")[0] for text in said] == [
        f"the controller at {server.address} is away",
        said[1],
        "the controller says that the run is over",
    ]
    assert "going on without it for up to 50 s" in said[0]
    assert said[1].startswith("the controller is back after ")
    await link.close()
    await again.stop(0)


async def test_a_controller_that_stays_away_ends_the_member(controller: tuple[FakeController, Any]) -> None:
    fake, server = controller
    fake.config_json = json.dumps({**CONFIG, "service": {"heartbeat_s": 0.05, "recovery_timeout_s": 0.3}})
    link = link_to(server.address)
    await link.register(120, STALE)
    running = asyncio.create_task(link.run(lambda: MemberReport(state=RolloutState.SERVING)))
    await heard(fake, 1)
    await server.stop(0)
    with pytest.raises(
        PeerLostError, match=r"has not answered for .* \(service.recovery_timeout_s=0.3\)"
    ) as caught:
        await asyncio.wait_for(running, 120)
    assert caught.value.peer == "controller"
    await link.close()


async def test_a_failure_is_reported_and_a_lost_controller_does_not_hide_it(
    controller: tuple[FakeController, Any],
) -> None:
    fake, server = controller
    link = link_to(server.address)
    await link.register(120, STALE)
    await link.fail("the engine died: out of memory", is_final=False)
    last = fake.heartbeats[-1]
    assert (last.state, last.failure, last.is_final) == ("", "the engine died: out of memory", False)
    await server.stop(0)
    await link.fail("again", is_final=True)
    await link.leave("gone")
    await link.close()


async def test_an_order_to_drain_is_passed_on(controller: tuple[FakeController, Any]) -> None:
    fake, server = controller
    link = link_to(server.address)
    await link.register(120, STALE)
    told = asyncio.Event()
    running = asyncio.create_task(link.run(lambda: STALE, on_drain=told.set))
    await heard(fake, 2)
    assert not told.is_set()
    fake.drain = True
    await asyncio.wait_for(told.wait(), 120)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await link.close()


async def test_who_is_held_may_start_when_a_heartbeat_says_so_and_from_then_on(
    controller: tuple[FakeController, Any],
) -> None:
    fake, server = controller
    link = link_to(server.address)
    fake.hold = True
    await link.register(120, STALE)
    running = asyncio.create_task(link.run(lambda: STALE))
    await heard(fake, 2)
    assert not link.may_start.is_set()
    fake.hold = False
    await asyncio.wait_for(link.may_start.wait(), 120)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await link.close()
    at_once = link_to(server.address)
    await at_once.register(120, STALE)
    assert at_once.may_start.is_set()
    await at_once.close()


async def test_run_before_register_is_refused(controller: tuple[FakeController, Any]) -> None:
    link = link_to("127.0.0.1:1")
    with pytest.raises(ProtocolError, match=r"register\(\) comes before run\(\)"):
        await link.run(lambda: MemberReport(state=RolloutState.SERVING))
    await link.close()


async def heard(fake: FakeController, count: int) -> None:
    async with asyncio.timeout(120):
        while len(fake.heartbeats) < count:
            fake.heard.clear()
            await fake.heard.wait()
