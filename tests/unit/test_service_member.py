"""A member's bootstrap against a controller of a few lines."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.controller.fleet.clients import is_serving
from paceline.core.errors import FailedStartError, ModelError, PacelineError, PeerLostError
from paceline.core.members import MemberKind, RewardState
from paceline.rpc.v1 import reward_pb2, reward_pb2_grpc
from paceline.sdk import RewardClient
from paceline.service.grpc import channels
from paceline.service.identity.credentials import Credentials
from paceline.service.member.bootstrap import MemberOptions, MemberSession
from paceline.service.member.controller_link import MemberReport
from paceline.service.member.runtime import ServiceContext
from support.fake_controller import FakeController, serve

CONFIG = {
    "data": {"train_files": ["x.parquet"]},
    "model": {"path": "m"},
    "reward": {"functions": [{"name": "exact_match"}]},
    "trainer": {"total_steps": 2},
}
ADD = reward_pb2_grpc.add_RewardServiceServicer_to_server


@pytest.fixture
async def controller(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[FakeController, str]]:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    fake = FakeController(config_json=parse(RunConfig, CONFIG).model_dump_json())
    # The run directory of the fake is not there, and a member may not need it to report a failure.
    monkeypatch.setattr("paceline.service.observability.telemetry.setup", lambda *_, **__: None)
    server = await serve(fake)
    yield fake, server.address
    await server.stop(0)


async def run(
    address: str,
    work: Callable[[MemberSession], Awaitable[None]],
    *,
    host: str = "127.0.0.1",
    advertise: str = "",
) -> None:
    """What `run_member` runs, without the process around it.

    A member that stops only logs the errors of its work; a failed assertion in it is the test's all the same.
    """
    failed: list[AssertionError] = []

    async def checked(session: MemberSession) -> None:
        try:
            await work(session)
        except AssertionError as error:
            failed.append(error)
            raise

    options = MemberOptions(
        controller=address, member_id="reward-0", host=host, port=0, advertise=advertise, engine="one"
    )
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        context = ServiceContext("reward-0", tasks)
        session = MemberSession(context, options, kind=MemberKind.REWARD)
        try:
            await session.reporting(checked(session))
        finally:
            await context._finish()
    if failed:
        raise failed[0]


async def _is_serving(session: MemberSession) -> bool:
    link = session.link
    return await is_serving(link.address, link.incarnation, role="reward", credentials=Credentials())


async def join(session: MemberSession) -> None:
    report = MemberReport(state=RewardState.SERVING)
    await session.join(ADD, reward_pb2_grpc.RewardServiceServicer(), lambda: report)


async def test_a_member_serves_registers_reports_and_leaves(controller: tuple[FakeController, str]) -> None:
    fake, address = controller

    async def work(session: MemberSession) -> None:
        await join(session)
        assert fake.registrations[0].address == session.link.address
        assert fake.registrations[0].engine == session.options.engine == "one"
        await fake.heard.wait()
        fake.run_over = True
        session.poke()
        await session.context.stopping.wait()

    await run(address, work)
    assert fake.calls[0] == "register"
    assert set(fake.calls[1:-1]) == {"heartbeat"}
    assert fake.calls[-1] == "leave stopped"
    assert fake.heartbeats[-1].state == "serving"


async def test_why_the_work_failed_is_told_before_the_goodbye(controller: tuple[FakeController, str]) -> None:
    fake, address = controller

    async def work(session: MemberSession) -> None:
        await join(session)
        raise ExceptionGroup("both", [ModelError("no such folder"), OSError("disk gone")])

    with pytest.raises(ExceptionGroup):
        await run(address, work)
    assert [beat.failure for beat in fake.heartbeats if beat.failure] == [
        "no such folder; OSError: disk gone"
    ]
    assert fake.calls[-1] == "leave stopped"


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (ModelError("the engine died"), True),
        (FailedStartError("the engine died", peer="the engine core"), False),
        (PeerLostError("the engine died", peer="rank 1"), False),
    ],
)
async def test_a_task_that_fails_ends_the_service_and_is_told(
    controller: tuple[FakeController, str], error: PacelineError, is_final: bool
) -> None:
    """The controller does not wait for a slot that fails for good, and does for others."""
    fake, address = controller

    async def fail() -> None:
        raise error

    async def work(session: MemberSession) -> None:
        await join(session)
        session.spawn("engine", fail())
        await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await run(address, work)
    assert caught.group_contains(type(error), match="the engine died")
    assert [(beat.failure, beat.is_final) for beat in fake.heartbeats if beat.failure] == [
        ("the engine died", is_final)
    ]


async def test_an_error_while_stopping_is_neither_told_nor_raised(
    controller: tuple[FakeController, str],
) -> None:
    fake, address = controller

    async def work(session: MemberSession) -> None:
        await join(session)
        session.context.stop("SIGTERM")
        raise ModelError("the engine's processes are gone")

    await run(address, work)
    assert not any(beat.failure for beat in fake.heartbeats)
    assert fake.calls[-1] == "leave stopped"


async def test_the_server_outlives_the_goodbye(controller: tuple[FakeController, str]) -> None:
    """Calls under way are answered until the controller knows that the member leaves."""
    fake, address = controller
    order: list[str] = []

    async def work(session: MemberSession) -> None:
        await join(session)

        async def probe() -> None:
            async with RewardClient(session.link.address, token="") as client:
                with pytest.raises(Exception, match="not served here"):
                    await client.score([], timeout_s=5)
            order.extend(["served", fake.calls[-1]])

        session.context.defer("own step", probe)

    await run(address, work)
    assert order[0] == "served"
    assert order[1] != "leave stopped"
    assert fake.calls[-1] == "leave stopped"


class Work:
    """What a member finishes before it leaves: until the test says so."""

    def __init__(self) -> None:
        self.done, self.began, self.finished, self.cut = asyncio.Event(), False, False, False

    async def finish(self) -> None:
        self.began = True
        try:
            await self.done.wait()
            self.finished = True
        except asyncio.CancelledError:
            self.cut = True
            raise


async def until_left(session: MemberSession, work: Work, *, grace_s: float) -> None:
    await join(session)
    await session.until_leaving()
    await session.finish(work.finish, grace_s=grace_s)


async def test_a_signal_makes_a_member_unhealthy_at_once_and_leaves_it_its_grace(
    controller: tuple[FakeController, str],
) -> None:
    fake, address = controller
    unfinished = Work()

    async def work(session: MemberSession) -> None:
        leaving = asyncio.create_task(until_left(session, unfinished, grace_s=4.0))
        await fake.heard.wait()
        assert await _is_serving(session)
        began = time.monotonic()
        session.context.stop("SIGTERM")
        while await _is_serving(session):
            assert not leaving.done()
        assert not leaving.done()
        await leaving
        assert 3.9 < time.monotonic() - began < 300

    await run(address, work)
    assert (unfinished.finished, unfinished.cut) == (False, True)
    assert fake.calls[-1] == "leave stopped"


async def test_a_drained_member_finishes_however_long_it_takes_and_leaves(
    controller: tuple[FakeController, str],
) -> None:
    fake, address = controller
    unfinished = Work()

    async def work(session: MemberSession) -> None:
        leaving = asyncio.create_task(until_left(session, unfinished, grace_s=0.1))
        await fake.heard.wait()
        fake.drain = True
        session.poke()
        async with asyncio.timeout(120):
            while await _is_serving(session):  # noqa: ASYNC110  a test's own look
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)  # twice the grace that a signal would have left it
        assert not leaving.done()
        unfinished.done.set()
        await leaving

    await run(address, work)
    assert unfinished.finished
    assert fake.calls[-1] == "leave drained"


async def test_when_the_run_is_over_nothing_is_finished(controller: tuple[FakeController, str]) -> None:
    fake, address = controller
    unfinished = Work()

    async def work(session: MemberSession) -> None:
        leaving = asyncio.create_task(until_left(session, unfinished, grace_s=600))
        await fake.heard.wait()
        session.context.stop("SIGTERM")
        await asyncio.sleep(0.1)
        assert not leaving.done()
        fake.run_over = True
        session.poke()
        await asyncio.wait_for(leaving, 120)

    await run(address, work)
    assert (unfinished.finished, unfinished.cut) == (False, True)


async def test_a_member_that_hears_of_the_end_does_not_begin_to_finish(
    controller: tuple[FakeController, str],
) -> None:
    fake, address = controller
    unfinished = Work()
    fake.run_over = True
    await run(address, lambda session: until_left(session, unfinished, grace_s=600))
    assert not unfinished.began


# --- told to end by whoever runs the process


async def told_to_end(session: MemberSession) -> None:
    """What SIGTERM does in a process that has a grace."""
    assert session.context.ask_first is not None
    session.context.ask_first()


async def test_a_member_serves_on_until_the_controller_can_do_without_it(
    controller: tuple[FakeController, str],
) -> None:
    fake, address = controller
    fake.stay = True

    async def work(session: MemberSession) -> None:
        await join(session)
        await fake.heard.wait()
        assert not any(beat.stopping for beat in fake.heartbeats)
        await told_to_end(session)
        async with asyncio.timeout(120):
            while sum(beat.stopping for beat in fake.heartbeats) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not session.context.stopping.is_set()
        assert await _is_serving(session)
        fake.stay = False
        await asyncio.wait_for(session.context.stopping.wait(), 120)
        assert not session.context.is_over

    await run(address, work)
    assert fake.calls[-1] == "leave stopped"


async def test_an_answer_from_before_the_signal_lets_nobody_go(
    controller: tuple[FakeController, str],
) -> None:
    fake, address = controller
    fake.stay = True
    fake.may_answer.clear()

    async def work(session: MemberSession) -> None:
        await join(session)
        await fake.heard.wait()
        await told_to_end(session)
        fake.may_answer.set()
        async with asyncio.timeout(120):
            while sum(beat.stopping for beat in fake.heartbeats) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not session.context.stopping.is_set()
        fake.run_over = True
        await asyncio.wait_for(session.context.stopping.wait(), 120)
        assert session.context.is_over

    await run(address, work)


async def test_a_member_does_not_wait_for_a_controller_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    monkeypatch.setattr("paceline.service.observability.telemetry.setup", lambda *_, **__: None)
    tree = CONFIG | {"service": {"suspect_after_s": 0.2, "dead_after_s": 60}}
    fake = FakeController(config_json=parse(RunConfig, tree).model_dump_json())
    server = await serve(fake)

    async def work(session: MemberSession) -> None:
        await join(session)
        await fake.heard.wait()
        await server.stop(0)
        await told_to_end(session)
        await asyncio.wait_for(session.context.stopping.wait(), 120)
        assert not session.context.is_over

    await run(server.address, work)


async def test_a_member_that_takes_long_to_end_is_heard_until_it_leaves(
    controller: tuple[FakeController, str],
) -> None:
    fake, address = controller
    heard = 0

    async def work(session: MemberSession) -> None:
        await join(session)
        fake.run_over = True
        session.poke()
        await session.context.stopping.wait()
        first = len(fake.heartbeats)

        async def shut_down_slowly() -> None:
            nonlocal heard
            while heard < 3:
                await fake.heard.wait()
                fake.heard.clear()
                heard = len(fake.heartbeats) - first

        session.context.defer("engine", shut_down_slowly, budget_s=10)

    await run(address, work)
    assert heard >= 3
    assert fake.calls[-1] == "leave stopped"


async def test_a_member_that_is_told_to_stop_does_not_wait_for_a_controller() -> None:
    async def work(session: MemberSession) -> None:
        asyncio.get_running_loop().call_later(0.1, session.context.stop, "SIGTERM")
        await join(session)

    async with asyncio.timeout(120):
        await run("127.0.0.1:1", work)


async def test_a_member_on_every_interface_says_where_the_controller_reaches_it(
    controller: tuple[FakeController, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host name may not resolve where the controller runs."""
    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    monkeypatch.setenv("PACELINE_INSECURE", "1")
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    fake, address = controller
    for advertise in ("", "lo", "fd00::7"):
        fake.run_over = False

        async def work(session: MemberSession) -> None:
            await join(session)
            fake.run_over = True
            await session.context.stopping.wait()

        await run(address, work, host="0.0.0.0", advertise=advertise)
    hosts = [registration.address.rpartition(":")[0] for registration in fake.registrations]
    assert hosts == ["127.0.0.1", "127.0.0.1", "[fd00::7]"]


