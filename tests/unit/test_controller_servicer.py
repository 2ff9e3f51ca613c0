"""How the controller answers members, over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config.run import RunConfig
from paceline.controller.events import EventHub
from paceline.controller.fleet.membership import Fleet, Health
from paceline.controller.fleet.supervisor import Supervisor
from paceline.controller.fleet.turns import Turn, Turns
from paceline.controller.journal import Journal
from paceline.controller.phases import Phase
from paceline.controller.progress import Progress, Run
from paceline.controller.servicer import ControllerServicer
from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError, InvalidMessageError
from paceline.core.members import MemberKind, RolloutState
from paceline.core.policy import PolicyTag
from paceline.rpc.v1 import common_pb2, controller_pb2_grpc
from paceline.rpc.v1 import controller_pb2 as pb
from paceline.service.grpc import channels
from paceline.service.grpc.server import start_server
from paceline.service.identity.credentials import Credentials
from paceline.storage.folder import Folder
from support.sequencer_run import config, turns_of
from support.training_run import read_jsonl


class Bench:
    """The fleet behind a servicer, and calls to it."""

    def __init__(
        self,
        run: Run,
        supervisor: Supervisor,
        progress: Progress,
        stub: controller_pb2_grpc.ControllerServiceStub,
    ) -> None:
        self.run, self.progress, self.supervisor = run, progress, supervisor
        self.fleet, self.events, self._stub = supervisor.fleet, run.events, stub
        self.stops: list[str] = []
        self.turns: Turns

    async def register(
        self, kind: common_pb2.MemberKind.ValueType, member_id: str, **fields: Any
    ) -> pb.RegisterResponse:
        given = {"incarnation": "a", "address": "h:1", **fields}
        request = pb.RegisterRequest(kind=kind, member_id=member_id, **given)
        return await channels.call(self._stub.Register, request, timeout_s=60, phase="R", peer="controller")

    async def beat(self, member_id: str, state: str, **fields: object) -> pb.HeartbeatResponse:
        request = pb.HeartbeatRequest(member_id=member_id, incarnation="a", state=state, **fields)  # type: ignore[arg-type]
        return await channels.call(self._stub.Heartbeat, request, timeout_s=60, phase="H", peer="controller")

    async def leave(self, member_id: str, reason: str) -> None:
        request = pb.LeaveRequest(member_id=member_id, incarnation="a", reason=reason)
        await channels.call(self._stub.Leave, request, timeout_s=60, phase="L", peer="controller")

    async def report_end(self, member_id: str, *incarnations: str) -> None:
        request = pb.ReportEndRequest(member_id=member_id, incarnations=incarnations, reason="killed")
        await channels.call(self._stub.ReportEnd, request, timeout_s=60, phase="E", peer="controller")

    async def stop(self, reason: str, *, after_step: bool = False) -> None:
        request = pb.StopRunRequest(reason=reason, after_step=after_step)
        await channels.call(self._stub.StopRun, request, timeout_s=60, phase="S", peer="controller")

    async def scale_rates(self, lr_scale: float) -> int:
        request = pb.SetRatesRequest(lr_scale=lr_scale)
        call = channels.call(self._stub.SetRates, request, timeout_s=60, phase="S", peer="controller")
        return (await call).from_step

    async def drain(self, member_id: str) -> None:
        request = pb.DrainRequest(member_id=member_id)
        await channels.call(self._stub.Drain, request, timeout_s=60, phase="D", peer="controller")

    async def follow(self, from_step: int) -> list[pb.WatchEvent]:
        request = pb.WatchRequest(from_step=from_step)
        answers = channels.stream(self._stub.Watch, request, phase="W", peer="controller", timeout_s=60)
        return [event async for event in answers]

    async def followers(self, count: int) -> None:
        """Returns when so many follow the run: a notice reaches those who do."""
        async with asyncio.timeout(120):
            while len(self.events._queues) < count:  # noqa: ASYNC110  a test's own look
                await asyncio.sleep(0.01)

    async def status(self, field: str = "state") -> dict[str, str]:
        call = channels.call(self._stub.GetStatus, pb.GetStatusRequest(), timeout_s=60, phase="S", peer="c")
        return {member.member_id: getattr(member, field) for member in (await call).members}


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with made(tmp_path, config()) as bench:
        yield bench


@contextlib.asynccontextmanager
async def made(tmp_path: Path, cfg: RunConfig) -> AsyncIterator[Bench]:
    clock, events = SystemClock(), EventHub()
    journal = Journal(tmp_path / "events.jsonl", clock)
    supervisor = Supervisor(Fleet(clock, suspect_after_s=5, dead_after_s=12), journal, events, clock)
    run = Run(config=cfg, id="run-1", dir=tmp_path, journal=journal, events=events)
    progress, stops = Progress(run), list[str]()
    turns = turns_of(run, supervisor)
    servicer = ControllerServicer(
        run,
        progress,
        supervisor,
        turns=turns,
        broker_url="redis://127.0.0.1:1/0",
        credentials=Credentials(),
        checkpoints=lambda: [Folder.at(tmp_path / "step_000002")],
        checkpoint_marker="m",
        stop=stops.append,
    )
    add = controller_pb2_grpc.add_ControllerServiceServicer_to_server
    server = await start_server(add, servicer)
    channel = channels.connect(server.address)
    bench = Bench(run, supervisor, progress, controller_pb2_grpc.ControllerServiceStub(channel))
    bench.stops, bench.turns = stops, turns
    yield bench
    await channel.close()
    await server.stop(0)
    journal.close()


async def test_heartbeats_bring_what_a_process_takes_of_its_machine(bench: Bench) -> None:
    await bench.register(common_pb2.MEMBER_KIND_ROLLOUT, "rollout-0")
    await bench.beat("rollout-0", "serving", usage=pb.Usage(cpu_seconds=3.0, memory_bytes=3 << 30))
    await bench.beat("rollout-0", "serving")  # of an older version
    assert bench.supervisor.usage_metrics()["perf/resident_gib/rollout"] == 3.0


async def test_a_heartbeat_brings_state_and_policy(bench: Bench) -> None:
    assert (await bench.register(common_pb2.MEMBER_KIND_ROLLOUT, "rollout-0")).run_id == "run-1"
    assert await bench.status() == {"rollout-0": "registered"}
    tag = common_pb2.PolicyTag(version=3, digest="ab" * 8)
    assert (await bench.beat("rollout-0", "serving", policy=tag, in_flight=7)).known
    member = bench.fleet.members(MemberKind.ROLLOUT)[0]
    assert (member.state, member.policy, member.in_flight) == (
        RolloutState.SERVING,
        PolicyTag(version=3, digest="ab" * 8),
        7,
    )
    assert await bench.status() == {"rollout-0": "serving"}


async def test_a_members_notice_is_shown_to_the_user(bench: Bench) -> None:
    await bench.register(common_pb2.MEMBER_KIND_LEARNER, "learner-0")
    following = asyncio.create_task(bench.follow(from_step=1))
    await bench.followers(1)
    await bench.beat("learner-0", "loading", notice="a checkpoint is damaged")
    bench.events.end(ok=True, message="done")
    notices = [event.notice.message for event in await following if event.HasField("notice")]
    # On a busy machine the registration, too, is told only now.
    assert [words for words in notices if words != "learner-0 is registered"] == [
        "learner-0: a checkpoint is damaged"
    ]


async def test_a_registration_tells_what_the_member_holds_and_what_is_committed(bench: Bench) -> None:
    answer = await bench.register(common_pb2.MEMBER_KIND_REWARD, "reward-0")
    assert (answer.term, answer.HasField("policy"), answer.checkpoint_root) == (1, False, "")
    answer = await bench.register(common_pb2.MEMBER_KIND_LEARNER, "learner-0")
    assert [Path(folder).name for folder in answer.checkpoints] == ["step_000002"]
    assert (Path(answer.checkpoint_root).name, answer.checkpoint_marker) == ("checkpoints", "m")

    tag = PolicyTag(version=3, digest="ab" * 8)
    bench.progress.policy = tag
    proto = common_pb2.PolicyTag(version=3, digest="ab" * 8)
    answer = await bench.register(common_pb2.MEMBER_KIND_ROLLOUT, "rollout-0", state="serving", policy=proto)
    assert answer.policy == proto
    member = bench.fleet.members(MemberKind.ROLLOUT)[0]
    assert (member.state, member.policy) == (RolloutState.SERVING, tag)


async def test_a_learner_reports_its_version_before_it_has_a_digest(bench: Bench) -> None:
    await bench.register(
        common_pb2.MEMBER_KIND_LEARNER, "learner-0", state="ready", policy=common_pb2.PolicyTag(version=7)
    )
    member = bench.fleet.members(MemberKind.LEARNER)[0]
    assert member.policy == PolicyTag(version=7, digest="")
    assert (await bench.beat("learner-0", "ready", policy=common_pb2.PolicyTag(version=8))).known
    assert member.policy == PolicyTag(version=8, digest="")


async def test_a_state_that_is_none_of_the_members_kind_is_rejected_and_changes_nothing(bench: Bench) -> None:
    await bench.register(common_pb2.MEMBER_KIND_REWARD, "reward-0")
    with pytest.raises(InvalidMessageError, match="a reward member has no state 'training'") as caught:
        await bench.beat("reward-0", "training")
    assert caught.value.reason == "unknown_state"
    assert bench.fleet.members()[0].state is None


async def test_a_failure_needs_no_state(bench: Bench) -> None:
    await bench.register(common_pb2.MEMBER_KIND_LEARNER, "learner-0")
    assert (await bench.beat("learner-0", "", failure="out of memory")).known
    member = bench.fleet.members()[0]
    assert (member.health, member.failure) == (Health.DEAD, "out of memory")
    assert await bench.status() == {"learner-0": "dead"}
    assert not (await bench.beat("learner-0", "ready")).known


LONG = "x\x1b[2J" * 100_000


async def test_texts_of_a_peer_are_cut_and_printable(bench: Bench) -> None:
    """They are kept in memory, in the journal and in the launcher's last words."""
    for member_id in ("learner-0", "learner-1"):
        await bench.register(common_pb2.MEMBER_KIND_LEARNER, member_id)
    await bench.beat("learner-0", "", failure=LONG)
    await bench.leave("learner-1", LONG)
    await bench.stop(LONG)
    texts = [member.failure for member in bench.fleet.members()] + bench.stops
    assert len(texts) == 3
    for text in texts:
        assert len(text) <= 2000
        assert text.startswith(r"x\x1b[2Jx")
        assert text.endswith(" ...")
    journal = (bench.run.dir / "events.jsonl").read_text()
    assert len(journal) < 20_000


