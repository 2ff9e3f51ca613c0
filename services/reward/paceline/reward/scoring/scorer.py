"""The one interface of everything that scores: what a kind of scorer implements and what it is built from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from paceline.config.reward import RewardConfig
from paceline.core.scoring import ScoreItem
from paceline.reward.scoring.scores import Score
from paceline.service.grpc.connection import DEFAULT_MAX_MESSAGE_BYTES
from paceline.service.identity.credentials import Credentials


def to_nobody(message: str) -> None:
    """Drops the messages of scorers that nobody follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerSettings:
    """What scorers are built from.

    Args:
        config: the section `reward` of the run's configuration.
        credentials: for calls to remote reward services.
        max_message_bytes: largest gRPC message.
        run_id: told to attached clients.
        notify: sends a message to all who follow the run.
        seed: what the random numbers of functions follow from; None: nothing.
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
        """The names of its components, without those of further values (`name/key`)."""
        ...

    async def start(self) -> None:
        """Makes it ready to score.

        Raises:
            ConfigError: it cannot be used as it is configured.
            DeadlineError, PeerLostError: a process of it does not start.
        """
        ...

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
        """One score per item, in the order of the items, with the scorer's weight applied. Calls may overlap.

        An item that cannot be scored gets an error for its score and does not affect the others. A batch is
        what the mailbox delivered: it may hold a part of a prompt group.

        Raises:
            RewardError: UNAVAILABLE, when the scorer cannot score anything any more.
        """
        ...

    async def close(self) -> None:
        """Stops its processes and closes its connections. Harmless when it was not started."""
        ...


@runtime_checkable
class Queued(Protocol):
    """A scorer that says how far behind it is."""

    @property
    def queue_name(self) -> str:
        """What its queue is called in metrics."""
        ...

    @property
    def num_unscored(self) -> int:
        """How many items it was asked about and has no score for yet. Any thread may ask."""
        ...
