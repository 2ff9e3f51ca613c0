"""How a step's rows are cut: each row once, budgets kept, even arithmetic, the same plan on every rank."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError, DataError
from paceline.learner.batch.planning.arithmetic import Arithmetic, RowLength
from paceline.learner.batch.planning.bin_packing import Bundle, pack_bins
from paceline.learner.batch.planning.plan import (
    CPU_TOKEN_BUDGET,
    BatchPlan,
    Chunk,
    effective_budget,
    plan_batch,
    plan_chunk,
)
from support.naive_batch_plan import naive_chunk, naive_pack_bins

BUDGET = 40
BY_TOKENS = Arithmetic(per_token=1, per_response_token=0, per_pair=0)


def rows_of(groups: list[list[tuple[int, int]]]) -> list[RowLength]:
    return [
        RowLength(prompt_id=number, num_prompt_tokens=prompt, num_response_tokens=response)
        for number, group in enumerate(groups)
        for prompt, response in group
    ]


def cut(
    rows: list[RowLength],
    sizes: list[int],
    world_size: int,
    budget: int = BUDGET,
    arithmetic: Arithmetic = BY_TOKENS,
    share_prompts: bool = False,
) -> BatchPlan:
    make = partial(
        plan_chunk,
        num_data_ranks=world_size,
        token_budget=budget,
        arithmetic=arithmetic,
        share_prompts=share_prompts,
    )
    return plan_batch(rows, prompts_per_chunk=math.gcd(*sizes), make=make)


def tokens_of(rows: list[RowLength], indices: tuple[int, ...]) -> int:
    return sum(rows[row].num_tokens for row in indices)


def test_patches_of_images_count_in_the_budget() -> None:
    """Each prompt's once where its samples share it."""
    rows = [
        RowLength(prompt_id=prompt, num_prompt_tokens=4, num_response_tokens=4, num_patches=patches)
        for prompt, patches in enumerate((0, 0, 24, 24))
        for _ in range(2)
    ]
    (chunk,) = cut(rows, [4], 1).chunks
    parts = [[rows[index].num_patches for index in part] for part in chunk.micro_batches[0]]
    assert sorted(map(sorted, parts)) == [[0, 24], [0, 24], [0, 24], [0, 24]]
    assert all(sum(rows[i].num_budgeted for i in part) <= BUDGET for part in chunk.micro_batches[0])
    (shared,) = cut(rows, [4], 1, share_prompts=True).chunks
    assert shared.num_micro_batches == 3
    text = [replace(row, num_patches=0) for row in rows]
    assert cut(text, [4], 1).chunks[0].num_micro_batches == 2
    with pytest.raises(ConfigError, match="a sequence of 8 tokens and 24 patches of images is over"):
        cut(rows, [4], 1, budget=31)
    with pytest.raises(ConfigError, match="a sequence of 8 tokens is over the token budget of 7"):
        cut(text, [4], 1, budget=7)


lengths = st.tuples(st.integers(1, 20), st.integers(1, 20))
batches = st.lists(st.lists(lengths, min_size=1, max_size=5), min_size=1, max_size=9).map(rows_of)
models = st.builds(
    Arithmetic,
    per_token=st.integers(1, 50),
    per_response_token=st.integers(0, 50),
    per_pair=st.integers(0, 5),
)


@given(
    rows=batches,
    world_size=st.integers(1, 4),
    sizes=st.sampled_from([[2], [4], [4, 2], [6, 4]]),
    arithmetic=models,
)
def test_every_row_is_in_exactly_one_micro_batch_of_its_mini_batch(
    rows: list[RowLength], world_size: int, sizes: list[int], arithmetic: Arithmetic
) -> None:
    plan = cut(rows, sizes, world_size, arithmetic=arithmetic)
    assert plan == cut(rows, sizes, world_size, arithmetic=arithmetic)
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


