"""The forms of `actor.memory` on two ranks: the same numbers, also where memory runs out on the way."""

from __future__ import annotations

from typing import Any

import pytest

from support.learner_fakes import write_model
from support.learner_ranks import run_ranks
from support.update_forms import FORMS

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    model = write_model(tmp_path_factory.mktemp("model"), num_layers=3)
    first, second = run_ranks("support.update_forms:everything", 2, str(model))
    assert first[:2] == second[:2]
    return first


def test_recomputation_and_gathering_change_no_bit_and_reducing_every_time_only_rounding(
    two_ranks: list[Any],
) -> None:
    plain, *others = two_ranks[0]
    assert plain["actor/grad_norm"] > 0.1
    for form, metrics in zip(FORMS[1:], others, strict=True):
        assert metrics["actor/first_ppo_kl"] == 0.0
        if form["accumulate"]:
            assert metrics == plain
        else:
            assert metrics == pytest.approx(plain, rel=2e-5, abs=1e-7)


def test_reducing_in_bfloat16_rounds(two_ranks: list[Any]) -> None:
    exact = two_ranks[0][0]["actor/grad_norm"]
    for metrics in two_ranks[1]:
        assert metrics["actor/grad_norm"] == pytest.approx(exact, rel=5e-3)
        assert abs(metrics["actor/grad_norm"] - exact) > 1e-6 * exact


def test_a_reference_in_host_memory_changes_no_bit(two_ranks: list[Any]) -> None:
    plain, offloaded = two_ranks[3]
    assert plain["actor/grad_norm"] > 0.1
    assert "actor/kl_loss" in plain
    assert offloaded == plain


def test_a_rank_that_runs_out_of_memory_catches_up_where_weights_stay_gathered(two_ranks: list[Any]) -> None:
    *tries, (_, _, expected, expected_bits, expected_after) = two_ranks[2]
    for _, _, metrics, bits, after in tries:
        assert metrics == expected
        assert bits == expected_bits
        assert after == expected_after
