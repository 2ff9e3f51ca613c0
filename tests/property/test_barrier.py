"""The on-policy barrier under any order of arrival, repeats, strangers and reward errors."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.controller.batch.barrier import Barrier, Verdict
from paceline.core.errors import ProtocolError
from paceline.core.ids import Purpose
from paceline.core.policy import PolicyRange, PolicyTag
from paceline.core.samples.trajectory import FinishReason, ScoredHeader
from support.headers import POLICY, scored


def make_barrier(prompts: Iterable[int], n: int) -> Barrier:
    return Barrier(step=4, policy=POLICY, counts={"train": n}, prompts=prompts)


def feed(barrier: Barrier, headers: list[ScoredHeader]) -> list[Verdict]:
    verdicts = []
    for header in headers:
        verdict = barrier.judge(header)
        barrier.apply(header, verdict)
        verdicts.append(verdict)
    return verdicts


@given(
    st.sets(st.integers(0, 50), min_size=1, max_size=8),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_the_batch_does_not_depend_on_arrival(expected: set[int], n: int, rng: random.Random) -> None:
    wanted = [scored(p, i) for p in expected for i in range(n)]
    repeats = [
        scored(h.trajectory_id.prompt_id, h.trajectory_id.sample_index, server_id="rollout-1")
        for h in wanted
        if rng.random() < 0.3
    ]
    stale = [scored(p, 0, policy=PolicyTag(version=2, digest=POLICY.digest)) for p in expected]
    forged = [scored(p, 0, policy=PolicyTag(version=3, digest="f" * 16)) for p in expected]
    strangers = [
        scored(99),
        scored(min(expected), 7),
        scored(min(expected), step=3),
        scored(min(expected), purpose=Purpose.VALIDATE),
    ]
    arrivals = wanted + repeats + stale + forged + strangers
    rng.shuffle(arrivals)
    barrier = make_barrier(expected, n)
    verdicts = feed(barrier, arrivals)
    assert barrier.closed
    assert [(h.trajectory_id.prompt_id, h.trajectory_id.sample_index) for h in barrier.batch()] == [
        (p, i) for p in sorted(expected) for i in range(n)
    ]
    assert {h.policy for h in barrier.batch()} == {POLICY}
    assert verdicts.count(Verdict.ADMITTED) == len(wanted) == barrier.num_admitted
    assert verdicts.count(Verdict.DUPLICATE) == len(repeats)
    assert verdicts.count(Verdict.WRONG_VERSION) == len(stale)
    assert verdicts.count(Verdict.WRONG_DIGEST) == len(forged)
    assert verdicts.count(Verdict.UNKNOWN) == len(strangers)


@given(st.integers(2, 6), st.integers(1, 4), st.data())
@settings(max_examples=40, deadline=None)
def test_every_group_is_trained_once_or_dropped_with_its_reason(
    num_prompts: int, n: int, data: st.DataObject
) -> None:
    bad = data.draw(st.sets(st.integers(0, num_prompts - 1)))
    headers = [
        scored(p, i, reward_error=("timeout", "slow") if p in bad and i == 0 else None)
        for p in range(num_prompts)
        for i in range(n)
    ]
    order = data.draw(st.permutations(headers))
    barrier = make_barrier(range(num_prompts), n)
    feed(barrier, order)
    assert barrier.closed
    assert [(d.prompt_id, d.reason, d.message) for d in barrier.dropped] == [
        (p, "reward:timeout", "slow") for p in sorted(bad)
    ]
    trained = [h.trajectory_id.prompt_id for h in barrier.batch()]
    assert sorted(trained) == sorted(p for p in range(num_prompts) if p not in bad for _ in range(n))


def test_an_open_barrier_gives_no_batch_and_says_what_is_missing() -> None:
    barrier = make_barrier([1, 5], 2)
    feed(barrier, [scored(1, 0), scored(5, 0), scored(5, 1)])
    assert barrier.missing == [1]
    with pytest.raises(ProtocolError, match="still open for 1 prompt"):
        barrier.batch()


def test_an_aborted_sample_does_not_complete_its_group() -> None:
    barrier = make_barrier([1], 1)
    assert feed(barrier, [scored(1, 0, finish_reason=FinishReason.ABORT)]) == [Verdict.ABORTED]
    assert not barrier.closed
    assert feed(barrier, [scored(1, 0)]) == [Verdict.ADMITTED]
    assert barrier.closed


@given(st.integers(1, 4), st.integers(1, 3), st.data())
@settings(max_examples=80, deadline=None)
def test_a_failed_copy_is_final_only_when_every_other_sample_is_settled(
    num_prompts: int, n: int, data: st.DataObject
) -> None:
    """Copies of the same samples, good, failed and refused, in any order before the last sample's first."""
    keys = [(p, i) for p in range(num_prompts) for i in range(n)]
    kinds = {key: data.draw(st.sampled_from(["good", "failed", "both", "failed twice"])) for key in keys}
    copies = []
    for p, i in keys:
        if kinds[p, i] in ("good", "both"):
            copies.append(scored(p, i))
        if kinds[p, i] != "good":
            copies.append(scored(p, i, reward_error=("timeout", "slow"), server_id="rollout-1"))
        if kinds[p, i] == "failed twice":
            copies.append(scored(p, i, reward_error=("crashed", "gone"), server_id="rollout-2"))
    batches = []
    for _ in range(2):
        barrier = make_barrier([*range(num_prompts), 99], n)
        feed(barrier, data.draw(st.permutations(copies)))
        assert not barrier.closed
        feed(barrier, [scored(99, i) for i in range(n)])
        assert barrier.closed
        batches.append(([h.trajectory_id for h in barrier.batch()], barrier.dropped))
    assert batches[0] == batches[1]
    failed = {p for (p, _), kind in kinds.items() if kind.startswith("failed")}
    assert {d.prompt_id for d in batches[0][1]} == failed
    assert {key.prompt_id for key in batches[0][0]} == {*range(num_prompts), 99} - failed


