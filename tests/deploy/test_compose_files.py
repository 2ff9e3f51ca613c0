"""The compose file as docker compose reads it, the GPU profile too, and the script that issues certificates.

Nothing here starts a container.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from cryptography import x509

from paceline.cli.certificates import Authority
from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.launch.container import own_gpus
from paceline.service.confinement import inside
from support import compose_stack, source
from support.compose_stack import FOLDER, TLS_NAMES

PROFILES = (
    *("cpu", "gpu", "colocated", "observability", "blob-store"),
    *("reward-model", "reward-model-gpu", "reward-model-server"),
)
# Seven GPUs, folders, limits.
NODE = """
LEARNER_GPUS=0,1,6
GPU_LEARNER_RANKS=3
ROLLOUT_GPUS=2,3,4,5
ROLLOUT_SERVERS=2
GPUS_PER_SERVER=2
COLOCATED_GPUS=0,2,3
COLOCATED_RANKS=3
GPU_CONFIG=deploy/compose/run/arithmetic.yaml
REWARD_MODEL_GPU=5
MODELS_FOLDER=/srv/models
DATA_FOLDER=./mine
RUNS_FOLDER=/srv/runs
CONTROLLER_MEMORY=1g
LEARNER_MEMORY=2g
ROLLOUT_MEMORY=3g
REWARD_MEMORY=4g
REWARD_MODEL_MEMORY=5g
REDIS_MEMORY=6g
TMP_SIZE=7g
CACHE_SIZE=9g
SHM_SIZE=10g
BLOB_STORES=rediss://paceline@redis-blobs:6379/0
"""


def rendered(folder: Path, text: str = "", *further: str) -> dict[str, dict[str, Any]]:
    """The services of all profiles, with every variable filled in; `text` follows what .env.example says.

    `further` files follow compose.yaml.
    """
    command = compose_stack.command()
    if not command:
        pytest.skip("there is no docker compose; install Debian's docker-compose, or Docker's plugin")
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("secrets", ".env"))
    (folder / ".env").write_text((folder / ".env.example").read_text() + text)
    subprocess.run([str(folder / "secrets.sh")], check=True, timeout=30)
    words = [word for profile in PROFILES for word in ("--profile", profile)]
    words += [word for file in ("compose.yaml", *further) for word in ("-f", file)]
    answer = subprocess.run(
        [*command, *words, "config"], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.returncode == 0, answer.stderr
    tree: dict[str, dict[str, Any]] = yaml.safe_load(answer.stdout)["services"]
    return tree


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return rendered(tmp_path_factory.mktemp("files") / "deploy" / "compose")


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The services on another node."""
    return rendered(tmp_path_factory.mktemp("changed") / "deploy" / "compose", NODE)


def of(services: dict[str, dict[str, Any]], *profiles: str) -> dict[str, dict[str, Any]]:
    """The services of some profiles."""
    return {name: each for name, each in services.items() if set(each["profiles"]) & set(profiles)}


def gpus(service: dict[str, Any]) -> list[str]:
    """The GPUs that the container's process uses; [] if it has nothing to do."""
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert device["count"] in ("all", -1)
    own = own_gpus({name: str(value) for name, value in service["environment"].items()})
    if own is None:
        return []
    return str(own.get("CUDA_VISIBLE_DEVICES") or service["environment"]["CUDA_VISIBLE_DEVICES"]).split(",")


@pytest.mark.parametrize("profile", ["cpu", "gpu", "colocated"])
def test_a_profile_is_complete(profile: str, services: dict[str, dict[str, Any]]) -> None:
    own = of(services, profile, "observability")
    for name, service in own.items():
        assert set(service.get("depends_on", ())) <= set(own), name
        assert service["read_only"] is True
    assert {"certs", "redis", "collector", "prometheus"} < set(own)