@pytest.mark.parametrize("field", ["member_id", "incarnation", "address"])
@pytest.mark.parametrize("name", ["r" * 201, "a\x1b[2Jb"])
async def test_a_name_that_nobody_can_print_is_refused(bench: Bench, field: str, name: str) -> None:
    with pytest.raises(InvalidMessageError, match=f"{field} must be at most 200 printable") as caught:
        await bench.register(common_pb2.MEMBER_KIND_ROLLOUT, **{"member_id": "r-0", field: name})
    assert caught.value.reason == "unusable_name"
    assert bench.fleet.members() == []


async def test_a_final_failure_is_noted_as_such(bench: Bench) -> None:
    await bench.register(common_pb2.MEMBER_KIND_LEARNER, "learner-0")
    await bench.beat("learner-0", "", failure="no tokenizer in m", is_final=True)
    assert bench.fleet.members()[0].is_final


async def test_a_second_process_with_the_id_of_one_at_work_is_refused(bench: Bench) -> None:
    """Otherwise each would put the other out at every registration, for ever."""
    kind = common_pb2.MEMBER_KIND_ROLLOUT
    at_work = await start_server(lambda servicer, server: None, None)
    await at_work.answer_as("a")
    await bench.register(kind, "rollout-0", address=at_work.address)
    with pytest.raises(ConfigError, match="refused: give it another --member-id") as caught:
        await bench.register(kind, "rollout-0", incarnation="b", address="127.0.0.1:1")
    assert at_work.address in str(caught.value)
    assert [m.incarnation for m in bench.fleet.usable(MemberKind.ROLLOUT)] == ["a"]

    # The same process may register as often as it likes; another at the same address is its successor.
    await bench.register(kind, "rollout-0", address=at_work.address)
    await bench.register(kind, "rollout-0", incarnation="b", address=at_work.address)
    assert [m.incarnation for m in bench.fleet.usable(MemberKind.ROLLOUT)] == ["b"]

    # One that ends says so to the probe; one that is gone does not answer.
    await at_work.stop(0)
    await bench.register(kind, "rollout-0", incarnation="c", address="127.0.0.1:1")
    assert [m.incarnation for m in bench.fleet.usable(MemberKind.ROLLOUT)] == ["c"]


