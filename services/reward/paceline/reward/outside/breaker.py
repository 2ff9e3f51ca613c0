"""A circuit breaker for calls to a service that does not answer.

CLOSED   every call is made               --several failures in a row--> OPEN
OPEN     no call is made                  --after a pause--> TRYING
TRYING   one call is made, the rest wait  --it succeeds--> CLOSED, --it fails--> OPEN, for twice as long
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable
from typing import Final

from paceline.reward.scoring.scorer import to_nobody
from paceline.service.tasks import wait_at_most

_log = logging.getLogger(__name__)

_LIMIT: Final = 5
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0


class BreakerState(enum.Enum):
    """Says whether calls are made at present."""

    CLOSED = "closed"
    OPEN = "open"
    TRYING = "trying"


class Breaker:
    """The breaker of one service. Each admitted caller reports once how the call went.

    Args:
        peer: the service, in messages.
        notify: called with a message when it opens and when it closes.

    Attributes:
        state: whether calls are made now.
    """

    def __init__(self, peer: str, notify: Callable[[str], None] = to_nobody) -> None:
        self._peer, self._notify = peer, notify
        self.state = BreakerState.CLOSED
        self._changed = asyncio.Event()
        self._num_failures, self._reason = 0, ""
        self._pause_s, self._opened_until = _FIRST_PAUSE_S, 0.0

    @property
    def explanation(self) -> str:
        """Says why no call is made."""
        return f"{self._peer} did not answer {self._num_failures} times in a row: {self._reason}"

    async def admit(self, until: float) -> bool:
        """Waits for a call's turn; returns whether it may be made. `until` is a time of `time.monotonic`."""
        while self.state is not BreakerState.CLOSED:
            now = time.monotonic()
            if self.state is BreakerState.OPEN and now >= self._opened_until:
                self._become(BreakerState.TRYING)
                return True
            if now >= until:
                return False
            end = min(until, self._opened_until) if self.state is BreakerState.OPEN else until
            await wait_at_most(self._changed, end - now)
        return True

    def succeeded(self) -> None:
        """Notes that the service answered, even if with an error."""
        self._num_failures, self._pause_s = 0, _FIRST_PAUSE_S
        if self.state is not BreakerState.CLOSED:
            _log.info("%s answers again", self._peer)
            self._notify(f"{self._peer} answers again")
            self._become(BreakerState.CLOSED)

    def failed(self, reason: str) -> None:
        """Notes that the service did not answer."""
        self._num_failures, self._reason = self._num_failures + 1, reason
        trying = self.state is BreakerState.TRYING
        # Calls that were under way when it opened add no information.
        if self.state is BreakerState.OPEN or (self._num_failures < _LIMIT and not trying):
            return
        if not trying:
            self._notify(f"{self.explanation}; items for it wait, and single calls try it")
        _log.warning("%s; the next call in %.1f s", self.explanation, self._pause_s)
        self._opened_until = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._become(BreakerState.OPEN)

    def called_off(self) -> None:
        """Notes that the call was cancelled, so another one may try."""
        if self.state is BreakerState.TRYING:
            self._become(BreakerState.OPEN)

    def _become(self, state: BreakerState) -> None:
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()