# --- the largest message


async def test_a_member_takes_messages_as_large_as_its_environment_says(
    controller: tuple[FakeController, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens before it knows the run's configuration."""
    fake, address = controller
    tree = CONFIG | {"service": {"max_message_mib": 1}}
    fake.config_json = parse(RunConfig, tree).model_dump_json()
    monkeypatch.setenv("PACELINE_MAX_MESSAGE_MIB", "1")

    async def work(session: MemberSession) -> None:
        await join(session)
        channel = channels.connect(session.link.address, max_message_bytes=1 << 26)
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        for size, sentence in ((1 << 19, "not served here|not implemented"), (1 << 21, "too large")):
            request = reward_pb2.ScoreRequest(items=[reward_pb2.ScoreItem(response="x" * size)])
            with pytest.raises(PacelineError, match=f"(?i){sentence}"):
                await channels.call(stub.Score, request, timeout_s=10, phase="SCORE", peer="reward-0")
        await channel.close()

    await run(address, work)


async def test_a_member_with_a_lower_limit_than_the_runs_says_what_to_set(
    controller: tuple[FakeController, str],
) -> None:
    fake, address = controller
    fake.config_json = parse(RunConfig, CONFIG | {"service": {"max_message_mib": 65}}).model_dump_json()
    with pytest.raises(ExceptionGroup) as raised:
        await run(address, join)
    sentence = "of up to 64 MiB, the run has service.max_message_mib=65: set PACELINE_MAX_MESSAGE_MIB=65"
    assert sentence in str(raised.value.exceptions[0])
    assert [beat.is_final for beat in fake.heartbeats if beat.failure] == [True]


@pytest.mark.parametrize("text", ["0", "-1", "64MiB"])
async def test_a_limit_that_is_no_number_is_refused(
    controller: tuple[FakeController, str], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("PACELINE_MAX_MESSAGE_MIB", text)
    with pytest.raises(ExceptionGroup) as raised:
        await run(controller[1], join)
    assert "must be a number of MiB" in str(raised.value.exceptions[0])


# --- the run directory


@pytest.mark.parametrize(("content", "is_seen"), [("run-1\n", True), ("another-run", False), (None, False)])
async def test_spans_go_to_the_run_directory_only_where_it_is_the_runs_own(
    controller: tuple[FakeController, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    content: str | None,
    is_seen: bool,
) -> None:
    """Another host may have no such folder, or one of another run; a member must not make one."""
    fake, address = controller
    fake.run_dir = str(tmp_path / "run")
    if content is not None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "run.id").write_text(content)
    given = list[object]()
    monkeypatch.setattr(
        "paceline.service.observability.telemetry.setup",
        lambda *_, **options: given.append(options["run_dir"]),
    )

    async def work(session: MemberSession) -> None:
        await join(session)

    await run(address, work)
    assert given == [tmp_path / "run" if is_seen else None]
