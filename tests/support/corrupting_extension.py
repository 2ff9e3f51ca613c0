"""The worker extension, and a way to damage one bit of a live parameter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from paceline.core.errors import WeightSyncError
from paceline.rollout.engines.vllm.worker import PacelineWorkerExtension
from paceline.rollout.engines.weights.trace import recall


class CorruptingExtension(PacelineWorkerExtension):
    """Used by tests only."""

    def paceline_flip_bit(self, rank: int, param: str, index: int) -> dict[str, Any]:
        """Flips the lowest bit of one element on one TP rank."""
        if self.rank == rank:
            values = self.get_model().get_parameter(param).data.view(torch.int32)
            values.view(-1)[index] ^= 1
        return {}

    def paceline_take_general_path(self) -> dict[str, Any]:
        """Full tensors from the next join on, even where the weights could be pushed in place."""
        trace = recall(self.get_model())
        assert trace is not None
        trace.reasons["model"] = "a test asked for it"
        return {}

    def paceline_break_load(self, after: int) -> dict[str, Any]:
        """The next load of full tensors breaks off after so many of them."""
        receiver = self._paceline_receiver()
        load = receiver._load_full

        def broken(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
            receiver._load_full = load
            load(_broken_off(tensors, after))

        receiver._load_full = broken
        return {}


def _broken_off(
    tensors: Iterator[tuple[str, torch.Tensor]], after: int
) -> Iterator[tuple[str, torch.Tensor]]:
    yield from itertools.islice(tensors, after)
    raise WeightSyncError("the load was broken off")
