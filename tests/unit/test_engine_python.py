"""Rollout servers from another environment than the command's: what is asked of it, and their start there."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from paceline.checks import engine_python
from paceline.checks.engine_python import require_engine
from paceline.checks.machine_checks import require_packages
from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.errors import EnvironmentLackError
from paceline.engines.facts import EngineFacts
from paceline.launch.planning.plan import members
from paceline.sizing.machine import Machine
from support import source

ENGINE = EngineFacts(title="An engine", package="an_engine", start="an_engine:start", check="an_engine:check")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment."""
    folder = tmp_path_factory.mktemp("other")
    venv.create(folder, with_pip=False)
    return folder


@pytest.fixture
def python(other: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its interpreter, which sees no package of this environment."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for path in _site(other).glob("*"):
        path.unlink()
    return str(other / "bin" / "python")


def _site(other: Path) -> Path:
    (folder,) = other.glob("lib/python*/site-packages")
    return folder


def _install(other: Path, *modules: str) -> None:
    """Gives it Paceline, this environment's packages and further modules."""
    services = [source.ROOT / "services" / service for service in source.SERVICES]
    paths = [source.ROOT / "src", *services, sysconfig.get_path("purelib")]
    (_site(other) / "these.pth").write_text("\n".join(map(str, paths)))
    for module in modules:
        (_site(other) / f"{module}.py").touch()


def config(python: str | None) -> RunConfig:
    return parse(
        RunConfig,
        {
            "data": {"train_files": "x.parquet"},
            "model": {"path": "some/model"},
            "rollout": {"python": python},
            "reward": {"functions": [{"name": "exact_match"}]},
            "trainer": {"total_steps": 1},
        },
    )


def test_an_environment_without_paceline_or_without_the_engine_is_named(python: str, other: Path) -> None:
    with pytest.raises(
        EnvironmentLackError, match=r"has no paceline\.rollout, grpc, .*an_engine: install .*An engine there"
    ):
        require_engine(python, ENGINE)
    _install(other)
    with pytest.raises(EnvironmentLackError, match=rf"rollout.python={python} has no an_engine:"):
        require_engine(python, ENGINE)
    _install(other, "an_engine")
    require_engine(python, ENGINE)


def test_another_version_of_paceline_is_named(
    python: str, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(other, "an_engine")
    (_site(other) / "these.pth").write_text("")
    info = _site(other) / "paceline-9.0.dist-info"
    monkeypatch.setattr(engine_python, "_MODULES", ())
    monkeypatch.setattr(engine_python, "version", {"paceline": "0.1.0"}.get)
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline\nVersion: 9.0\n")
    try:
        with pytest.raises(EnvironmentLackError, match=r"has Paceline 9\.0, this command 0\.1\.0"):
            require_engine(python, ENGINE)
    finally:
        (info / "METADATA").unlink()
        info.rmdir()


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("/no/such/python", "does not start"),
        ("/bin/false", r"not a working Python interpreter \(exit code 1\)"),
    ],
)
def test_what_is_no_interpreter_is_named(python: str, words: str) -> None:
    with pytest.raises(EnvironmentLackError, match=rf"rollout.python={python} .*{words}"):
        require_engine(python, ENGINE)


def test_a_run_asks_the_other_environment_for_the_engine_and_not_its_own(
    python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "vllm" else name)
    with pytest.raises(EnvironmentLackError, match=r"not installed in this environment: vllm;"):
        require_packages(config(None))
    with pytest.raises(EnvironmentLackError, match=rf"rollout.python={python} has no .*vllm"):
        require_packages(config(python))
    require_packages(config(python), engine=False)


def test_only_rollout_servers_start_from_there(python: str, other: Path) -> None:
    specs = members(config(python), Machine.here(), controller_address="127.0.0.1:1", master_port=2)
    assert {spec.role.value: spec.command[0] for spec in specs} == {
        "learner": sys.executable,
        "reward": sys.executable,
        "rollout": python,
    }
    _install(other)
    (server,) = [spec for spec in specs if spec.role.value == "rollout"]
    code = f"from importlib.util import find_spec; print(find_spec({server.command[2]!r}).origin)"
    done = subprocess.run(
        [server.command[0], "-c", code],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert Path(done.stdout.strip()) == source.ROOT / "services/rollout/paceline/rollout/__init__.py"
