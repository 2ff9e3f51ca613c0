"""One of two ranks runs out of memory in an update: both take the step again, in halves, to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from support.learner_fakes import make_batch, write_model
from support.learner_ranks import run_ranks
from support.memory_faults import PLACES

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    model = write_model(tmp_path_factory.mktemp("model"))
    return run_ranks("support.memory_faults:on_several_ranks", 2, str(model))


def test_a_loss_knows_the_groups_and_values_of_its_rows_on_two_ranks(two_ranks: list[Any]) -> None:
    rows, _ = make_batch(step=1, seed=1)
    tokens = [row.num_sampled_tokens for row in rows]
    groups = [row.trajectory_id.prompt_id**2 * row.num_sampled_tokens for row in rows]
    (_, first), (_, second) = two_ranks
    assert first == second
    full, halved = first
    for metrics in (full, halved):
        assert metrics["actor/group"] == pytest.approx(sum(groups) / sum(tokens), rel=1e-5)
        assert metrics["actor/value"] == pytest.approx(metrics["critic/values/mean"], rel=1e-4)
    assert halved["guard/out_of_memory"] == 1
    assert "guard/out_of_memory" not in full


def test_both_ranks_take_the_step_again_wherever_one_ran_out(two_ranks: list[Any]) -> None:
    (first, _), (second, _) = two_ranks
    for results in (first, second):
        *tries, (_, _, expected, expected_bits, expected_after) = results
        assert len(tries) == len(PLACES)
        for notes, _, metrics, own_bits, after in tries:
            assert len(notes) == 1
            assert "on 1 rank(s)" in notes[0]
            assert metrics == expected
            assert own_bits == expected_bits
            assert after == expected_after
    assert first[0][2] == second[0][2]
    # The second rank's parts of the first mini-batch were fillers from where it ran out.
    assert 0 in second[0][1][0]
