"""Chooses how many learner ranks share a copy of the weights, where they are on several hosts."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config.run import RunConfig
from paceline.engines.memory import GIB, engine_while_training
from paceline.models.model_shape import ModelShape
from paceline.sizing.memory.learner_memory import LearnerMemory
from paceline.sizing.memory_choice import USABLE_SHARE
from paceline.sizing.model_files import model_tree


def settle_copies(
    config: RunConfig, ranks_per_host: Sequence[int], totals: Sequence[int]
) -> tuple[RunConfig, list[str]]:
    """Gives each host a copy of weights and optimizer where the memory plan has room for it.

    A layer's weights are gathered within each host then, and only gradients cross the network. The sums of
    gradients have another order, and so another rounding.

    Args:
        config: with `actor.memory` chosen.
        ranks_per_host: learner ranks of each host that has any.
        totals: bytes of a GPU of each of these hosts, as far as they are known.

    Returns:
        The configuration, and in words why it has which `learner.fsdp_size`, if we chose it.
    """
    if config.learner.fsdp_size != "auto":
        return config, []
    if len(ranks_per_host) == 1:
        return _with_size(config, None), []
    if why := _why_not(config, ranks_per_host, totals):
        words = f"learner.fsdp_size: one copy of the weights over all hosts, as {why}"
        return _with_size(config, None), [words]
    size, reason = ranks_per_host[0], "each host has a copy of the weights, which are gathered within it"
    return _with_size(config, size), [f"learner.fsdp_size={size}: {reason}"]


def _why_not(config: RunConfig, ranks_per_host: Sequence[int], totals: Sequence[int]) -> str:
    """Why the hosts have no copy each; "" if they can."""
    size, shape = ranks_per_host[0], ModelShape.of(model_tree(config.model))
    if any(ranks != size for ranks in ranks_per_host):
        return f"they have {', '.join(map(str, ranks_per_host))} ranks"
    if len(totals) < len(ranks_per_host):
        return "HOSTS.yaml does not name the card of each"
    if shape is None:
        return "the sizes of the model are not known"
    total = min(totals)
    engine = engine_while_training(config, total) if config.placement == "colocated" else 0
    needed = LearnerMemory.of(_with_size(config, size), shape, totals).most
    if needed > USABLE_SHARE * (total - engine):
        sizes = f"{needed / GIB:.1f} of {total / GIB:.1f} GiB"
        return f"the learner would need {sizes} on each GPU with one per host"
    return ""


def _with_size(config: RunConfig, size: int | None) -> RunConfig:
    return config.model_copy(update={"learner": config.learner.model_copy(update={"fsdp_size": size})})
