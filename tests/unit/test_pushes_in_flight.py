"""Runs whose pushes land in mid-answer, against fake services: which tokens are of which version."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from unit.test_bounded_run import ages, bounded

from paceline.controller.verify.check import follow, verify
from paceline.controller.verify.findings import Findings
from paceline.controller.verify.journal.entries import read
from paceline.core.errors import ConfigError
from paceline.core.samples.trajectory import PromptGroup
from support.faulty_fleet import FaultyFleet, Killed
from support.sequencer_run import SequencerRun, config, events_of, run


def in_flight(k: int, steps: int = 6, **changes: Any) -> dict[str, Any]:
    return bounded(k, steps, **{"rollout__in_flight": "keep", **changes})


def mixing(it: SequencerRun) -> None:
    """Groups with an even prompt id wait for new weights until their step has begun."""
    it.services.may_end = lambda group: group.prompt_id % 2 == 1 or it.sequencer.progress.step >= group.step


@pytest.mark.parametrize("k", [1, 2, 4])
async def test_samples_go_on_under_new_weights_and_every_token_is_within_the_bound(
    k: int, tmp_path: Path
) -> None:
    async with run(tmp_path, **in_flight(k, 7, trainer__save_freq=5, trainer__test_freq=3)) as it:
        mixing(it)
        it.services.writes = True
        await it.enlist_all()
        await it.go()
        admitted = [e for e in events_of(it, "trajectory") if e["verdict"] == "admitted"]
        mixed = [e for e in admitted if "ranges" in e]
        assert mixed
        assert {e["verdict"] for e in events_of(it, "trajectory")} == {"admitted"}
        assert [len(order.rows) for order in it.services.orders] == [6] * 7
        # A step is dispatched for the same version as where pushes wait.
        assert ages(it) == [min(step, k) for step in range(5)] + [min(step, k) for step in range(2)]
        lines = it.lines()[1:]
        assert all(line["barrier/staleness/max"] <= k for line in lines)
        assert any(line["barrier/staleness/mean"] < line["barrier/staleness/max"] for line in lines)
        assert it.breaches() == []


async def test_a_push_does_not_wait_for_samples_that_are_begun(tmp_path: Path) -> None:
    async with run(tmp_path, **in_flight(1, 4)) as it:
        it.services.may_end = lambda group: group.step == 1 or it.sequencer.progress.step == 4
        await it.enlist_all()
        await it.go()
        for step in (2, 3):
            own = [e for e in events_of(it, "trajectory") if e["id"].startswith(f"train:{step}:")]
            assert len(own) == 6
            assert {tuple(tuple(part[1:]) for part in e["ranges"]) for e in own} == {((0, 1), (1, 2))}
        phases = [e["to"] for e in events_of(it, "phase") if e["step"] == 2]
        assert phases == ["dispatch", "collect", "learn", "publish", "commit"]
        assert it.breaches() == []


# --- planted faults

Plant = Callable[[dict[str, Any]], None]


def older(event: dict[str, Any]) -> None:
    """By one version more than the bound of 1."""
    version = int(event["id"].split(":")[1]) - 3
    event["ranges"][0][0] = event["policy"] = f"v{version}@" + event["policy"].partition("@")[2]


def overlapping(event: dict[str, Any]) -> None:
    event["ranges"][1][1] = 0


def with_a_hole(event: dict[str, Any]) -> None:
    event["ranges"][0][2], event["ranges"][1][1], event["ranges"][1][2] = 1, 2, 3


def of_another_digest(event: dict[str, Any]) -> None:
    event["ranges"][1][0] = event["ranges"][1][0].partition("@")[0] + "@" + "f" * 16


def of_a_later_version(event: dict[str, Any]) -> None:
    event["ranges"][1][0] = "v6@" + "f" * 16


def backwards(event: dict[str, Any]) -> None:
    event["ranges"][1][0] = event["ranges"][0][0]


def begun_otherwise(event: dict[str, Any]) -> None:
    event["policy"] = event["ranges"][1][0]


def cut_short(event: dict[str, Any]) -> None:
    event["ranges"] = event["ranges"][:1]


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (older, "versions older than the weights"),
        (overlapping, "overlap at token 0"),
        (with_a_hole, "leave a hole at token 1"),
        (of_another_digest, "was committed as"),
        (of_a_later_version, "versions older than the weights"),
        (backwards, "sampled tokens after version"),
        (begun_otherwise, "its ranges begin with"),
    ],
)
async def test_what_is_planted_in_the_ranges_of_a_sample_is_found(
    plant: Plant, words: str, tmp_path: Path
) -> None:
    async with run(tmp_path, **in_flight(1, 5)) as it:
        mixing(it)
        await it.enlist_all()
        await it.go()
        assert it.breaches() == []
        journal = it.folder / "events.jsonl"
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        plant([e for e in lines if "ranges" in e][-1])
        journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert any("I1" in breach and words in breach for breach in it.breaches())


async def test_ranges_in_a_run_whose_pushes_wait_are_found(tmp_path: Path) -> None:
    async with run(tmp_path, **in_flight(1, 4)) as it:
        mixing(it)
        await it.enlist_all()
        await it.go()
        journal = it.folder / "events.jsonl"
        journal.write_text(journal.read_text().replace('"in_flight":"keep"', '"in_flight":"wait"'))
        assert any("was admitted in a step of" in breach for breach in it.breaches())


async def test_the_files_of_a_run_have_the_ranges_and_a_changed_one_is_found(tmp_path: Path) -> None:
    changes = in_flight(1, 4)
    async with run(tmp_path, **changes) as it:
        mixing(it)
        it.services.writes = True
        await it.enlist_all()
        await it.go(scored_by_component)
        it.journal.record("end", ok=True, message="")
        (tmp_path / "config.resolved.yaml").write_text(config(**changes).model_dump_json())
        findings = verify(tmp_path)
        assert [str(breach) for breach in findings.breaches] == []
        assert findings.counts["digests of trajectories recomputed"] == 24
        path = next(p for p in sorted((tmp_path / "trajectories").glob("*.parquet")) if ranges_in(p))
        table = pyarrow.parquet.read_table(path)
        texts = [text and text.replace(", 1, 2]", ", 1, 3]") for text in ranges_in(path)]
        place = table.schema.get_field_index("policy_ranges")
        pyarrow.parquet.write_table(table.set_column(place, "policy_ranges", pyarrow.array(texts)), path)
        breaches = [str(breach) for breach in verify(tmp_path).breaches]
        assert any("was trained or answered" in breach and "1, 3]" in breach for breach in breaches)


def scored_by_component(group: PromptGroup, index: int) -> dict[str, Any]:
    return {"reward": float(index), "reward_error": None, "components": {"exact_match": float(index)}}


def ranges_in(path: Path) -> list[str | None]:
    texts = pyarrow.parquet.read_table(path).column("policy_ranges").to_pylist()
    return texts if any(texts) else []


# --- the configuration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"barrier__max_staleness": 0}, "its samples are of one version"),
        ({"rollout__sampler": "engine"}, "does not record where a version begins"),
        ({"rollout__tools": ["tools.py:add"]}, "only single answers"),
    ],
)
def test_what_does_not_go_with_pushes_in_mid_answer(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**in_flight(1) | changes)
    assert config(**in_flight(1)).pushes_in_flight


async def test_a_controller_that_is_killed_reads_again_what_had_come_of_later_steps(tmp_path: Path) -> None:
    fleet, kills = FaultyFleet(tmp_path, in_flight(2, 6)), [2, 4]
    fleet.services.may_end = lambda group: (
        group.prompt_id % 2 == 1 or group.step <= fleet.services.version + 1
    )

    def kill(it: SequencerRun, event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] in kills:
            kills.remove(event["step"])
            raise Killed

    while not await fleet.live(kill):
        pass
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert kills == []
    assert [e for e in events if e["event"] in ("recollect", "lost", "rewind", "withdrawn")] == []
    assert [len(order.rows) for order in fleet.services.orders] == [6] * 6


@pytest.mark.parametrize("mode", ["keep", "wait"])
async def test_a_sample_that_was_lost_and_drawn_again_may_differ_where_pushes_land_in_mid_answer(
    mode: str, tmp_path: Path
) -> None:
    """Where pushes wait, it is drawn as before, so another one is a breach."""
    changes = in_flight(1, 4) if mode == "keep" else bounded(1, 4)
    fleet, kills = FaultyFleet(tmp_path, changes), [2]
    if mode == "keep":
        fleet.services.may_end = lambda group: group.step <= fleet.services.version + 1

    def kill(it: SequencerRun, event: dict[str, Any]) -> None:
        if event["event"] == "batch" and event["step"] in kills:
            kills.remove(event["step"])
            raise Killed

    while not await fleet.live(kill):
        pass
    path = tmp_path / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    first = next(e for e in events if e.get("id", "").startswith("train:2:"))
    assert [e.get("id") for e in events].count(first["id"]) == 2
    assert breaches(path, changes) == []
    first["digest"] = "0" * len(first["digest"])
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    differs = f"I3: {first['id']} differs from what it was before the controller was restarted"
    assert any(differs in breach for breach in breaches(path, changes)) == (mode == "wait")


def breaches(journal: Path, changes: dict[str, Any]) -> list[str]:
    findings = Findings()
    follow(read(journal, findings), findings, config(**changes))
    return [str(breach) for breach in findings.breaches]
