"""The compose file as a test runs it: a project of its own, its containers, and what its run has written."""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from support import source

FOLDER: Final = source.ROOT / "deploy" / "compose"
IMAGES: Final = (
    "paceline/controller:local",
    "paceline/reward:local",
    "paceline/learner:cpu",
    "paceline/rollout:cpu",
    "paceline/redis:local",
)
PROMETHEUS: Final = "paceline/prometheus:local"
TLS_NAMES: Final = ("controller", "learner", "rollout", "reward", "client", "redis", "client-prometheus")
DOCKER: Final = os.environ.get("DOCKER", "docker")


def lacking(images: tuple[str, ...] = IMAGES) -> str:
    """Why containers of some images cannot be started here, and what to do about it; "" if they can."""
    if shutil.which(DOCKER) is None:
        return "there is no docker; install Debian's docker.io and docker-compose"
    if _run([DOCKER, "info"], check=False).returncode != 0:
        return "no Docker daemon answers; start dockerd"
    if not command():
        return "there is no docker compose; install Debian's docker-compose, or Docker's plugin"
    missing = [name for name in images if _run([DOCKER, "image", "inspect", name], check=False).returncode]
    names = " ".join(name.removeprefix("paceline/").partition(":")[0] for name in missing)
    return f"no image {', '.join(missing)}; run deploy/compose/build.sh {names}" if missing else ""


