"""The policy for a server that does not answer: commands wait up to a bound, and the wait is announced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import BrokerError
from paceline.service.observability import metrics, telemetry

log = logging.getLogger(__name__)

ANNOUNCED_AFTER_S: Final = 2.0
"""Shorter outages are not announced."""

STORE_PATIENCE_S: Final = 5.0
"""How long commands wait for a blob store; the launcher starts one again sooner than that."""

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_NEVER: Final = float("-inf")

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Why a server cannot do its work at the moment.

    Attributes:
        state: continues a sentence that begins with the server's name.
        remedy: what the user can do about it.
        silent_s: how long the server had already been silent when this was noticed.
        may_move: whether another server may take over the address, so that clients should reconnect.
        needs_help: whether the user must solve the problem; if so, it is announced at once.
    """

    state: str
    remedy: str
    silent_s: float = 0.0
    may_move: bool = True
    needs_help: bool = False


class Outage:
    """What one client knows about its server's outages; all its commands share it.

    An outage begins when a command fails with a `Trouble`, and ends when a command succeeds. While commands
    wait, only one of them can end the outage: a full server still answers readers, and their success does not
    help the waiting writers.

    After `timeout_s` seconds commands that wait raise BrokerError. Later ones raise it at their first
    failure, until a command gets through.

    Args:
        server: the server's name for messages, without its password.
        timeout_s: longest outage that commands wait through.
        is_store: whether it is a blob store, without which the run goes on.
        on_outage, on_recovery: called with a sentence when an outage has lasted for 2 s or needs the user,
            and when it is over. Both sentences are logged in any case.
    """

    def __init__(
        self,
        server: str,
        *,
        timeout_s: float,
        is_store: bool = False,
        on_outage: Say | None = None,
        on_recovery: Say | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.server = f"{'blob store' if is_store else 'broker'} {server}"
        self._limit = "a store" if is_store else "broker.outage_timeout_s"
        self._metric = metrics.BLOB_STORE_OUTAGE if is_store else metrics.BROKER_OUTAGE
        self.timeout_s = timeout_s
        self._on_outage, self._on_recovery = on_outage, on_recovery
        self._clock = clock or SystemClock()
        self._since_s: float | None = None
        self._over_s = _NEVER
        self._announced: Trouble | None = None
        self._counted_s = 0.0
        self.num_waiting = 0
        telemetry.count(self._metric, 0)

    @property
    def is_on(self) -> bool:
        """Whether an outage has begun and is not over."""
        return self._since_s is not None

    def is_recent(self, seconds: float) -> bool:
        """Returns whether there is an outage, or the last one ended less than `seconds` seconds ago."""
        return self.is_on or self._clock.monotonic() - self._over_s < seconds

    def note_failure(self, command: str, trouble: Trouble, limit_s: float) -> float:
        """Notes that a command failed; returns the seconds left to wait.

        Raises:
            BrokerError: the outage has lasted for `limit_s` seconds.
        """
        now = self._clock.monotonic()
        if self._since_s is None:
            self._since_s = self._counted_s = now - trouble.silent_s
        self._count(now)
        seconds = now - self._since_s
        if seconds >= limit_s:
            raise BrokerError(
                f"{command}: {self.server} {trouble.state}, for {seconds:.1f} s now; commands wait "
                f"{limit_s:g} s ({self._limit}): {trouble.remedy}"
            )
        if self._is_worth_a_word(trouble, seconds):
            self._announced = trouble
            sentence = f"{self.server} {trouble.state}; waiting up to {limit_s:g} s"
            _say(self._on_outage, f"{sentence}: {trouble.remedy}")
        return limit_s - seconds

    def _count(self, now: float) -> None:
        """Counts the seconds of the outage since the last call."""
        telemetry.count(self._metric, now - self._counted_s)
        self._counted_s = now

    def _is_worth_a_word(self, trouble: Trouble, seconds: float) -> bool:
        """Returns whether to announce the outage now: first, or again because it needs the user."""
        if self._announced is None:
            return trouble.needs_help or seconds >= ANNOUNCED_AFTER_S
        return trouble.needs_help and not self._announced.needs_help

    def note_answer(self, *, waited: bool) -> None:
        """Notes that the server did what a command asked for."""
        if self._since_s is None or (self.num_waiting and not waited):
            return
        now = self._clock.monotonic()
        self._count(now)
        if self._announced:
            _say(self._on_recovery, f"{self.server} is back after {now - self._since_s:.0f} s")
        self._since_s, self._over_s, self._announced = None, now, None


class Attempts:
    """The attempts of one command, as a context manager.

    Args:
        outage: what the client knows about its server.
        limit_s: longest outage that this command waits through, if shorter than the client's.
    """

    def __init__(self, outage: Outage, command: str, *, limit_s: float | None = None) -> None:
        self._outage, self._command = outage, command
        self._limit_s = outage.timeout_s if limit_s is None else min(limit_s, outage.timeout_s)
        self._num_failures = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._outage.num_waiting -= self._num_failures > 0

    def failed(self, trouble: Trouble) -> float:
        """Notes a failed attempt; returns how many seconds to pause before the next.

        Raises:
            BrokerError: the outage has lasted too long.
        """
        left_s = self._outage.note_failure(self._command, trouble, self._limit_s)
        self._outage.num_waiting += self._num_failures == 0
        self._num_failures += 1
        return min(_FIRST_PAUSE_S * 2.0 ** min(self._num_failures - 1, 10), _LONGEST_PAUSE_S, left_s)

    def answered(self) -> None:
        """Notes that the server did its work."""
        self._outage.note_answer(waited=self._num_failures > 0)


def _say(listener: Say | None, sentence: str) -> None:
    log.warning("%s", sentence)
    if listener is not None:
        listener(sentence)
