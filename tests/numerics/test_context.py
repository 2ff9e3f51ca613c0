"""Ranks that share the tokens of rows: which tokens each computes, and what they refuse."""

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
from paceline.learner.train.scoring import Planner, lengths
from paceline.learner.train.state.learner import Learner
from support.learner_fakes import make_batch, run_config

pytestmark = pytest.mark.torch


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


def test_heads_that_ranks_cannot_share_evenly_are_refused() -> None:
    class Config:
        num_attention_heads = 6

        def get_text_config(self) -> Config:
            return self

    with pytest.raises(ConfigError, match="4 ranks cannot share the 6 attention heads .* a divisor of 6"):
        architectures.require_shared_tokens(Config(), 4)
