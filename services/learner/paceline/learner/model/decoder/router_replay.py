"""Sends tokens to the experts that the engine chose for them (`actor.router_replay`).

R3, arXiv:2510.11370. Only a router's indices are replaced: the weights of the chosen experts are the
learner's, of its own logits, so the router learns as ever.

choices of a micro-batch (T, L, K) -> `give_choices` -> each router's (T, K) -> its forward pass
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import ModelError
from paceline.learner.batch.types import MicroBatch
from paceline.learner.distributed.context import added_up
from paceline.learner.distributed.mesh import RankGroup
from paceline.learner.model.decoder.experts import routers

_SOFTMAX = {"Qwen2Moe", "Qwen3Moe", "Qwen3Next", "Qwen3_5Moe", "Olmoe", "Mixtral", "DeepseekV2"}
_SIGMOID = {"DeepseekV3", "Glm4Moe", "Glm4MoeLite", "MiniMaxM2"}
_OF_CHOSEN = {"GptOss"}
"""Families whose weights are the softmax of the chosen logits."""
_ALWAYS_SUM_TO_1 = {"Qwen3_5Moe", "Mixtral", "MiniMaxM2"}
_LEAST_SUM = 1e-20
"""What families with a factor of their weights add to the sum by which they divide."""


Routers = Sequence[Any]
"""Routers that `use_given_choices` has changed."""


def use_given_choices(lm: nn.Module) -> Routers:
    """Makes routers take the choices that `give_choices` gives them; returns them, one per layer.

    Raises:
        ModelError: it is not known how a router of this kind weighs its experts.
    """
    replaying: list[Any] = [*routers(lm)]
    for router in replaying:
        kind: Any = type(router)
        if _family(router) not in _SOFTMAX | _SIGMOID | _OF_CHOSEN:
            raise ModelError(
                f"actor.router_replay: Paceline does not know how {kind.__name__} weighs the experts that it "
                "chooses; leave it out, or use another model of docs/models.md"
            )
        router.__class__ = _replaying_kind(kind)
        router.given, router.own_choice = None, None
    return replaying


# One class for all layers, so that they share compiled code.
@cache
def _replaying_kind(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, hidden: Tensor, *correction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        plain: Any = kind.forward
        logits, weights, own = plain(self, hidden, *correction)
        is_given = (self.given[:, 0] != self.given[:, 1]).unsqueeze(-1)
        indices = torch.where(is_given, self.given.long(), own)
        if self.notes_choice:
            self.own_choice = own
        return logits, _weights(self, logits, indices).to(weights.dtype), indices

    return type(kind.__name__, (kind,), {"forward": forward})


def _family(router: nn.Module) -> str:
    name = type(router).__name__
    return name.removesuffix("TopKRouter").removesuffix("TopkRouter").removesuffix("Text")


def _weights(router: Any, logits: Tensor, indices: Tensor) -> Tensor:
    """Returns the weights of experts, (T, K), by the same operations as transformers' routers, to the bit."""
    family = _family(router)
    if family in _OF_CHOSEN:
        return torch.softmax(logits.gather(-1, indices), dim=-1)
    scores = logits.float()
    scores = scores.sigmoid() if family in _SIGMOID else torch.softmax(scores, dim=-1)
    weights = scores.gather(-1, indices)
    factor = getattr(router, "routed_scaling_factor", None)
    if family in _ALWAYS_SUM_TO_1 or getattr(router, "norm_topk_prob", False):
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total if factor is None else total + _LEAST_SUM)
    return weights if factor is None else weights * factor


def give_choices(replaying: Routers, choices: Tensor | None, num_tokens: int, start: int) -> None:
    """Gives each router the choices of the next pass; its backward pass still reads them.

    Args:
        choices: (T, L, K) on the host; None if no token has any.
        num_tokens: tokens of this rank in the pass; those behind the T have no choices.
        start: the first of them among the T.

    Raises:
        ModelError: the choices are of another model.
    """
    first = replaying[0]
    shape = (len(replaying), int(first.top_k))
    given = torch.zeros(num_tokens, *shape, dtype=torch.uint8 if first.num_experts <= 256 else torch.int16)
    if choices is not None:
        largest = int(choices.max()) if choices.numel() else 0
        if choices.shape[1:] != shape or not largest < first.num_experts or int(choices.min()) < 0:
            raise ModelError(
                f"the engine chose {choices.shape[2]} experts per token in {choices.shape[1]} layers, with "
                f"numbers up to {largest}; the model chooses {shape[1]} of {first.num_experts} in {shape[0]} "
                "layers: engine and learner run different models"
            )
        own = choices[start : start + num_tokens]
        given[: len(own)] = own
    by_layer = given.transpose(0, 1).contiguous().to(first.weight.device, non_blocking=True)
    for router, part in zip(replaying, by_layer.unbind(), strict=True):
        router.given = part


def changes_by_token(
    replaying: Routers, batch: MicroBatch, context: RankGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Returns, by response token, what the state that predicts it had: changed choices, and none.

    Call it after a pass within `recorded_choices`.

    Returns:
        (n,), the share of layers in which the router would have chosen other experts, and (n,), 1 where the
        engine gave no choices and the router chose by itself.
    """
    numbers = []
    for router in replaying:
        given, own = (x.long().sort(-1).values for x in (router.given, router.own_choice))
        is_given = (router.given[:, 0] != router.given[:, 1]).float()
        numbers.append(torch.stack([(given != own).any(-1) * is_given, 1.0 - is_given]))
        router.own_choice = None
    means = torch.stack(numbers).mean(0)  # (2, T/n)
    if context is not None:
        length = means.shape[1]
        everywhere = means.new_zeros(2, length * context.size)
        everywhere[:, context.rank * length : (context.rank + 1) * length] = means
        means = added_up(everywhere, context)
    changed, missing = means.index_select(1, batch.score_positions)
    return changed, missing
