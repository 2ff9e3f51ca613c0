"""The compose file as docker compose reads it, the GPU profile too, and the script that issues certificates.

Nothing here starts a container.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli.certificates import Authority
from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.service.confinement import inside
from support import compose_stack, source
from support.compose_stack import FOLDER, TLS_NAMES

PROFILES = ("cpu", "gpu", "colocated", "observability")


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The services of all profiles, with every variable filled in."""
    command = compose_stack.command()
    if not command:
        pytest.skip("there is no docker compose; install Debian's docker-compose, or Docker's plugin")
    folder = tmp_path_factory.mktemp("files") / "deploy" / "compose"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("secrets", ".env"))
    shutil.copy(folder / ".env.example", folder / ".env")
    subprocess.run([str(folder / "secrets.sh")], check=True, timeout=30)
    words = [word for profile in PROFILES for word in ("--profile", profile)]
    answer = subprocess.run(
        [*command, *words, "config"], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.returncode == 0, answer.stderr
    tree: dict[str, dict[str, Any]] = yaml.safe_load(answer.stdout)["services"]
    return tree


def of(services: dict[str, dict[str, Any]], *profiles: str) -> dict[str, dict[str, Any]]:
    """The services of some profiles."""
    return {name: each for name, each in services.items() if set(each["profiles"]) & set(profiles)}


def gpus(service: dict[str, Any]) -> list[str]:
    """The ids of the GPUs that a service reserves."""
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    ids: list[str] = device["device_ids"]
    return ids


@pytest.mark.parametrize("profile", ["cpu", "gpu", "colocated"])
def test_a_profile_is_complete(profile: str, services: dict[str, dict[str, Any]]) -> None:
    own = of(services, profile, "observability")
    for name, service in own.items():
        assert set(service.get("depends_on", ())) <= set(own), name
        assert service["read_only"] is True
    assert {"certs", "redis", "collector", "prometheus"} < set(own)


def host_of(port: Any) -> str:
    """Where a port is published: docker-compose prints a port as a string, Docker's plugin as a mapping."""
    if isinstance(port, dict):
        return str(port.get("host_ip", ""))
    return str(port).rpartition(":")[0].rpartition(":")[0]


def test_every_container_is_closed_and_the_ports_are_the_nodes_own(
    services: dict[str, dict[str, Any]],
) -> None:
    published = []
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"cap_add", "privileged"} & set(service), name
        published += [(name, host_of(port)) for port in service.get("ports", ())]
    assert {"controller", "controller-gpu", "controller-colocated"} <= {name for name, _ in published}
    assert [each for each in published if each[1] != "127.0.0.1"] == []


def test_every_service_of_a_run_is_asked_for_its_health(services: dict[str, dict[str, Any]]) -> None:
    """In its own role: compose waits for the controller's answer, `docker ps` shows the others'."""
    asked = {
        name: service["healthcheck"]["test"][1:]
        for name, service in services.items()
        if name.partition("-")[0] in ("controller", "learner", "rollout", "reward")
        and name not in ("reward-model", "reward-model-gpu")  # which have no port
    }
    assert len(asked) == 4 + (3 + 4) + (3 + 8) + 1
    for name, command in asked.items():
        role = name.partition("-")[0]
        assert command == ["paceline", "health", "127.0.0.1:7000", "--role", role], name
    for name, service in services.items():
        waits = service.get("depends_on", {})
        for other in set(waits) & set(asked):
            if other.startswith("controller"):
                assert waits[other]["condition"] == "service_healthy", name


def configured(controller: dict[str, Any]) -> RunConfig:
    """What a controller's command gives the run."""
    command = controller["command"]
    words = command.split() if isinstance(command, str) else command
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    return load(RunConfig, source.ROOT / words[words.index("--config") + 1], overrides)


def test_the_gpu_profile_gives_each_process_of_the_example_a_gpu(
    services: dict[str, dict[str, Any]],
) -> None:
    config = configured(services["controller-gpu"])
    assert config.learner.devices is config.rollout.devices is None
    learner = services["learner-gpu"]
    rollouts = [service for name, service in services.items() if name.startswith("rollout-gpu-")]
    assert int(learner["environment"]["PET_NPROC_PER_NODE"]) == config.learner.world_size
    assert len(gpus(learner)) == config.learner.world_size
    assert len(rollouts) == config.rollout.replicas
    every = gpus(learner) + [gpu for service in rollouts for gpu in gpus(service)]
    assert sorted(every) == [str(gpu) for gpu in range(8)]


