"""Runs a training step of a user's algorithm; checks the order of its verbs and their arguments."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from paceline.algorithms.algorithm import Algorithm, Estimator, LossFunction, StepVerbs, TrainedNetwork
from paceline.algorithms.users_own.own import checked_estimates, checked_loss
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.text import one_line

_FORM = "write s.score(), s.estimate(self.advantages), s.update(network, loss), in this order"


Agree = Callable[[str], None]
"""Raises ConfigError on every rank unless all ranks call this verb."""


class OwnAlgorithm(Algorithm):
    """A user's algorithm, checked at every call.

    Args:
        label: the algorithm's name for errors.
        agree: called at each verb.
    """

    def __init__(self, label: str, theirs: Algorithm, agree: Agree) -> None:
        super().__init__(
            partial(checked_estimates, label, theirs.advantages), partial(checked_loss, label, theirs.loss)
        )
        self._label, self._theirs, self._agree = label, theirs, agree

    def step(self, s: StepVerbs) -> None:
        """Carries out a training step with the user's `step`.

        Raises:
            ConfigError: the user's code raised an error, or its verbs do not form a training step.
        """
        verbs = _CheckedVerbs(self._label, s, self._agree)
        try:
            self._theirs.step(verbs)
        except Exception as error:
            if verbs.failure is None:
                # The other ranks may wait at a verb.
                self._agree(one_line(f"{type(error).__name__}: {error}"))
            if verbs.failure is None and not isinstance(error, PacelineError):
                raise self._said(error) from error
            if verbs.failure in (None, error):
                raise
        verbs.finish()

    def _said(self, error: Exception) -> ConfigError:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
        return ConfigError(f"{one_line(f'{self._label}: its step raised {said}')}; {_FORM}")


class _CheckedVerbs:
    """Refuses an order of verbs that would train nothing, or train on numbers from other weights.

    Attributes:
        failure: the failure of a verb, if any.
    """

    def __init__(self, label: str, verbs: StepVerbs, agree: Agree) -> None:
        self._label, self._verbs, self._agree = label, verbs, agree
        self._done: list[str] = []
        self.failure: BaseException | None = None

    @property
    def has_critic(self) -> bool:
        return self._verbs.has_critic

    def score(self) -> None:
        with self._verb("score"):
            self._require(not self._done, "scores the samples twice")
            self._verbs.score()

    def estimate(self, estimator: Estimator) -> None:
        with self._verb("estimate"):
            self._require("score" in self._done, "estimates before it has scored the samples")
            self._require("policy" not in self._done, "estimates after the policy's update")
            self._verbs.estimate(partial(checked_estimates, self._label, estimator))

    def update(self, network: TrainedNetwork, loss: LossFunction | None = None) -> None:
        trained = ("policy", "critic") if self.has_critic else ("policy",)
        with self._verb(network):
            names = " and ".join(trained)
            self._require(network in trained, f"updates {network!r}, but the run trains {names}")
            early = f"updates the {network} before it has estimated advantages"
            self._require("estimate" in self._done, early)
            self._require(network not in self._done, f"updates the {network} twice")
            self._require(network == "critic" or loss is not None, "updates the policy without a loss")
            self._require(
                network == "policy" or loss is None, "gives the critic a loss, but the critic has its own"
            )
            checked = None if loss is None else partial(checked_loss, self._label, loss)
            self._verbs.update(network, checked)

    def finish(self) -> None:
        """Raises the failure of a verb if there was one, or ConfigError unless every network was updated."""
        with self._verb("the end"):
            self._require("policy" in self._done, "never updates the policy")
            self._require("critic" in self._done or not self.has_critic, "never updates the critic")

    @contextmanager
    def _verb(self, name: str) -> Iterator[None]:
        """Ensures that all ranks enter the block, or none."""
        if self.failure is not None:
            raise self.failure
        try:
            self._agree(name)
            yield
        except BaseException as error:
            self.failure = error
            raise
        self._done.append(name)

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise ConfigError(f"{self._label}: its step {what}; {_FORM}, each network once")
