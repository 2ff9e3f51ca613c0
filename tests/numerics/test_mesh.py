"""The learner's mesh over gloo: the ranks along each dimension, and the sums over them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from paceline.core.errors import ConfigError
from paceline.learner.distributed.ranks import RankEnvironment, form_group, leave_group, open_store
from support.learner_ranks import WAIT_S, run_ranks

pytestmark = pytest.mark.torch


def group_of(ranks: list[int], rank: int) -> dict[str, Any]:
    """What `rank` sees of a group of these ranks, of which each has its power of 10."""
    numbers = [10**other for other in ranks]
    return {
        "rank": ranks.index(rank),
        "size": len(ranks),
        "sum": sum(numbers),
        "max": max(numbers),
        "all": numbers,
        "timeout_s": WAIT_S,
    }


def test_two_ranks_have_different_rows_and_share_the_parameters() -> None:
    everyone = [0, 1]
    seen = run_ranks("support.mesh_ranks:groups", 2)
    assert seen == [
        {name: group_of(everyone, rank) for name in ("world", "data", "fsdp")} for rank in everyone
    ]


def test_ranks_with_the_same_rows_are_neighbours_and_all_share_the_parameters() -> None:
    everyone = [0, 1, 2, 3]
    data = {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}
    assert run_ranks("support.mesh_ranks:groups", 4, context=2) == [
        {
            "world": group_of(everyone, rank),
            "data": group_of(data[rank], rank),
            "fsdp": group_of(everyone, rank),
        }
        for rank in everyone
    ]


def test_a_number_of_ranks_that_does_not_divide_is_refused() -> None:
    environment = RankEnvironment.read({})
    try:
        with pytest.raises(ConfigError, match="1 ranks cannot share the tokens of rows in groups of 2"):
            form_group(environment, open_store(environment, WAIT_S), torch.device("cpu"), WAIT_S, context=2)
    finally:
        leave_group()
