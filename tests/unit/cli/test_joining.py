"""How others join a run: the token's file, and the commands that `paceline train --open` prints."""

from __future__ import annotations

import shlex
import stat
from pathlib import Path

import pytest

from paceline.cli.launch.joining import how_to_join, keep_token
from paceline.core.members import MemberKind
from paceline.service.credentials import Credentials
from paceline.service.member import MemberOptions
from support.cli_configs import config


def test_the_token_is_for_this_user_and_the_same_after_a_restart(tmp_path: Path) -> None:
    assert keep_token(tmp_path, "first") == "first"
    assert keep_token(tmp_path, "second") == "first"
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_the_printed_commands_are_what_members_read(tmp_path: Path) -> None:
    keep_token(tmp_path, "secret")
    run = config(rollout={"replicas": 2}, service={"max_message_mib": 128})
    text = how_to_join(run, tmp_path, "127.0.0.1:4711")
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
        assert variables["PACELINE_MAX_MESSAGE_MIB"] == "128"


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({}, "from this host only: for other hosts set service.host"),
        ({"service": {"host": "10.0.0.1"}}, "add --host ADDRESS; broker.url, too, must be set"),
        (
            {"service": {"host": "10.0.0.1"}, "broker": {"url": "rediss://10.0.0.1:6379/0"}},
            "from another host: copy the token file and the TLS folder there, and add --host ADDRESS",
        ),
    ],
)
def test_what_other_hosts_need_is_said(sections: dict[str, object], sentence: str, tmp_path: Path) -> None:
    assert sentence in how_to_join(config(**sections), tmp_path, "10.0.0.1:7000").splitlines()[-1]