def test_a_refused_group_is_settled_at_once_and_a_good_copy_before_the_end_wins() -> None:
    barrier = make_barrier([1, 2, 3], 2)
    feed(barrier, [scored(1, 0), scored(3), scored(3, 1)])
    assert barrier.refuse(1, Purpose.TRAIN, reason="rollout:engine", message="out of memory")
    assert barrier.refuse(2, Purpose.TRAIN, reason="rollout:engine", message="out of memory")
    assert not barrier.refuse(3, Purpose.TRAIN, reason="rollout:engine", message="it is complete")
    assert not barrier.refuse(9, Purpose.TRAIN, reason="rollout:engine", message="not asked for")
    assert barrier.closed
    assert feed(barrier, [scored(1, 1)]) == [Verdict.ADMITTED]
    assert [(d.prompt_id, d.reason, d.message) for d in barrier.dropped] == [
        (2, "rollout:engine", "out of memory")
    ]
    assert [h.trajectory_id.prompt_id for h in barrier.batch()] == [1, 1, 3, 3]


@pytest.mark.parametrize(
    ("versions", "verdict"),
    [
        ((3, 5), Verdict.ADMITTED),
        ((4,), Verdict.ADMITTED),
        ((2, 3), Verdict.WRONG_VERSION),
        ((3, 6), Verdict.WRONG_VERSION),
        ((3, -5), Verdict.WRONG_DIGEST),
        ((-4, 5), Verdict.WRONG_DIGEST),
    ],
)
def test_in_mid_answer_every_range_is_of_a_committed_version_within_the_bound(
    versions: tuple[int, ...], verdict: Verdict
) -> None:
    """Step 6 trains version 5, and was dispatched for version 3; a negative version has another digest."""
    commits = {v: f"{v:016x}" for v in range(7)}
    tags = [PolicyTag(version=abs(v), digest=commits[v] if v > 0 else "f" * 16) for v in versions]
    ranges = tuple(PolicyRange(tag, i, i + 1) for i, tag in enumerate(tags))
    header = replace(scored(1, step=6, policy=tags[0]), ranges=ranges if len(tags) > 1 else ())
    due = PolicyTag(version=3, digest=commits[3])
    mixing = Barrier(step=6, policy=due, counts={"train": 1}, prompts=[1], max_staleness=2, commits=commits)
    assert mixing.judge(header) is verdict
    waiting = Barrier(step=6, policy=due, counts={"train": 1}, prompts=[1], max_staleness=2)
    assert waiting.judge(header) in (Verdict.WRONG_VERSION, Verdict.WRONG_DIGEST)
