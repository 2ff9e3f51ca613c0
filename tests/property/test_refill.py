"""Dynamic sampling against a plain model, which asks for one prompt after the other."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.controller.batch.barrier import Barrier
from paceline.controller.batch.refill import Refill
from paceline.core.errors import ConfigError
from paceline.core.ids import Purpose
from paceline.core.samples.trajectory import ScoredHeader
from paceline.data.mixture import PromptMixture
from paceline.data.prompts import Prompt
from support.headers import POLICY, scored


@dataclass(frozen=True)
class World:
    """What the samples of each prompt score, None where scoring fails, and the step's sizes."""

    scores: Mapping[int, tuple[float | None, ...]]
    num_first: int
    max_extra: int
    skip: int
    with_greedy: bool

    def cursor(self) -> PromptMixture:
        """Where the step begins: `skip` prompts into the walk."""
        cursor = PromptMixture({"": list(self.scores)}, batch_size=self.num_first, seed=1)
        cursor.take_more(self.skip, without=())
        return cursor

    def headers(self, prompt_id: int, server: str = "rollout-0") -> list[ScoredHeader]:
        """All that comes back of a prompt; the last score is the greedy answer's, where there is one."""
        made = []
        for index, score in enumerate(self.scores[prompt_id]):
            greedy = self.with_greedy and index == len(self.scores[prompt_id]) - 1
            made.append(
                scored(
                    prompt_id,
                    0 if greedy else index,
                    purpose=Purpose.GREEDY if greedy else Purpose.TRAIN,
                    reward=score,
                    reward_error=("raised", "boom") if score is None else None,
                    server_id=server,
                )
            )
        return made

    @property
    def num_samples(self) -> int:
        return len(next(iter(self.scores.values()))) - self.with_greedy


@st.composite
def worlds(draw: st.DrawFn) -> World:
    num_first, size = draw(st.integers(1, 5)), draw(st.integers(2, 4))
    num_prompts = draw(st.integers(num_first, 25))
    # Mostly groups that teach nothing, or there is little to refill.
    equal = st.sampled_from([0.0, 1.0]).map(lambda score: (score,) * size)
    any_scores = st.tuples(*[st.sampled_from([0.0, 0.5, 1.0]) for _ in range(size)])
    failing = any_scores.map(lambda scores: (*scores[:-1], None))
    groups = draw(st.lists(equal | equal | any_scores | failing, min_size=num_prompts, max_size=num_prompts))
    return World(
        scores={3 * i + 1: group for i, group in enumerate(groups)},
        num_first=num_first,
        max_extra=draw(st.integers(0, 30)),
        skip=draw(st.integers(0, num_prompts)),
        with_greedy=draw(st.booleans()),
    )


def plain(world: World) -> tuple[list[int], list[int], list[int]]:
    """Ids to train, set aside and dropped, each ascending, by asking for one prompt after the other."""
    cursor = world.cursor()
    asked = cursor.take(1)
    fates: dict[str, list[int]] = {"train": [], "aside": [], "drop": []}
    for prompt_id in asked:  # grows while it is walked
        scores = world.scores[prompt_id]
        fate = "drop" if None in scores else "aside" if len(set(scores)) == 1 else "train"
        fates[fate].append(prompt_id)
        if fate == "aside" and len(asked) < world.num_first + world.max_extra:
            asked += cursor.take_more(1, without=asked)
    return sorted(fates["train"]), sorted(fates["aside"]), sorted(fates["drop"])


# Of the order of arrival: to draw each of its numbers would take ten times as long as the step.
seeds = st.integers(0, 2**32 - 1)


def concurrent(world: World, seed: int) -> tuple[Barrier, Refill, PromptMixture]:
    """The step as the controller runs it: all at once, in any order, in portions, with repeats."""
    rng, cursor = random.Random(seed), world.cursor()
    first = sorted(cursor.take(1))

    def draw(count: int, without: Collection[int]) -> dict[int, Prompt]:
        return dict.fromkeys(cursor.take_more(count, without=without), cast(Prompt, None))

    barrier = Barrier(
        step=4,
        policy=POLICY,
        counts={"train": world.num_samples} | ({"greedy": 1} if world.with_greedy else {}),
        prompts=first,
    )
    refill = Refill(asked=first, max_extra=world.max_extra, draw=draw)
    under_way = [header for prompt_id in first for header in world.headers(prompt_id)]
    while under_way:
        rng.shuffle(under_way)
        count = rng.randint(1, len(under_way))
        arrived, under_way = under_way[:count], under_way[count:]
        for header in arrived:
            barrier.apply(header, barrier.judge(header))
            if header.server_id == "rollout-0" and rng.random() < 0.2:
                again = world.headers(header.trajectory_id.prompt_id, "rollout-1")
                under_way += [h for h in again if h.trajectory_id == header.trajectory_id]
        replacement = refill.settle(barrier, (h.trajectory_id.prompt_id for h in arrived))
        under_way += [header for prompt_id in replacement.prompts for header in world.headers(prompt_id)]
    return barrier, refill, cursor


@given(worlds(), seeds)
@settings(max_examples=300, deadline=None)
def test_the_batch_is_that_of_asking_for_one_prompt_after_the_other(world: World, seed: int) -> None:
    train, aside, dropped = plain(world)
    barrier, refill, _ = concurrent(world, seed)
    assert barrier.closed
    assert [(h.trajectory_id.prompt_id, h.trajectory_id.sample_index) for h in barrier.batch()] == [
        (prompt_id, index) for prompt_id in train for index in range(world.num_samples)
    ]
    assert sorted({h.trajectory_id.prompt_id for h in barrier.aside()}) == aside
    assert [group.prompt_id for group in barrier.dropped] == dropped
    # Nothing is lost and nothing comes twice, no more is asked for than allowed, and no more trained than
    # wanted.
    assert barrier.num_groups == len(train) + len(aside) + len(dropped) == world.num_first + refill.num_extra
    assert refill.num_extra <= world.max_extra
    assert len(train) + len(dropped) == world.num_first - refill.num_unfilled
    if refill.num_unfilled:
        assert refill.num_extra == world.max_extra or barrier.num_groups == len(world.scores)


@given(worlds(), seeds, seeds)
@settings(max_examples=100, deadline=None)
def test_the_cursor_ends_in_the_same_place_whatever_came_first(
    world: World, seed: int, other_seed: int
) -> None:
    (_, _, first), (_, _, second) = concurrent(world, seed), concurrent(world, other_seed)
    assert first.state == second.state


def test_a_named_component_is_compared_and_must_be_there() -> None:
    def settle(metric: str) -> list[int]:
        barrier = Barrier(step=4, policy=POLICY, counts={"train": 2}, prompts=(1, 2))
        samples: dict[int, Any] = {1: (0.0, 0.7), 2: (1.0, 0.7)}
        for prompt_id, (low, length) in samples.items():
            for index in range(2):
                header = scored(prompt_id, index, reward=length + index)
                header = replace(
                    header, components={"right": low if index else 0.0, "length": length + index}
                )
                barrier.apply(header, barrier.judge(header))
        refill = Refill(asked=[1, 2], max_extra=0, draw=lambda *_: {}, metric=metric)
        return list(refill.settle(barrier, [1, 2]).set_aside)

    assert settle("right") == [1]
    assert settle("length") == []
    with pytest.raises(ConfigError, match="metric='wrong' is no component.*length, right"):
        settle("wrong")
