"""The interface of all scorers, and the settings from which they are built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.config.reward import RewardConfig
from paceline.core.scoring import ScoreItem
from paceline.reward.scoring.scores import Score
from paceline.service.grpc.connection import DEFAULT_MAX_MESSAGE_BYTES
from paceline.service.identity.credentials import Credentials


def to_nobody(message: str) -> None:
    """Drops messages that nobody follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerSettings:
    """The settings from which scorers are built.

    Args:
        config: the section `reward` of the run's configuration.
        run_id: the run's id, which attached clients are told.
        notify: sends a message to all who follow the run.
        seed: seed of the random numbers of functions; None: not seeded.
    """

    config: RewardConfig
    credentials: Credentials = field(default_factory=Credentials)
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    run_id: str = ""
    notify: Callable[[str], None] = to_nobody
    seed: str | None = None


class Scorer(Protocol):
    """Gives scores to batches of items.

    Implemented by `FunctionPool` (functions in child processes), `RemoteScorer` (a service of the user's),
    `AttachedScorer` (clients that attach) and `WeightedSum` (all scorers of a run).
    """

    @property
    def names(self) -> Sequence[str]:
        """Returns the names of the scorer's components, without further values (`name/key`)."""

    async def start(self) -> None:
        """Makes the scorer ready to score items.

        Raises:
            ConfigError: the scorer's configuration is unusable.
            DeadlineError, PeerLostError: one of the scorer's processes does not start.
        """

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
        """Returns one score per item, in order, with the scorer's weight applied. Calls may overlap.

        An item that cannot be scored gets an error as its score and does not affect the others. A batch is
        a delivery of the mailbox, so it may hold only a part of a prompt group.

        Raises:
            RewardError: UNAVAILABLE, when the scorer was closed or not started, or cannot score any more.
        """

    async def close(self) -> None:
        """Stops its processes and closes its connections. Has no effect if it was not started."""
