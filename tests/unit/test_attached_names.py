"""Clients that attach to all addresses of a name."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from paceline.core.attached_clients.attachment import (
    Leave,
)
from paceline.core.errors import (
    ConfigError,
    PeerLostError,
)
from paceline.sdk import RewardAttachment
from paceline.sdk.attached import attachment
from support.attached_scorers import items, length, run


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The addresses that the name `reward` stands for; it is looked up often."""
    hosts: set[str] = set()

    async def look_up(loop: Any, host: str, port: int, **_: Any) -> list[Any]:
        assert host == "reward"
        if not hosts:
            raise socket.gaierror("no such name")
        other = (socket.AF_INET6, 0, 0, "", ("::1", port, 0, 0))
        return [*((socket.AF_INET, 0, 0, "", (each, port)) for each in sorted(hosts)), other]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", look_up)
    monkeypatch.setattr(attachment, "_LOOK_UP_EVERY_S", 0.02)
    return hosts


async def test_a_client_attaches_to_every_address_of_a_name(listed: set[str]) -> None:
    """To one that comes later, too; one that goes away does no harm; the run's end ends the client."""
    async with run() as first:
        port = int(first.address.rpartition(":")[2])
        client = RewardAttachment(length, address=f"reward:{port}", name="judge", every_address=True)
        running = asyncio.create_task(client.run())
        await asyncio.sleep(0)
        assert not client.is_attached
        listed |= {"127.0.0.1"}
        await first.clients(1)
        async with run(port=port, host="127.0.0.2") as second:
            listed |= {"127.0.0.2"}
            await second.clients(1)
            assert first.scorer.gateway.num_clients == 1  # no stream twice
            for service in (first, second):
                assert [score.reward for score in await service.scorer.score(items("a", "bb"))] == [1.0, 2.0]
        listed -= {"127.0.0.2"}
        async with asyncio.timeout(120):
            while len(client._clients) > 1:  # noqa: ASYNC110  a test's own look
                await asyncio.sleep(0.01)
        assert client.is_attached
        assert [score.reward for score in await first.scorer.score(items("ccc"))] == [3.0]
        async with run(port=port, host="127.0.0.2") as second:  # under the address of the one that went
            listed |= {"127.0.0.2"}
            await second.clients(1)
            await second.scorer.gateway.close(Leave(reason="the run is over", for_good=True))
            await first.scorer.gateway.close(Leave(reason="the run is over", for_good=True))
            async with asyncio.timeout(120):
                await running


async def test_a_server_that_is_still_asked_is_not_left_when_its_name_is_unknown_for_a_while(
    listed: set[str],
) -> None:
    async with run() as service:
        listed |= {"127.0.0.1"}
        port = service.address.rpartition(":")[2]
        client = RewardAttachment(length, address=f"reward:{port}", name="judge", every_address=True)
        running = asyncio.create_task(client.run())
        await service.clients(1)
        async with asyncio.timeout(120):
            while not client.is_attached:  # noqa: ASYNC110  the service has let it in; the client hears of it later
                await asyncio.sleep(0.01)
        (stream,) = service.scorer.gateway._streams
        listed.clear()
        for response in "abcdef":
            await asyncio.sleep(0.03)
            assert [score.reward for score in await service.scorer.score(items(response))] == [1.0]
        assert list(service.scorer.gateway._streams) == [stream]
        client.stop()
        async with asyncio.timeout(120):
            await running


async def test_a_name_without_an_address_ends_the_client_after_its_patience(listed: set[str]) -> None:
    client = RewardAttachment(length, address="reward:7000", name="judge", every_address=True, patience_s=0.1)
    with pytest.raises(PeerLostError, match="reward:7000 has not resolved to any address for 0.1 s"):
        await client.run()


async def test_a_client_of_a_name_that_is_refused_says_so(listed: set[str]) -> None:
    async with run(token="secret") as service:
        listed |= {"127.0.0.1"}
        port = service.address.rpartition(":")[2]
        client = RewardAttachment(
            length, address=f"reward:{port}", name="judge", every_address=True, token="wrong"
        )
        with pytest.raises(ConfigError, match="refused the token"):
            await client.run()
