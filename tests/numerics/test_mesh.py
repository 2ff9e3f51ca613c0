"""The learner's mesh over gloo: the ranks along each dimension, and steps on any mesh as on one rank."""

from __future__ import annotations

import math
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
from paceline.learner.export import read_policy
from paceline.models.model_shape import ModelShape
from paceline.storage.folder import Folder
from support import tensor_ranks
from support.architectures import tiny_config
from support.expert_ranks import KINDS as EXPERT_KINDS
from support.learner_fakes import VOCAB_SIZE
from support.learner_ranks import WAIT_S, alone, run_ranks
from support.mesh_ranks import EVERY_TIME, EXPERTS, GRID, VARIANT
from support.mesh_steps import against_one_rank, steps, write_models

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

EVERYONE = [0, 1, 2, 3]
NORM = "input_layernorm.weight"
WHOLE = (
    "gemma4_text",
    "minimax_m2",
    "olmoe",
    "phi",
    "phi3",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
"""Families of which nothing can be divided, or whose ranks cannot share tokens"""
FUSED = ("arcee", "glm", "glm4", "llama4_text", "phi", "starcoder2")
"""Families of which less is divided than the memory plan takes for granted"""


class FourRanks:
    """What four ranks computed, `by_rank`, and one rank's run of each of their variants.

    Attributes:
        models, checkpoints, expected: folders: of models by kind, of checkpoints, of parameters by variant.
    """

    def __init__(self, function: str, cases: Sequence[tuple[str, str]], folder: Path, small: Path) -> None:
        self.models = write_models(folder / "models")
        if function == "grid":
            tensor_ranks.write_configs(self.models / "families")
        self.checkpoints, self.expected = folder / "checkpoints", folder / "expected"
        self.expected.mkdir()
        self.metrics: dict[str, list[dict[str, float]]] = {}
        with alone() as ranks:
            for variant in {VARIANT, *(variant for _, variant in cases)}:
                place = str(self.checkpoints / f"{variant} by one rank")
                writes = {"checkpoint": place} if variant in (VARIANT, EXPERTS) else {}
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

    def assert_went_on(self, *outcomes: dict[str, Any], key: str = "resumed", variant: str = VARIANT) -> None:
        """The steps after a checkpoint are those of the run that did not end."""
        for outcome in (*outcomes, *(outcomes[key] for outcomes in self.by_rank)):
            assert outcome["difference"] <= 1e-5
            for own, others in zip(outcome["metrics"], self.metrics[variant][1:], strict=True):
                assert own == pytest.approx(others, rel=1e-4, abs=1e-6)

    def assert_families_are_divided(self) -> None:
        """Results and gradients are those of whole matrices, and the memory plan counts what is divided."""
        for outcomes in self.by_rank:
            for kind, outcome in outcomes["families"].items():
                if isinstance(outcome, str):
                    assert kind in WHOLE, outcome
                    continue
                assert kind not in WHOLE
                difference, parts = outcome
                assert difference < 1e-5, kind
                own = sum(math.prod(shape) for name, shape in parts.items() if name.endswith("weight"))
                shape = ModelShape.of(tiny_config(kind, vocab_size=VOCAB_SIZE).to_dict())
                if kind not in FUSED and shape is not None:
                    assert shape.divided(2) == len(self.by_rank) * own, kind

    def assert_the_step_is_that_of_halves(self, sharing: str = "shared rows") -> None:
        for outcomes in self.by_rank:
            metrics, parameters, disturbed, at_once = outcomes[f"out of memory, {sharing}"]
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


def test_divided_experts_are_sharded_among_the_ranks_that_have_them(four: FourRanks) -> None:
    """Of four experts, the ranks 0 and 2 have the first two, and one each."""
    shards = [outcomes["shards of experts"] for outcomes in four.by_rank]
    for name in ("gate_up_proj", "down_proj"):
        parts = [rows[f"model.layers.0.mlp.experts.{name}"] for rows in shards]
        assert parts == [[0, 1, True], [2, 3, True], [1, 2, True], [3, 4, True]]
    assert [rows["model.embed_tokens.weight"][0] for rows in shards] == [0, 12, 24, 36]
    assert all(same for rows in shards for *_, same in rows.values())


def test_divided_matrices_are_sharded_among_the_ranks_that_have_the_same_part(four: FourRanks) -> None:
    """The ranks 0 and 2 have the first half of each matrix, the ranks 1 and 3 the second."""
    shards = [outcomes["shards of matrices"] for outcomes in four.by_rank]
    layer = "model.layers.0."
    parts = {name: [rows[layer + name][:2] for rows in shards] for name in ("mlp.up_proj.weight", NORM)}
    assert parts["mlp.up_proj.weight"] == [[0, 12], [24, 36], [12, 24], [36, 48]]
    assert parts[NORM] == [[0, 8], [8, 16], [16, 24], [24, 32]]  # not divided, over all ranks
    for rows in shards:
        # Of the last matrices a rank has half of the columns, which are too few for a block of 8-bit codes.
        wrong = {name.rpartition(".layers.0.")[2] for name, (*_, same) in rows.items() if not same}
        assert {name for name in wrong if ".layers." not in name} == {
            "self_attn.o_proj.weight",
            "mlp.down_proj.weight",
        }


@pytest.mark.more
def test_layers_of_all_families_compute_with_divided_matrices_what_they_do_with_whole_ones(
    grid: FourRanks,
) -> None:
    grid.assert_families_are_divided()


def test_layers_of_divided_experts_compute_what_one_rank_does(four: FourRanks) -> None:
    """Of each family; also where all tokens go to one rank, and none to the others."""
    for outcomes in four.by_rank:
        assert len(outcomes["experts"]) == 2 * len(EXPERT_KINDS)
        for name, difference in outcomes["experts"].items():
            assert difference < 1e-5, name


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


def test_a_run_with_divided_experts_goes_on_on_one_rank_and_one_ranks_run_with_divided_experts(
    four: FourRanks,
) -> None:
    with alone() as ranks:
        resume = str(four.checkpoints / "by experts 2")
        single = against_one_rank(ranks, four.models, four.expected, EXPERTS, resume=resume)
    four.assert_went_on(single, key="resumed experts", variant=EXPERTS)


def test_a_checkpoint_of_divided_experts_is_exported_as_one_ranks(four: FourRanks) -> None:
    divided, single = (
        dict(read_policy(Folder.at(four.checkpoints / name)))
        for name in ("by experts 2", f"{EXPERTS} by one rank")
    )
    assert divided.keys() == single.keys()
    assert any(".experts." in name for name in divided)
    for name, tensor in divided.items():
        torch.testing.assert_close(tensor, single[name], rtol=1e-5, atol=1e-6)


def test_a_run_with_divided_matrices_goes_on_with_smaller_parts_and_on_one_rank(four: FourRanks) -> None:
    with alone() as ranks:
        resume = str(four.checkpoints / "by tensor 2")
        single = against_one_rank(ranks, four.models, four.expected, VARIANT, resume=resume)
    four.assert_went_on(single, key="resumed matrices")


@pytest.mark.more
def test_a_run_of_one_rank_goes_on_with_four_copies(grid: FourRanks) -> None:
    grid.assert_went_on()


def test_one_of_several_ranks_with_the_same_shards_writes_them(four: FourRanks) -> None:
    """Twice as many shards have some bytes more, and not twice as many as without copies."""
    sizes = {
        name: sum(path.stat().st_size for path in (four.checkpoints / name).glob("*.distcp"))
        for name in (f"{VARIANT} by one rank", "by 2 copies")
    }
    assert sizes["by 2 copies"] < 1.5 * sizes[f"{VARIANT} by one rank"]


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


def test_a_rank_runs_out_of_memory_after_it_announced_tokens_to_experts(four: FourRanks) -> None:
    four.assert_the_step_is_that_of_halves("divided experts")


def test_a_rank_runs_out_of_memory_where_others_recompute_layers_with_its_tokens(four: FourRanks) -> None:
    four.assert_the_step_is_that_of_halves("recomputed experts")


@pytest.mark.more
def test_a_rank_runs_out_of_memory_where_others_recompute_layers_with_its_part_of_rows(
    grid: FourRanks,
) -> None:
    """The others attend to zeros of that rank, so their routers would choose other experts than before."""
    grid.assert_the_step_is_that_of_halves("recomputed experts")


@pytest.mark.more
def test_a_rank_with_a_part_of_the_matrices_runs_out_of_memory(grid: FourRanks) -> None:
    """The others' tokens lack its summands, and the step is repeated."""
    grid.assert_the_step_is_that_of_halves("divided matrices")


@pytest.mark.more
def test_a_rank_runs_out_of_memory_among_compiled_layers(grid: FourRanks) -> None:
    grid.assert_the_step_is_that_of_halves("compiled experts")


@pytest.mark.more
def test_a_rank_of_a_dense_model_that_shares_rows_runs_out_of_memory(grid: FourRanks) -> None:
    grid.assert_the_step_is_that_of_halves()


def test_sizes_that_do_not_divide_the_ranks_are_refused() -> None:
    environment = RankEnvironment.read({})
    for sizes, words in (
        ({"context": 2}, "1 ranks cannot share the tokens of rows in groups of 2"),
        ({"expert": 2}, "a copy on 1 ranks cannot be divided in groups of 2; set learner.expert_parallel"),
        ({"tensor": 2}, "a copy on 1 ranks cannot be divided in groups of 2; set learner.tensor_parallel"),
        ({"fsdp_size": 2}, "1 ranks cannot shard the parameters in groups of 2; set learner.fsdp_size"),
    ):
        try:
            with pytest.raises(ConfigError, match=words):
                store = open_store(environment, WAIT_S)
                form_group(environment, store, torch.device("cpu"), WAIT_S, **sizes)
        finally:
            leave_group()
