"""`rollout.other_engines`: servers of one run with several engines, from the configuration to the journal."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unit.test_controller_servicer import made

from paceline.chaos.faults import all_faults
from paceline.checks.machine_checks import require_packages
from paceline.checks.rollout_checks import CHECKS, engine_line
from paceline.config.load import parse, with_overrides
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.engines.facts import EngineFacts
from paceline.engines.memory import EngineMemory, engine_while_training, fixed_cache
from paceline.engines.registry import ENGINES
from paceline.launch.planning import hosts, plan
from paceline.models.model_shape import ModelShape
from paceline.rollout import app
from paceline.rpc.v1 import common_pb2
from paceline.show.report.content import RunContent
from paceline.sizing.machine import Machine
from paceline.sizing.placement import settle
from support.cli_configs import SEVEN, config
from support.sequencer_run import config as run_config
from support.training_run import read_jsonl

GIB = 1 << 30
MIXED = {
    "replicas": 3,
    "engine_kwargs": {"block_size": 32},
    "other_engines": {"sglang": {"python": "/opt/sglang/bin/python", "engine_kwargs": {"page_size": 16}}},
}


def mixed(**rollout: object) -> RunConfig:
    return config(rollout={**MIXED, **rollout})


def servers(told: RunConfig) -> dict[str, plan.ProcessSpec]:
    machine = Machine(num_cores=8, gpus=())
    specs = plan.members(told, machine, controller_address="h:1", master_port=29)
    return {spec.name: spec for spec in specs if spec.role is plan.Role.ROLLOUT}


def engine_option(spec: plan.ProcessSpec) -> str:
    words = spec.command
    return words[words.index("--engine") + 1] if "--engine" in words else ""


# --- the configuration


def test_each_engine_has_its_own_python_and_arguments_and_shares_everything_else() -> None:
    vllm, sglang = mixed(python="/opt/vllm/python", temperature=0.7).by_engine
    assert (vllm.rollout.name, vllm.rollout.python) == ("vllm", "/opt/vllm/python")
    assert vllm.rollout.engine_kwargs == {"block_size": 32}
    assert (sglang.rollout.name, sglang.rollout.python) == ("sglang", "/opt/sglang/bin/python")
    assert sglang.rollout.engine_kwargs == {"page_size": 16}
    assert [one.rollout.temperature for one in (vllm, sglang)] == [0.7, 0.7]
    assert [one.rollout.other_engines for one in (vllm, sglang)] == [{}, {}]
    # Without a python of its own, another engine does not get that of rollout.name.
    (_, plain) = mixed(python="/opt/vllm/python", other_engines={"sglang": {}}).by_engine
    assert (plain.rollout.python, plain.rollout.engine_kwargs) == (None, {})


def test_overrides_name_an_engine_by_its_key() -> None:
    words = ["rollout.replicas=4", "rollout.other_engines.sglang.replicas=2"]
    told = parse(RunConfig, with_overrides(config().model_dump(mode="json"), words))
    assert [told.rollout.engine_at(number) for number in range(5)] == [
        *("vllm", "vllm", "sglang", "sglang", "vllm")
    ]


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"replicas": 1}, r"other_engines take 1 of replicas=1 and leave no server with vllm: set replicas"),
        ({"other_engines": {"vllm": {}}}, "other_engines has vllm, which is rollout.name: remove it there"),
        ({"other_engines": {"sglang": {"replicas": -1}}}, r"other_engines\.sglang\.replicas=-1"),
        ({"other_engines": {"sglang": {"temperature": 1}}}, r"unknown key rollout\.other_engines\.sglang\.t"),
    ],
)
def test_a_fleet_that_makes_no_sense_is_refused_by_its_key(rollout: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        mixed(**rollout)
    with pytest.raises(ConfigError, match="other_engines does not go with placement: fit"):
        config(placement="fit", rollout=MIXED)


# --- launcher and checks


def test_the_last_servers_start_with_the_other_engine_from_its_environment() -> None:
    specs = servers(mixed(replicas=4))
    assert [engine_option(spec) for spec in specs.values()] == ["", "", "", "sglang"]
    assert specs["rollout-3"].command[0] == "/opt/sglang/bin/python"
    assert specs["rollout-2"].command[0] != "/opt/sglang/bin/python"
    (newcomer, _) = plan.newcomers(mixed(), Machine(num_cores=8, gpus=()), controller_address="h:1")
    assert engine_option(newcomer) == ""
    remark = settle(mixed(), Machine(num_cores=4, gpus=())).remarks[-1]
    assert "1 learner rank and 3 rollout servers (1 with sglang) on 4 CPU cores" in remark


def test_an_engine_with_no_servers_of_the_launcher_is_for_those_that_are_started_by_hand() -> None:
    told = mixed(replicas=1, other_engines={"sglang": {"replicas": 0}})
    assert [engine_option(spec) for spec in servers(told).values()] == [""]
    assert engine_line(told) == "vllm, sglang"


def test_on_hosts_an_engine_keeps_its_own_interpreter_and_too_few_servers_are_refused() -> None:
    tree = {
        "config": "run.yaml",
        "address": "127.0.0.1",
        "hosts": [
            {"name": "a", "address": "127.0.0.1", "folder": "/srv", "python": "/opt/python"}
            | {"learner": 1, "rollout": 2, "reward": 1}
        ],
    }
    there = parse(hosts.Hosts, tree)
    run = hosts.with_hosts(mixed(), there)
    specs = hosts.members(there, run, Machine(num_cores=4, gpus=()), controller_address="h:1", master_port=1)
    first, second = (spec for spec in specs if spec.role is plan.Role.ROLLOUT)
    assert (first.command[0], engine_option(first)) == ("/opt/python", "")
    assert (second.command[0], engine_option(second)) == ("/opt/sglang/bin/python", "sglang")
    tree["hosts"][0]["rollout"] = 1  # type: ignore[index]
    with pytest.raises(ConfigError, match="the hosts' rollout servers are too few: other_engines take 1 of"):
        hosts.with_hosts(mixed(), parse(hosts.Hosts, tree))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"sglang": {"engine_kwargs": {"tp_size": 2}}},
            r"engines\.sglang: rollout.engine_kwargs may not set tp",
        ),
        ({"vlm": {}}, r"rollout\.other_engines\.vlm: .*there is no such engine"),
    ],
)
def test_check_asks_each_engine_and_names_the_one_that_refuses(other: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_line(mixed(other_engines=other))
    with pytest.raises(ConfigError, match=r"^rollout\.engine_kwargs may not set enable_lora"):
        engine_line(mixed(engine_kwargs={"enable_lora": True}))
    # What only the first engine can do is refused for the other.
    with pytest.raises(ConfigError, match=r"^rollout\.other_engines\.sglang: .*rollout\.sampler: engine"):
        engine_line(mixed(sampler="engine"))


def test_packages_and_log_probs_are_asked_for_each_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "sglang" else name)
    monkeypatch.setattr(EngineFacts, "lacking_library", None)
    with pytest.raises(EnvironmentLackError, match=r"sglang: rollout.python=/opt/sglang/bin/python does not"):
        require_packages(mixed())
    with pytest.raises(
        EnvironmentLackError, match=r"^rollout\.other_engines\.sglang: not installed .*sglang;"
    ):
        require_packages(mixed(other_engines={"sglang": {}}))
    require_packages(mixed(), engine=False)
    (check,) = [each for each in CHECKS if each.name == "engine's log-probs"]
    monkeypatch.setattr(EngineFacts, "has_cpu_build", False)
    first, second = check.run(mixed(), kept=tmp_path).split("\n")
    assert "vLLM's build for CPUs" in first
    assert "the engine of rollout.name=sglang cannot score given rows" in second


def test_faults_hit_the_engines_that_have_a_process_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "within", EngineFacts(title="W", package="w", start="w:s", check="w:c"))
    told = mixed(other_engines={"within": {}})
    assert sorted({target for _, target in all_faults(told) if target.endswith("/engine")}) == [
        *("rollout-0/engine", "rollout-1/engine")
    ]


# --- memory


def test_the_plan_counts_the_engine_that_takes_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    large = EngineFacts(
        title="L", package="l", start="l:s", check="l:c", rest_bytes=5 * GIB, asleep_bytes=4 * GIB
    )
    monkeypatch.setitem(ENGINES, "large", large)
    told = mixed(other_engines={"large": {}}, sleep="always")
    memory = EngineMemory.of_numbers(told, 1000)
    assert (memory.rest, memory.asleep) == (5 * GIB, 4 * GIB)
    assert engine_while_training(told, 80 * GIB) == 4 * GIB


def test_a_cache_is_fixed_if_it_is_for_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    fixing = EngineFacts(title="F", package="f", start="f:s", check="f:c", cache_argument="bytes")
    monkeypatch.setitem(ENGINES, "fixing", fixing)
    first = {"kv_cache_memory_bytes": 3 * GIB}
    assert fixed_cache(mixed(other_engines={}, engine_kwargs=first)) == 3 * GIB
    assert fixed_cache(mixed(engine_kwargs=first)) is None
    other = {"fixing": {"engine_kwargs": {"bytes": 4 * GIB}}}
    assert fixed_cache(mixed(other_engines=other, engine_kwargs=first)) == 4 * GIB
    # Tokens are no bytes: SGLang's argument that limits them fixes nothing.
    assert (
        fixed_cache(config(rollout={"name": "sglang", "engine_kwargs": {"max_total_tokens": 20_000}})) is None
    )


def test_on_shared_gpus_each_engine_gets_the_argument_that_fixes_its_own_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixing = EngineFacts(title="F", package="f", start="f:s", check="f:c", cache_argument="bytes")
    monkeypatch.setitem(ENGINES, "fixing", fixing)
    (tmp_path / "config.json").write_text(json.dumps(SEVEN | {"torch_dtype": "bfloat16"}))
    others = {"sglang": MIXED["other_engines"]["sglang"], "fixing": {"engine_kwargs": {"a": 1}}}  # type: ignore[index]
    told = config(
        model={"path": str(tmp_path)}, placement="colocated", rollout={**MIXED, "other_engines": others}
    )
    machine = Machine(num_cores=8, gpus=(0, 1, 2), gpu_bytes=dict.fromkeys(range(3), 80 * GIB))
    settled = settle(told, machine).config.rollout
    cache = settled.engine_kwargs["kv_cache_memory_bytes"]
    assert settled.engine_kwargs == {"block_size": 32, "kv_cache_memory_bytes": cache}
    assert settled.other_engines["fixing"].engine_kwargs == {"a": 1, "bytes": cache}
    assert settled.other_engines["sglang"].engine_kwargs == {"page_size": 16}
    assert ModelShape.of(SEVEN) is not None
    assert isinstance(cache, int)
    assert cache > GIB


# --- server, controller, journal and page


@pytest.mark.parametrize(("option", "name"), [("", "vllm"), ("sglang", "sglang")])
async def test_a_server_starts_the_engine_of_its_option_with_the_arguments_of_that_engine(
    option: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[RunConfig] = []

    async def start(told: RunConfig) -> None:
        began.append(told)

    monkeypatch.setattr(app, "start_engine", start)
    monkeypatch.setattr(app, "local_model", lambda model, *_, **__: model)
    may_start = SimpleNamespace(is_set=lambda: True)
    session: Any = SimpleNamespace(
        poke=lambda: None,
        options=SimpleNamespace(engine=option),
        link=SimpleNamespace(may_start=may_start),
    )
    await app.RolloutApp(session)._start(mixed())
    assert (began[0].rollout.name, began[0].rollout.other_engines) == (name, {})
    assert began[0].rollout.engine_kwargs == ({"page_size": 16} if option else {"block_size": 32})


async def test_a_fleet_of_two_engines_registers_and_the_journal_and_the_page_know_which_is_which(
    tmp_path: Path,
) -> None:
    kind = common_pb2.MEMBER_KIND_ROLLOUT
    told = run_config(rollout__other_engines={"sglang": {}})
    async with made(tmp_path, told) as bench:
        await bench.register(kind, "rollout-0", state="stale", address="h:1")
        await bench.register(kind, "rollout-1", state="stale", address="h:2", engine="sglang")
        await bench.register(common_pb2.MEMBER_KIND_REWARD, "reward-0", address="h:3")
        assert [m.member_id for m in bench.supervisor.rollouts] == ["rollout-0", "rollout-1"]
        with pytest.raises(
            ConfigError, match="rollout-2 was started with --engine vlm, and this run has vllm, s"
        ):
            await bench.register(kind, "rollout-2", address="h:4", engine="vlm")
        assert await bench.status("engine") == {"rollout-0": "vllm", "rollout-1": "sglang", "reward-0": ""}
    events = [e for e in read_jsonl(tmp_path / "events.jsonl") if e.get("what") == "registered"]
    assert [e.get("engine") for e in events] == ["vllm", "sglang", None]
    fleet = RunContent(tmp_path).journal()["fleet"]
    assert {member["name"]: member["engine"] for member in fleet} == {
        "reward-0": "",
        "rollout-0": "vllm",
        "rollout-1": "sglang",
    }