async def test_another_process_on_the_port_of_a_member_is_not_taken_for_it(bench: Bench) -> None:
    """rollout-0 has died; its free port went to another member before rollout-0 was started again."""
    kind = common_pb2.MEMBER_KIND_ROLLOUT
    other = await start_server(lambda servicer, server: None, None)
    await other.answer_as("x")
    await bench.register(kind, "rollout-0", address=other.address)
    await bench.register(kind, "rollout-0", incarnation="b", address="127.0.0.1:1")
    assert [m.incarnation for m in bench.fleet.usable(MemberKind.ROLLOUT)] == ["b"]
    await other.stop(0)


async def test_a_member_whose_process_has_ended_is_dead_at_once_and_its_successor_stays(bench: Bench) -> None:
    await bench.register(common_pb2.MEMBER_KIND_ROLLOUT, "rollout-0")
    await bench.report_end("rollout-0", "an earlier one")
    await bench.report_end("rollout-1", "a")
    assert await bench.status() == {"rollout-0": "registered"}
    member = bench.fleet.get("rollout-0")
    assert member is not None
    waiting = asyncio.create_task(bench.supervisor.gone(member))
    for _ in range(2):
        await bench.report_end("rollout-0", "x", "a")
    async with asyncio.timeout(60):
        await waiting
    assert (member.health, member.failure) == (Health.DEAD, "killed")
    assert not (await bench.beat("rollout-0", "serving")).known
    await bench.register(common_pb2.MEMBER_KIND_ROLLOUT, "rollout-0", incarnation="b")
    await bench.report_end("rollout-0", "x", "a")
    assert await bench.status() == {"rollout-0": "registered"}
    told = [e["what"] for e in read_jsonl(bench.run.dir / "events.jsonl") if e["event"] == "member"]
    assert told == ["registered", "dead", "registered"]


