"""A run whose services are started by hand on several hosts, over TLS and without a shared folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from paceline.cli.certificates import Authority
from support.hosts import OWN, Host, Network
from support.redis_servers import need_redis_with_tls, tls_words
from support.s3_server import aws_environment
from support.training_run import PACELINE, Row, only, read_jsonl, tiny_config

CONTROLLER_PORT, REDIS_PORT, S3_PORT, MASTER_PORT = 7001, 7002, 7003, 7004
TESTS = Path(__file__).parents[1]
BUCKET = "s3://bucket/checkpoints"
SSH = """#!/bin/sh
# As ssh: a host, then one command line for its shell. Of this environment only the way to Python gets there.
exec ip netns exec {prefix}"$1" env -i PATH="$PATH" PYTHONPATH="{path}" \\
  sh -c 'mount --bind "$0" {own} && exec sh -c "$1"' {folder}/"$1" "$2"
"""


class HostsRun:
    """Redis and an object store for the checkpoints are on the first host, the rest where the test says.

    Args:
        net: the hosts; each has a folder and a certificate of its own.
        inputs: of `prepare_inputs`; every host gets a copy of the model, the first one the data.
        sections: of the run's configuration.
    """

    def __init__(self, net: Network, inputs: Path, sections: Mapping[str, Any]) -> None:
        self.net, self.first, self._sections = net, next(iter(net.hosts.values())), sections
        certificates = self.first.folder.parent / "certs"
        authority = Authority.create(certificates, days=1)
        for host in net.hosts.values():
            shutil.copytree(inputs / "model", host.folder / "model")
            authority.issue(host.folder / "tls", f"host-{host.name}", role="host")
        address = self.first.address
        authority.issue(self.first.folder / "redis-tls", "redis", role="redis", hosts=[address])
        shutil.copytree(inputs / "data", self.first.folder / "data")
        self.env = {
            "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}",
            "PACELINE_TOKEN": "the token of this run",
            "PACELINE_TLS_DIR": str(OWN / "tls"),
            "PACELINE_HOST": "eth0",
            "PACELINE_CONTROLLER": f"{address}:{CONTROLLER_PORT}",
            "OMP_WAIT_POLICY": "passive",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            **aws_environment(f"http://{address}:{S3_PORT}"),
        }

    def config(self) -> dict[str, Any]:
        """Of the run, as the first host reads it."""
        config = tiny_config(OWN, **self._sections)
        config["broker"] = {"url": f"rediss://:secret@{self.first.address}:{REDIS_PORT}/0"}
        config["trainer"] |= {"checkpoint_url": BUCKET}
        return config

    def serve_storage(self) -> None:
        """Redis, over TLS, and the object store."""
        address, files = self.first.address, OWN / "redis-tls"
        redis = [need_redis_with_tls(), *tls_words(files, REDIS_PORT), "--bind", address]
        self.first.start("redis", redis, {})
        store = [sys.executable, "-m", "support.s3_server", address, str(S3_PORT)]
        self.first.start("s3", store, self.env)

    def start_controller(self) -> subprocess.Popen[bytes]:
        """On the first host."""
        (self.first.folder / "config.yaml").write_text(yaml.safe_dump(self.config()))
        files = ["--config", str(OWN / "config.yaml"), "--run-dir", str(OWN / "run")]
        command = [sys.executable, "-m", "paceline.controller", *files, "--port", str(CONTROLLER_PORT)]
        return self.first.start("controller", command, self.env | {"OMP_NUM_THREADS": "1"})

    def start_torchrun(self, *hosts: Host) -> None:
        """One agent on each host, with one learner rank; the agents start lost ranks again."""
        for number, host in enumerate(hosts):
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts)),
                "--nproc-per-node", "1", "--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-id", "run",
                "--rdzv-endpoint", f"{hosts[0].address}:{MASTER_PORT}", "--local-addr", host.address,
                # torchrun knows its host only by the address that the machine's name has.
                "--rdzv-conf", f"is_host={int(number == 0)}",
                "-m", "paceline.learner",
            ]  # fmt: skip
            env = {
                "OMP_NUM_THREADS": "1",
                "PACELINE_MEMBER_ID": "learner-0",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            }
            host.start(f"learner-{number}", command, self.env | env)

    def start_member(self, kind: str, host: Host) -> None:
        """A rollout server or a reward service."""
        env = {"PACELINE_MEMBER_ID": f"{kind}-{host.name}"}
        if kind == "reward":
            env["OMP_NUM_THREADS"] = "1"
        host.start(kind, [sys.executable, "-m", f"paceline.{kind}"], self.env | env)

    @property
    def events(self) -> list[Row]:
        """The journal so far."""
        return read_jsonl(self.first.folder / "run/events.jsonl")

    @property
    def metrics(self) -> list[Row]:
        """As the controller wrote them."""
        return read_jsonl(self.first.folder / "run/metrics.jsonl")

    def registrations(self, member: str) -> int:
        """How often a member registered."""
        return sum(
            (event["member"], event["what"]) == (member, "registered")
            for event in only(self.events, "member")
        )

    def log_of(self, name: str) -> str:
        """What a process wrote."""
        return (self.first.folder.parent / f"{name}.log").read_text(errors="replace")

    def logs(self) -> str:
        """The ends of all logs."""
        files = sorted(self.first.folder.parent.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{self.log_of(file.stem)[-2500:]}" for file in files)

    def wait_for_phase(self, phase: str, step: int, *, seconds: float = 500.0) -> None:
        """Waits until the run enters a phase of a step."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if any((event["to"], event["step"]) == (phase, step) for event in only(self.events, "phase")):
                return
            assert self.first.processes["controller"].poll() is None, self.logs()
            time.sleep(0.2)
        raise AssertionError(f"no {phase} of step {step} within {seconds:g} s:\n{self.logs()}")

    def assert_sound(self) -> None:
        """`paceline verify` on the first host has nothing to say against the run."""
        command = [str(PACELINE), "verify", str(OWN / "run")]
        verify = self.first.start("verify", command, self.env)
        assert verify.wait(600) == 0, self.log_of("verify")

    def finish(self, seconds: float) -> None:
        """Waits for the end of the run, and of every process that belongs to it."""
        try:
            code = self.first.processes["controller"].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {seconds:g} s:\n{self.logs()}") from None
        assert code == 0, self.logs()
        for host in self.net.hosts.values():
            for name in host.processes.keys() - {"redis", "s3"}:
                assert host.processes[name].wait(300) == 0, self.logs()


