"""What a run does when a member or the broker's data is lost: it aligns, collects again, serves newcomers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paceline.broker import names
from paceline.controller.batch import collect
from paceline.controller.phases import Phase
from paceline.controller.run import publication
from paceline.controller.run.align import goes_on
from paceline.controller.standing import Standing, StepInProgress
from paceline.core.errors import IllegalTransitionError, LostDataError, PeerLostError, ProtocolError
from paceline.core.members import LearnerState, MemberKind, RewardState, RolloutState
from paceline.core.policy import PolicyTag
from support.memory_broker import MemoryBroker
from support.sequencer_run import SequencerRun, config, run, run_of

CALM = {"trainer__val_before_train": False, "service__recovery_timeout_s": 30.0}


def of(it: SequencerRun, event: str) -> list[dict[str, Any]]:
    return [e for e in it.events() if e["event"] == event]


async def called(it: SequencerRun, beginning: str) -> None:
    """Returns when a service was called so."""
    while not any(call.startswith(beginning) for call in it.services.calls):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def collecting(it: SequencerRun) -> None:
    """Returns when the run is in COLLECT."""
    while it.sequencer.progress.phase is not Phase.COLLECT:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def answerable(it: SequencerRun) -> bool:
    """Whether a server has the policy that is collected."""
    return it.sequencer.progress.policy in it.services.policies.values()


def restart_learner(
    it: SequencerRun, version: int, incarnation: str, state: LearnerState = LearnerState.READY
) -> None:
    """Another process takes the learner's place, with the weights of a checkpoint, or none of this run."""
    it.services.version = it.services.source = version
    it.services.learner.epoch = None
    it.services.trained.clear()
    changes = it.supervisor.fleet.register(
        kind=MemberKind.LEARNER,
        member_id="learner",
        incarnation=incarnation,
        address="learner",
        num_ranks=1,
        state=state,
    )
    asyncio.get_running_loop().create_task(it.supervisor.apply(changes))


@pytest.mark.parametrize(
    ("finished", "trained", "version", "expected"),
    [
        (4, False, 4, True),
        (4, False, 5, True),
        (4, True, 5, True),
        (4, True, 4, False),
        (4, False, 3, False),
        (4, False, 6, False),
        (-1, False, 0, True),
        (-1, False, 7, False),
    ],
)
def test_which_versions_a_step_goes_on_with(
    finished: int, trained: bool, version: int, expected: bool
) -> None:
    current = StepInProgress(step=finished + 1, trained=trained)
    assert goes_on(Standing(finished=finished, current=current), version) is expected


@pytest.mark.parametrize("version", [0, 2, 3])
async def test_a_learner_lost_while_it_trains_comes_back_from_its_checkpoint(
    version: int, tmp_path: Path
) -> None:
    """Step 4 is being trained; the learner comes back with the checkpoint of step 0, 2 or 3."""
    async with run(tmp_path, **CALM, trainer__total_steps=4) as it:
        it.services.writes = True
        await it.enlist_all()
        train, lives = it.services.learner.train, iter("bc")

        async def dying(member: Any, order: Any) -> Any:
            if order.step == 4 and member.incarnation == "a":
                restart_learner(it, version, next(lives))
                raise PeerLostError("the learner was killed", peer="learner")
            return await train(member, order)

        it.services.learner.train = dying  # type: ignore[method-assign]
        await it.go()
        assert [line["step"] for line in it.lines()] == [0, 1, 2, 3, 4]
        rewinds = [event["to_step"] for event in of(it, "rewind")]
        assert rewinds == ([] if version == 3 else [version])
        batches = it.services.batches
        # What is trained again is trained on the same prompts as before.
        assert batches[3:] == [*batches[version:3], batches[-1]]
        assert len({str(batch) for batch in batches[:3]}) == 3
        finished = [event["step"] for event in of(it, "step")]
        assert finished == [0, 1, 2, 3, *range(version + 1, 5)]