async def test_a_silent_member_is_replaced_without_being_asked(bench: Bench) -> None:
    kind = common_pb2.MEMBER_KIND_ROLLOUT
    frozen = await start_server(lambda servicer, server: None, None)
    await frozen.answer_as("a")
    await bench.register(kind, "rollout-0", address=frozen.address)
    bench.fleet.members()[0].health = Health.SUSPECT
    await bench.register(kind, "rollout-0", incarnation="b", address="127.0.0.1:1")
    assert [m.incarnation for m in bench.fleet.usable(MemberKind.ROLLOUT)] == ["b"]
    await frozen.stop(0)


async def test_a_drained_member_is_told_with_its_heartbeat(bench: Bench) -> None:
    for number in range(2):
        await bench.register(common_pb2.MEMBER_KIND_ROLLOUT, f"rollout-{number}")
    await bench.register(common_pb2.MEMBER_KIND_LEARNER, "learner-0")
    assert not (await bench.beat("rollout-0", "serving")).drain
    await bench.drain("rollout-0")
    for phase in (Phase.FORMING, Phase.PUBLISH, Phase.COMMIT):
        bench.progress.phase = phase
        assert not (await bench.beat("rollout-0", "serving")).drain, "in the middle of a push"
    bench.progress.phase = Phase.COLLECT
    assert (await bench.beat("rollout-0", "draining")).drain
    assert not (await bench.beat("rollout-1", "serving")).drain
    assert await bench.status() == {
        "learner-0": "registered",
        "rollout-0": "draining",
        "rollout-1": "serving",
    }
    assert [m.member_id for m in bench.supervisor.rollouts] == ["rollout-1"]


async def test_a_server_that_comes_in_the_learners_turn_is_held_until_it_ends(tmp_path: Path) -> None:
    async with made(tmp_path, config(rollout__sleep="always")) as bench:
        rollout = common_pb2.MEMBER_KIND_ROLLOUT
        assert not (await bench.register(rollout, "rollout-0")).hold
        await bench.beat("rollout-0", "stale")
        await bench.turns.take(Turn.LEARNER)
        assert (await bench.register(rollout, "rollout-1")).hold
        assert (await bench.beat("rollout-1", "joining")).hold
        assert not (await bench.beat("rollout-0", "asleep")).hold
        assert not (await bench.register(common_pb2.MEMBER_KIND_LEARNER, "learner-0")).hold
        await bench.turns.take(Turn.PUSH)
        assert not (await bench.beat("rollout-1", "joining")).hold


async def test_who_cannot_be_spared_is_not_drained(bench: Bench) -> None:
    await bench.register(common_pb2.MEMBER_KIND_ROLLOUT, "rollout-0")
    await bench.register(common_pb2.MEMBER_KIND_LEARNER, "learner-0")
    for name in ("learner-0", "rollout-7"):
        with pytest.raises(ConfigError, match=f"no member {name} can be drained; those that can: rollout-0"):
            await bench.drain(name)
    with pytest.raises(ConfigError, match="rollout-0 is the last rollout member"):
        await bench.drain("rollout-0")
    await bench.register(common_pb2.MEMBER_KIND_ROLLOUT, "rollout-1")
    await bench.drain("rollout-0")
    with pytest.raises(ConfigError, match="rollout-1 is the last rollout member"):
        await bench.drain("rollout-1")
    # It was taken for dead meanwhile, and registers again: it still leaves.
    bench.fleet.mark_dead(bench.fleet.usable(MemberKind.ROLLOUT)[0], "silent for 12.1 s")
    await bench.register(common_pb2.MEMBER_KIND_ROLLOUT, "rollout-0", state="draining")
    with pytest.raises(ConfigError, match="rollout-1 is the last rollout member"):
        await bench.drain("rollout-1")


