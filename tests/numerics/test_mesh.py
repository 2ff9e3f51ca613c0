"""The learner's mesh over gloo: the ranks along each dimension, and steps on any mesh as on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from paceline.core.errors import ConfigError
from paceline.learner.distributed.ranks import (
    RankEnvironment,
    form_group,
    leave_group,
    open_store,
)
from support.learner_ranks import WAIT_S, alone, run_ranks
from support.mesh_ranks import EVERY_TIME, GRID, VARIANT
from support.mesh_steps import against_one_rank, steps, write_models

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

EVERYONE = [0, 1, 2, 3]


class FourRanks:
    """What four ranks computed, `by_rank`, and one rank's run of each of their variants.

    Attributes:
        models, checkpoints, expected: folders: of models by kind, of checkpoints, of parameters by variant.
    """

    def __init__(self, function: str, cases: Sequence[tuple[str, str]], folder: Path, small: Path) -> None:
        self.models = write_models(folder / "models")
        self.checkpoints, self.expected = folder / "checkpoints", folder / "expected"
        self.expected.mkdir()
        self.metrics: dict[str, list[dict[str, float]]] = {}
        with alone() as ranks:
            for variant in {VARIANT, *(variant for _, variant in cases)}:
                writes = {"checkpoint": str(self.checkpoints / "by one rank")} if variant == VARIANT else {}
                self.metrics[variant], parameters = steps(ranks, self.models, variant, **writes)
                torch.save(parameters, self.expected / f"{variant}.pt")
        folders = map(str, (self.models, self.expected, self.checkpoints, small))
        self.by_rank = run_ranks(f"support.mesh_ranks:{function}", 4, *folders, context=2, fsdp_size=2)

    def assert_steps_are_those_of_one_rank(self, mesh: str, variant: str) -> None:
        for outcomes in self.by_rank:
            outcome = outcomes["steps"][f"{mesh}: {variant}"]
            assert outcome["difference"] <= 1e-5
            for step, (own, others) in enumerate(zip(outcome["metrics"], self.metrics[variant], strict=True)):
                assert own == pytest.approx(others, rel=1e-4, abs=1e-6), step

    def assert_went_on(self, *outcomes: dict[str, Any]) -> None:
        """The second step, after a checkpoint, is that of the run that did not end."""
        for outcome in (*outcomes, *(outcomes["resumed"] for outcomes in self.by_rank)):
            assert outcome["difference"] <= 1e-5
            (last,) = outcome["metrics"]
            assert last == pytest.approx(self.metrics[VARIANT][-1], rel=1e-4, abs=1e-6)

    def assert_the_step_is_that_of_halves(self) -> None:
        for outcomes in self.by_rank:
            metrics, parameters, disturbed, at_once = outcomes["out of memory, shared rows"]
            notes, _, *outcome = disturbed
            assert "on 1 rank(s)" in notes[0]
            assert "on 4 rank(s)" in at_once[0][0]
            assert outcome == at_once[2:]
            halved = {name: value for name, value in outcome[0].items() if name != "guard/out_of_memory"}
            assert halved == pytest.approx(metrics, rel=1e-4, abs=1e-6)
            for numbers, undisturbed in zip(outcome[1], parameters, strict=True):
                assert numbers == pytest.approx(undisturbed, abs=3e-5 * max(0.01, *map(abs, undisturbed)))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, model: Path) -> FourRanks:
    return FourRanks("every_time", EVERY_TIME, tmp_path_factory.mktemp("four"), model)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory, model: Path) -> FourRanks:
    return FourRanks("grid", GRID, tmp_path_factory.mktemp("grid"), model)


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


@pytest.mark.parametrize(
    ("mesh", "dimensions"),
    [
        ("one copy", {"data": [EVERYONE], "shard": [EVERYONE]}),
        ("context 4", {"data": [[0], [1], [2], [3]], "context": [EVERYONE], "shard": [EVERYONE]}),
        (
            "begun",
            {
                "data": [[0, 2], [1, 3]],
                "context": [[0, 1], [2, 3]],
                "replicate": [[0, 2], [1, 3]],
                "shard": [[0, 1], [2, 3]],
            },
        ),
    ],
)
def test_neighbours_share_rows_and_a_copy_of_the_parameters(
    four: FourRanks, mesh: str, dimensions: dict[str, list[list[int]]]
) -> None:
    for rank in EVERYONE:
        own = {name: next(ranks for ranks in all_ if rank in ranks) for name, all_ in dimensions.items()}
        assert four.by_rank[rank]["groups"][mesh] == {
            name: group_of(ranks, rank) for name, ranks in {"world": EVERYONE, **own}.items()
        }


def test_ranks_with_the_same_shards_describe_them_alike(four: FourRanks) -> None:
    """48 rows are halved; of a copy of the model each rank has a half, whichever copy it is."""
    first, second, *others = (outcomes["shards"] for outcomes in four.by_rank)
    assert others == [first, second]
    assert first["model.embed_tokens.weight"] == [0, 24, True]
    assert second["model.embed_tokens.weight"] == [24, 48, True]
    assert all(same for rows in (first, second) for *_, same in rows.values())


@pytest.mark.parametrize("num_ranks", ["2", "4"])
def test_attention_by_heads_and_numbers_of_all_tokens_are_those_of_one_rank(
    four: FourRanks, num_ranks: str
) -> None:
    """With fewer key heads than ranks, and where the ranks do not divide them; with prefixes and windows."""
    for outcomes in four.by_rank:
        differences = outcomes["collectives"][num_ranks]
        assert len(differences) == 16
        for name, difference in differences.items():
            assert difference < (1e-12 if "64" in name else 1e-5), name


@pytest.mark.parametrize(("mesh", "variant"), EVERY_TIME)
def test_steps_move_the_parameters_as_on_one_rank(four: FourRanks, mesh: str, variant: str) -> None:
    """The models have two key heads; on four ranks that share rows each is on two of them."""
    four.assert_steps_are_those_of_one_rank(mesh, variant)


@pytest.mark.more
@pytest.mark.parametrize(("mesh", "variant"), GRID)
def test_steps_on_every_other_mesh_are_those_of_one_rank(grid: FourRanks, mesh: str, variant: str) -> None:
    grid.assert_steps_are_those_of_one_rank(mesh, variant)


def test_a_run_of_two_copies_goes_on_with_shared_rows_and_on_one_rank(four: FourRanks) -> None:
    with alone() as ranks:
        resume = str(four.checkpoints / "by 2 copies")
        single = against_one_rank(ranks, four.models, four.expected, VARIANT, resume=resume)
    four.assert_went_on(single)


@pytest.mark.more
def test_a_run_of_one_rank_goes_on_with_four_copies(grid: FourRanks) -> None:
    grid.assert_went_on()


def test_one_of_several_ranks_with_the_same_shards_writes_them(four: FourRanks) -> None:
    """Twice as many shards have some bytes more, and not twice as many as without copies."""
    sizes = {
        name: sum(path.stat().st_size for path in (four.checkpoints / name).glob("*.distcp"))
        for name in ("by one rank", "by 2 copies")
    }
    assert sizes["by 2 copies"] < 1.5 * sizes["by one rank"]


@pytest.mark.more
def test_a_rank_that_runs_out_of_memory_catches_up_with_averages_over_copies(grid: FourRanks) -> None:
    for outcomes in grid.by_rank:
        disturbed, (_, _, metrics, bits, after) = outcomes["out of memory"]
        notes, _, *outcome = disturbed
        assert "on 1 rank(s)" in notes[0]
        assert outcome == [metrics, bits, after]


def test_a_rank_with_experts_and_shared_rows_runs_out_of_memory_and_the_step_is_that_of_halves(
    four: FourRanks,
) -> None:
    four.assert_the_step_is_that_of_halves()


@pytest.mark.more
def test_a_rank_of_a_dense_model_that_shares_rows_runs_out_of_memory(grid: FourRanks) -> None:
    grid.assert_the_step_is_that_of_halves()


def test_sizes_that_do_not_divide_the_ranks_are_refused() -> None:
    environment = RankEnvironment.read({})
    for sizes, words in (
        ({"context": 2}, "1 ranks cannot share the tokens of rows in groups of 2"),
        ({"fsdp_size": 2}, "1 ranks cannot shard the parameters in groups of 2; set learner.fsdp_size"),
    ):
        try:
            with pytest.raises(ConfigError, match=words):
                store = open_store(environment, WAIT_S)
                form_group(environment, store, torch.device("cpu"), WAIT_S, **sizes)
        finally:
            leave_group()
