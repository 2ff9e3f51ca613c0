"""Validations on servers of their own: training goes on, and each value is that of exactly one version."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from paceline.controller.phases import Phase
from paceline.controller.standing import Standing
from paceline.core.errors import ConfigError, GuardError
from paceline.core.ids import Purpose
from paceline.core.members import MemberKind, RolloutState
from paceline.core.samples.trajectory import PromptGroup
from support.beside import BESIDE, SETS, by_version
from support.sequencer_run import SequencerRun, config, events_of, run


def val_lines(it: SequencerRun) -> dict[int, dict[str, Any]]:
    """The values of validations by step, whichever line they are in; without times."""
    by_step: dict[int, dict[str, Any]] = {}
    for line in it.lines():
        values = {name: value for name, value in line.items() if name.startswith("val/")}
        if values:
            assert line["step"] not in by_step
            by_step[line["step"]] = values
    return by_step


def order_of(it: SequencerRun) -> list[str]:
    """The steps' and validations' beginnings and ends, as the journal has them."""
    words = {"dispatch": "step", "validate": "validate", "validated": "validated", "step": "finished"}
    return [f"{words[e['event']]} {e['step']}" for e in it.events() if e["event"] in words]


async def test_the_values_are_those_of_a_run_without_validation_servers(tmp_path: Path) -> None:
    values, trained = [], []
    for name, changes in (("alone", SETS), ("beside", BESIDE)):
        (tmp_path / name).mkdir()
        async with run(tmp_path / name, **changes) as it:
            await it.enlist_all()
            await it.go(by_version)
            assert it.breaches() == []
            values.append(val_lines(it))
            trained.append(it.services.trained)
            if name == "beside":
                assert [e["step"] for e in events_of(it, "validated")] == [0, 2, 4, 6]
    assert values[0] == values[1]
    assert sorted(values[0]) == [0, 2, 4, 6]
    assert values[0][4]["val/reward/mean"] == pytest.approx(4.005)
    assert trained[0] == trained[1]
    for step in (0, 2, 4, 6):
        files = [
            pyarrow.parquet.read_table(
                tmp_path / name / "trajectories" / f"val_{step:06d}.parquet"
            ).drop_columns(["server"])
            for name in ("alone", "beside")
        ]
        assert files[0].equals(files[1])


async def test_steps_are_trained_while_a_validation_is_under_way(tmp_path: Path) -> None:
    async with run(tmp_path, **BESIDE) as it:

        def may_validate(version: int) -> bool:
            return it.journal.standing.finished >= min(5, version + 1)

        it.may_validate = may_validate
        await it.enlist_all()
        await it.go(by_version)
        order = order_of(it)
        assert it.breaches() == []
        assert order == [
            *("validate 0", "finished 0", "step 1", "finished 1", "step 2"),
            *("validate 2", "validated 0", "finished 2", "step 3", "finished 3", "step 4"),
            *("validate 4", "validated 2", "finished 4", "step 5", "finished 5", "step 6"),
            *("validate 6", "validated 4", "validated 6", "finished 6"),
        ]
        received = [call for call in it.services.calls if call.startswith("receive rollout-2")]
        assert [call.split()[2] for call in received] == ["v0", "v2", "v4", "v6"]
        answers = [e for e in events_of(it, "trajectory") if "beside" in e]
        servers = {step: {e["server"] for e in answers if e["beside"] == step} for step in (0, 2, 4, 6)}
        # The last is answered by all, as nothing is trained meanwhile.
        assert servers == {0: {"rollout-2"}, 2: {"rollout-2"}, 4: {"rollout-2"}, 6: {"rollout-2", "fake"}}
        lines = [(line["step"], "val/reward/mean" in line) for line in it.lines()]
        assert lines[:6] == [(0, False), (1, False), (2, False), (0, True), (3, False), (4, False)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.002)


async def go_with(it: SequencerRun, script: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs to the end while something happens."""
    await it.enlist_all()
    happening = asyncio.create_task(script())
    try:
        await it.go(by_version)
    finally:
        happening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await happening