@pytest.mark.parametrize(
    ("event", "to"), [("phase", "learn"), ("trained", None), ("phase", "checkpoint")], ids=str
)
async def test_a_step_does_not_go_on_with_a_learner_that_was_started_again(
    event: str, to: str | None, tmp_path: Path
) -> None:
    """It comes back with step 1 before it trains, publishes or saves step 3: steps 2 and 3 are run again."""
    changes = {**CALM, "trainer__total_steps": 3, "trainer__keep_checkpoints": 9}
    async with run(tmp_path, **changes) as it:
        it.services.writes = True
        await it.enlist_all()
        record, lives = it.journal.record, iter("b")

        def recording(kind: str, **fields: Any) -> None:
            record(kind, **fields)
            is_there = (
                (kind, fields.get("to"), fields["step"]) == (event, to, 3) if "step" in fields else False
            )
            if is_there and (life := next(lives, None)):
                restart_learner(it, 1, life)

        it.journal.record = recording  # type: ignore[method-assign]
        await it.go()
        assert [e["to_step"] for e in of(it, "rewind")] == [1]
        assert [e["step"] for e in of(it, "step")] == [0, 1, 2, 2, 3]
        assert it.services.sources == {1: 1, 2: 2, 3: 3}
        assert [int(e["digest"], 16) - 7 for e in of(it, "commit")] == [
            e["version"] for e in of(it, "commit")
        ]
        assert "restart" not in it.services.calls
        assert it.breaches() == []


async def test_what_was_drawn_for_a_void_step_is_not_trained_on(tmp_path: Path) -> None:
    """The learner that has trained step 3 is lost before the push, and comes back with step 2."""
    async with run(tmp_path, **CALM, trainer__total_steps=3) as it:
        it.services.writes = True
        await it.enlist_all()
        train, lives = it.services.learner.train, ["a"]

        async def dying(member: Any, order: Any) -> Any:
            result = await train(member, order)
            if (order.step, lives) == (3, ["a"]):
                lives.append("b")
                restart_learner(it, 2, "b")
            return result

        def answer(group: Any, index: int) -> dict[str, Any]:
            return {"reward": index + 10.0 * len(lives), "reward_error": None}

        it.services.learner.train = dying  # type: ignore[method-assign]
        await it.go(answer)
        assert [e["to_step"] for e in of(it, "rewind")] == [2]
        trained = [(order.step, {row.reward for row in order.rows}) for order in it.services.orders]
        assert trained == [(1, {10, 11}), (2, {10, 11}), (3, {10, 11}), (3, {20, 21})]
        assert it.breaches() == []


async def test_a_learner_that_was_only_away_meets_the_servers_in_a_new_weight_group(tmp_path: Path) -> None:
    """Its group ends when it is asked what it holds; the next push must not go to that group."""
    async with run(tmp_path, **CALM, trainer__total_steps=3) as it:
        await it.enlist_all()
        learner = it.services.learner
        lost = iter(["the line was cut", "the line is still cut"])

        def cut(call: Any) -> Any:
            async def cut_in_step_2(*args: Any) -> Any:
                if it.sequencer.progress.step == 2 and (sentence := next(lost, None)) is not None:
                    raise PeerLostError(sentence, peer="learner")
                return await call(*args)

            return cut_in_step_2

        learner.train, learner.describe = cut(learner.train), cut(learner.describe)  # type: ignore[method-assign]
        await it.go()
        assert [line["step"] for line in it.lines()] == [0, 1, 2, 3]
        assert [event["number"] for event in of(it, "epoch")] == [1, 2]
        assert of(it, "rewind") == []
        assert next(lost, None) is None
        assert [text for text in it.notices if "cut" in text] == ["step 2: the line was cut"]


async def test_a_learner_that_never_comes_back_ends_the_run_after_the_recovery_time(tmp_path: Path) -> None:
    async with run(tmp_path, **{**CALM, "service__recovery_timeout_s": 0.2}) as it:
        await it.enlist_all()

        async def dying(member: Any, order: Any) -> Any:
            await it.supervisor.expel(member, "killed")
            raise PeerLostError("the learner was killed", peer="learner")

        it.services.learner.train = dying  # type: ignore[method-assign]
        with pytest.raises(Exception, match=r"the learner.*0.2 s.*killed"):
            await it.go()


async def test_a_run_whose_learner_is_lost_again_and_again_ends(tmp_path: Path) -> None:
    async with run(tmp_path, **{**CALM, "service__recovery_timeout_s": 0.5}) as it:
        await it.enlist_all()

        async def lost(member: Any, order: Any) -> Any:
            raise PeerLostError("killed once more", peer="learner")

        it.services.learner.train = lost  # type: ignore[method-assign]
        with pytest.raises(PeerLostError, match="killed once more"):
            await it.go()
        assert of(it, "resume")