@given(rows=batches, world_size=st.integers(1, 4), arithmetic=models)
def test_micro_batches_keep_the_budget_and_are_as_many_on_every_rank(
    rows: list[RowLength], world_size: int, arithmetic: Arithmetic
) -> None:
    plan = cut(rows, [3], world_size, arithmetic=arithmetic)
    for chunk in plan.chunks:
        assert {len(batches) for batches in chunk.micro_batches} == {chunk.num_micro_batches}
        for indices in (indices for batches in chunk.micro_batches for indices in batches):
            assert tokens_of(rows, indices) <= BUDGET
            assert list(indices) == sorted(indices, key=lambda row: (rows[row].num_tokens, row))
        assert chunk.num_micro_batches <= fewest(rows, chunk, world_size)


@given(
    rows=batches,
    world_size=st.integers(1, 4),
    sizes=st.sampled_from([[2], [3], [4, 2]]),
    arithmetic=models,
    share_prompts=st.booleans(),
)
def test_how_a_chunk_is_cut_follows_from_its_own_rows(
    rows: list[RowLength], world_size: int, sizes: list[int], arithmetic: Arithmetic, share_prompts: bool
) -> None:
    """So it may be computed before the rows behind it are known."""
    plan = cut(rows, sizes, world_size, arithmetic=arithmetic, share_prompts=share_prompts)
    for chunk in plan.chunks:
        first = chunk.rows[0]
        own = rows[first : first + len(chunk.rows)]
        alone = plan_chunk(
            own,
            first,
            num_data_ranks=world_size,
            token_budget=BUDGET,
            arithmetic=arithmetic,
            share_prompts=share_prompts,
        )
        assert alone == chunk
        assert alone.share_prompts == share_prompts


def fewest(rows: list[RowLength], chunk: Chunk, world_size: int) -> int:
    """The micro-batches of a rank if bins are filled with the longest rows first."""
    room: list[int] = []
    for tokens in sorted((rows[row].num_tokens for row in chunk.rows), reverse=True):
        place = next((number for number, free in enumerate(room) if free >= tokens), None)
        if place is None:
            room.append(BUDGET - tokens)
        else:
            room[place] -= tokens
    return -(-len(room) // world_size)


@given(rows=batches, world_size=st.integers(1, 4), arithmetic=models)
def test_micro_batches_that_run_together_differ_by_a_row_at_most(
    rows: list[RowLength], world_size: int, arithmetic: Arithmetic
) -> None:
    # Without a budget there is one micro-batch per rank.
    plan = cut(rows, [3], world_size, budget=10_000, arithmetic=arithmetic)
    costliest = max(arithmetic.of_rows([row]) for row in rows)
    for chunk in plan.chunks:
        costs = [arithmetic.of_rows(rows[row] for row in indices) for (indices,) in chunk.micro_batches]
        assert max(costs) - min(costs) <= costliest
        assert (chunk.longest, chunk.cost) == (max(costs), sum(costs))


@given(rows=batches, world_size=st.integers(2, 4), arithmetic=models)
def test_the_imbalance_is_the_wait_for_the_costliest_micro_batches(
    rows: list[RowLength], world_size: int, arithmetic: Arithmetic
) -> None:
    plan = cut(rows, [3], world_size, arithmetic=arithmetic)
    waited = 0
    for chunk in plan.chunks:
        for together in zip_longest(*chunk.micro_batches, fillvalue=None):
            waited += max(arithmetic.of_rows(rows[row] for row in indices or ()) for indices in together)
    assert plan.imbalance == pytest.approx(waited * world_size / arithmetic.of_rows(rows) - 1)
    assert plan.imbalance >= -1e-12


grouped = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=1, max_size=6)),
    min_size=1,
    max_size=6,
).map(lambda groups: rows_of([[(prompt, length) for length in lengths] for prompt, lengths in groups]))


