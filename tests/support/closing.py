"""Closes with the test what it opened, so that one that fails leaves nothing for the next to warn of."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol, TypeVar


class Closable(Protocol):
    """A client with connections."""

    async def close(self) -> None:
        """Closes them."""
        ...


C = TypeVar("C", bound=Closable)


class Closing(Protocol):
    """Registers a client and returns it."""

    def __call__(self, client: C) -> C:
        """It is closed when the test is over, whatever its end."""
        ...


@asynccontextmanager
async def closing_all() -> AsyncIterator[Closing]:
    """Yields what registers clients; the last one is closed first."""
    async with AsyncExitStack() as stack:

        def register(client: C) -> C:
            stack.push_async_callback(client.close)
            return client

        yield register