async def test_weights_that_are_not_the_committed_ones_end_the_run(tmp_path: Path) -> None:
    async with run(tmp_path, **CALM) as it:
        it.services.writes = True
        await it.enlist_all()
        await it.go()
        services = it.services
    services.standings.clear()
    services.source = 17
    async with run_of(config(**CALM, trainer__total_steps=3), tmp_path, services) as it:
        await it.enlist_all()
        with pytest.raises(Exception, match="version 2 was committed with digest 0000000000000009"):
            await it.go()


async def test_a_server_that_outlived_the_controller_gets_no_push(tmp_path: Path) -> None:
    broker = MemoryBroker()
    async with run_of(config(**CALM), tmp_path, broker=broker) as it:
        await it.enlist_all()
        await it.go()
        services = it.services
    calls = len(services.calls)
    async with run_of(config(**CALM, trainer__total_steps=3), tmp_path, services, broker) as it:
        await it.enlist_all()
        await it.go()
        assert services.calls[calls : calls + 2] == ["describe learner", "train 3"]


# --- data of the broker


async def test_a_step_whose_data_the_broker_loses_is_collected_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker comes back empty when half of the step's samples are in."""
    async with run(tmp_path, **CALM, barrier__stall_timeout_s=30.0) as it:
        await it.enlist_all()
        answered: list[int] = []

        def answer(group: Any, index: int) -> dict[str, Any]:
            answered.append(index)
            if len(answered) == 3:
                store = it.broker._store
                store.streams.clear()
                store.blobs.clear()
            return {"reward": float(index), "reward_error": None}

        monkeypatch.setattr(collect, "_CHECK_S", 0.1)
        await it.go(answer)
        (event,) = of(it, "recollect")
        assert event["step"] == 1
        assert "lost the run's data" in event["reason"]
        assert [step for step, _ in it.services.trained] == [1, 2]
        assert [len(batch) for batch in it.services.batches] == [6, 6]


async def test_blobs_that_the_learner_misses_are_collected_again_but_not_for_ever(tmp_path: Path) -> None:
    async with run(tmp_path, **CALM) as it:
        await it.enlist_all()
        train, orders = it.services.learner.train, list[Any]()

        async def missing(member: Any, order: Any) -> Any:
            orders.append(order)
            if order.step == 2 or len(orders) < 3:
                raise LostDataError("3 blobs are gone")
            return await train(member, order)

        it.services.learner.train = missing  # type: ignore[method-assign]
        with pytest.raises(LostDataError, match="3 blobs are gone"):
            await it.go()
        assert [e["step"] for e in of(it, "recollect")] == [1, 1, 2, 2, 2]
        assert len({order.digest for order in orders if order.step == 1}) == 1
        assert len({order.digest for order in orders if order.step == 2}) == 1


async def test_a_learner_that_has_trained_another_batch_is_sent_back(tmp_path: Path) -> None:
    async with run(tmp_path, **CALM) as it:
        it.services.writes = True
        await it.enlist_all()
        train = it.services.learner.train
        it.services.restarted = lambda reason: restart_learner(it, 1, "b")

        async def refusing(member: Any, order: Any) -> Any:
            if order.step == 2 and member.incarnation == "a":
                raise IllegalTransitionError("step 2 was trained on the batch with digest ab")
            return await train(member, order)

        it.services.learner.train = refusing  # type: ignore[method-assign]
        await it.go()
        (lost,) = of(it, "lost")
        assert (lost["step"], lost["reason"]) == (2, "step 2 was trained on the batch with digest ab")
        assert it.services.calls.count("restart") == 1
        assert [step for step, _ in it.services.trained] == [2]
        assert [line["step"] for line in it.lines()] == [0, 1, 2]
        assert it.breaches() == []


async def test_a_learner_whose_version_nobody_knows_is_sent_back(tmp_path: Path) -> None:
    async with run(tmp_path, **CALM) as it:
        await it.enlist_all()
        it.services.version = 7
        it.services.restarted = lambda reason: restart_learner(it, 0, "b")
        await it.go()
        assert it.services.calls[:2] == ["describe learner", "restart"]
        assert any("holds version 7, of which this run has no checkpoint" in text for text in it.notices)
        assert [line["step"] for line in it.lines()] == [0, 1, 2]