async def test_an_unknown_member_must_register(bench: Bench) -> None:
    assert not (await bench.beat("nobody", "ready")).known


async def test_a_registration_must_be_complete(bench: Bench) -> None:
    with pytest.raises(InvalidMessageError, match="kind 0 is none of learner, reward, rollout") as caught:
        await bench.register(common_pb2.MEMBER_KIND_UNSPECIFIED, "rollout-0")
    assert caught.value.reason == "incomplete_registration"
    with pytest.raises(InvalidMessageError, match="must name its id and incarnation; got id ''"):
        await bench.register(common_pb2.MEMBER_KIND_ROLLOUT, "")


async def test_a_follower_gets_the_steps_it_missed_and_everything_until_the_end(bench: Bench) -> None:
    for step in (1, 2):
        bench.events.step(step, {"m": step / 2})
    bench.events.phase(step=3, phase="collect", admitted=4, wanted=8)
    following = asyncio.create_task(bench.follow(from_step=2))
    await bench.followers(1)
    bench.events.notice("rollout-1 is dead")
    bench.events.end(ok=True, message="3 steps done")
    bench.events.end(ok=False, message="too late")
    assert await following == [
        pb.WatchEvent(step=pb.StepEvent(step=2, metrics={"m": 1.0})),
        pb.WatchEvent(phase=pb.PhaseEvent(step=3, phase="collect", admitted=4, wanted=8)),
        pb.WatchEvent(notice=pb.NoticeEvent(message="rollout-1 is dead")),
        pb.WatchEvent(end=pb.EndEvent(ok=True, message="3 steps done")),
    ]
    assert [event.WhichOneof("event") for event in await bench.follow(from_step=9)] == ["phase", "end"]


async def test_a_run_is_stopped_at_once_or_after_its_step(bench: Bench) -> None:
    await bench.stop("SIGINT", after_step=True)
    assert (bench.progress.stop_reason, bench.stops) == ("SIGINT", [])
    await bench.stop("enough")
    assert bench.stops == ["enough"]


async def test_rates_are_scaled_from_the_next_step_on(bench: Bench) -> None:
    bench.progress.step = 7
    assert await bench.scale_rates(0.25) == 8
    assert bench.progress.lr_scale == 0.25
    for wrong in (-0.1, 101.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="must be from 0 to 100"):
            await bench.scale_rates(wrong)
    assert bench.progress.lr_scale == 0.25


async def test_a_member_that_is_told_to_end_hears_whether_the_step_needs_it(bench: Bench) -> None:
    """The last server stays until it is released; then again only while a push is under way."""
    await bench.register(common_pb2.MEMBER_KIND_ROLLOUT, "rollout-0", state="serving")
    assert not (await bench.beat("rollout-0", "serving")).stay
    assert (await bench.beat("rollout-0", "serving", stopping=True)).stay
    bench.supervisor.departures.release()
    assert not (await bench.beat("rollout-0", "serving", stopping=True)).stay
    bench.progress.phase = Phase.PUBLISH
    assert (await bench.beat("rollout-0", "serving", stopping=True)).stay
    # A member that the controller does not know registers first.
    answer = await bench.beat("rollout-7", "serving", stopping=True)
    assert (answer.known, answer.stay) == (False, False)


async def test_validation_servers_are_known_as_such_and_refused_where_none_are_wanted(
    bench: Bench, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="rollout-9 was started with --validates, and this run has no"):
        await bench.register(common_pb2.MEMBER_KIND_ROLLOUT, "rollout-9", validates=True)
    (tmp_path / "other").mkdir()
    wanted = config(rollout__replicas=2, rollout__validation_servers=1)
    async with made(tmp_path / "other", wanted) as other:
        for name, validates in (("rollout-0", False), ("rollout-1", True)):
            await other.register(
                common_pb2.MEMBER_KIND_ROLLOUT, name, state="stale", address=name, validates=validates
            )
        supervisor = other.supervisor
        assert [m.member_id for m in supervisor.rollouts] == ["rollout-0"]
        assert [m.member_id for m in supervisor.validators] == ["rollout-1"]
        with pytest.raises(ConfigError, match="rollout-0 is the last rollout member"):
            supervisor.drain("rollout-0")
        supervisor.drain("rollout-1")
