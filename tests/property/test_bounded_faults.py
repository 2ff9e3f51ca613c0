"""Random faults in runs with a bound on staleness; `benchmarks/bounded_faults.py` injects any number.

What `paceline verify` finds in the record of a run that faults have struck is as good as in one without: each
violation that is planted into such a record is found.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.controller.batch.barrier import Barrier, Verdict
from paceline.controller.verify.check import verify
from support import bounded_faults
from support.bounded_faults import Faults, faulty_run

NUM_SEEDS = 3
Events = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with bounded_faults.quick():
        yield


@pytest.mark.parametrize("in_flight", ["wait", "keep"])
@pytest.mark.parametrize("k", [1, 4])
async def test_random_faults_leave_every_step_whole_and_within_its_bound(
    k: int, in_flight: str, tmp_path: Path
) -> None:
    struck = Counter[str]()
    for seed in range(NUM_SEEDS):
        struck += await faulty_run(k, in_flight, seed, tmp_path / f"{seed}")
    assert (struck.pop("mixed", 0) > 0) == (in_flight == "keep")
    assert struck.pop("again", 0) == 0
    assert struck


@pytest.mark.parametrize(("k", "in_flight", "seed"), [(1, "wait", 3), (1, "keep", 3), (4, "wait", 109)])
async def test_under_random_faults_samples_are_trained_again_by_permission(
    k: int, in_flight: str, seed: int, tmp_path: Path
) -> None:
    """In the last run the broker loses tokens before they are saved, which are not trained again."""
    struck = await faulty_run(k, in_flight, seed, tmp_path / "run", replays=True)
    assert struck["again"] > 0
    journal = (tmp_path / "run" / "events.jsonl").read_text()
    assert ('"without_tokens"' in journal) == (seed == 109)


async def test_a_barrier_that_lets_old_tokens_pass_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples from beyond the bound come, and this barrier admits them."""
    judge = Barrier.judge

    def judge_too_mildly(barrier: Barrier, header: Any) -> Verdict:
        is_old = judge(barrier, header) is Verdict.WRONG_VERSION
        return (
            Verdict.ADMITTED
            if is_old and header.trajectory_id.step == barrier.step
            else judge(barrier, header)
        )

    monkeypatch.setattr(Barrier, "judge", judge_too_mildly)
    monkeypatch.setattr(bounded_faults, "STRIKES", (Faults.beyond_the_bound,))
    monkeypatch.setattr(bounded_faults, "MOST_SECONDS", 20.0)
    with pytest.raises(AssertionError, match="beyond_the_bound"):
        await faulty_run(1, "wait", 0, tmp_path / "run")


# --- what is planted in the record of such a run


def _last_admitted(events: Events) -> dict[str, Any]:
    """The last sample that was admitted for training."""
    admitted = [e for e in events if e["event"] == "trajectory" and e["verdict"] == "admitted"]
    return [event for event in admitted if event["id"].startswith("train:")][-1]


def older_tokens(events: Events) -> None:
    last = _last_admitted(events)
    last["policy"] = "v0@" + last["policy"].partition("@")[2]


def a_lost_prompt(events: Events) -> None:
    events.remove(_last_admitted(events))


def another_digest(events: Events) -> None:
    _last_admitted(events)["digest"] = "0" * 32


def a_step_that_is_trained_again(events: Events) -> None:
    place = max(place for place, e in enumerate(events) if e["event"] == "trained")
    events.insert(place + 1, {**events[place], "digest": "0" * 32})


def a_step_without_training(events: Events) -> None:
    events.remove([e for e in events if e["event"] == "trained"][-1])


def a_step_that_is_not_finished(events: Events) -> None:
    events.remove([e for e in events if e["event"] == "step"][-1])


PLANTED: tuple[Callable[[Events], None], ...] = (
    older_tokens,
    a_lost_prompt,
    another_digest,
    a_step_that_is_trained_again,
    a_step_without_training,
    a_step_that_is_not_finished,
)


@pytest.mark.parametrize("in_flight", ["wait", "keep"])
async def test_what_is_planted_into_the_record_of_a_run_with_faults_is_found(
    in_flight: str, tmp_path: Path
) -> None:
    await faulty_run(1, in_flight, 7, tmp_path / "run")
    journal = tmp_path / "run" / "events.jsonl"
    text = journal.read_text()
    for plant in PLANTED:
        events = [json.loads(line) for line in text.splitlines()]
        plant(events)
        journal.write_text("".join(json.dumps(event) + "\n" for event in events))
        assert verify(tmp_path / "run").breaches, plant.__name__
