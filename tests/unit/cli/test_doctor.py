"""`paceline doctor`: what is missing on a machine, and how to get it."""

from __future__ import annotations

import pytest

from paceline.cli.launch import environment
from paceline.cli.launch.environment import Status
from paceline.cli.main import main
from paceline.core.errors import EnvironmentLackError


def test_doctor_says_what_is_lacking_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks() -> str:
        raise EnvironmentLackError("no Redis server on this machine. Three ways to have one: ...")

    monkeypatch.setattr("paceline.broker.redis_server.find_server", lacks)
    monkeypatch.setattr(environment, "_version", lambda package: None)
    findings = {finding.part: finding for finding in environment.examine()}
    assert findings["Python"].status is Status.OK
    assert findings["Redis server"].status is findings["vLLM"].status is Status.LACKING
    assert "Three ways" in findings["Redis server"].hint
    assert main(["doctor"]) == 1
    assert "lacking: torch, vLLM, transformers" in capsys.readouterr().out