def command() -> list[str]:
    if _run([DOCKER, "compose", "version"], check=False).returncode == 0:
        return [DOCKER, "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


def _run(
    words: Iterable[str], *, check: bool = True, timeout_s: float = 600.0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    answer = subprocess.run(
        list(words), capture_output=True, text=True, timeout=timeout_s, env=env, check=False, cwd=FOLDER
    )
    assert not check or answer.returncode == 0, f"{words}\n{answer.stdout[-3000:]}\n{answer.stderr[-3000:]}"
    return answer


class Stack:
    """A compose project; its volumes stay until `remove`, so that several runs share data and model."""

    def __init__(self) -> None:
        self.project = f"paceline-test-{secrets.token_hex(3)}"
        self.run = ""
        self._env = dict(os.environ)
        self._words = [
            *command(), "--project-name", self.project, "--file", str(FOLDER / "compose.yaml"),
            "--profile", "cpu",
        ]  # fmt: skip
        subprocess.run([str(FOLDER / "secrets.sh")], check=True, timeout=120)

    def down(self, *words: str) -> None:
        """Ends and removes the containers, those that only observe included."""
        self.compose("--profile", "observability", "down", *words, check=False)

    def compose(self, *words: str, check: bool = True, timeout_s: float = 600.0) -> str:
        """Runs a compose command; returns what it printed."""
        return _run([*self._words, *words], check=check, timeout_s=timeout_s, env=self._env).stdout

    @contextlib.contextmanager
    def settings(self, run: str, *overrides: str, file: Path | None = None, **env: str) -> Iterator[None]:
        """What `.env` would say of a run, and a further compose file.

        Removes its containers at the end, whatever happens.
        """
        self.run = run
        words = self._words
        if file is not None:
            self._words = [*words, "--file", str(file)]
        self._env |= {"RUN": run, "OVERRIDES": " ".join(overrides), "CONTROLLER_PORT": "0", **env}
        try:
            yield
        finally:
            self.down("--timeout", "20")
            self._words = words

    @contextlib.contextmanager
    def up(
        self, run: str, *overrides: str, scale: dict[str, int] | None = None, **env: str
    ) -> Iterator[None]:
        """Starts a run in the background."""
        with self.settings(run, *overrides, **env):
            self.scale(**(scale or {}))
            yield

    def train(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Runs the command of docs/deploy.md in the foreground to its end."""
        words = [*self._words, "up", "--exit-code-from", "follow", "follow"]
        return _run(words, check=False, timeout_s=timeout_s, env=self._env)

    def prepare(self, *words: str) -> None:
        """Makes data and model in the volumes."""
        self.compose("run", "--rm", "prepare", *words, timeout_s=1500.0)

    def scale(self, **numbers: int) -> None:
        """Has so many containers of each service, also in the middle of a run."""
        words = [word for name, number in numbers.items() for word in ("--scale", f"{name}={number}")]
        command = [*self._words, "up", "--detach", "--no-recreate", *words]
        answer = _run(command, check=False, timeout_s=1200.0, env=self._env)
        assert answer.returncode == 0, f"{answer.stderr[-2000:]}\n{self.logs()}"

    def gateway(self) -> str:
        """This machine's address on the run's network, once a container is on it."""
        form = "{{range .IPAM.Config}}{{.Gateway}}{{end}}"
        return _run([DOCKER, "network", "inspect", "--format", form, f"{self.project}_run"]).stdout.strip()

    def containers(self, service: str = "") -> list[str]:
        """Ids of the project's containers, those that have ended included."""
        label = f"label=com.docker.compose.service={service}" if service else "status=running"
        words = ["ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={self.project}"]
        return _run([DOCKER, *words, "--filter", label]).stdout.split()

    def kill(self, service: str) -> None:
        """Kills a container's process as a crash would: the engine starts it again, as its policy says."""
        (container, *_) = self.containers(service)
        # The container's own process 1 passes its child's end on, and cannot be killed from inside.
        kill = "for p in /proc/[0-9]*; do grep -q '^PPid:.1$' $p/status && kill -9 ${p#/proc/}; done; true"
        # The command may end with the container.
        _run([DOCKER, "exec", container, "sh", "-c", kill], check=False)

    def starts(self, service: str) -> int:
        """How often the engine has started a service's first container again."""
        (container, *_) = self.containers(service)
        return int(_run([DOCKER, "inspect", "--format", "{{.RestartCount}}", container]).stdout)

    def exit_code(self, service: str, timeout_s: float) -> int:
        """The exit code of a service's container, for whose end this waits."""
        (container, *_) = self.containers(service)
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            words = [DOCKER, "inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", container]
            status, code = _run(words).stdout.split()
            if status == "exited":
                return int(code)
            time.sleep(1.0)
        raise AssertionError(f"{service} did not end within {timeout_s:g} s\n{self.logs()}")

    def logs(self) -> str:
        """The last lines of every container."""
        return self.compose("logs", "--no-color", "--tail", "25", check=False)

    def in_volumes(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs a command in the controller's image over the project's runs and certificates."""
        own = {f"tls-{name.removeprefix('client-')}": f"tls/{name}" for name in TLS_NAMES}
        folders = {"runs": "runs", "tls-authority": "tls", **own}
        volumes = [f"{self.project}_{name}:/paceline/{path}:ro" for name, path in folders.items()]
        mounts = [word for volume in volumes for word in ("--volume", volume)]
        return _run(
            [DOCKER, "run", "--rm", "--network", "none", *mounts, "--entrypoint", words[0], IMAGES[0],
             *words[1:]],
            check=check,
        )  # fmt: skip

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The complete lines of a JSON lines file of the run; none if it is not there yet."""
        controllers = self.containers("controller")
        if not controllers:
            return []
        path = f"{controllers[0]}:/paceline/runs/{self.run}/{name}"
        copy = subprocess.run([DOCKER, "cp", path, "-"], capture_output=True, timeout=300)
        if copy.returncode != 0:
            return []
        with tarfile.open(fileobj=io.BytesIO(copy.stdout)) as archive:
            file = archive.extractfile(archive.getmembers()[0])
            text = file.read().decode() if file is not None else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def wait_for(
        self, what: str, condition: Callable[[list[dict[str, Any]]], bool], timeout_s: float, ends: int = 0
    ) -> None:
        """Waits until the journal's events fulfil a condition, at most until the run has ended.

        ends: how often it had ended before, of which its journal tells.
        """
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            events = self.lines("events.jsonl")
            if condition(events):
                return
            ended = sum(event["event"] == "end" for event in events)
            assert ended <= ends, f"the run ended before: {what}"
            time.sleep(1.0)
        raise AssertionError(f"not within {timeout_s:g} s: {what}\n{self.logs()}")

    def remove(self) -> list[str]:
        """Removes everything of the project; returns what is left of it."""
        self.down("--volumes", "--timeout", "10")
        label = ["--quiet", "--filter", f"label=com.docker.compose.project={self.project}"]
        kinds = (["ps", "--all"], ["volume", "ls"], ["network", "ls"])
        return [line for kind in kinds for line in _run([DOCKER, *kind, *label]).stdout.split()]
