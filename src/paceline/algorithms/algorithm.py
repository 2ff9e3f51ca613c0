"""Defines an algorithm: advantages from rewards, a loss from advantages, and the training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol

from paceline.algorithms.policy_losses.base import LossInputs, LossOutputs
from paceline.algorithms.rows import Estimates, SampleRows
from paceline.core.estimators import Need

Estimator = Callable[[SampleRows], Estimates]
"""Estimates the advantages of this rank's rows."""
LossFunction = Callable[[LossInputs], LossOutputs]
"""Computes the policy loss of a micro-batch."""
TrainedNetwork = Literal["policy", "critic"]


class StepVerbs(Protocol):
    """The operations of a training step; every rank calls them in the same order."""

    @property
    def has_critic(self) -> bool:
        """Whether the run has a critic."""
        ...

    def score(self) -> None:
        """Lets every network score the samples; must come first."""
        ...

    def estimate(self, estimator: Estimator) -> None:
        """Estimates the advantages of all samples; the estimator's rows hold the results of `score`."""
        ...

    def update(self, network: TrainedNetwork, loss: LossFunction | None = None) -> None:
        """Takes all optimizer steps of a network on the samples and their latest advantages.

        Args:
            network: the network to update, each exactly once; the critic's warm-up leaves the policy
                unchanged.
            loss: the policy's loss; the critic has its own.
        """
        ...


class Algorithm:
    """Estimates advantages and trains with a policy loss, both chosen by name; subclass it for others.

    An object holds no state between steps: each step creates a new one on every rank.

    Attributes:
        networks: names of the frozen networks that it reads. `algorithm.networks` of the configuration says
            where they are; their log-probs are in `rows.log_probs` and `inputs.log_probs_of`.
        needs: which of "critic", "greedy" (a greedy answer to each prompt) and "group" (two samples or more
            of each prompt) a run must have; `algorithm.needs` of the configuration names them too.
        scalable: the options that are clip ranges, which the guard's `lower_clip` may scale.
    """

    networks: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[Need, ...]] = ()
    scalable: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        estimator: Estimator,
        policy_loss: LossFunction,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._estimator, self._policy_loss = estimator, policy_loss
        self.options = options or {}

    def advantages(self, rows: SampleRows) -> Estimates:
        """Estimates the advantages of this rank's rows, by `algorithm.adv_estimator`."""
        return self._estimator(rows)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Computes the policy loss of a micro-batch, by `actor.policy_loss`."""
        return self._policy_loss(inputs)

    def step(self, s: StepVerbs) -> None:
        """Carries out a training step."""
        s.score()
        s.estimate(self.advantages)
        if s.has_critic:
            s.update("critic")
        s.update("policy", self.loss)
