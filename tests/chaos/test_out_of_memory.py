"""One of two ranks runs out of memory in an update: both take the step again, in halves, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.learner_fakes import write_model
from support.learner_ranks import run_ranks
from support.memory_faults import PLACES

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


def test_both_ranks_take_the_step_again_wherever_one_ran_out(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    first, second = run_ranks("support.memory_faults:one_rank_runs_out", 2, str(model))
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