@given(rows=grouped, world_size=st.integers(1, 4), arithmetic=models, size=st.integers(1, 3))
def test_shared_prompts_stay_within_the_budget_and_take_no_longer(
    rows: list[RowLength], world_size: int, arithmetic: Arithmetic, size: int
) -> None:
    plan = cut(rows, [size], world_size, arithmetic=arithmetic, share_prompts=True)
    everything = sorted(row for rank in range(world_size) for row in plan.rows_of(rank))
    assert everything == list(range(len(rows)))
    cost = 0
    for chunk in plan.chunks:
        for micro_batches in chunk.micro_batches:
            assert len(micro_batches) == chunk.num_micro_batches
            for indices in micro_batches:
                prompts = {rows[row].prompt_id: rows[row].num_prompt_tokens for row in indices}
                responses = sum(rows[row].num_response_tokens for row in indices)
                assert sum(prompts.values()) + responses <= BUDGET
                order = [rows[row].prompt_id for row in indices]
                assert order == sorted(order)
                cost += arithmetic.of_rows((rows[row] for row in indices), share_prompts=True)
    plain = cut(rows, [size], world_size, arithmetic=arithmetic)
    assert plan.cost == cost <= plain.cost
    assert plan.longest <= plain.longest


def test_a_group_is_cut_where_ranks_would_wait_for_it() -> None:
    # One group of 4 + 4 x 4 tokens: whole, rank 1 has nothing to do; in halves each has 4 + 2 x 4.
    rows = rows_of([[(4, 4)] * 4])
    alone = cut(rows, [1], 1, share_prompts=True)
    assert (alone.cost, alone.chunks[0].micro_batches) == (20, (((0, 1, 2, 3),),))
    halves = cut(rows, [1], 2, share_prompts=True)
    assert (halves.cost, halves.longest) == (24, 12)
    assert sorted(len(batches[0]) for batches in halves.chunks[0].micro_batches) == [2, 2]
    # A budget of 13 tokens holds a prompt and two responses.
    tight = cut(rows, [1], 1, budget=13, share_prompts=True)
    assert [len(indices) for indices in tight.chunks[0].micro_batches[0]] == [2, 2]


def test_a_plan_by_hand() -> None:
    # Tokens: 9 7 | 5 3. A budget of 10 tokens makes four micro-batches; 9 runs beside 7, 5 beside 3.
    rows = rows_of([[(4, 5), (4, 3)], [(2, 3), (2, 1)]])
    plan = cut(rows, [2], 2, budget=10)
    assert plan.chunks[0].micro_batches == (((0,), (3,)), ((1,), (2,)))
    assert plan.rows_of(1) == [1, 2]
    assert plan.imbalance == pytest.approx(2 * (9 + 5) / 24 - 1)


def test_rows_are_packed_by_arithmetic_and_not_by_tokens() -> None:
    # A row of 8 tokens does 64 pairs, one of 4 does 16: with 4 x 4 tokens the long row waits for nobody.
    rows = rows_of([[(4, 4), (2, 2), (2, 2), (2, 2), (2, 2)]])
    by_pairs = Arithmetic(per_token=0, per_response_token=0, per_pair=1)
    assert cut(rows, [1], 2).chunks[0].micro_batches == (((1, 2, 4),), ((3, 0),))
    assert cut(rows, [1], 2, arithmetic=by_pairs).chunks[0].micro_batches == (((0,),), ((1, 2, 3, 4),))
    assert cut(rows, [1], 2, arithmetic=by_pairs).imbalance == 0


def test_a_row_by_hand() -> None:
    row = RowLength(prompt_id=0, num_prompt_tokens=3, num_response_tokens=2)
    arithmetic = Arithmetic(per_token=100, per_response_token=10, per_pair=1)
    assert arithmetic.of_prompt(row) == 309
    assert arithmetic.of_response(row) == 220 + 16
    assert arithmetic.of_rows([row, row]) == 2 * (500 + 20 + 25)


def test_a_rank_without_rows_gets_empty_micro_batches() -> None:
    plan = cut(rows_of([[(4, 4)]]), [1], 3, budget=10)
    assert plan.chunks[0].micro_batches == (((0,),), ((),), ((),))


def loose(tokens: list[int]) -> list[Bundle]:
    return [Bundle(rows=(row,), num_tokens=number, cost=number) for row, number in enumerate(tokens)]


