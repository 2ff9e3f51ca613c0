"""The prompt cursor: every epoch visits each prompt at most once, and a resumed walk is the same walk."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import CheckpointError, DataError
from paceline.data.cursor import CursorState, PromptCursor
from paceline.data.mixture import PromptMixture


@given(st.integers(1, 40), st.data(), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_epochs_and_resume(num_ids: int, data: st.DataObject, seed: int) -> None:
    batch = data.draw(st.integers(1, num_ids))
    ids = [3 * i + 1 for i in range(num_ids)]
    cursor = PromptCursor(ids, seed=seed)
    per_epoch = num_ids // batch
    batches, states = [], []
    for _ in range(3 * per_epoch + 1):
        states.append(cursor.state)
        batches.append(cursor.take(batch))
    for epoch in range(3):
        seen = [i for b in batches[epoch * per_epoch : (epoch + 1) * per_epoch] for i in b]
        assert len(seen) == len(set(seen)) == per_epoch * batch
        assert set(seen) <= set(ids)
    cut = data.draw(st.integers(0, len(states) - 1))
    again = PromptCursor(list(reversed(ids)), seed=seed)
    again.restore(states[cut])
    assert [again.take(batch) for _ in batches[cut:]] == batches[cut:]


def test_orders_differ_by_seed_and_epoch() -> None:
    first, second = (PromptCursor(range(100), seed=s) for s in (0, 1))
    a, b, c = first.take(100), first.take(100), second.take(100)
    assert a != b
    assert a != c
    assert sorted(a) == sorted(b) == sorted(c) == list(range(100))


def test_too_few_prompts_and_foreign_states_are_errors() -> None:
    with pytest.raises(DataError, match="3 usable prompts cannot fill data.train_batch_size=4"):
        PromptMixture({"": [1, 2, 3]}, batch_size=4, seed=0)
    cursor = PromptCursor([1, 2, 3], seed=0)
    with pytest.raises(CheckpointError, match="there are 3 prompts"):
        cursor.restore(CursorState(epoch=0, position=9))


@given(st.integers(1, 30), st.data())
@settings(max_examples=60, deadline=None)
def test_further_ids_of_a_step_are_the_next_of_the_walk_and_none_comes_twice(
    num_ids: int, data: st.DataObject
) -> None:
    batch, ids = data.draw(st.integers(1, num_ids)), [3 * i + 1 for i in range(num_ids)]
    portions = data.draw(st.lists(st.integers(0, 12), max_size=4))
    together, apart = (PromptCursor(ids, seed=2) for _ in range(2))
    first = together.take(batch)
    assert apart.take(batch) == first
    further = together.take_more(sum(portions), without=first)
    asked = list(first)
    for portion in portions:
        asked += apart.take_more(portion, without=asked)
    assert asked == first + further
    assert len(set(asked)) == len(asked) == min(num_ids, batch + sum(portions))
    assert together.state == apart.state
    # A walk that goes on from a checkpoint is the same walk.
    again = PromptCursor(ids, seed=2)
    again.restore(apart.state)
    assert again.take(batch) == apart.take(batch)


def test_an_epoch_that_ends_within_a_step_passes_its_ids_over() -> None:
    cursor = PromptCursor(range(5), seed=0, shuffle=False)
    assert cursor.take(3) == [0, 1, 2]
    assert cursor.take_more(3, without=[0, 1, 2]) == [3, 4]
    assert cursor.take_more(1, without=[0, 1, 2, 3, 4]) == []
