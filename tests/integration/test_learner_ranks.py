"""One run on one rank and on two: equal losses, checkpoints that fit either, resuming changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import learner_scenarios as scenarios
from support.learner_fakes import write_model
from support.learner_ranks import alone, run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two_ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """What two processes made of all scenarios, by rank, and their checkpoint."""
    folder = tmp_path_factory.mktemp("two") / "step_000001"
    return run_ranks("support.learner_scenarios:everything", 2, str(model), str(folder)), folder


def test_two_ranks_compute_what_one_does_and_their_checkpoint_fits_one(
    model: Path, two_ranks: tuple[list[Any], Path], tmp_path: Path
) -> None:
    ((uninterrupted, resumed, *_), (other_uninterrupted, other_resumed, *_)), folder = two_ranks
    assert (other_uninterrupted, other_resumed) == (uninterrupted, resumed)
    assert resumed == uninterrupted[1:]  # to the last bit

    with alone() as ranks:
        single = scenarios.three_steps_with_a_checkpoint(ranks, str(model), str(tmp_path / "single"))
        resharded = scenarios.resumed_steps(ranks, str(model), str(folder))
    for metrics, other in zip([*single, *resharded], [*uninterrupted, *uninterrupted[1:]], strict=True):
        assert metrics.keys() == other.keys()
        for name, value in metrics.items():
            assert value == pytest.approx(other[name], abs=2e-5, rel=1e-4), name
    assert uninterrupted[2]["algorithm/kl_coef"] != uninterrupted[0]["algorithm/kl_coef"]
    assert uninterrupted[2]["actor/pg_loss"] != uninterrupted[1]["actor/pg_loss"]


def test_greedy_scores_give_the_same_on_two_ranks(model: Path, two_ranks: tuple[list[Any], Path]) -> None:
    (_, _, first, *_), (_, _, second, *_) = two_ranks[0]
    assert first == second
    with alone() as ranks:
        single = scenarios.remax_step(ranks, str(model))
    for name, value in single.items():
        assert value == pytest.approx(first[name], abs=2e-5, rel=1e-4), name


def test_rewards_placed_on_tokens_give_the_same_on_two_ranks(
    model: Path, two_ranks: tuple[list[Any], Path]
) -> None:
    """Sums of token rewards round by where a row lies, which equal scores would make an advantage."""
    (_, _, _, first, *_), (_, _, _, second, *_) = two_ranks[0]
    assert_placed_alike(model, first, second)


@pytest.mark.more
def test_rewards_placed_on_tokens_give_the_same_with_every_other_estimator(model: Path) -> None:
    estimators = scenarios.MORE_GROUP_ESTIMATORS
    assert_placed_alike(
        model, *run_ranks("support.learner_scenarios:placed_on_tokens", 2, str(model), *estimators)
    )


def assert_placed_alike(model: Path, first: dict[str, Any], second: dict[str, Any]) -> None:
    """Metrics and advantages by estimator, of two ranks, are those of one."""
    with alone() as ranks:
        single = scenarios.placed_on_tokens(ranks, str(model), *first)
    for name, (metrics, advantages) in single.items():
        assert first[name][0] == second[name][0]
        assert len(first[name][1]) > 8 < len(second[name][1])
        both = first[name][1] | second[name][1]
        # Whitening adds up all tokens, so its mean is that of another order.
        error = 1e-7 if name == "reinforce_plus_plus_baseline" else 0.0
        for row, expected in advantages.items():
            np.testing.assert_allclose(both[str(row)], expected, rtol=0, atol=error, err_msg=name)
            if error == 0.0 and row // 4 % 2:
                assert not any(expected), name
        assert first[name][0]["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=1e-6)
        for metric, value in metrics.items():
            assert value == pytest.approx(first[name][0][metric], abs=2e-5, rel=1e-4), (name, metric)


def test_going_back_leaves_nothing_of_the_steps_in_between(
    model: Path, two_ranks: tuple[list[Any], Path]
) -> None:
    (_, _, _, _, first, *_), (_, _, _, _, second, *_) = two_ranks[0]
    back, fresh = first
    assert back == fresh  # to the last bit
    assert first == second
    # Step 3 of the run that did not go back started from other weights.
    assert back["actor/pg_loss"] != two_ranks[0][0][0][2]["actor/pg_loss"]


def test_work_ahead_changes_no_bit_on_two_ranks(two_ranks: tuple[list[Any], Path]) -> None:
    (_, _, _, _, _, first, *_), (_, _, _, _, _, second, *_) = two_ranks[0]
    assert first == second
    accumulated, accumulated_ahead, reduced, reduced_ahead = first
    assert accumulated_ahead == accumulated
    assert reduced_ahead == reduced
    assert accumulated[1] != accumulated[3]  # the second step has moved the weights


def test_a_bad_gradient_of_one_rank_keeps_all_from_the_step(
    model: Path, two_ranks: tuple[list[Any], Path]
) -> None:
    (*_, first, _, _), (*_, second, _, _) = two_ranks[0]
    assert first == second
    assert [step["actor/skipped_updates"] for step in first] == [1, 0]
    assert [step["critic/skipped_updates"] for step in first] == [0, 0]
    # The step that was not taken is missing in what follows, alike on one rank and on two.
    undisturbed = two_ranks[0][0][0]
    assert first[1]["actor/pg_loss"] != undisturbed[1]["actor/pg_loss"]
    with alone() as ranks:
        single = scenarios.one_rank_has_a_bad_gradient(ranks, str(model))
    for metrics, other in zip(single, first, strict=True):
        for name, value in metrics.items():
            assert value == pytest.approx(other[name], abs=2e-5, rel=1e-4), name


def test_an_error_of_one_rank_is_every_ranks_and_nothing_has_changed(
    two_ranks: tuple[list[Any], Path],
) -> None:
    (*_, first, _), (*_, second, _) = two_ranks[0]
    assert first == ["VersionMismatchError: learner rank 1: a stale row", "0", "1"]
    assert second == ["VersionMismatchError: a stale row", "0", "1"]


def test_a_rank_that_fails_takes_the_others_out_of_their_wait_with_its_reason(
    two_ranks: tuple[list[Any], Path],
) -> None:
    (*_, first), (*_, second) = two_ranks[0]
    reason = "learner rank 1 failed: ZeroDivisionError: by nothing"
    assert first == f"PeerLostError: {reason} / {reason}"
    assert second == "ZeroDivisionError: by nothing"


def test_random_states_travel_with_a_checkpoint(model: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "step_000001")
    with alone() as ranks, torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        expected = scenarios.three_steps_with_a_checkpoint(ranks, str(model), folder)
        torch.manual_seed(12)
        assert scenarios.resumed_steps(ranks, str(model), folder) == expected[1:]
        torch.manual_seed(11)
        drawn = torch.rand(3)
        scenarios.resumed_steps(ranks, str(model), folder)
        assert torch.equal(torch.rand(3), drawn)


def test_an_own_step_that_goes_on_differently_on_a_rank_ends_on_all_with_one_sentence(
    two_ranks: tuple[list[Any], Path],
) -> None:
    first, second = (results[6] for results in two_ranks[0])
    assert first == second
    well, *strayed = first
    assert well == "step 1"
    for said, where in zip(
        strayed,
        (
            "estimate on rank 0, policy on rank 1",
            "estimate on rank 0, the end on rank 1",
            "estimate on rank 0, ZeroDivisionError: by a rank's own rows on rank 1",
        ),
        strict=True,
    ):
        assert said.startswith(f"the algorithm's step goes on differently from rank to rank ({where});")
