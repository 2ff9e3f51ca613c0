"""A channel over TLS that follows its certificate files: calls after a change use a new connection."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from paceline.service.identity.credentials import LatestTls


class RotatingChannel(grpc.aio.Channel):
    """Opens a channel with the current files, and a new one when the files have changed.

    Running calls end on the channel on which they began; gRPC closes it after the last of them.

    Args:
        connect: opens a channel with given credentials.
    """

    def __init__(
        self, latest: LatestTls, connect: Callable[[grpc.ChannelCredentials], grpc.aio.Channel]
    ) -> None:
        self._latest, self._connect = latest, connect
        self._channel = connect(latest.identity.for_channel())
        self._open: weakref.WeakSet[grpc.aio.Channel] = weakref.WeakSet([self._channel])

    def _now(self) -> grpc.aio.Channel:
        if self._latest.changed():
            self._channel = self._connect(self._latest.identity.for_channel())
            self._open.add(self._channel)
        return self._channel

    def unary_unary(self, *method: Any, **codecs: Any) -> Any:
        """Makes a call as any channel does, over the newest channel."""
        return self._calls("unary_unary", method, codecs)

    def unary_stream(self, *method: Any, **codecs: Any) -> Any:
        """Makes a call as any channel does, over the newest channel."""
        return self._calls("unary_stream", method, codecs)

    def stream_unary(self, *method: Any, **codecs: Any) -> Any:
        """Makes a call as any channel does, over the newest channel."""
        return self._calls("stream_unary", method, codecs)

    def stream_stream(self, *method: Any, **codecs: Any) -> Any:
        """Makes a call as any channel does, over the newest channel."""
        return self._calls("stream_stream", method, codecs)

    def _calls(self, kind: str, method: tuple[Any, ...], codecs: dict[str, Any]) -> Callable[..., Any]:
        """Returns a function that begins calls of a method on the channel that is current at that time."""

        def begin(*request: Any, **options: Any) -> Any:
            channel = self._now()
            call = getattr(channel, kind)(*method, **codecs)(*request, **options)
            # gRPC closes a channel that nothing refers to, although a call is about to begin on it.
            call.add_done_callback(partial(_let_go, channel))
            return call

        return begin

    async def close(self, grace: float | None = None) -> None:
        """Closes every channel that is still open."""
        for channel in list(self._open):
            await channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Returns the state of the newest channel."""
        return self._now().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits until the newest channel changes its state."""
        await self._now().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits until the newest channel is connected."""
        await self._now().channel_ready()

    async def __aenter__(self) -> RotatingChannel:
        """Connects at the first call."""
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _let_go(channel: grpc.aio.Channel, call: Any) -> None:
    """Does nothing at the end of a call; until then, the callback keeps the channel alive."""
