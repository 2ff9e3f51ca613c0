"""Sequences of many lengths in a few padded batches: attention and gradients are those of each by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.learner.batch import padded
from paceline.learner.batch.padded import MOST_SCORES, SHORT, STEP
from paceline.learner.batch.types import PackedSequences
from paceline.learner.model.decoder import attention
from support.padded_sequences import attention_one_by_one, many

CPU = torch.device("cpu")
HEADS, GROUPS, SIZE = 4, 2, 8


def one_by_one(inputs: list[Tensor], packed: PackedSequences, window: int | None) -> Tensor:
    def sees(queries: Tensor, keys: Tensor) -> Tensor:
        back = queries - keys
        return (back >= 0) & (back < (window or len(keys)))

    return attention_one_by_one(inputs, packed, sees)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("seed", "longest"), [(0, 6), (1, 40), (2, SHORT + 50)])
def test_attention_and_gradients_are_those_of_each_sequence_alone(
    seed: int, longest: int, window: int | None
) -> None:
    lengths, prefixes = many(seed, longest=longest)
    packed = PackedSequences.of(lengths, CPU, prefixes)
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> Tensor:
        return torch.randn(1, heads, sum(lengths), SIZE, generator=generator, dtype=torch.float64)

    inputs = [draw(heads).requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]
    weights = draw(HEADS).transpose(1, 2)
    expected = one_by_one(inputs, packed, window)
    out, _ = attention.packed_attention(
        torch.nn.Identity(), *inputs, None, packed=packed, sliding_window=window
    )
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    ours = torch.autograd.grad((out * weights).sum(), inputs)
    for gradient, other in zip(ours, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-12, rtol=1e-12)


def test_a_batch_of_the_demo_takes_a_few_calls_instead_of_hundreds() -> None:
    """32 prompts with 8 responses each."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    prefixes: list[int | None] = []
    for _ in range(32):
        prefixes += [None, *[len(lengths)] * 8]
        lengths += [int(rng.integers(10, 19)), *(int(n) for n in rng.integers(3, 13, 8))]
    packed = PackedSequences.of(lengths, CPU, prefixes)
    assert len(packed.blocks) > 200
    sizes = [(batch.num_queries, batch.num_keys) for batch in packed.padded.batches]
    assert sorted(sizes) == [(16, 16), (16, 32), (16, 48), (32, 32)]
    assert packed.padded is packed.padded, "made once"


def test_long_sequences_are_not_padded() -> None:
    packed = PackedSequences.of([SHORT + 1, SHORT + 3, SHORT + 1, SHORT], CPU)
    sizes = [(batch.num_sequences, batch.num_queries) for batch in packed.padded.batches]
    assert sizes == [(2, SHORT + 1), (1, SHORT + 3), (1, SHORT)]
    short = PackedSequences.of([3, STEP + 1], CPU)
    assert [batch.num_queries for batch in short.padded.batches] == [STEP, 2 * STEP]


def test_no_batch_holds_more_scores_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded, "MOST_SCORES", 4 * STEP * STEP)
    packed = PackedSequences.of([5, 7, 6, 8, 9, 5, 7, 4, 3, STEP], CPU)
    assert [batch.num_sequences for batch in packed.padded.batches] == [4, 4, 2]
    assert MOST_SCORES == 16 << 16, "float32: 4 MiB a head"
    longer = PackedSequences.of([10 * STEP, 10 * STEP], CPU)
    assert [batch.num_sequences for batch in longer.padded.batches] == [1, 1], "one has more, alone"


def test_what_stands_in_free_places_changes_nothing() -> None:
    """Not even its gradient: keys of other sequences and of free places have none."""
    packed = PackedSequences.of([3, 2, 5], CPU, [None, 0, 0])
    q, k, v = (torch.randn(1, heads, 10, SIZE, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS))
    out, _ = attention.packed_attention(torch.nn.Identity(), q, k, v, None, packed=packed)
    (gradient,) = torch.autograd.grad(out[0, 3:5].sum(), [v])
    assert gradient[0, :, :5].abs().sum(-1).gt(0).all(), "the prompt's and its own"
    assert not gradient[0, :, 5:].any(), "its neighbour's"
