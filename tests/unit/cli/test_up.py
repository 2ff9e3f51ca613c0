"""`paceline up`: the plan over several hosts, and processes behind a stand-in for ssh."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from paceline.checks import host_check
from paceline.checks.host_check import check_hosts
from paceline.cli.commands.start import up
from paceline.cli.main import main
from paceline.config.load import parse
from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.launch.planning import hosts as several
from paceline.launch.planning.hosts import Hosts
from paceline.launch.planning.plan import ProcessSpec, Role
from paceline.launch.processes.spawn import ManagedProcess, start
from paceline.sizing.machine import Machine
from paceline.sizing.memory_choice import LEAST
from support.cli_configs import SEVEN, config
from support.source import ROOT

REDIS = {"url": "rediss://redis:6379/0"}


def two_hosts(**first: object) -> Hosts:
    tree = {
        "config": "run.yaml",
        "address": "10.0.0.1",
        "hosts": [
            {"name": "me@a", "address": "10.0.0.2", "folder": "/srv/a", "learner": 2, "reward": 2, **first},
            {
                "name": "b",
                "address": "10.0.0.3",
                "folder": "/srv b",
                "python": "/opt/python",
                "learner": 1,
                "rollout": 2,
                "gpus": [4, 5, 6],
                "env": {"PACELINE_TLS_DIR": "/tls"},
            },
        ],
    }
    return parse(Hosts, tree)


def specs(hosts: Hosts, **sections: object) -> dict[str, ProcessSpec]:
    run = several.with_hosts(config(broker=REDIS, **{"learner": {"device": "cpu"}} | sections), hosts)
    machine = Machine(num_cores=1, gpus=())
    planned = several.members(hosts, run, machine, controller_address="10.0.0.1:7000", master_port=1)
    return {spec.name: spec for spec in planned}


def test_every_process_is_planned_on_its_host() -> None:
    planned = specs(two_hosts(gpus=[0, 1]))
    assert list(planned) == [
        *("rollout-0", "rollout-1", "learner-0", "learner-1", "learner-2", "reward-0", "reward-1"),
    ]
    names = {name: spec.shell[-2] for name, spec in planned.items()}
    assert [name for name, host in names.items() if host == "b"] == ["rollout-0", "rollout-1", "learner-2"]
    ranks = [
        [
            planned[f"learner-{rank}"].env[key]
            for key in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
        ]
        for rank in range(3)
    ]
    assert ranks == [["0", "0", "2", "3"], ["1", "1", "2", "3"], ["2", "0", "1", "3"]]
    store = {(s.env["MASTER_ADDR"], s.env["MASTER_PORT"]) for s in planned.values() if s.role is Role.LEARNER}
    assert store == {("10.0.0.2", "29500")}
    visible = {name: spec.env.get("CUDA_VISIBLE_DEVICES") for name, spec in planned.items()}
    assert (visible["learner-0"], visible["learner-2"]) == ("0,1", "4")
    assert (visible["rollout-0"], visible["rollout-1"]) == ("5", "6")
    rollout, reward = planned["rollout-1"], planned["reward-1"]
    assert rollout.command[:3] == ("/opt/python", "-m", "paceline.rollout")
    assert rollout.command[rollout.command.index("--host") + 1] == "10.0.0.3"
    assert rollout.env["PACELINE_TLS_DIR"] == "/tls"
    assert rollout.shell[-1] == "cd '/srv b' && exec /opt/python -m paceline.launch.remote"
    assert "reward-1" in reward.command
    assert reward.member_id == "reward-1"


def test_colocated_the_servers_of_a_host_are_on_the_learners_gpus() -> None:
    hosts = two_hosts(gpus=[0, 1], rollout=1)
    size = {"rollout": {"tensor_model_parallel_size": 2}, "learner": {"device": "cuda"}}
    planned = specs(parse(Hosts, _without_rollout(hosts)), placement="colocated", **size)
    visible = {name: spec.env["CUDA_VISIBLE_DEVICES"] for name, spec in planned.items() if name != "reward-0"}
    assert visible == {"rollout-0": "0,1", "learner-0": "0,1", "learner-1": "0,1", "learner-2": "4"}
    with pytest.raises(ConfigError, match=r"b has 3 GPUs for 2 rollout servers of 2: correct its gpus"):
        specs(hosts, placement="colocated", **size)


def _without_rollout(hosts: Hosts) -> dict[str, object]:
    """The file with servers on the first host alone."""
    first, second = hosts.model_dump(mode="json")["hosts"]
    return hosts.model_dump(mode="json") | {"hosts": [first | {"reward": 1}, second | {"rollout": 0}]}


def test_reward_models_run_where_a_host_names_them_and_attach_to_every_reward_service() -> None:
    tree = two_hosts().model_dump(mode="json")
    first, second = tree["hosts"]
    hosts = parse(Hosts, tree | {"hosts": [first, second | {"reward_models": ["rm", "steps"]}, HELPER]})
    models = [
        {"name": "rm", "path": "rm", "device": "cuda:1", "replicas": 2},
        {"name": "steps", "path": "steps", "kind": "process"},
    ]
    planned = specs(hosts, reward={"models": models}, service={"reward_port": 4711})
    replicas = {name: spec for name, spec in planned.items() if spec.role is Role.REWARD_MODEL}
    places = {name: (s.shell[-2], s.env.get("CUDA_VISIBLE_DEVICES")) for name, s in replicas.items()}
    assert places == {
        "reward-model-rm-0": ("b", "1"),
        "reward-model-rm-1": ("b", "2"),
        "reward-model-rm-2": ("c", "1"),
        "reward-model-rm-3": ("c", "2"),
        "reward-model-steps-0": ("b", None),
    }
    for spec in replicas.values():
        at = spec.command.index("--attach")
        assert spec.command[at + 1 : at + 3] == ("10.0.0.2:4711", "10.0.0.2:4712")
        assert spec.command[at + 3] == "--name"
        assert spec.token_variable == "PACELINE_REWARD_TOKEN"
    ports = [planned[name].command[-1] for name in ("reward-0", "reward-1")]
    assert ports == ["4711", "4712"], "of one host"
    # They have no part in the sharing of the learner's and the servers' GPUs.
    assert planned["rollout-1"].env["CUDA_VISIBLE_DEVICES"] == "6"


HELPER = {"name": "c", "address": "fd00::4", "folder": "/", "reward_models": ["rm"]}


def test_a_reward_model_without_a_host_is_refused() -> None:
    models = {"models": [{"name": "rm", "path": "rm"}]}
    with pytest.raises(ConfigError, match="reward.models names rm, but the hosts run none"):
        several.with_hosts(config(broker=REDIS, reward=models), two_hosts())
    with pytest.raises(ConfigError, match="reward.models names none, but the hosts run rm"):
        several.with_hosts(config(broker=REDIS), two_hosts(reward_models=["rm"]))


def test_what_cannot_run_is_said_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"`paceline redis DIR --host 10\.0\.0\.1`"):
        several.with_hosts(config(), two_hosts())
    lonely = two_hosts().model_copy(update={"hosts": two_hosts().hosts[:1]})
    with pytest.raises(ConfigError, match="no host runs rollout: give one of them rollout: 1"):
        several.with_hosts(config(broker=REDIS), lonely)
    with pytest.raises(
        ConfigError, match=r"learner.fsdp_size=2 must divide the 3 learner ranks of the hosts"
    ):
        specs(two_hosts(), learner={"world_size": 2, "fsdp_size": 2})
    with pytest.raises(ConfigError, match="me@a has 1 GPUs for 2 learner ranks"):
        specs(two_hosts(gpus=[0]))


def copies(*, cards: tuple[str | None, ...], ranks: tuple[int, ...] = (8, 8), **sections: Any) -> Any:
    """What a model of 7B has as `learner.fsdp_size` on hosts with these ranks, and why."""
    entry = {"folder": "/", "rollout": 1, "reward": 1}
    tree = {
        "config": "run.yaml",
        "address": "10.0.0.1",
        "hosts": [
            {"name": f"h{number}", "address": f"10.0.0.{number + 2}", "learner": size, "card": card, **entry}
            for number, (size, card) in enumerate(zip(ranks, cards, strict=True))
        ],
    }
    hosts = parse(Hosts, tree)
    run = several.with_hosts(config(broker=REDIS, **sections), hosts)
    run = run.changed(actor={"memory": run.actor.memory.with_rest_of(LEAST)})
    settled, words = several.with_copies(run, hosts)
    assert settled.learner.num_shards == (settled.learner.fsdp_size or sum(ranks))
    return settled.learner.fsdp_size, " ".join(words)


def test_each_host_has_a_copy_of_the_weights_where_its_gpus_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SEVEN))
    assert copies(cards=("H200", "141xH200")) == (
        8,
        "learner.fsdp_size=8: each host has a copy of the weights, which are gathered within it",
    )
    single = "learner.fsdp_size: one copy of the weights over all hosts, as "
    size, why = copies(cards=("H200", "L40S"))
    assert size is None
    words = rf"{single}the learner would need \d+\.\d of 45\.0 GiB on each GPU with one per host"
    assert re.fullmatch(words, why)
    assert copies(cards=("H200", None)) == (None, f"{single}HOSTS.yaml does not name the card of each")
    assert copies(cards=("H200", "H200"), ranks=(8, 4)) == (None, f"{single}they have 8, 4 ranks")
    assert copies(cards=("H200",), ranks=(8,)) == (None, "")
    given = {"world_size": 16, "fsdp_size": 4}
    assert copies(cards=("H200", "H200"), learner=given) == (4, "")
    assert copies(cards=("H200", "H200"), learner={"fsdp_size": None}) == (None, "")
    # Colocated engines keep a part of the memory.
    awake = {"placement": "colocated", "rollout": {"sleep": "never", "gpu_memory_utilization": 0.8}}
    assert copies(cards=("H200", "H200"), **awake)[0] is None
    with pytest.raises(ConfigError, match="names no known GPUs"):
        copies(cards=("H200", "Z9"))


def test_up_trains_with_what_it_chose_and_asks_the_hosts_for_the_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SEVEN))
    sections = {"broker": REDIS, "service": {"ports": "20000-20999"}}
    sections |= {"data": {"train_files": ["train.parquet"], "max_response_length": 31744}}
    run = config(**sections, actor={"ppo_max_token_len_per_gpu": 16384})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run.model_dump(mode="json", exclude_unset=True)))
    host = {"folder": "/", "learner": 2, "rollout": 1, "reward": 1, "gpus": [0, 1, 2], "card": "H200"}
    hosts = [{"name": f"h{number}", "address": f"10.0.0.{number}", **host} for number in (2, 3)]
    tree = {"config": "run.yaml", "address": "10.0.0.1", "hosts": hosts}
    (tmp_path / "HOSTS.yaml").write_text(yaml.safe_dump(tree))
    seen: dict[str, Any] = {}
    monkeypatch.setattr(up, "quick_check", lambda config, here: None)
    monkeypatch.setattr(up, "check_hosts", lambda hosts, **given: seen.update(given))
    monkeypatch.setattr(up, "train", lambda config, **given: seen.update(given, config=config) or 0)
    assert main(["up", "HOSTS.yaml"]) == 0
    assert seen["ports"] == "20000-20999"
    learner = seen["config"].learner
    assert (learner.context_parallel, learner.fsdp_size, learner.world_size) == (2, 2, 4)
    chosen = ("learner.context_parallel=2: a row of 32,256 tokens", "learner.fsdp_size=2: each host has")
    for choice in chosen:
        assert any(words.startswith(choice) for words in seen["remarks"]), seen["remarks"]


# --- behind the remote shell

SSH = """#!/bin/sh
# As ssh: words, then the host, then one command line that the host's shell runs.
echo "$@" >> {folder}/argv
exec /bin/sh -c "$2"
"""

SERVICE = (
    "import json, os, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (open('ended', 'w'), sys.exit(3)))\n"
    "print(json.dumps([os.getcwd(), os.environ['SECRET'], os.environ['OWN']]), flush=True)\n"
    "open('pid', 'w').write(str(os.getpid()))\n"
    "{then}"
)


async def begin(tmp_path: Path, then: str) -> ManagedProcess:
    there = tmp_path / "there"
    there.mkdir()
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH.format(folder=tmp_path))
    ssh.chmod(0o755)
    remote = f"cd {there} && exec env PYTHONPATH={ROOT / 'src'} {sys.executable} -m paceline.launch.remote"
    spec = ProcessSpec(
        name="rollout-0",
        role=Role.ROLLOUT,
        command=(sys.executable, "-c", SERVICE.format(then=then)),
        env={"OWN": "o"},
        shell=(str(ssh), "host", remote),
    )
    return await start(spec, tmp_path / "log", {"SECRET": "hush"})


async def pid_of(tmp_path: Path) -> psutil.Process:
    path = tmp_path / "there" / "pid"
    async with asyncio.timeout(120):
        while not path.exists() or not path.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return psutil.Process(int(path.read_text()))


async def test_a_remote_process_has_its_folder_and_its_secrets_off_the_command_line(tmp_path: Path) -> None:
    process = await begin(tmp_path, "sys.exit(7)")
    assert await asyncio.wait_for(process.exited, 120) == 7
    assert json.loads((tmp_path / "log").read_text()) == [str(tmp_path / "there"), "hush", "o"]
    assert "hush" not in (tmp_path / "argv").read_text()


async def test_a_remote_process_is_asked_to_end(tmp_path: Path) -> None:
    process = await begin(tmp_path, "time.sleep(60)")
    await pid_of(tmp_path)
    process.terminate()
    assert await asyncio.wait_for(process.exited, 120) == 3
    assert (tmp_path / "there" / "ended").exists()


async def test_a_remote_process_ends_when_the_connection_is_lost(tmp_path: Path) -> None:
    process = await begin(tmp_path, "time.sleep(60)")
    service = await pid_of(tmp_path)
    wrapper = service.parent()
    assert wrapper is not None
    # ssh is gone, and the host's end of the connection with it.
    process._stdin.close()  # type: ignore[union-attr]
    async with asyncio.timeout(120):
        while service.is_running() and service.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert await asyncio.wait_for(process.exited, 120) == 3


async def test_a_killed_remote_process_counts_as_killed(tmp_path: Path) -> None:
    """Before it was ready, a failure ends the run, and a kill does not."""
    process = await begin(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert await asyncio.wait_for(process.exited, 120) == -signal.SIGKILL
    assert process.outcome() == "killed by SIGKILL"


async def test_a_lost_connection_is_no_signal(tmp_path: Path) -> None:
    process = await begin(tmp_path, "sys.exit(255)")
    assert await asyncio.wait_for(process.exited, 120) == 255


# --- before anything starts


def stand_in(tmp_path: Path, **first: object) -> Hosts:
    """One host with all services; its shell is /bin/sh of this machine."""
    host = {"name": "node1", "address": "127.0.0.1", "folder": str(tmp_path), "python": sys.executable}
    host |= {"learner": 1, "rollout": 1, "reward": 1, **first}
    return parse(
        Hosts, {"config": "run.yaml", "address": "127.0.0.1", "shell": ["/bin/sh", "-c"], "hosts": [host]}
    )


def test_a_host_that_cannot_run_its_services_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(**changes: object) -> str:
        with pytest.raises(EnvironmentLackError) as raised:
            check_hosts(stand_in(tmp_path, **changes))
        return str(raised.value)

    check_hosts(stand_in(tmp_path))
    assert "node1 cannot run its services" in fault(folder="/no/such")
    assert "check its name, folder (/no/such) and python" in fault(folder="/no/such")
    assert "/no/python: not found (exit code 127)" in fault(python="/no/python")
    bare = tmp_path / "python"
    packages = ROOT / "src"
    bare.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", "")
    assert "has no paceline.learner, paceline.rollout, paceline.reward; install" in fault(python=str(bare))


def test_a_host_without_a_certificate_is_told_which_variable_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACELINE_TLS_DIR", raising=False)

    def faults(env: dict[str, str], *, tls_dir: str = "", insecure: bool = False) -> list[str]:
        hosts = stand_in(tmp_path, env=env, address="10.0.0.2").model_copy(update={"address": "10.0.0.1"})
        try:
            check_hosts(hosts, tls_dir=tls_dir, insecure=insecure)
        except EnvironmentLackError as error:
            return str(error).splitlines()
        return []

    assert faults({}, insecure=True) == []
    here, host = faults({})
    assert here.startswith(
        "this machine has no certificate: set PACELINE_TLS_DIR, to the folder that `paceline certs"
    )
    assert host.startswith("node1 has no certificate: in HOSTS.yaml set its env, PACELINE_TLS_DIR, to the")
    (tmp_path / "tls").mkdir()
    for name in ("ca.pem", "cert.pem"):
        (tmp_path / "tls" / name).touch()
    (host,) = faults({"PACELINE_TLS_DIR": "tls"}, tls_dir="here")
    assert host.startswith("node1 cannot read key.pem in PACELINE_TLS_DIR=tls")
    (tmp_path / "tls" / "key.pem").touch()
    assert faults({"PACELINE_TLS_DIR": "tls"}, tls_dir="here") == []


def test_an_address_that_leads_a_host_to_itself_is_refused(tmp_path: Path) -> None:
    """As the own name does that Debian writes into /etc/hosts."""
    with pytest.raises(EnvironmentLackError, match=r"on node1 the name 127\.1 stands for 127\.0\.0\.1"):
        check_hosts(stand_in(tmp_path, address="127.1"), insecure=True)
    with pytest.raises(EnvironmentLackError, match=r"node1 does not know the name no\.such\.invalid"):
        check_hosts(stand_in(tmp_path, address="no.such.invalid"), insecure=True)
    with pytest.raises(ConfigError, match=r"the address of me@a, 127\.0\.0\.1, leads every other host"):
        several.with_hosts(config(broker=REDIS), two_hosts(address="127.0.0.1"))


def test_a_host_that_does_not_answer_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_check, "_LIMIT_S", 0.3)
    silent = stand_in(tmp_path).model_copy(update={"shell": ("/bin/sh", "-c", "exec sleep 30")})
    with pytest.raises(EnvironmentLackError, match=r"node1 has not answered /bin/sh for 0\.3 s"):
        check_hosts(silent)
    with pytest.raises(EnvironmentLackError, match="no-such-shell does not start"):
        check_hosts(silent.model_copy(update={"shell": ("no-such-shell",)}))
