"""The worker extension, and a way to damage one bit of a live parameter."""

from __future__ import annotations

from typing import Any

import torch

from paceline.rollout.engines.vllm.worker import PacelineWorkerExtension


class CorruptingExtension(PacelineWorkerExtension):
    """Used by tests only."""

    def paceline_flip_bit(self, rank: int, param: str, index: int) -> dict[str, Any]:
        """Flips the lowest bit of one element on one TP rank."""
        if self.rank == rank:
            values = self.get_model().get_parameter(param).data.view(torch.int32)
            values.view(-1)[index] ^= 1
        return {}
