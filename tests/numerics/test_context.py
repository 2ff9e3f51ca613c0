"""Ranks that share the tokens of rows compute what one rank does: collectives, and whole training steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from paceline.core.errors import ConfigError
from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import PackedRow
from paceline.learner.distributed.context import put_together
from paceline.learner.distributed.mesh import RankGroup
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model import architectures
from paceline.learner.model.networks import hidden_states
from paceline.learner.train.scoring.chunks import Planner, lengths
from paceline.learner.train.state.learner import Learner
from support.context_ranks import VARIANTS, steps
from support.learner_fakes import make_batch, run_config
from support.learner_ranks import run_ranks

pytestmark = pytest.mark.torch
NUM_LAYERS = 2


@pytest.fixture(scope="module")
def expected(
    model: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[dict[str, float]]]]:
    """A folder with one rank's parameters by variant, and its metrics."""
    folder, metrics = tmp_path_factory.mktemp("expected"), {}
    for variant in VARIANTS:
        metrics[variant], parameters = steps(ranks, str(model), variant)
        torch.save(parameters, folder / f"{variant}.pt")
    return folder, metrics


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_attention_by_heads_and_numbers_of_all_tokens_are_those_of_one_rank(num_ranks: int) -> None:
    """With fewer key heads than ranks, and where the ranks do not divide them; with prefixes and windows."""
    for differences in run_ranks("support.context_ranks:collectives", num_ranks, context=num_ranks):
        assert len(differences) == 16
        for name, difference in differences.items():
            assert difference < (1e-12 if "64" in name else 1e-5), name


@pytest.mark.parametrize(("context", "variants"), [(4, ("copies", "shared prompts")), (2, ("adapters",))])
def test_two_steps_move_the_parameters_as_on_one_rank(
    model: Path,
    expected: tuple[Path, dict[str, list[dict[str, float]]]],
    context: int,
    variants: tuple[str, ...],
) -> None:
    """The model has two key heads; on four ranks that share rows each is on two of them."""
    folder, metrics = expected
    seen: list[dict[str, Any]] = run_ranks(
        "support.context_ranks:against_one_rank", 4, str(model), str(folder), *variants, context=context
    )
    for by_variant in seen:
        assert by_variant.keys() == {*variants}
        for variant, ours in by_variant.items():
            assert ours["difference"] <= 1e-5, variant
            for step, (own, others) in enumerate(zip(ours["metrics"], metrics[variant], strict=True)):
                assert own == pytest.approx(others, rel=1e-4, abs=1e-6), (variant, step)


def test_a_micro_batch_has_the_token_budgets_of_all_ranks_that_share_it(model: Path, ranks: Ranks) -> None:
    learner = {"device": "cpu", "world_size": 2, "context_parallel": 2}
    config = run_config(model, actor={"ppo_max_token_len_per_gpu": 20}, learner=learner)
    rows, _ = make_batch()
    assert Planner(Learner.load(config, ranks)).budget(lengths(rows)) == 40


def test_a_rank_without_a_response_token_computes_one_number_that_counts_nowhere(ranks: Ranks) -> None:
    """The second of two ranks, of a row whose only response token is predicted by the first token."""
    row = PackedRow(
        index=0,
        prompt_token_ids=np.array([3], np.int32),
        response_token_ids=np.array([4], np.int32),
        response_mask=np.ones(1, np.uint8),
        response_log_probs=np.zeros(1, np.float32),
    )
    seen: dict[str, Any] = {}

    class Body(torch.nn.Module):
        def forward(self, **inputs: Any) -> Any:
            seen.update(inputs)
            return SimpleNamespace(last_hidden_state=torch.tensor([[[7.0]]]))

    second = RankGroup(rank=1, size=2, process_group=ranks.world.process_group)
    own = hidden_states(Body(), pack([row], torch.device("cpu")), context=second)
    assert (seen["input_ids"].tolist(), seen["position_ids"].tolist()) == ([[4]], [[1]])
    assert seen["packed"].context is second
    assert own.states.tolist() == [[7.0]]
    assert own.part_of(torch.tensor([5])).tolist() == [0]
    assert put_together(torch.tensor([-9.0]), own.places, 1, ranks.world).tolist() == [0.0]


@pytest.mark.parametrize(
    ("heads", "has_experts", "model_type", "reason"),
    [
        (6, False, "qwen2", "4 ranks cannot share the 6 attention heads"),
        (8, True, "qwen3_moe", "context_parallel: 1 for a model with experts"),
        (8, False, "qwen2_5_vl", "rows with images"),
    ],
)
def test_what_ranks_cannot_share_is_refused(
    heads: int, has_experts: bool, model_type: str, reason: str
) -> None:
    class Config:
        num_attention_heads = heads

        def get_text_config(self) -> Config:
            return self

    config = Config()
    config.model_type = model_type  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=reason):
        architectures.require_shared_tokens(config, 4, has_experts=has_experts)
