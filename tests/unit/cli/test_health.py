"""`paceline health`: its exit code is what a container engine acts on."""

from __future__ import annotations

import asyncio

import pytest

from paceline.cli.main import main
from paceline.rpc.v1 import reward_pb2_grpc
from paceline.service.grpc.server import start_server


async def test_the_exit_code_says_whether_a_service_serves(capsys: pytest.CaptureFixture[str]) -> None:
    server = await start_server(
        reward_pb2_grpc.add_RewardServiceServicer_to_server, reward_pb2_grpc.RewardServiceServicer()
    )
    command = ["health", server.address, "--timeout", "3"]
    try:
        assert await asyncio.to_thread(main, command) == 0
        await server.refuse_work()
        assert await asyncio.to_thread(main, command) == 1
        assert "answers NOT_SERVING" in capsys.readouterr().err
    finally:
        await server.stop()
    assert await asyncio.to_thread(main, command) == 1
    assert "cannot be reached" in capsys.readouterr().err
