"""How others join a run: the token's file, and the commands that `paceline train --open` prints."""

from __future__ import annotations

import shlex
import stat
from pathlib import Path

import pytest

from paceline.core.members import MemberKind
from paceline.launch.planning import plan
from paceline.launch.planning.joining import how_to_join, keep_token
from paceline.service.identity.credentials import Credentials
from paceline.service.member.bootstrap import MemberOptions
from paceline.sizing.machine import Machine
from support.cli_configs import config

CPU = Machine(num_cores=2, gpus=())
TOKEN_FILE = "PACELINE_TOKEN_FILE"


def test_the_token_is_for_this_user_and_the_same_after_a_restart(tmp_path: Path) -> None:
    assert keep_token(tmp_path, "first") == "first"
    assert keep_token(tmp_path, "second") == "first"
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_the_printed_commands_are_what_members_read(tmp_path: Path) -> None:
    keep_token(tmp_path, "secret")
    run = config(rollout={"replicas": 2}, service={"max_message_mib": 128})
    text = how_to_join(run, tmp_path, "127.0.0.1:4711")
    launched = plan.members(run, CPU, controller_address="127.0.0.1:4711", master_port=1)
    assert "secret" not in text
    _, rollout, reward, _ = text.splitlines()
    for line, name, kind in (
        (rollout, "rollout-2", MemberKind.ROLLOUT),
        (reward, "reward-1", MemberKind.REWARD),
    ):
        words = shlex.split(line)
        start = next(i for i, word in enumerate(words) if "=" not in word)
        variables = dict(word.split("=", 1) for word in words[:start])
        assert words[start + 1 : start + 3] == ["-m", f"paceline.{kind.value}"]
        options = MemberOptions.parse(words[start + 3 :], prog="p", kind=kind, description="")
        assert (options.controller, options.member_id) == ("127.0.0.1:4711", name)
        assert Credentials.from_env(environ=variables).token == "secret"
        assert options.host == "127.0.0.1"
        first = next(spec for spec in launched if spec.role.value == kind.value)
        # Without them a server asks the model hub, and threads that wait take the cores from those that work.
        assert {**first.env, TOKEN_FILE: str(tmp_path / "token")} == variables
        assert variables["PACELINE_MAX_MESSAGE_MIB"] == "128"


def test_a_newcomer_has_the_tls_files_of_the_launcher_and_a_metrics_port_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TLS_DIR", str(tmp_path / "host-1"))
    run = config(rollout={"replicas": 2}, learner={"world_size": 2}, telemetry={"prometheus_port": 9000})
    _, rollout, reward, _ = how_to_join(run, tmp_path, "127.0.0.1:4711").splitlines()
    launched = plan.members(run, CPU, controller_address="c:1", master_port=1)
    assert [spec.env["PACELINE_PROMETHEUS_PORT"] for spec in launched[-2:]] == ["9003", "9005"]
    for line, port in ((rollout, "9006"), (reward, "9007")):
        assert f" PACELINE_TLS_DIR={tmp_path / 'host-1'} " in line
        assert f" PACELINE_PROMETHEUS_PORT={port} " in line


def test_a_newcomer_takes_gpus_that_nobody_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = config(rollout={"replicas": 1, "tensor_model_parallel_size": 2}, learner={"world_size": 2})
    monkeypatch.setattr("paceline.sizing.machine.is_cpu_build", lambda: False)
    for gpus, free in (("0,1,2,3,4,5,6", "4,5"), ("0,1,2,3", "''")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        rollout = how_to_join(run, tmp_path, "127.0.0.1:4711").splitlines()[1]
        assert f" CUDA_VISIBLE_DEVICES={free} " in rollout


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({}, "from this host only: for other hosts set service.host"),
        ({"service": {"host": "10.0.0.1"}}, "give --host its own address; broker.url, too, must be set"),
        (
            {"service": {"host": "10.0.0.1"}, "broker": {"url": "rediss://10.0.0.1:6379/0"}},
            "issue TLS files for it, and give --host its own address",
        ),
    ],
)
def test_what_other_hosts_need_is_said(sections: dict[str, object], sentence: str, tmp_path: Path) -> None:
    assert sentence in how_to_join(config(**sections), tmp_path, "10.0.0.1:7000").splitlines()[-1]