def test_bins_that_would_overflow_when_even_are_filled_first_fit() -> None:
    # Evenly 6 | 5, then 5+4 and 6+4: the last 3 finds no room in 11 tokens, but in 12.
    packed = pack_bins(loose([6, 5, 4, 4, 3]), multiple=1, budget=11)
    assert [[b.num_tokens for b in bundles] for bundles in packed] == [[6, 5], [4, 4, 3]]
    even = pack_bins(loose([6, 5, 4, 4, 3]), multiple=1, budget=12)
    assert [[b.num_tokens for b in bundles] for bundles in even] == [[6, 4], [5, 4, 3]]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6)), max_size=30),
    multiple=st.integers(1, 4),
    budget=st.integers(12, 30),
)
def test_bins_are_those_of_a_search_through_all_of_them(
    sizes: list[tuple[int, int]], multiple: int, budget: int
) -> None:
    """Tokens and costs in no relation, as images make them."""
    bundles = [Bundle(rows=(row,), num_tokens=tokens, cost=cost) for row, (tokens, cost) in enumerate(sizes)]
    packed = pack_bins(bundles, multiple=multiple, budget=budget)
    assert packed == naive_pack_bins(bundles, multiple=multiple, budget=budget)
    assert packed == pack_bins(bundles[::-1], multiple=multiple, budget=budget), (
        "the order given is no matter"
    )


@given(
    groups=st.lists(
        st.tuples(
            st.integers(1, 12),
            st.sampled_from([0, 0, 0, 7]),
            st.lists(st.integers(1, 20), min_size=1, max_size=9),
        ),
        min_size=1,
        max_size=8,
    ),
    world_size=st.integers(1, 4),
    budget=st.integers(40, 120),
    per_pair=st.integers(0, 2),
    share_prompts=st.booleans(),
)
def test_chunks_are_those_of_a_search_through_all_cuts(
    groups: list[tuple[int, int, list[int]]],
    world_size: int,
    budget: int,
    per_pair: int,
    share_prompts: bool,
) -> None:
    rows = [
        RowLength(prompt_id=n, num_prompt_tokens=prompt, num_response_tokens=response, num_patches=patches)
        for n, (prompt, patches, responses) in enumerate(groups)
        for response in responses
    ]
    arithmetic = Arithmetic(per_token=3, per_response_token=2, per_pair=per_pair, per_patch=1)
    shape = {"num_data_ranks": world_size, "token_budget": budget, "arithmetic": arithmetic}
    chunk = plan_chunk(rows, 0, **shape, share_prompts=share_prompts)
    assert chunk == naive_chunk(rows, **shape, share_prompts=share_prompts)


@pytest.mark.parametrize("share_prompts", [False, True])
def test_the_work_of_a_plan_grows_with_its_rows_and_not_with_their_square(share_prompts: bool) -> None:
    draw = random.Random(3)

    def num_operations(num_prompts: int, num_samples: int) -> int:
        rows = rows_of([[(3, draw.randint(1, 37)) for _ in range(num_samples)] for _ in range(num_prompts)])
        count = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            cut(rows, [num_prompts], 4, share_prompts=share_prompts)
        finally:
            sys.settrace(before)
        return count

    assert num_operations(320, 1) < 6 * num_operations(80, 1)
    assert num_operations(2, 160) < 6 * num_operations(2, 40)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="a sequence of 41 tokens is over the token budget of 40"):
        cut(rows_of([[(21, 20)]]), [1], 1)
    with pytest.raises(DataError, match="no rows"):
        cut([], [1], 1)
    torn = [RowLength(prompt_id=p, num_prompt_tokens=1, num_response_tokens=1) for p in (0, 1, 0)]
    with pytest.raises(DataError, match="next to each other"):
        cut(torn, [1], 1)
    with pytest.raises(ConfigError, match="3 prompts is no multiple of the chunk of 2"):
        BatchPlan(chunks=(), prompts_per_chunk=2).mini_batches(3)


def test_a_cpu_takes_smaller_micro_batches_that_still_hold_the_longest_row() -> None:
    assert effective_budget(8192, "cuda", 100) == 8192
    assert effective_budget(8192, "cpu", 100) == CPU_TOKEN_BUDGET
    assert effective_budget(8192, "cpu", 5000) == 5000
    assert effective_budget(1024, "cpu", 100) == 1024
