"""Algorithms whose step is another on the second rank."""

from __future__ import annotations

import torch.distributed as dist

from paceline.algorithms.algorithm import Algorithm, StepVerbs


class Straying(Algorithm):
    """On rank 1, does what `options["how"]` says."""

    def step(self, s: StepVerbs) -> None:
        """Estimates in between, ends early, or raises, on rank 1."""
        s.score()
        how = self.options["how"] if dist.get_rank() == 1 else "well"
        if how == "updates":
            s.update("policy", self.loss)
        if how == "ends":
            return
        if how == "raises":
            raise ZeroDivisionError("by a rank's own rows")
        s.estimate(self.advantages)
        s.update("policy", self.loss)
