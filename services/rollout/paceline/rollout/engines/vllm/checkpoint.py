"""Turns the tensors of a live Hugging Face model into those of its checkpoint, which vLLM's loader reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def checkpoint_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as a checkpoint has them, one after another."""
    for name, tensor in tensors:
        yield from _split_experts(name, tensor)


def _split_experts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Splits the experts that transformers stacks in memory into one tensor per expert and projection.

    `...experts.gate_up_proj` of shape (E, 2 I, H) becomes `...experts.0.gate_proj.weight` (I, H) and so on,
    `...experts.down_proj` (E, H, I) becomes `...experts.0.down_proj.weight` (H, I), as Qwen's
    Mixture-of-Experts checkpoints have it. Every other tensor passes as it is.
    """
    if tensor.ndim == 3 and name.endswith(_GATE_UP):
        prefix = name.removesuffix("gate_up_proj")
        for expert, fused in enumerate(tensor):
            gate_proj, up_proj = fused.chunk(2, dim=0)
            yield f"{prefix}{expert}.gate_proj.weight", gate_proj
            yield f"{prefix}{expert}.up_proj.weight", up_proj
    elif tensor.ndim == 3 and name.endswith(_DOWN):
        prefix = name.removesuffix("down_proj")
        for expert, down in enumerate(tensor):
            yield f"{prefix}{expert}.down_proj.weight", down
    else:
        yield name, tensor
