"""Runs with a bound on staleness, against fake services: later steps are sampled beside the learner."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.broker import names
from paceline.config.run import RunConfig
from paceline.controller.batch.barrier import Barrier
from paceline.controller.run.lookahead import steps_ahead
from paceline.core.errors import ConfigError, ProtocolError
from paceline.core.guard import Reading
from paceline.core.members import MemberKind
from paceline.core.policy import PolicyTag
from support.sequencer_run import RUN, SequencerRun, config, events_of, run

TIS = {"method": "tis"}


def bounded(k: int, steps: int = 5, **changes: Any) -> dict[str, Any]:
    return {
        "barrier__mode": "bounded",
        "barrier__max_staleness": k,
        "trainer__total_steps": steps,
        "trainer__save_freq": 0,
        "trainer__val_before_train": False,
        "trainer__test_freq": 0,
        **changes,
    }


def ages(it: SequencerRun) -> list[int]:
    """How old the rows of each step are, in versions."""
    return [order.step - 1 - order.policy.version for order in it.services.orders]


def train_slowly(it: SequencerRun, last: int) -> None:
    """Lets the learner end a step when the samples of the next one are all there."""
    train = it.services.learner.train

    async def slow_train(member: Any, order: Any) -> Any:
        assert None not in await it.broker.get_blobs([row.blob_key for row in order.rows])
        for _ in range(2000):
            admitted = [e for e in events_of(it, "trajectory") if e.get("ahead") == order.step + 1]
            if len(admitted) == 6 or order.step >= last:
                return await train(member, order)
            await asyncio.sleep(0.005)
        raise AssertionError(f"too little of step {order.step + 1} came while step {order.step} was trained")

    it.services.learner.train = slow_train  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("k", "save_freq", "expected"),
    [
        (1, 0, [0, 1, 1, 1, 1, 1]),
        (2, 0, [0, 1, 2, 2, 2, 2]),
        (9, 0, [0, 1, 2, 3, 4, 5]),
        (1, 3, [0, 1, 1, 0, 1, 1]),
        (4, 2, [0, 1, 0, 1, 0, 1]),
    ],
)
async def test_how_old_samples_are_follows_from_the_step(
    k: int, save_freq: int, expected: list[int], tmp_path: Path
) -> None:
    async with run(tmp_path, **bounded(k, 6, trainer__save_freq=save_freq)) as it:
        await it.enlist_all()
        await it.go()
        assert ages(it) == expected
        assert [line.get("barrier/staleness/max", 0) for line in it.lines()][1:] == expected
        assert [line["barrier/rejected"] for line in it.lines()[1:]] == [0.0] * 6
        assert it.breaches() == []


def test_the_ages_of_all_small_schedules_are_within_their_bounds() -> None:
    for k, save_freq, steps in ((k, f, n) for k in range(5) for f in (0, 2, 3, 4, 7) for n in range(1, 12)):
        cfg = config(**bounded(k, steps, trainer__save_freq=save_freq))
        sampled_from: dict[int, int] = {}
        for step in range(1, steps + 1):
            for due in (step, *steps_ahead(cfg, step)):
                sampled_from.setdefault(due, step - 1)
        assert sampled_from.keys() == set(range(1, steps + 1))
        for step, version in sampled_from.items():
            assert 0 <= step - 1 - version <= k
            saved = [s for s in range(1, step) if cfg.trainer.saves_after(s)]
            assert version >= max(saved, default=0), "sampled ahead of a checkpoint"


async def test_a_bound_of_none_is_strict_to_the_bit(tmp_path: Path) -> None:
    seen = []
    for name, mode in (("strict", {"barrier__mode": "strict"}), ("bounded", {})):
        (tmp_path / name).mkdir()
        changes = bounded(0, 3, trainer__save_freq=2, trainer__test_freq=2) | mode
        changes["barrier__max_staleness"] = 0 if name == "bounded" else None
        async with run(tmp_path / name, **changes) as it:
            await it.enlist_all()
            await it.go()
            timed = ("n", "time", "metrics", "log_position", "folder", "guard")
            journal = [{k: v for k, v in e.items() if k not in timed} for e in it.events()]
            # Files of trajectories are written beside the push, and checkpoints beside the next step.
            beside = {"saved", "checkpoint", "checkpoint_removed"}
            files = {kind: [e for e in journal if e["event"] == kind] for kind in beside}
            others = [e for e in journal if e["event"] not in beside]
            assert others
            assert files["saved"]
            assert files["checkpoint"]
            seen.append((it.services.trained, it.services.calls, files, others))
    assert seen[0] == seen[1]


async def test_the_learner_trains_while_later_steps_are_sampled(tmp_path: Path) -> None:
    async with run(tmp_path, **bounded(1, 4)) as it:
        train_slowly(it, last=4)
        await it.enlist_all()
        await it.go()
        assert it.breaches() == []
        # What was sampled ahead is not waited for: the phase goes from LEARN to PUBLISH.
        phases = [e["to"] for e in events_of(it, "phase") if e["step"] == 3]
        assert phases == ["dispatch", "collect", "learn", "publish", "commit"]
        # Nothing is left of steps that are finished.
        keys = [e["id"] for e in events_of(it, "trajectory") if e["id"].startswith("train:2:")]
        assert await it.broker.get_blobs([names.blob(RUN, key, "fake", "0") for key in keys]) == [None] * 6


async def test_the_weights_wait_for_samples_that_are_begun(tmp_path: Path) -> None:
    async with run(tmp_path, **bounded(1, 3)) as it:
        it.may_answer = lambda: it.sequencer.progress.phase.value == "collect"
        await it.enlist_all()
        await it.go()
        phases = [e["to"] for e in events_of(it, "phase") if e["step"] == 1]
        assert phases == ["dispatch", "collect", "learn", "collect", "publish", "commit"]
        assert it.breaches() == []


def restart(it: SequencerRun, name: str) -> None:
    """A server ends and comes back without weights."""
    (member,) = [m for m in it.supervisor.fleet.members(MemberKind.ROLLOUT) if m.member_id == name]
    it.services.standings.pop(name, None)
    standing = it.services.standing(name)
    it.services.standings[name] = standing
    member.state, member.policy, member.incarnation = standing.state, standing.policy, "b"


async def test_a_step_whose_servers_all_end_is_sampled_anew_from_the_next_version(tmp_path: Path) -> None:
    async with run(tmp_path, **bounded(1, 4)) as it:
        train = it.services.learner.train

        async def train_and_lose(member: Any, order: Any) -> Any:
            if order.step == 2:
                for name in ("rollout-0", "rollout-1"):
                    restart(it, name)
            return await train(member, order)

        # Step 3 is sampled while step 2 trains: no answer may come before the servers end.
        it.may_answer = lambda: it.sequencer.progress.step != 2
        it.services.learner.train = train_and_lose  # type: ignore[method-assign]
        await it.enlist_all()
        await it.go()
        assert ages(it) == [0, 1, 0, 1]
        (withdrawn,) = events_of(it, "withdrawn")
        assert withdrawn["step"] == 3
        assert it.breaches() == []
        assert [len(batch) for batch in it.services.batches] == [6] * 4


async def test_what_a_broken_broker_lost_is_sampled_anew(tmp_path: Path) -> None:
    async with run(tmp_path, **bounded(2, 5)) as it:
        publish = it.services.learner.publish

        async def publish_and_lose(member: Any, **kwargs: Any) -> Any:
            if kwargs["version"] == 2:
                await it.broker.purge(names.prefix(RUN))
            return await publish(member, **kwargs)

        it.services.learner.publish = publish_and_lose  # type: ignore[method-assign]
        await it.enlist_all()
        await it.go()
        assert ages(it) == [0, 1, 0, 1, 2]
        assert [step for step, _ in it.services.trained] == [1, 2, 3, 4, 5]
        assert it.breaches() == []


async def test_what_was_sampled_from_weights_that_are_rolled_back_is_not_trained(tmp_path: Path) -> None:
    changes = bounded(1, 5, guard__ppo_kl={"rollback": 0.1, "skip": None}, trainer__save_freq=3)
    async with run(tmp_path, **changes) as it:
        it.services.writes = True
        it.services.readings = {2: [Reading(rule="ppo_kl", network="actor", value=0.3)]}
        train_slowly(it, last=3)
        await it.enlist_all()
        await it.go()
        assert ages(it) == [0, 1, 0, 0, 1]
        assert [e["step"] for e in events_of(it, "withdrawn")] == [3]
        assert it.breaches() == []


async def test_a_run_that_is_stopped_withdraws_what_it_has_sampled_ahead(tmp_path: Path) -> None:
    async with run(tmp_path, **bounded(1, 5)) as it:
        publish = it.services.learner.publish

        async def publish_and_stop(member: Any, **kwargs: Any) -> Any:
            if kwargs["version"] == 2:
                it.sequencer.progress.stop_reason = "asked"
            return await publish(member, **kwargs)

        it.services.writes = True
        it.services.learner.publish = publish_and_stop  # type: ignore[method-assign]
        await it.enlist_all()
        await it.go()
        assert [e["step"] for e in events_of(it, "withdrawn")] == [3]
        assert it.journal.standing.dispatched(3) is None
        it.journal.record("end", ok=True, message="")
        assert it.breaches() == []


async def test_engine_and_learner_are_compared_only_where_they_have_the_same_weights(tmp_path: Path) -> None:
    async with run(tmp_path, **bounded(1, 4, guard__mismatch_kl={"warn": 1.0})) as it:
        train = it.services.learner.train

        async def train_apart(member: Any, order: Any) -> Any:
            result = await train(member, order)
            result.metrics["rollout/mismatch_kl"] = 5e-6
            return result

        it.services.learner.train = train_apart  # type: ignore[method-assign]
        await it.enlist_all()
        await it.go()
        fired = [e["step"] for e in events_of(it, "guard") if e["rule"] == "mismatch_kl"]
        assert fired == [1]


class _EnoughError(Exception):
    """Ends a run at an instant."""


async def test_a_batch_whose_trajectories_the_broker_has_lost_is_not_trained(tmp_path: Path) -> None:
    """As in a validation, in which nothing else forgets what was collected ahead."""
    async with run(tmp_path, **bounded(1, 4)) as it:
        ahead, publish = it.sequencer._lookahead, it.services.learner.publish

        async def publish_and_lose(member: Any, **kwargs: Any) -> Any:
            if kwargs["version"] < 2:
                return await publish(member, **kwargs)
            assert ahead.batch(3) is not None
            it.journal.record("lost", step=2, reason="planted")
            assert ahead.batch(3) is None
            raise _EnoughError

        it.services.learner.publish = publish_and_lose  # type: ignore[method-assign]
        await it.enlist_all()
        with pytest.raises(_EnoughError):
            await it.go()


# --- planted faults


async def test_a_token_beyond_the_bound_is_found(tmp_path: Path) -> None:
    """A run with a bound of 2 whose journal says 1."""
    async with run(tmp_path, **bounded(2, 4)) as it:
        await it.enlist_all()
        await it.go()
        assert it.breaches() == []
        journal = it.folder / "events.jsonl"
        journal.write_text(journal.read_text().replace('"max_staleness":2', '"max_staleness":1'))
        breaches = it.breaches()
    beyond = [breach for breach in breaches if "barrier.max_staleness is 1" in breach]
    assert len(beyond) == 2
    assert "I1" in beyond[0]
    assert "step 3 trained tokens of v0@" in beyond[0]


async def test_a_step_that_is_withdrawn_and_was_not_dispatched_is_found(tmp_path: Path) -> None:
    async with run(tmp_path, **bounded(1, 3)) as it:
        await it.enlist_all()
        await it.go()
        it.journal.record("withdrawn", step=5, reason="planted")
        (breach,) = it.breaches()
    assert "I2" in breach
    assert "step 5 was withdrawn, but was not dispatched ahead" in breach


async def test_a_sample_of_another_version_than_its_step_is_found(tmp_path: Path) -> None:
    """Within the bound, too, a step has one version."""
    async with run(tmp_path, **bounded(1, 3)) as it:
        await it.enlist_all()
        await it.go()
        journal = it.folder / "events.jsonl"
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        first = next(e for e in lines if e["event"] == "trajectory" and e.get("ahead") == 3)
        first["policy"] = next(e for e in lines if e["event"] == "commit" and e["version"] == 2)["digest"]
        journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert any("I1" in breach and "was admitted in a step of" in breach for breach in it.breaches())


# --- the configuration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"barrier__max_staleness": None}, "needs max_staleness"),
        ({"barrier__mode": "strict"}, "is for mode=bounded"),
        ({"algorithm__rollout_correction": {"method": "none"}}, "nothing corrects for that"),
        ({"trainer__save_freq": 1}, "trainer.save_freq=1"),
        ({"trainer__dataflow": "flow.py:flow"}, "trainer.dataflow"),
        ({"data__image_key": "images"}, "data.image_key"),
        ({"rollout__sleep": "always"}, "turns"),
        ({"barrier__work_ahead": "scores"}, "barrier.work_ahead"),
        ({"algorithm__dynamic_sampling": {"enable": True}}, "dynamic_sampling"),
    ],
)
def test_what_does_not_go_with_a_bound(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**bounded(1) | changes)
    assert isinstance(config(**bounded(1)), RunConfig)


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        (bounded(1), "sequence_mask"),
        (bounded(0), "none"),
        (bounded(0, algorithm__replay={"prompts_per_step": 2}), "sequence_mask"),
        (bounded(1, algorithm__rollout_correction=TIS), "tis"),
        ({}, "none"),
        ({"algorithm__rollout_correction": TIS}, "tis"),
    ],
)
def test_samples_of_older_weights_are_corrected_without_a_word_in_the_file(
    changes: dict[str, Any], method: str
) -> None:
    it = config(**changes)
    assert it.rollout_correction.method == method
    assert it.needs_all_old_log_probs == (method != "none")


def test_the_barrier_refuses_a_step_that_is_too_old() -> None:
    policy = PolicyTag(version=1, digest="0" * 16)
    assert Barrier(step=4, policy=policy, counts={"train": 1}, prompts=[1], max_staleness=2).missing == [1]
    with pytest.raises(ProtocolError, match="2 versions behind"):
        Barrier(step=4, policy=policy, counts={"train": 1}, prompts=[1], max_staleness=1)
