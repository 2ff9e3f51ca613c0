"""Handles Mixture of Experts: float32 routers, the balance of their choices, a token's active parameters.

router's logits of all layers -> shares of choices and of probability per row -> balance, 1 if even

`paceline.learner.model.decoder.router_replay` replaces what routers choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.learner.batch.types import MicroBatch
from paceline.learner.distributed.context import added_up
from paceline.learner.distributed.mesh import RankGroup
from paceline.learner.distributed.shards import own_part
from paceline.weights import corrections

_IN_FLOAT32 = "TopkRouter"
"""Class names of routers end with this if they compute in float32 (DeepSeek, GLM), else with "TopKRouter"."""


def routers(lm: nn.Module) -> list[nn.Module]:
    """Returns the routers, one per layer with experts, in order; they return (logits, weights, indices)."""
    return [module for module in lm.modules() if type(module).__name__.endswith(("TopKRouter", _IN_FLOAT32))]


def use_float32_routers(lm: nn.Module) -> None:
    """Makes routers compute in float32 where the rest computes in half precision.

    Rounding of a router's logits changes which experts a token uses. The weights do not change.
    """
    for router in routers(lm):
        kind: Any = type(router)
        if not kind.__name__.endswith(_IN_FLOAT32):
            router.__class__ = _float32_kind(kind)


def use_correction_parameters(lm: nn.Module) -> None:
    """Turns the corrections of routers' scores, and the layers' factors, into frozen parameters.

    See `corrections`.
    """
    buffer, name = (end.removeprefix(".") for end in (corrections.BUFFER, corrections.PARTS))
    corrections.use_factor_parameters(lm)
    for module in lm.modules():
        # The correction belongs to a router, or to the layer of experts with a router.
        correction = module._buffers.pop(buffer, None)
        if correction is None:
            continue
        parts = torch.empty(*correction.shape, corrections.NUM_PARTS, device=correction.device)
        module.register_parameter(name, nn.Parameter(parts, requires_grad=False))
        kind: Any = type(module)
        module.__class__ = _corrected_kind(kind)


def correction_parameters(lm: nn.Module) -> list[nn.Parameter]:
    """Returns the routers' corrections, (E, 3) per layer with one, in order."""
    return [parameter for name, parameter in lm.named_parameters() if name.endswith(corrections.PARTS)]


@torch.no_grad()
def move_corrections(lm: nn.Module, rate: float, counts: Tensor) -> None:
    """Raises corrections of experts that are chosen less than their layer's mean, and lowers the others'.

    So the load becomes even without a loss that would disturb the gradient (arXiv:2408.15664, DeepSeek-V3).

    Args:
        rate: by how much; 0 changes nothing.
        counts: what `num_choices` returned for a mini-batch, added up over all ranks.
    """
    if not rate:
        return
    parameters = correction_parameters(lm)
    by_layer = torch.split(counts, [len(parameter) for parameter in parameters])
    for parameter, of_layer in zip(parameters, by_layer, strict=True):
        local, box = own_part(parameter)
        moves = rate * (of_layer.mean() - of_layer).sign()[box.slices[0]].to(local.device)
        local.copy_(corrections.split(corrections.join(local) + moves.float()))


# One class for all layers, so that they share compiled code.
@cache
def _float32_kind(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, hidden: Tensor, *correction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        plain: Any = kind.forward
        logits, weights, indices = plain(_InFloat32(self), hidden.float(), *correction)
        return logits, weights.to(hidden.dtype), indices

    return type(kind.__name__, (kind,), {"forward": forward})


@cache
def _corrected_kind(kind: type[nn.Module]) -> type[nn.Module]:
    buffer, name = (end.removeprefix(".") for end in (corrections.BUFFER, corrections.PARTS))
    joined = property(lambda self: corrections.join(getattr(self, name)))
    return type(kind.__name__, (kind,), {buffer: joined})


class _InFloat32:
    """A router's attributes with its tensors in float32; its class's `forward` reads nothing else."""

    def __init__(self, router: nn.Module) -> None:
        self._router = router

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._router, name)
        return value.float() if isinstance(value, Tensor) else value


def note_choices(lm: nn.Module) -> None:
    """Makes routers record their choices for `recorded_choices`; call it before layers are compiled.

    The hook stays installed and checks a flag, because adding or removing it would recompile every layer.
    """
    for router in routers(lm):
        router.notes_choice, router.choice = False, None  # type: ignore[assignment]
        router.register_forward_hook(_note)


def _note(router: Any, arguments: Any, result: tuple[Tensor, Tensor, Tensor]) -> None:
    if router.notes_choice:
        router.choice = (result[0], result[2])


