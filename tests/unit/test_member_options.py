"""A member's command line, and the environment that stands in for it."""

from __future__ import annotations

import socket

import pytest

from paceline.core.members import MemberKind
from paceline.service.member.bootstrap import MemberOptions


def options_of(*words: str) -> MemberOptions:
    return MemberOptions.parse(words, prog="p", kind=MemberKind.ROLLOUT, description="d")


def test_the_command_line() -> None:
    options = options_of("--controller", "host:1", "--member-id", "rollout-3")
    assert options == MemberOptions(controller="host:1", member_id="rollout-3", host="127.0.0.1", port=0)
    assert not options.validates
    assert (options.engine, options_of("--controller", "host:1", "--engine", "one").engine) == ("", "one")
    assert options_of("--controller", "host:1", "--validates").validates
    with pytest.raises(SystemExit):
        options_of("--member-id", "rollout-3")
    with pytest.raises(SystemExit):
        MemberOptions.parse(["--validates"], prog="p", kind=MemberKind.REWARD, description="d")


def test_the_environment_stands_in_for_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CONTROLLER": "c:1", "MEMBER_ID": "r-1", "HOST": "eth0", "ADVERTISE": "::2"}.items():
        monkeypatch.setenv(f"PACELINE_{name}", value)
    assert options_of() == MemberOptions(
        controller="c:1", member_id="r-1", host="eth0", port=0, advertise="::2"
    )
    assert options_of("--host", "::1", "--controller", "d:2").host == "::1"
    monkeypatch.setenv("PACELINE_MEMBER_ID", "")
    assert options_of().member_id == f"rollout-{socket.gethostname()}"
