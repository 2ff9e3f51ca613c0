"""From `rollout.name` to an engine."""

from __future__ import annotations

import importlib
import sys
from operator import attrgetter
from types import ModuleType

import pytest

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.rollout import __main__ as rollout
from paceline.rollout.engines import registry
from support.fake_engine import FakeEngine

started: list[str] = []


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


async def test_a_name_in_the_table_starts_its_engine_with_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started.clear()
    module = ModuleType("an_engine")
    module.start, module.check = start, check
    monkeypatch.setitem(sys.modules, "an_engine", module)
    entry = registry.EngineEntry(start="an_engine:start", check="an_engine:check")
    monkeypatch.setitem(registry.ENGINES, "fake", entry)
    engine = await registry.start_engine(config("fake"))
    assert isinstance(engine, FakeEngine)
    assert started == ["some/model"]
    with pytest.raises(ConfigError, match="three samples are too many"):
        await registry.start_engine(config("fake", n=3))
    assert started == ["some/model"]


async def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.name='vlm': there is no such engine; .*vllm"):
        await registry.start_engine(config("vlm"))


def test_every_entry_of_the_table_can_be_imported() -> None:
    for target in (target for entry in registry.ENGINES.values() for target in entry if target):
        module, _, path = target.partition(":")
        assert callable(attrgetter(path)(importlib.import_module(module)))


def test_a_rollout_server_lets_its_engines_begin_before_it_has_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = list[str]()
    module = ModuleType("an_engine")
    module.begin = lambda: calls.append("begin")
    monkeypatch.setitem(sys.modules, "an_engine", module)
    entry = registry.EngineEntry(start="a:b", check="a:b", begin="an_engine:begin")
    monkeypatch.setattr(registry, "ENGINES", {"fake": entry, "other": entry._replace(begin="")})
    monkeypatch.setattr(rollout, "run_member", lambda *_, **__: calls.append("serve") or 0)
    assert rollout.main(["--controller", "localhost:1", "--member-id", "rollout-0"]) == 0
    assert calls == ["begin", "serve"]