@contextmanager
def recorded_choices(lm: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collects (logits, indices) of each router's next forward pass, (T, E) and (T, K).

    The list is filled at the end of the block. The softmax of the logits is each expert's share of the
    scores, even for routers that score by sigmoid (those with a correction, and Llama 4's). A layer that the
    backward pass repeats records nothing the second time. The layer must save the same tensors as the first
    time, so recording computes no new ones.
    """
    noting: list[Any] = [*routers(lm)]
    choices: list[tuple[Tensor, Tensor]] = []
    for router in noting:
        router.notes_choice = True
    try:
        yield choices
    finally:
        is_corrected = any(name.endswith(corrections.PARTS) for name, _ in lm.named_parameters())
        for router in noting:
            if router.choice is not None:
                logits, indices = router.choice
                is_sigmoid = is_corrected or getattr(router, "is_sigmoid", False)
                choices.append((F.logsigmoid(logits) if is_sigmoid else logits, indices))
            router.notes_choice, router.choice = False, None


def _predicting(batch: MicroBatch, length: int, context: RankGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the states that predict a response, their rows, (S,) each, and the number per row, (B,).

    With ranks in `context` the states are those of this rank, counted from its first of `length` on; the
    numbers are of all.
    """
    inside = batch.places < len(batch.targets)
    states = batch.score_positions[batch.places[inside]]
    num_rows = batch.places.shape[0]
    rows = torch.arange(num_rows, device=states.device).unsqueeze(1).expand_as(inside)[inside]
    if context is not None:
        states = states - context.rank * length
        own = (states >= 0) & (states < length)
        states, rows = states[own], rows[own]
    return states, rows, inside.sum(-1)


def num_choices(
    choices: Sequence[tuple[Tensor, Tensor]], batch: MicroBatch, context: RankGroup | None = None
) -> Tensor:
    """Counts how often each expert is chosen for the states that predict responses.

    Args:
        choices, batch, context: as for `balance_by_row`.

    Returns:
        (E of the first layer + E of the second + ...), float64.
    """
    states, _, _ = _predicting(batch, len(choices[0][0]), context)
    counts = []
    for logits, indices in choices:
        chosen = indices[states].flatten()
        zeros = torch.zeros(logits.shape[-1], dtype=torch.float64, device=logits.device)
        counts.append(zeros.index_add(0, chosen, torch.ones_like(chosen, dtype=torch.float64)))
    added = torch.cat(counts)
    return added if context is None else added_up(added, context)


def balance_by_row(
    choices: Sequence[tuple[Tensor, Tensor]], batch: MicroBatch, context: RankGroup | None = None
) -> Tensor:
    """Returns how evenly the states that predict a row's response choose their experts.

    DeepSeek-V3's sequence-wise loss (arXiv:2412.19437, equations 17 to 20): the sum over experts of f P, with
    f being E times the expert's share of the choices, and P its mean probability. It is 1 if the choices are
    even, and at most E / K, where K experts take everything. It is computed per row, so it does not depend on
    other rows of the micro-batch. Masks are ignored. The result is (B,), the mean over layers.

    Args:
        choices: logits (T, E) and indices (T, K) per layer; with n ranks in `context`, (T/n, ...).
        batch: batch of T tokens.
        context: the ranks that share the tokens, and add up their counts.
    """
    states, rows, num_states = _predicting(batch, len(choices[0][0]), context)
    num_rows, lengths = len(num_states), num_states.clamp(min=1)
    total = torch.zeros(num_rows, device=states.device)
    for logits, indices in choices:
        num_experts, num_chosen = logits.shape[-1], indices.shape[-1]
        probs = torch.softmax(logits[states].float(), dim=-1)
        chosen = torch.zeros_like(probs).scatter_(-1, indices[states], 1.0)
        zeros = probs.new_zeros(num_rows, num_experts)
        counts, sums = (zeros.index_add(0, rows, values) for values in (chosen, probs))
        if context is not None:
            counts, sums = added_up(torch.stack([counts, sums]), context)
        total = total + (counts * sums).sum(-1) * num_experts / (num_chosen * lengths.square())
    return total / len(choices)


def active_parameters(layers: nn.Module, config: Any, *, trained: bool) -> int:
    """Counts the parameters that one token uses: of the experts, only those that it is sent to.

    Args:
        trained: count trained parameters; else frozen ones.
    """
    per_token = getattr(config, "num_experts_per_tok", None)
    total = 0
    for name, parameter in layers.named_parameters():
        if parameter.requires_grad != trained or name.endswith(corrections.PARTS):
            continue
        is_stack = parameter.ndim == 3 or name.endswith("_proj_bias")
        is_expert = per_token is not None and ".experts." in name and is_stack
        used = int(per_token or 0) if is_expert else parameter.shape[0]
        total += parameter.numel() // parameter.shape[0] * used
    return total
