"""Turns tensors of a live Hugging Face model into those of its checkpoint, which engines' loaders read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from paceline.models.facts import family_of
from paceline.weights import corrections

logger = logging.getLogger(__name__)

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def learner_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes, by name, of a learner's tensors for a Hugging Face configuration.

    Empty if transformers has no causal language model for it.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind: Any = (
        AutoModelForImageTextToText if family_of(config.model_type).takes_images else AutoModelForCausalLM
    )
    try:
        with torch.device("meta"):
            model = kind.from_config(config)
    except (ImportError, KeyError, TypeError, ValueError, AttributeError) as error:
        logger.info("the tensors of %s are unknown here: %s", config.model_type, error)
        return {}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, buffer in model.named_buffers():
        if name.endswith(corrections.BUFFER):
            parts = name.removesuffix(corrections.BUFFER) + corrections.PARTS
            shapes[parts] = (*buffer.shape, corrections.NUM_PARTS)
        elif name.endswith(corrections.FACTOR):
            shapes[name] = tuple(buffer.shape)
    return shapes


def checkpoint_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], *, model_type: str = "", keeps_stacks: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in the form of a checkpoint.

    Args:
        model_type: as in the model's config.json.
        keeps_stacks: whether stacks of experts that also exist in checkpoints stay stacks, under the names of
            parameters.
    """
    family = family_of(model_type)
    split = _split_experts
    if family.holds_experts_transposed:
        split = _split_transposed_experts
    elif family.stacks_experts:
        split = _whole_stack if keeps_stacks else _each_expert
    for name, tensor in corrections.as_stored(tensors):
        for stored, part in split(name, tensor):
            for live, own in family.stored_names:
                stored = stored.replace(live, own)
            yield stored, part


def _each_expert(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Names each expert of a stack as engines' loaders for gpt-oss expect it: `...experts.0.gate_up_proj`.

    That loader copies an entire stack into its parameter, bypassing the layer-by-layer collection of a
    reload.
    """
    prefix, is_stack, kind = name.rpartition(".experts.")
    if not is_stack:
        yield name, tensor
        return
    for expert, part in enumerate(tensor):
        yield f"{prefix}.experts.{expert}.{kind}", part


def _whole_stack(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Names a stack as an engine may name its parameter: `...experts.routed_experts.gate_up_proj`.

    Some accept gpt-oss's experts only as stacks, and under that name.
    """
    yield name.replace(".experts.", ".experts.routed_experts."), tensor


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


def _split_transposed_experts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Splits experts like `_split_experts`, from (E, H, 2 I) and (E, I, H)."""
    is_stack = tensor.ndim == 3 and name.endswith((_GATE_UP, _DOWN))
    yield from _split_experts(name, tensor.mT if is_stack else tensor)
