"""`paceline health`: its exit code is what a container engine acts on."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from paceline.cli.certificates import Authority
from paceline.cli.main import main
from paceline.rpc.v1 import reward_pb2_grpc
from paceline.service.grpc.server import start_server
from paceline.service.identity.credentials import TLS_DIR, Credentials


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


MODULES_OF_OTHERS = (
    "torch",
    "transformers",
    "numpy",
    "redis",
    "pydantic",
    "yaml",
    "rich",
    "importlib.metadata",
)


async def test_it_loads_little_and_leaves_no_channel_to_the_end_of_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC holds up the end of a process for two seconds where a channel over TLS is left."""
    authority = Authority.create(tmp_path, days=1)
    authority.issue(tmp_path / "tls", "reward", role="reward")
    monkeypatch.setenv(TLS_DIR, str(tmp_path / "tls"))
    server = await start_server(
        reward_pb2_grpc.add_RewardServiceServicer_to_server,
        reward_pb2_grpc.RewardServiceServicer(),
        credentials=Credentials.from_env(),
    )
    program = (
        "import gc, sys; from paceline.cli.main import main; "
        f"code = main(['health', {server.address!r}, '--role', 'reward']); "
        "left = [each for each in gc.get_objects() if type(each).__name__ == 'AioChannel']; "
        f"print(code, len(left), [m for m in {MODULES_OF_OTHERS} if m in sys.modules])"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    await server.stop()
    assert out.decode() == "0 0 []\n"
