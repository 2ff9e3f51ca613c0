"""What a rank sees of the learner's mesh; `run_ranks` calls this in every rank's process."""

from __future__ import annotations

from typing import Any

import torch

from paceline.learner.distributed.mesh import RankGroup
from paceline.learner.distributed.ranks import Ranks


def groups(ranks: Ranks) -> dict[str, Any]:
    """By dimension: this rank's place and what it gets of the ranks' numbers 1, 10, 100, ..."""
    fsdp = RankGroup.of(ranks.fsdp.get_group())
    return {
        name: seen(group, torch.tensor([10**ranks.world.rank]))
        for name, group in (("world", ranks.world), ("data", ranks.data), ("fsdp", fsdp))
    }


def seen(group: RankGroup, number: torch.Tensor) -> dict[str, Any]:
    backend: Any = group.process_group._get_backend(torch.device("cpu"))
    return {
        "rank": group.rank,
        "size": group.size,
        "sum": int(group.all_sum(number)),
        "max": int(group.all_max(number)),
        "all": group.all_gather(number).tolist(),
        "timeout_s": backend.options._timeout.total_seconds(),
    }
