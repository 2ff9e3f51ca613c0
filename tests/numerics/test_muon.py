"""Muon: the arithmetic of torch's, whatever ranks share the matrices."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from paceline.learner.train.state.muon import MOMENTUM, Muon, Sharing, is_muons, step_of

pytestmark = pytest.mark.torch


def gradients(shape: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(shape[0])
    return [torch.randn(shape, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_whole_matrices_move_as_torchs_muon_moves_them(shape: tuple[int, int]) -> None:
    start = torch.randn(shape, generator=torch.Generator().manual_seed(9))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    muon = Muon([ours], momentum=0.9, weight_decay=0.1)
    muon.state[ours] = {MOMENTUM: torch.zeros(shape)}
    library = torch.optim.Muon(
        [theirs], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    for gradient in gradients(shape):
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        muon.step(0.02)
        library.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(ours, start, atol=0.01)


def test_matrices_of_layers_are_its_own() -> None:
    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    assert is_muons("model.layers.0.self_attn.q_proj.weight", matrix)
    assert is_muons("layers.0.mlp.up_proj.weight", matrix)
    assert not is_muons("model.layers.0.input_layernorm.weight", vector)
    assert not is_muons("model.embed_tokens.weight", matrix)
    assert not is_muons("lm_head.weight", matrix)


class Rank(Sharing):
    """One of several ranks, which are threads."""

    def __init__(self, rank: int, size: int, sent: dict[tuple[int, int], Tensor], barrier: threading.Barrier):
        self.size, self._rank, self._group = size, rank, object()  # type: ignore[assignment]
        self._sent, self._barrier = sent, barrier

    def _exchanged(self, values: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        for to, part in enumerate(values.split(list(sends))):
            self._sent[self._rank, to] = part
        self._barrier.wait(60)
        received = [self._sent[sender, self._rank] for sender in range(self.size)]
        self._barrier.wait(60)
        assert [part.numel() for part in received] == list(receives)
        return torch.cat(received)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_sharded_matrices_are_orthogonalized_as_whole_ones_are_to_the_bit(size: int) -> None:
    """Rows that do not divide, ranks without rows, and fewer matrices than ranks."""
    shapes = [(6, 4), (3, 7)][: size - 1]
    matrices = [torch.randn(shape, generator=torch.Generator().manual_seed(7)) for shape in shapes]
    sent: dict[tuple[int, int], Tensor] = {}
    barrier, parts = threading.Barrier(size), dict[int, list[Tensor]]()

    def run(rank: int) -> None:
        rows = [list(matrix.chunk(size)) for matrix in matrices]
        own = [
            part[rank] if rank < len(part) else matrix[:0]
            for part, matrix in zip(rows, matrices, strict=True)
        ]
        parts[rank] = Rank(rank, size, sent, barrier).orthogonalized(matrices, own)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for place, matrix in enumerate(matrices):
        assert torch.equal(torch.cat([parts[rank][place] for rank in range(size)]), step_of(matrix))
