"""The wheels: the distribution's has the page's files, the SDK's works without torch, redis and pydantic."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from support import source

SDK = source.ROOT / "packaging" / "sdk"
# What a reward server may not need. None in sys.modules makes an import fail.
BLOCKED = ("torch", "redis", "pydantic", "yaml", "transformers", "vllm", "pyarrow", "rich", "fsspec")
SCRIPT = f"""
import sys
sys.modules.update(dict.fromkeys({BLOCKED!r}))
from paceline.sdk import RewardClient, RewardServer, ScoreItem
import asyncio, paceline.sdk
assert paceline.sdk.__file__.startswith(sys.argv[1]), paceline.sdk.__file__
def length(response: str, ground_truth: str, **extra) -> float:
    return len(response) / 10
async def main():
    async with RewardServer(length, port=0) as server:
        async with RewardClient(server.address) as client:
            item = ScoreItem(trajectory_id="a", prompt="p", response="12345", ground_truth="")
            results = await client.score([item])
            print(results[0].reward)
asyncio.run(main())
third = sorted({{name.partition(".")[0] for name in sys.modules if sys.modules[name] is not None}})
print(" ".join(third))
"""


def build(root: Path, out: Path) -> zipfile.ZipFile:
    (path,) = WheelBuilder(str(root)).build(directory=str(out), versions=["standard"])
    return zipfile.ZipFile(path)


def requirements(wheel: zipfile.ZipFile) -> set[str]:
    """Of the base installation, by name."""
    (metadata,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    lines = wheel.read(metadata).decode().splitlines()
    named = [line for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    return {re.split(r"[<>=; ]", line.removeprefix("Requires-Dist: "))[0] for line in named}


def test_the_distribution_has_the_pages_files_and_no_tests(tmp_path: Path) -> None:
    names = build(source.ROOT, tmp_path).namelist()
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    front = source.ROOT / "src" / "paceline" / "show" / "report" / "front"
    for file in front.iterdir():
        assert f"paceline/show/report/front/{file.name}" in names
    for package in ("controller", "rollout", "learner", "reward"):
        assert f"paceline/{package}/__main__.py" in names
    modules = {str(path.relative_to(source.ROOT / "src")) for path in (source.ROOT / "src").rglob("*.py")}
    assert modules - set(names) == set(), "not in the wheel: is the folder's name in .gitignore?"
    assert not [name for name in names if "/tests/" in name or name.startswith("tests/")]


def test_a_reward_server_runs_from_the_sdks_wheel_alone(tmp_path: Path) -> None:
    wheel = build(SDK, tmp_path)
    assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())
    wheel.extractall(tmp_path / "site")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "site")],
        capture_output=True, text=True, timeout=120, env=environ, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]
    reward, modules = done.stdout.splitlines()
    assert float(reward) == 0.5
    assert not {"paceline.config", "paceline.broker"} & set(modules.split())
    third = {
        "grpc": "grpcio",
        "google": "protobuf",
        "msgpack": "msgpack",
        "numpy": "numpy",
        "psutil": "psutil",
    }
    needed = {name for module, name in third.items() if module in modules.split()}
    assert needed <= requirements(wheel)
    assert not requirements(wheel) & {"torch", "redis", "pydantic", "fsspec", "rich"}


@pytest.mark.parametrize("key", ["version", "requires-python", "license"])
def test_both_are_of_one_version(key: str) -> None:
    projects = [
        tomllib.loads((root / "pyproject.toml").read_text())["project"] for root in (source.ROOT, SDK)
    ]
    assert projects[0][key] == projects[1][key]
