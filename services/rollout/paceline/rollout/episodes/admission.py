"""Limits open conversations, so that their contexts together fit the engine's KV cache.

An episode enters before it begins, in order, and waits while there is no room for its prompt and the
longest next answer. An admitted episode continues without asking, however long it gets, so that it can end
and free its room. If no episode is admitted, the next one enters in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Ledger:
    """Tracks which conversations are admitted and which wait, without a clock.

    Args:
        capacity: tokens that fit.
    """

    capacity: int
    _inside: dict[int, int] = field(default_factory=dict)
    _waiting: dict[int, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """The tokens of all admitted conversations."""
        return sum(self._inside.values())

    @property
    def num_waiting(self) -> int:
        """How many conversations wait for room."""
        return len(self._waiting)

    def ask(self, key: int, num_tokens: int) -> list[int]:
        """Queues a conversation; returns the keys of those that enter now."""
        self._waiting[key] = num_tokens
        return self._admit()

    def grow(self, key: int, num_tokens: int) -> list[int]:
        """Notes the tokens of an admitted conversation; returns the keys of those that may enter now."""
        self._inside[key] = num_tokens
        return self._admit()

    def leave(self, key: int) -> list[int]:
        """Removes a conversation that ended or stopped waiting; returns the keys that enter in its place."""
        self._inside.pop(key, None)
        self._waiting.pop(key, None)
        return self._admit()

    def _admit(self) -> list[int]:
        entered = []
        for key, num_tokens in self._waiting.items():
            if self._inside and self.num_tokens + num_tokens > self.capacity:
                break
            self._inside[key] = num_tokens
            entered.append(key)
        for key in entered:
            del self._waiting[key]
        return entered


Grow = Callable[[int], None]
"""Notes the number of tokens that an admitted conversation has now."""


class AdmissionControl:
    """A `Ledger` whose conversations wait.

    Args:
        capacity: tokens that fit.
    """

    def __init__(self, capacity: int) -> None:
        self._ledger = Ledger(capacity)
        self._entered: dict[int, asyncio.Event] = {}
        self._keys = itertools.count(1)

    @property
    def is_full(self) -> bool:
        """Whether a conversation waits for room."""
        return self._ledger.num_waiting > 0

    @contextlib.asynccontextmanager
    async def entered(self, num_tokens: int) -> AsyncIterator[Grow]:
        """Admits a conversation for the duration; the caller's deadline bounds the wait.

        The block gets the function that notes how long the conversation has become.

        Args:
            num_tokens: number of tokens of its prompt and the longest first answer.
        """
        key, entered = next(self._keys), asyncio.Event()
        self._entered[key] = entered
        try:
            self._call(self._ledger.ask(key, num_tokens))
            await entered.wait()
            yield lambda num_tokens: self._call(self._ledger.grow(key, num_tokens))
        finally:
            del self._entered[key]
            self._call(self._ledger.leave(key))

    def _call(self, keys: list[int]) -> None:
        for key in keys:
            self._entered[key].set()