def test_a_blob_store_is_a_second_redis_without_a_file(
    services: dict[str, dict[str, Any]], changed: dict[str, dict[str, Any]], issue: Any, tmp_path: Path
) -> None:
    store, redis = changed["redis-blobs"], changed["redis"]
    assert (store["profiles"], store["environment"]["REDIS_APPEND_ONLY"]) == (["blob-store"], "no")
    assert "REDIS_APPEND_ONLY" not in redis["environment"]
    assert (mounts(store)["/data"], mounts(redis)["/data"]) == ("redis-blobs", "redis")
    same = ("image", "entrypoint", "user", "group_add", "networks", "healthcheck", "secrets")
    assert [store[key] for key in same] == [redis[key] for key in same]
    told = changed["controller"]["environment"]["PACELINE_BLOB_STORES"]
    assert services["controller"]["environment"]["PACELINE_BLOB_STORES"] == ""
    issue()
    certificate = x509.load_pem_x509_certificate((tmp_path / "tls" / "redis" / "cert.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert urlsplit(told).hostname in names.get_values_for_type(x509.DNSName)


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
    assert len(asked) == 4 + (3 + 7) + (3 + 8) + 1
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
    assert int(learner["environment"]["PET_NPROC_PER_NODE"]) == config.learner.world_size == 4
    servers = servers_of(services, "gpu")
    assert len(servers) == config.rollout.replicas == 4
    assert config.rollout.tensor_model_parallel_size == 1
    assert sorted(chain(gpus(learner), *servers)) == [str(gpu) for gpu in range(8)]


def test_one_server_of_the_gpu_profile_can_have_another_engine(
    services: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "deploy" / "compose"
    with_sglang = rendered(folder, "OVERRIDES=rollout.other_engines.sglang.replicas=1\n", "sglang.yaml")
    images = {name: service["image"] for name, service in services.items()}
    assert {name for name, service in with_sglang.items() if service["image"] != images[name]} == {
        "rollout-gpu-3"
    }
    server = with_sglang["rollout-gpu-3"]
    assert (server["image"], server["command"]) == ("paceline/rollout:sglang", ["--engine", "sglang"])
    assert gpus(server) == gpus(services["rollout-gpu-3"]) == ["7"]
    rollout = configured(with_sglang["controller-gpu"]).rollout
    assert (rollout.replicas, rollout.engine_names) == (4, ("vllm", "sglang"))


def test_one_server_of_the_gpu_profile_can_answer_held_out_prompts_only(
    services: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "deploy" / "compose"
    with_one = rendered(folder, "OVERRIDES=rollout.validation_servers=1\n", "validation.yaml")
    assert {name for name, service in with_one.items() if "--validates" in service.get("command", ())} == {
        "rollout-gpu-3"
    }
    server, plain = with_one["rollout-gpu-3"], services["rollout-gpu-3"]
    assert (server["image"], gpus(server)) == (plain["image"], gpus(plain))
    rollout = configured(with_one["controller-gpu"]).rollout
    assert (rollout.replicas, rollout.training_servers) == (4, 3)


def servers_of(services: dict[str, dict[str, Any]], profile: str) -> list[list[str]]:
    """The GPUs of each rollout server that has some."""
    names = [name for name in services if name.startswith(f"rollout-{profile}-")]
    assert len(names) == {"gpu": 7, "colocated": 8}[profile]
    assert set(names) < set(services["follow-" + profile]["depends_on"])
    return [own for own in (gpus(services[name]) for name in sorted(names)) if own]


def test_the_colocated_profile_has_a_rank_and_a_server_on_each_gpu(
    services: dict[str, dict[str, Any]],
) -> None:
    config = configured(services["controller-colocated"])
    assert (config.placement, config.weights.backend) == ("colocated", "shared")
    assert config.rollout.sleep != "auto"  # which nobody would decide here
    learner = services["learner-colocated"]
    assert int(learner["environment"]["PET_NPROC_PER_NODE"]) == config.learner.world_size == 8
    servers = servers_of(services, "colocated")
    assert len(servers) == config.rollout.replicas
    assert gpus(learner) == list(chain(*servers)) == [str(gpu) for gpu in range(8)]
    for name, service in services.items():
        if name.startswith(("learner-colocated", "rollout-colocated")):
            # Memory is opened through the other process, which each must see.
            assert service["pid"] == "service:processes"
            assert "processes" in service["depends_on"]
    assert services["processes"]["restart"] == "unless-stopped"


def test_gpus_and_numbers_of_processes_are_those_of_the_node(changed: dict[str, dict[str, Any]]) -> None:
    learner = changed["learner-gpu"]
    assert (gpus(learner), learner["environment"]["PET_NPROC_PER_NODE"]) == (["0", "1", "6"], "3")
    assert servers_of(changed, "gpu") == [["2", "3"], ["4", "5"]]
    assert gpus(changed["reward-model-gpu"]) == ["5"]
    config = configured(changed["controller-gpu"])
    assert config.data.train_files == ("data/arithmetic/train.parquet",)  # of the named configuration
    rollout = config.rollout
    assert (config.learner.world_size, rollout.replicas, rollout.tensor_model_parallel_size) == (3, 2, 2)
    assert gpus(changed["learner-colocated"]) == ["0", "2", "3"]
    assert servers_of(changed, "colocated") == [["0"], ["2"], ["3"]]
    config = configured(changed["controller-colocated"])
    assert (config.learner.world_size, config.rollout.replicas) == (3, 3)
    assert changed["learner-colocated"]["environment"]["PET_NPROC_PER_NODE"] == "3"


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """What lies where in a container: docker-compose prints strings, Docker's plugin mappings."""
    listed = (
        (each["source"], each["target"]) if isinstance(each, dict) else each.split(":")[:2]
        for each in service.get("volumes", ())
    )
    return {target: source for source, target in listed}


def test_models_data_and_runs_are_folders_of_the_node_where_it_names_some(
    services: dict[str, dict[str, Any]], changed: dict[str, dict[str, Any]]
) -> None:
    folders = {"models": "/srv/models", "data": "/mine", "runs": "/srv/runs"}
    counts = dict.fromkeys(folders, 0)
    for name, service in changed.items():
        for kind, folder in folders.items():
            there = mounts(service).get(f"/paceline/{kind}")
            assert mounts(services[name]).get(f"/paceline/{kind}") == (there and kind), name
            if there:
                assert there.endswith(folder), name
                counts[kind] += 1
    assert min(counts.values()) >= 6


def test_memory_and_processes_of_a_container_have_limits(
    services: dict[str, dict[str, Any]], changed: dict[str, dict[str, Any]]
) -> None:
    limits = {"controller": 1, "learner": 2, "rollout": 3, "reward": 4, "reward-model": 5, "redis": 6}
    seen = set()
    for name, service in changed.items():
        # docker-compose 1.29 gives the engine what it is given, which takes no string.
        assert isinstance(service["pids_limit"], int), name
        kind = "reward-model" if name.startswith("reward-model") else name.partition("-")[0]
        if kind in limits:
            assert in_gib(service["mem_limit"]) == limits[kind], name
            assert in_gib(services[name].get("mem_limit", 0)) == 0, name
            seen.add(kind)
        sizes = dict(re.findall(r"/(tmp|cache):\S*size=(\d+)g", " ".join(service["tmpfs"])))
        assert sizes.pop("tmp") == "7", name
        assert set(sizes.values()) <= {"9"}, name
        assert len(service["tmpfs"]) == 1 + len(sizes), name
        if kind in ("learner", "rollout", "controller", "reward"):
            assert sizes or "/cache" in mounts(service), name
        if kind == "rollout" or name in ("learner-gpu", "learner-colocated"):
            assert in_gib(service["shm_size"]) == 10, name
    assert seen == set(limits)


def in_gib(size: Any) -> float:
    """docker-compose prints a size as it is written, Docker's plugin in bytes."""
    return float(size[:-1]) if str(size).endswith("g") else int(size) / 2**30


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
    authority.issue(folder / "redis", "redis", role="redis", hosts=["redis", "redis-blobs"], days=7 / 1440)
    authority.issue(folder / "rollout", "rollout", role="rollout", days=3 / 1440)
    (folder / "redis" / "key.pem").chmod(0o640)
    first = {role: (folder / role / "cert.pem").read_bytes() for role in TLS_NAMES}
    assert issue().count("keeps its certificate") == len(TLS_NAMES) - 1
    second = {role: (folder / role / "cert.pem").read_bytes() for role in TLS_NAMES}
    assert {role for role in TLS_NAMES if first[role] != second[role]} == {"rollout"}
    assert stat.S_IMODE((folder / "rollout" / "key.pem").stat().st_mode) == 0o600
