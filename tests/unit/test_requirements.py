"""The lock files: what they pin installs on every Python that the program supports."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from support import source

# The first release of each: Debian 12 has 3.11.2, Ubuntu 24.04 has 3.12.3.
PYTHONS = ("3.11.0", "3.12.0")


def pinned() -> dict[str, str]:
    lines = "\n".join((source.ROOT / "requirements" / f"{name}.txt").read_text() for name in ("cpu", "dev"))
    return dict(re.findall(r"^([\w.-]+)==([\w.+]+)\s*$", lines, re.MULTILINE))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_pinned_package_installs_on_the_first_release_of_each_supported_python() -> None:
    installed = {normal(package.name): package for package in importlib.metadata.distributions()}
    compared, refused = 0, []
    for name, version in pinned().items():
        package = installed.get(normal(name))
        if package is None or package.version != version:
            continue
        compared += 1
        allowed = SpecifierSet(package.metadata.get("Requires-Python") or "")
        refused += [f"{name}=={version} on {python}" for python in PYTHONS if python not in allowed]
    assert not refused, "pin an older version"
    assert compared > 150, "run this in the environment of make venv"


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_are_what_the_pinned_packages_require_of_each_other(python: str) -> None:
    pins = {normal(name): version for name, version in pinned().items()}
    markers = {"python_version": python.rpartition(".")[0], "python_full_version": python, "extra": ""}
    compared, refused = 0, []
    for package in importlib.metadata.distributions():
        if pins.get(normal(package.name)) != package.version or package.name == "grpcio-tools":
            continue  # grpcio-tools only generates code, which must be readable by older protobufs
        for needed in map(Requirement, package.requires or []):
            version = pins.get(normal(needed.name))
            if version is None or not (needed.marker is None or needed.marker.evaluate(markers)):
                continue
            compared += 1
            if not needed.specifier.contains(version, prereleases=True):
                refused.append(f"{package.name} requires {needed}, pinned is {version}")
    assert refused == []
    assert compared > 300, "run this in the environment of make venv"


def versions_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("versions", source.ROOT / "tools" / "versions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_make_versions_counts_the_releases_after_each_pin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = versions_tool()
    locks = {"cpu": tool.pins("a==1\ntorch==2.13.0+cpu\nb==2; python_version < '3.12'\n"), "cuda": {"b": "9"}}
    assert tool.behind("torch", locks, ["2.15.0", "2.14.0", "2.13.0"]) == ["cpu 2.13.0+cpu (2 behind)"]
    assert tool.behind("b", locks, ["3", "2"]) == ["cpu 2 (1 behind)", "cuda 9"]

    def index(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        listed = "" if command[-1] == "redis" else "x (99.1)\nAvailable versions: 99.1, 98.0\n"
        return subprocess.CompletedProcess(command, 0, listed, "")

    monkeypatch.setattr(tool.subprocess, "run", index)
    assert tool.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("vllm: newest 99.1; ")
    assert "cuda-next " in lines[0]
    assert any("redis: newest unknown" in line for line in lines)


def test_the_next_lock_file_has_a_newer_vllm_than_the_tested_one() -> None:
    pins = versions_tool().pins
    next_, tested = (
        pins((source.ROOT / "requirements" / f"{name}.txt").read_text()) for name in ("cuda-next", "cuda")
    )
    assert Version(next_["vllm"]) > Version(tested["vllm"])
    assert Version(next_["torch"]) > Version(tested["torch"])
