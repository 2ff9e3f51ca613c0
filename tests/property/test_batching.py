"""How a step's rows are cut: each row once, budgets kept, the same plan on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError, DataError
from paceline.learner.batch.plan import (
    CPU_TOKEN_BUDGET,
    BatchPlan,
    RowLength,
    deal_evenly,
    effective_budget,
    plan_batch,
)

BUDGET = 40


def rows_of(groups: list[list[tuple[int, int]]]) -> list[RowLength]:
    return [
        RowLength(prompt_id=number, num_prompt_tokens=prompt, num_response_tokens=response)
        for number, group in enumerate(groups)
        for prompt, response in group
    ]


lengths = st.tuples(st.integers(1, 20), st.integers(1, 20))
batches = st.lists(st.lists(lengths, min_size=1, max_size=5), min_size=1, max_size=9).map(rows_of)


@given(rows=batches, world_size=st.integers(1, 4), sizes=st.sampled_from([[2], [4], [4, 2], [6, 4]]))
def test_every_row_is_in_exactly_one_micro_batch_of_its_mini_batch(
    rows: list[RowLength], world_size: int, sizes: list[int]
) -> None:
    plan = plan_batch(rows, mini_batch_sizes=sizes, world_size=world_size, token_budget=BUDGET)
    assert plan == plan_batch(rows, mini_batch_sizes=sizes, world_size=world_size, token_budget=BUDGET)
    everything = sorted(row for rank in range(world_size) for row in plan.rows_of(rank))
    assert everything == list(range(len(rows)))
    for size in sizes:
        seen = []
        for chunks in plan.mini_batches(size):
            members = [row for chunk in chunks for row in plan.chunks[chunk].rows]
            prompts = [rows[row].prompt_id for row in members]
            assert len(set(prompts)) == size or chunks == plan.mini_batches(size)[-1]
            seen += members
        assert seen == list(range(len(rows)))


@given(rows=batches, world_size=st.integers(1, 4))
def test_micro_batches_keep_the_budget_and_are_as_many_on_every_rank(
    rows: list[RowLength], world_size: int
) -> None:
    plan = plan_batch(rows, mini_batch_sizes=[3], world_size=world_size, token_budget=BUDGET)
    longest = max(row.num_tokens for row in rows)
    for chunk in plan.chunks:
        assert {len(batches) for batches in chunk.micro_batches} == {chunk.num_micro_batches}
        loads = []
        for micro_batches in chunk.micro_batches:
            sizes = [sum(rows[row].num_tokens for row in indices) for indices in micro_batches]
            assert max(sizes) <= BUDGET
            loads.append(sum(sizes))
            for indices in micro_batches:
                assert list(indices) == sorted(indices, key=lambda row: (rows[row].num_tokens, row))
        assert max(loads) - min(loads) <= longest


def test_a_plan_by_hand() -> None:
    # Tokens: 9 7 | 5 3. Two ranks, longest first: rank 0 takes 9 and 3, rank 1 takes 7 and 5.
    # A budget of 10 tokens splits both.
    rows = rows_of([[(4, 5), (4, 3)], [(2, 3), (2, 1)]])
    plan = plan_batch(rows, mini_batch_sizes=[2], world_size=2, token_budget=10)
    assert plan.chunks[0].micro_batches == (((0,), (3,)), ((1,), (2,)))
    assert plan.rows_of(1) == [1, 2]


def test_a_rank_without_rows_gets_empty_micro_batches() -> None:
    plan = plan_batch(rows_of([[(4, 4)]]), mini_batch_sizes=[1], world_size=3, token_budget=10)
    assert plan.chunks[0].micro_batches == (((0,),), ((),), ((),))


def test_bins_that_would_overflow_when_even_are_filled_first_fit() -> None:
    # 6 5 5 4 4 fit two bins of 12 only as 6+5 and 5+4 | 4: three bins; evenly dealt they are 6 | 5+4 | 5+4.
    assert deal_evenly([0, 1, 2, 3, 4], [6, 5, 5, 4, 4], 3) == [(0,), (3, 1), (4, 2)]


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="a sequence of 41 tokens is over the token budget of 40"):
        plan_batch(rows_of([[(21, 20)]]), mini_batch_sizes=[1], world_size=1, token_budget=BUDGET)
    with pytest.raises(DataError, match="no rows"):
        plan_batch([], mini_batch_sizes=[1], world_size=1, token_budget=BUDGET)
    torn = [RowLength(prompt_id=p, num_prompt_tokens=1, num_response_tokens=1) for p in (0, 1, 0)]
    with pytest.raises(DataError, match="next to each other"):
        plan_batch(torn, mini_batch_sizes=[1], world_size=1, token_budget=BUDGET)
    with pytest.raises(ConfigError, match="3 prompts is no multiple of the chunk of 2"):
        BatchPlan(chunks=(), prompts_per_chunk=2).mini_batches(3)


def test_a_cpu_takes_smaller_micro_batches_that_still_hold_the_longest_row() -> None:
    assert effective_budget(8192, "cuda", 100) == 8192
    assert effective_budget(8192, "cpu", 100) == CPU_TOKEN_BUDGET
    assert effective_budget(8192, "cpu", 5000) == 5000
    assert effective_budget(1024, "cpu", 100) == 1024