async def test_what_finished_steps_left_in_the_broker_goes_even_after_a_restart(tmp_path: Path) -> None:
    broker = MemoryBroker()
    async with run_of(config(**CALM), tmp_path, broker=broker) as it:
        await it.enlist_all()
        await it.go()
        services = it.services
    left = [key for key in broker._store.blobs if ":blob:" in key]
    assert left, "the last step's blobs are there: it was finished only at the end"
    async with run_of(config(**CALM, trainer__total_steps=3), tmp_path, services, broker) as it:
        await it.enlist_all()
        await it.go()
        assert not set(left) & broker._store.blobs.keys()
        assert names.prompts("r", 1) not in broker._store.streams


# --- newcomers


async def test_a_server_that_comes_while_collecting_gets_the_weights_at_once(tmp_path: Path) -> None:
    """The only server dies in the first step; another one registers and answers in its place."""
    async with run(tmp_path, **CALM, rollout__replicas=1, barrier__stall_timeout_s=30.0) as it:
        await it.enlist("learner", MemberKind.LEARNER, LearnerState.READY)
        await it.enlist("reward-0", MemberKind.REWARD, RewardState.SERVING)
        await it.enlist("rollout-0", MemberKind.ROLLOUT, RolloutState.STALE)
        served: list[str] = []

        async def replace() -> None:
            await called(it, "commit rollout-0 0")
            await it.supervisor.expel(it.supervisor.rollouts[0], "killed")
            await it.enlist("rollout-1", MemberKind.ROLLOUT, RolloutState.STALE)
            await called(it, "commit rollout-1 0")
            served.append("rollout-1")

        replacing = asyncio.create_task(replace())
        it.may_answer = lambda: bool(served)
        await it.go()
        await replacing
        (event,) = of(it, "newcomers")
        assert (event["version"], event["servers"]) == (0, ["rollout-1"])
        assert [step for step, _ in it.services.trained] == [1, 2]


async def test_a_newcomer_with_other_weights_is_put_out_and_the_step_goes_on(tmp_path: Path) -> None:
    async with run(tmp_path, **CALM, trainer__total_steps=1) as it:
        await it.enlist_all()
        it.services.corrupt = {"rollout-9"}

        async def come() -> None:
            await called(it, "commit rollout-1 0")
            await it.enlist("rollout-9", MemberKind.ROLLOUT, RolloutState.STALE)

        def is_out() -> bool:
            member = it.supervisor.fleet.get("rollout-9")
            return member is not None and not member.usable

        coming = asyncio.create_task(come())
        it.may_answer = is_out
        await it.go()
        await coming
        (dead,) = [e for e in of(it, "member") if e["what"] == "dead"]
        assert dead["reason"].startswith("WeightSyncError: w: rollout-9 holds")
        assert of(it, "newcomers") == []
        assert [step for step, _ in it.services.trained] == [1]


async def test_a_push_to_newcomers_is_called_off_when_the_barrier_closes(tmp_path: Path) -> None:
    async with run(tmp_path, **CALM, trainer__total_steps=1) as it:
        await it.enlist_all()
        receive, hung = it.services.rollout.receive, asyncio.Event()

        async def hanging(member: Any, **kwargs: Any) -> Any:
            if member.member_id == "rollout-9" and kwargs["version"] == 0:
                hung.set()
                await asyncio.Event().wait()
            return await receive(member, **kwargs)

        it.services.rollout.receive = hanging  # type: ignore[method-assign]

        async def come() -> None:
            await called(it, "commit rollout-1 0")
            await it.enlist("rollout-9", MemberKind.ROLLOUT, RolloutState.STALE)

        coming = asyncio.create_task(come())
        it.may_answer = hung.is_set
        async with asyncio.timeout(120):
            running = asyncio.create_task(it.go())
            await called(it, "abandon")
            await running
        await coming
        assert "commit rollout-9 1" in it.services.calls


async def test_a_policy_that_nobody_holds_any_more_is_not_waited_for(tmp_path: Path) -> None:
    """In step 3 all servers and the learner are replaced; the learner comes back with step 1."""
    async with run(tmp_path, **CALM, trainer__total_steps=3, barrier__stall_timeout_s=30.0) as it:
        it.services.writes = True
        await it.enlist_all()

        replaced = False

        async def replace() -> None:
            nonlocal replaced
            await called(it, "commit rollout-1 2")
            await collecting(it)
            for member in it.supervisor.rollouts:
                it.services.standings.pop(member.member_id, None)
                await it.supervisor.expel(member, "killed")
            restart_learner(it, 1, "b")
            replaced = True
            for i in range(2):
                await it.enlist(f"rollout-{i}", MemberKind.ROLLOUT, RolloutState.STALE, "b")

        it.may_answer = lambda: answerable(it) and (replaced or it.sequencer.progress.policy.version < 2)
        replacing = asyncio.create_task(replace())
        await it.go()
        await replacing
        assert [event["to_step"] for event in of(it, "rewind")] == [1]
        assert [line["step"] for line in it.lines()] == [0, 1, 2, 3]
        assert it.breaches() == []


