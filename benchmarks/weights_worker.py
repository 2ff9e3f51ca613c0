"""The worker extension of `weights.py`: Paceline's own, with times in its answers and two baselines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from weights_exchange import Broadcast, Trace, plain_messages

from paceline.rollout.engines.vllm.worker import PacelineWorkerExtension
from paceline.weights.plan.spec import WeightGroupSpec


class TimedExtension(PacelineWorkerExtension):
    """Paceline's extension; all methods are called through `paceline_call`."""

    def paceline_receive(self, version: int, timeout_s: float, is_paused: bool) -> dict[str, Any]:
        """Receives a push; returns when it began and ended."""
        began = time.perf_counter()
        reply = super().paceline_receive(version, timeout_s, is_paused)
        return reply | {"began": began, "ended": time.perf_counter()}

    def paceline_plain(self, repeats: int) -> dict[str, Any]:
        """Exchanges plain messages with the same bytes; returns milliseconds."""
        group = self._paceline_receiver()._group
        assert group is not None
        return {"ms": plain_messages(group, repeats)}

    def paceline_usual_join(self, spec: bytes, rank_offset: int) -> dict[str, Any]:
        """Joins the broadcast group, of which learner rank 0 is the first rank."""
        group = WeightGroupSpec.from_bytes(spec)
        rank = rank_offset + self.rank - group.num_learners + 1
        self.__dict__["_paceline_usual"] = Broadcast(group, rank, torch.device(self.device), None)
        return {}

    def paceline_usual(self, tensors: list[Any]) -> dict[str, Any]:
        """Receives full tensors and loads them."""
        began = time.perf_counter()
        with torch.no_grad():
            self.__dict__["_paceline_usual"].receive(tensors, self.get_model().load_weights)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {"began": began, "ended": time.perf_counter()}

    def paceline_usual_leave(self) -> dict[str, Any]:
        """Leaves the broadcast group."""
        self.__dict__.pop("_paceline_usual").close()
        return {}

    def paceline_memory(self, reset: bool) -> dict[str, Any]:
        """Returns the bytes allocated now, and the peak since the last reset."""
        if not torch.cuda.is_available():
            return {"now": 0, "peak": 0}
        memory = {"now": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return memory

    def paceline_trace(self, folder: str | None) -> dict[str, Any]:
        """Begins a trace, or ends it and writes the file of this rank."""
        if folder is None:
            self.__dict__["_paceline_trace"] = trace = Trace()
            trace.begin()
        else:
            name = str(self._paceline_receiver().rank_ref).replace(" ", "-")
            self.__dict__.pop("_paceline_trace").end(Path(folder) / f"{name}.json.gz")
        return {}