SERVICES = {"a": {"learner": 1, "reward": 1}, "b": {"learner": 1, "rollout": 1}}


class Up:
    """`paceline up` on the first of two hosts; `services` says how many of which run on a and b."""

    def __init__(self, run: HostsRun, services: Mapping[str, Mapping[str, int]] = SERVICES) -> None:
        self._run, first = run, run.first
        wanted = ("AWS_", "PACELINE_TLS_DIR")
        self._env = {name: value for name, value in run.env.items() if name.startswith(wanted)}
        prefix = first.namespace.removesuffix(first.name)
        ssh = first.folder / "ssh"
        text = {"prefix": prefix, "own": OWN, "folder": first.folder.parent, "path": run.env["PYTHONPATH"]}
        ssh.write_text(SSH.format(**text))
        ssh.chmod(0o755)
        (first.folder / "run.yaml").write_text(yaml.safe_dump(run.config()))
        hosts = [
            {
                "name": host.name,
                "address": host.address,
                "folder": str(OWN),
                "python": sys.executable,
                "cores": 1,
                "env": self._env | {"PACELINE_NODE_ID": host.name},
                **services[host.name],
            }
            for host in run.net.hosts.values()
        ]
        tree = {"config": "run.yaml", "address": first.address, "shell": [str(OWN / "ssh"), "{name}"]}
        tree |= {"learner_port": MASTER_PORT, "hosts": hosts}
        (first.folder / "HOSTS.yaml").write_text(yaml.safe_dump(tree))

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Runs the command; its output is the log NAME."""
        command = [str(PACELINE), "up", str(OWN / "HOSTS.yaml"), f"trainer.run_dir={OWN / 'run'}"]
        return self._run.first.start(name, command, self._env)

    def left(self) -> list[str]:
        """Command lines of processes on the hosts, without the two that the test started there."""
        keep = {process.pid for process in self._run.first.processes.values()}
        pids = {pid for host in self._run.net.hosts.values() for pid in host.pids()} - keep
        return [" ".join(psutil.Process(pid).cmdline()) for pid in pids]
