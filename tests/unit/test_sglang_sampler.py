"""Draws of SGLang's batches by seed and position, and the log-probability of what was drawn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.rollout.engines.sampling.draw import draw, uniforms  # noqa: E402
from paceline.rollout.engines.sglang.sampler import GREEDY, drawn  # noqa: E402

pytestmark = pytest.mark.torch

VOCAB = 700


def batch(temperatures: list[float], seeds: list[int], top_p: float = 1.0, top_k: int = 1 << 30) -> Any:
    """What of SGLang's SamplingBatchInfo is read."""
    return SimpleNamespace(
        temperatures=torch.tensor(temperatures).unsqueeze(-1),
        sampling_seed=torch.tensor(seeds),
        top_ps=torch.full((len(seeds),), top_p),
        top_ks=torch.full((len(seeds),), top_k),
        need_top_p_sampling=top_p < 1,
        need_top_k_sampling=top_k < VOCAB,
    )


@pytest.fixture
def logits() -> Any:
    return torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def test_a_row_is_drawn_by_its_seed_and_the_position_of_its_token(logits: Any) -> None:
    positions = torch.tensor([0, 5, 6, 6])
    tokens, log_probs = drawn(logits, batch([1.0, 0.5, 2.0, 2.0], [7, 8, 9, 10]), positions)
    numbers = torch.stack([uniforms(torch.tensor([seed]), 10)[0] for seed in (7, 8, 9, 10)])
    divided = (logits / torch.tensor([[1.0], [0.5], [2.0], [2.0]])).log_softmax(-1)
    expected = draw(divided, numbers[torch.arange(4), positions + 1])
    assert tokens.tolist() == expected.tolist()
    torch.testing.assert_close(log_probs, divided[torch.arange(4), tokens])
    alone, _ = drawn(logits[2:3], batch([2.0], [9]), positions[2:3])
    assert alone.tolist() == tokens[2:3].tolist()


def test_greedy_rows_take_the_likeliest_token_and_its_log_probability_of_temperature_1(logits: Any) -> None:
    tokens, log_probs = drawn(logits, batch([GREEDY, 1.0, GREEDY, 1.0], [1, 2, 3, 4]), torch.zeros(4).long())
    assert tokens[::2].tolist() == logits.argmax(-1)[::2].tolist()
    torch.testing.assert_close(log_probs[::2], logits.log_softmax(-1).max(-1).values[::2])


def test_truncated_rows_have_log_probabilities_of_what_is_kept(logits: Any) -> None:
    tokens, log_probs = drawn(logits, batch([1.0] * 4, [1, 2, 3, 4], top_k=1), torch.zeros(4).long())
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(log_probs, torch.zeros(4))
    tokens, log_probs = drawn(logits, batch([1.0] * 4, [1, 2, 3, 4], top_p=0.3), torch.zeros(4).long())
    assert (log_probs > logits.log_softmax(-1)[torch.arange(4), tokens]).all()