async def test_servers_that_train_answer_for_a_validation_server_that_died(tmp_path: Path) -> None:
    """It dies while step 3 is collected; the others have the weights of step 2 until they get those of 3."""
    async with run(tmp_path, **BESIDE) as it:
        it.may_validate = lambda version: version != 2
        it.may_answer = lambda: it.journal.standing.finished != 2 or "rollout-2" not in it.services.policies

        async def script() -> None:
            await until(lambda: it.journal.standing.finished == 2)
            await it.lose("rollout-2")

        await go_with(it, script)
        assert it.breaches() == []
        values = val_lines(it)
        assert {step: of["val/reward/mean"] for step, of in values.items()} == pytest.approx(
            {0: 0.005, 2: 2.005, 4: 4.005, 6: 6.005}
        )
        phases = [(e["step"], e["source"]) for e in events_of(it, "phase") if e["to"] == "validate"]
        assert phases == [(3, "learn"), (4, "commit"), (5, "learn"), (6, "commit")] or phases[0] == (
            3,
            "learn",
        )
        assert any("no validation server has v2@" in notice for notice in it.notices)
        assert events_of(it, "validation_skipped") == []


async def test_a_validation_whose_version_nobody_has_is_left_out_and_a_new_server_does_the_next(
    tmp_path: Path,
) -> None:
    """It dies when the others have the weights of step 3 already."""
    async with run(tmp_path, **BESIDE) as it:
        # Each validation lasts until the next step has ended, whose weights its server does not get.
        it.may_validate = lambda version: version != 2 and it.journal.standing.finished >= min(5, version + 1)

        async def script() -> None:
            await until(lambda: it.journal.standing.finished == 3)
            await it.lose("rollout-2")
            await it.enlist("rollout-2", MemberKind.ROLLOUT, RolloutState.STALE, incarnation="b")

        await go_with(it, script)
        assert it.breaches() == []
        assert sorted(val_lines(it)) == [0, 4, 6]
        (skipped,) = events_of(it, "validation_skipped")
        assert skipped["step"] == 2
        assert "no server has v2@" in skipped["reason"]
        assert any(notice.startswith("the validation of step 2 is left out") for notice in it.notices)
        received = [call for call in it.services.calls if call.startswith("receive rollout-2")]
        assert [call.split()[2] for call in received] == ["v0", "v2", "v4", "v6"]


async def test_a_validation_server_that_is_started_again_goes_on(tmp_path: Path) -> None:
    """It comes back while step 3 is collected, and gets the same weights again."""
    async with run(tmp_path, **BESIDE) as it:
        is_back = False
        it.may_validate = lambda version: version != 2 or is_back
        it.may_answer = lambda: it.journal.standing.finished != 2 or is_back

        async def script() -> None:
            nonlocal is_back
            await until(lambda: it.journal.standing.finished == 2)
            await it.lose("rollout-2")
            await it.enlist("rollout-2", MemberKind.ROLLOUT, RolloutState.STALE, incarnation="b")
            await until(lambda: "rollout-2" in it.services.policies)
            assert it.services.policies["rollout-2"].version == 2
            is_back = True

        await go_with(it, script)
        assert it.breaches() == []
        assert sorted(val_lines(it)) == [0, 2, 4, 6]
        assert not any("no validation server" in notice for notice in it.notices)
        assert [e["servers"] for e in events_of(it, "newcomers")] == [["rollout-2"]]


async def test_a_checkpoint_waits_for_the_validation_of_an_earlier_step_only(tmp_path: Path) -> None:
    async with run(tmp_path, **{**BESIDE, "trainer__save_freq": 2, "trainer__test_freq": 3}) as it:
        it.may_validate = lambda version: version != 3 or it.progress.phase is Phase.VALIDATE
        await it.enlist_all()
        await it.go(by_version)
        assert it.breaches() == []
        phases = [(e["step"], e["source"]) for e in events_of(it, "phase") if e["to"] == "validate"]
        assert phases == [(4, "commit"), (6, "commit")]
        order = order_of(it)
        assert order.index("validated 3") == order.index("finished 4") - 1


