"""The mixture of training sets: counts follow the weights, and a resumed draw is the same draw."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.mixture import WeightsFrom
from paceline.core.errors import CheckpointError, DataError
from paceline.data.mixture import MixtureState, PromptMixture

SETS = {"math": range(100), "code": range(100, 150), "chat": range(150, 250)}


def mixture(
    *stages: tuple[int, tuple[float, ...]], sets: dict[str, range] = SETS, batch: int = 8
) -> PromptMixture:
    schedule = [WeightsFrom(step=step, weights=weights) for step, weights in stages]
    return PromptMixture(sets, batch_size=batch, seed=3, schedule=schedule)


def counts(draw: PromptMixture, ids: list[int]) -> list[int]:
    by_set = Counter(draw.set_of(i) for i in ids)
    return [by_set[name] for name in draw.names]


@given(
    st.lists(st.floats(0.05, 9), min_size=3, max_size=3),
    st.integers(1, 30),
    st.integers(0, 12),
)
@settings(max_examples=60, deadline=None)
def test_every_step_and_all_together_have_what_the_weights_say(
    weights: list[float], batch: int, num_more: int
) -> None:
    draw = mixture((1, tuple(weights)), batch=batch)
    total = [0, 0, 0]
    for step in range(1, 9):
        ids = draw.take(step)
        ids += draw.take_more(num_more, without=ids)
        assert len(set(ids)) == batch + num_more
        of_step = counts(draw, ids)
        total = [sum(both) for both in zip(total, of_step, strict=True)]
        for num_drawn, count_of in ((len(ids), of_step), (sum(total), total)):
            for weight, count in zip(weights, count_of, strict=True):
                assert abs(count - num_drawn * weight / sum(weights)) < 2


def test_each_set_goes_through_its_own_epochs() -> None:
    draw = mixture((1, (1, 2, 1)), batch=20)
    taken = [i for step in range(1, 11) for i in draw.take(step)]
    seen = Counter(taken)
    assert {seen[i] for i in SETS["code"]} == {2}
    assert Counter(seen[i] for i in SETS["math"]) == {0: 50, 1: 50}
    assert [walk.epoch for walk in draw.state.walks] == [0, 1, 0]


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_draw_goes_on_from_what_json_kept(data: st.DataObject) -> None:
    def made() -> PromptMixture:
        return mixture((1, (1, 0.3, 0)), (4, (0, 1, 2.5)), batch=7)

    draw, states, drawn = made(), [], []
    for step in range(1, 12):
        states.append(json.dumps(draw.state.to_plain()))
        ids = draw.take(step)
        more: list[int] = []
        for count in data.draw(st.lists(st.integers(0, 3), max_size=12) | st.just([70, 70, 110])):
            more += draw.take_more(count, without=ids + more)
        drawn.append((ids, more))
    cut = data.draw(st.integers(0, 10))
    again = made()
    again.restore(MixtureState.from_plain(json.loads(states[cut])))
    for step, (ids, more) in enumerate(drawn[cut:], start=cut + 1):
        assert again.take(step) == ids
        assert again.take_more(len(more), without=ids) == more


def test_the_curriculum_says_from_which_step_on() -> None:
    draw = mixture((1, (1, 0, 0)), (3, (0, 1, 1)))
    assert [counts(draw, draw.take(step)) for step in (1, 2, 3, 4)] == [[8, 0, 0]] * 2 + [[0, 4, 4]] * 2
    draw.choose((0, 0, 5))
    assert counts(draw, draw.take(5)) == [0, 0, 8]
    assert MixtureState.from_plain(draw.state.to_plain()).chosen == (0, 0, 5)


def test_rows_come_by_rank_and_those_of_one_rank_are_shuffled() -> None:
    ranks = {i: -(-i // 5) for i in range(20)}
    draw = PromptMixture({"": range(20)}, batch_size=20, seed=1, ranks=ranks)
    first, second = draw.take(1), draw.take(2)
    for ids in (first, second):
        assert [ranks[i] for i in ids] == sorted(ranks.values())
    assert first != second
    straight = PromptMixture({"": range(20)}, batch_size=20, seed=1, ranks=ranks, shuffle=False)
    assert straight.take(1) == straight.take(2) == sorted(range(20), key=lambda i: (ranks[i], i))


def test_sets_of_one_size_have_different_orders() -> None:
    draw = mixture((1, (1, 0, 1)), batch=200)
    ids = draw.take(1)
    assert [i - 150 for i in ids[100:]] != ids[:100]


def test_a_set_that_is_used_up_within_a_step_leaves_its_place_to_others() -> None:
    draw = mixture((1, (1, 1)), sets={"a": range(4), "b": range(4, 40)})
    draw.choose((9, 1))
    assert [counts(draw, draw.take(step)) for step in (1, 2)] == [[4, 4], [4, 4]]
    draw.choose((1, 3))
    assert [counts(draw, draw.take(step)) for step in (3, 4)] == [[2, 6], [2, 6]]
    drawn = draw.take(5)
    rest = draw.take_more(99, without=drawn)
    assert sorted(drawn + rest) == list(range(40))


def test_sets_and_positions_that_cannot_be() -> None:
    with pytest.raises(
        DataError, match=r"train_sets.code has 50 usable prompts.*step 5 on.*60 different ones"
    ):
        mixture((1, (1, 0, 0)), (5, (0, 3, 1)), batch=80)
    two = PromptMixture({"a": range(9), "b": range(9, 20)}, batch_size=4, seed=0)
    with pytest.raises(CheckpointError, match="positions in 1 training sets, but there are 2"):
        two.restore(MixtureState.of_one(epoch=0, position=0))


def test_the_runs_of_ids_say_what_the_walks_are() -> None:
    draw = PromptMixture(
        {"a": [0, 1, 2, 5], "b": [7, 8]}, batch_size=2, seed=0, ranks={0: 1, 1: 1, 2: 0, 5: 0, 7: 0, 8: 1}
    )
    assert draw.ranges() == [[(2, 2, 0), (5, 5, 0), (0, 1, 1)], [(7, 7, 0), (8, 8, 1)]]
    assert [draw.set_of(i) for i in (5, 8, 6, 99)] == ["a", "b", None, None]