async def test_a_learner_that_is_still_loading_is_not_asked_for_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In step 2 the only server and the learner are replaced, and the server is the first to be ready."""
    monkeypatch.setattr(publication, "_PAUSE_S", 0.2)
    patient = {**CALM, "service__recovery_timeout_s": 30.0, "barrier__stall_timeout_s": 30.0}
    async with run(tmp_path, **patient, rollout__replicas=1) as it:
        it.services.writes = True
        await it.enlist("learner", MemberKind.LEARNER, LearnerState.READY)
        await it.enlist("reward-0", MemberKind.REWARD, RewardState.SERVING)
        await it.enlist("rollout-0", MemberKind.ROLLOUT, RolloutState.STALE)
        describe, is_loading, replaced = it.services.learner.describe, False, False

        async def refusing(member: Any) -> Any:
            if is_loading:
                raise ProtocolError("the learner is still loading; wait until its state is ready")
            return await describe(member)

        async def replace() -> None:
            nonlocal is_loading, replaced
            await called(it, "commit rollout-0 1")
            await collecting(it)
            it.services.standings.pop("rollout-0")
            await it.supervisor.expel(it.supervisor.rollouts[0], "killed")
            is_loading = True
            restart_learner(it, 1, "b", LearnerState.LOADING)
            replaced = True
            await it.enlist("rollout-1", MemberKind.ROLLOUT, RolloutState.STALE)
            await asyncio.sleep(1)
            is_loading = False
            _, changes = it.supervisor.fleet.heartbeat(
                "learner", "b", state=LearnerState.READY, policy=None, in_flight=0
            )
            await it.supervisor.apply(changes)

        it.services.learner.describe = refusing  # type: ignore[method-assign]
        it.may_answer = lambda: answerable(it) and (replaced or it.sequencer.progress.policy.version < 1)
        replacing = asyncio.create_task(replace())
        await it.go()
        await replacing
        assert [line["step"] for line in it.lines()] == [0, 1, 2]
        assert it.breaches() == []


async def test_a_server_that_comes_while_validating_gets_the_weights_at_once(tmp_path: Path) -> None:
    """The only server dies while held-out prompts are answered; another one takes its place."""
    async with run(
        tmp_path, rollout__replicas=1, service__recovery_timeout_s=30.0, trainer__total_steps=1
    ) as it:
        await it.enlist("learner", MemberKind.LEARNER, LearnerState.READY)
        await it.enlist("reward-0", MemberKind.REWARD, RewardState.SERVING)
        await it.enlist("rollout-0", MemberKind.ROLLOUT, RolloutState.STALE)

        async def replace() -> None:
            await called(it, "commit rollout-0 0")
            await it.supervisor.expel(it.supervisor.rollouts[0], "killed")
            await it.enlist("rollout-1", MemberKind.ROLLOUT, RolloutState.STALE)

        replacing = asyncio.create_task(replace())
        it.may_answer = lambda: "commit rollout-1 0" in it.services.calls
        await it.go()
        await replacing
        (event,) = of(it, "newcomers")
        assert (event["version"], event["servers"]) == (0, ["rollout-1"])


async def test_a_run_that_is_cancelled_as_a_collection_ends_does_not_go_on(tmp_path: Path) -> None:
    async with run(tmp_path, **CALM) as it:
        await it.enlist_all()
        policy = PolicyTag(version=0, digest="0" * 16)

        async def nothing() -> None:
            pass

        async def collect() -> None:
            await it.sequencer._publication.to_newcomers(policy, nothing())

        num_cancelled = 0
        for turns in range(8):
            task = asyncio.create_task(collect())
            for _ in range(turns):
                await asyncio.sleep(0)
            if task.cancel():
                num_cancelled += 1
                with pytest.raises(asyncio.CancelledError):
                    await task
        assert num_cancelled >= 2