def test_the_colocated_profile_has_a_rank_and_a_server_on_each_gpu(
    services: dict[str, dict[str, Any]],
) -> None:
    config = configured(services["controller-colocated"])
    assert (config.placement, config.weights.backend) == ("colocated", "shared")
    assert config.rollout.sleep != "auto"  # which nobody would decide here
    learner = services["learner-colocated"]
    rollouts = [service for name, service in services.items() if name.startswith("rollout-colocated-")]
    assert int(learner["environment"]["PET_NPROC_PER_NODE"]) == config.learner.world_size == 8
    assert len(rollouts) == config.rollout.replicas == 8
    devices = [str(gpu) for gpu in range(8)]
    assert sorted(service["environment"]["CUDA_VISIBLE_DEVICES"] for service in rollouts) == devices
    for service in (learner, *rollouts):
        assert gpus(service) == devices
        # Memory is opened through the other process, which each must see.
        assert service["pid"] == "service:processes"
        assert "processes" in service["depends_on"]
    assert services["processes"]["restart"] == "unless-stopped"


def test_only_reward_services_may_confine_code_and_nothing_else(
    services: dict[str, dict[str, Any]],
) -> None:
    """The filter of confined.yaml allows what builds a confinement, and nothing more of what that refuses."""
    further = yaml.safe_load((FOLDER / "confined.yaml").read_text())["services"]
    scoring = {name for name in services if name.startswith("reward") and "model" not in name}
    assert set(further) == scoring
    assert all(each == {"security_opt": ["seccomp:confined.json"]} for each in further.values())
    profile = json.loads((FOLDER / "confined.json").read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ALLOW"
    (refused,) = profile["syscalls"]
    assert refused["action"] == "SCMP_ACT_ERRNO"
    builds = {"unshare", "mount", "umount2", "pivot_root", "mount_setattr"}
    # Memory that no limit of a process counts is refused to programs alone: a container's limit counts it.
    hoards = {"shmget", "memfd_create", "memfd_secret", "msgget", "semget", "mq_open", "io_setup"}
    assert set(inside._DENIED) - set(refused["names"]) == builds | hoards


@pytest.fixture
def issue(tmp_path: Path) -> Any:
    """Runs the script of the service `certs` in a folder as the container has it; returns what it printed."""
    programs, folder, password = tmp_path / "bin", tmp_path / "tls", tmp_path / "password"
    programs.mkdir()
    (programs / "paceline").write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline.cli.main "$@"\n')
    (programs / "paceline").chmod(0o755)
    for role in TLS_NAMES:
        (folder / role).mkdir(parents=True)
    password.write_text("of the run")
    env = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PACELINE_REDIS_PASSWORD_FILE": str(password),
    }

    def run() -> str:
        script = FOLDER / "certs" / "issue.sh"
        return subprocess.run(
            ["sh", str(script)],
            cwd=folder,
            env=env,
            check=True,
            timeout=100,
            capture_output=True,
            text=True,
        ).stdout

    return run


@pytest.mark.timeout(900)
def test_certificates_are_issued_once_and_renewed_when_half_of_their_days_are_over(
    issue: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "tls"
    issue()
    first = {role: (folder / role / "cert.pem").read_bytes() for role in TLS_NAMES}
    assert len(set(first.values())) == len(TLS_NAMES)
    modes = {
        path.relative_to(folder).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in folder.rglob("*")
        if path.suffix in (".key", ".acl") or path.name == "key.pem"
    }
    assert modes == {
        "ca.key": 0o600,
        **{f"{role}/key.pem": 0o600 for role in TLS_NAMES},
        "redis/key.pem": 0o640,
        "client-prometheus/key.pem": 0o640,
        "redis/users.acl": 0o640,
    }
    users = (folder / "redis" / "users.acl").read_text().splitlines()
    assert users[0].split()[:3] == ["user", "default", "off"]
    assert users[1].startswith("user paceline on #")
    assert len(users) == 2

    # Certificates begin five minutes before they are issued: half of rollout's time is over.
    authority = Authority.load(folder)
    authority.issue(folder / "redis", "redis", role="redis", hosts=["redis"], days=7 / 1440)
    authority.issue(folder / "rollout", "rollout", role="rollout", days=3 / 1440)
    (folder / "redis" / "key.pem").chmod(0o640)
    first = {role: (folder / role / "cert.pem").read_bytes() for role in TLS_NAMES}
    assert issue().count("keeps its certificate") == len(TLS_NAMES) - 1
    second = {role: (folder / role / "cert.pem").read_bytes() for role in TLS_NAMES}
    assert {role for role in TLS_NAMES if first[role] != second[role]} == {"rollout"}
    assert stat.S_IMODE((folder / "rollout" / "key.pem").stat().st_mode) == 0o600