async def test_the_broker_may_lose_everything(tmp_path: Path) -> None:
    async with run(tmp_path, **BESIDE) as it:
        is_lost = False
        it.may_validate = lambda version: version != 2 or is_lost

        async def script() -> None:
            nonlocal is_lost
            await until(lambda: it.journal.standing.finished == 2)
            await it.broker.purge("paceline:")
            is_lost = True

        await go_with(it, script)
        assert it.breaches() == []
        assert sorted(val_lines(it)) == [0, 2, 4, 6]


async def test_a_fall_that_is_seen_late_ends_the_run_under_the_step_that_fell(tmp_path: Path) -> None:
    changes = {**BESIDE, "guard__val_fall": {"stop": 0.5}}

    def falling(group: PromptGroup, index: int) -> dict[str, Any]:
        answered = by_version(group, index)
        is_fallen = group.purpose == Purpose.VALIDATE and group.step == 2
        reward = -5.0 if is_fallen else answered["reward"]
        return {**answered, "reward": reward, "components": {"exact_match": reward}}

    async with run(tmp_path, **changes) as it:
        it.may_validate = lambda version: version != 2 or it.journal.standing.finished >= 3
        await it.enlist_all()
        with pytest.raises(GuardError, match="step 2: the guard ends the run: .*val_fall"):
            await it.go(falling)
        assert it.journal.standing.finished in (3, 4)
        assert {(e["step"], e["rule"]) for e in events_of(it, "guard")} == {(2, "val_fall")}
        assert 2 in val_lines(it)


async def test_a_rollback_for_a_late_fall_takes_weights_from_before_it(tmp_path: Path) -> None:
    changes = {**BESIDE, "trainer__save_freq": 1, "guard__val_fall": {"rollback": 0.5}}

    def falling(group: PromptGroup, index: int) -> dict[str, Any]:
        answered = by_version(group, index)
        is_fallen = group.purpose == Purpose.VALIDATE and group.step == 2
        reward = -5.0 if is_fallen else answered["reward"]
        return {**answered, "reward": reward, "components": {"exact_match": reward}}

    async with run(tmp_path, **changes) as it:
        it.services.writes = True
        it.may_validate = lambda version: version != 2 or it.progress.phase is Phase.VALIDATE
        await it.enlist_all()
        await it.go(falling)
        (rollback,) = events_of(it, "rollback")
        # Step 2 was saved before its validation was judged, in step 3.
        assert (rollback["step"], rollback["to_step"]) == (4, 1)
        assert it.breaches() == []


@pytest.mark.parametrize(("to_step", "again"), [(1, []), (2, [2]), (3, [])])
def test_a_rewind_makes_only_the_validation_of_its_target_again(to_step: int, again: list[int]) -> None:
    """The result of step 2 came in with step 3: the state after step 2 does not know it."""

    def finished(step: int) -> dict[str, Any]:
        return {"event": "step", "step": step, "log_position": "0-0", "cursor": {}, "guard": {}}

    commits = [{"event": "commit", "version": version, "digest": f"{version:016x}"} for version in range(4)]
    asked = {"event": "validate", "step": 2, "policy": f"v2@{2:016x}", "beside": True}
    standing = Standing()
    for event in (*commits, finished(1), asked, finished(2)):
        standing.note(event)
    assert standing.validations == {2: asked["policy"]}
    for event in ({"event": "validated", "step": 2}, finished(3)):
        standing.note(event)
    assert standing.validations == {}
    standing.note({"event": "rewind", "to_step": to_step, "cursor": {}, "guard": {}})
    assert standing.validations == dict.fromkeys(again, asked["policy"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout__replicas": 1}, "validation_servers=1 of replicas=1 leave no server"),
        ({"placement": "colocated"}, "does not go with turns"),
        ({"data__image_key": "image"}, "does not go with data.image_key"),
        ({"data__val_sets": {}, "data__val_files": []}, "a run without held-out prompts"),
    ],
)
def test_what_does_not_go_with_validation_servers(changes: dict[str, Any], message: str) -> None:
    changes = {"rollout__replicas": 2, "rollout__validation_servers": 1, **changes}
    placement = {"placement": changes.pop("placement")} if "placement" in changes else {}
    with pytest.raises(ConfigError, match=message):
        if placement:
            config(**changes, rollout__sleep="always")
        else:
            config(**changes)
