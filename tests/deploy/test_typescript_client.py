"""The client in TypeScript attaches, scores what a gateway sends, and ends with the run."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.config.reward import AttachedConfig
from paceline.core.attached_clients.attachment import Leave
from paceline.core.scoring import ScoreItem
from paceline.reward.attached.scorer import AttachedScorer
from paceline.reward.attached.servicer import GatewayServicer
from paceline.rpc.v1 import reward_pb2_grpc
from paceline.service.grpc.server import start_server
from paceline.service.identity.credentials import Credentials

ROOT = Path(__file__).parents[2]
FILES = ("package.json", "tsconfig.json", "attach.ts", "main.ts")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built client."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("there is no node and npm: install Node.js 20 or newer")
    folder = tmp_path_factory.mktemp("typescript")
    for name in FILES:
        shutil.copy(ROOT / "examples" / "reward_typescript" / name, folder)
    install = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock", "--fetch-retries=1"]
    try:
        done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm did not install the client's packages within 120 s: is its registry reachable?")
    if done.returncode:
        pytest.skip(f"npm cannot install the client's packages: {done.stderr[-300:]}")
    subprocess.run([npm, "run", "build"], cwd=folder, check=True, capture_output=True, timeout=120)
    return folder / "build" / "main.js"


def items(*pairs: tuple[str, str]) -> list[ScoreItem]:
    return [
        ScoreItem(trajectory_id=f"t{index}", prompt="", response=response, ground_truth=truth)
        for index, (response, truth) in enumerate(pairs)
    ]


@pytest.mark.timeout(900)
async def test_it_scores_and_ends_with_the_run(client: Path) -> None:
    scorer = AttachedScorer(AttachedConfig(name="judge", timeout_s=20), timeout_s=20, run_id="run-1")
    servicer = GatewayServicer()
    servicer.gateways = {"judge": scorer.gateway}
    add: Callable[..., None] = reward_pb2_grpc.add_RewardGatewayServicer_to_server
    server = await start_server(add, servicer, credentials=Credentials(token="secret"))
    await scorer.start()
    environment = {
        **os.environ,
        "PACELINE_PROTO": str(ROOT / "proto"),
        "PACELINE_REWARD_TOKEN": "secret",
    }
    process = await asyncio.create_subprocess_exec(
        "node", str(client), server.address, "judge", env=environment
    )
    try:
        pairs = [(str(number), str(number % 7)) for number in range(200)]
        scores = await scorer.score(items(*pairs, ("throw", "1")))
        assert [score.reward for score in scores[:-1]] == [float(left == right) for left, right in pairs]
        assert scores[-1].error is not None
        assert scores[-1].error[1] == "judge: Error: no opinion"
        await scorer.gateway.close(Leave(reason="the run is over", for_good=True))
        async with asyncio.timeout(20):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await scorer.close()
        await server.stop(grace_s=0)
