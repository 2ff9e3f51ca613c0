"""`paceline doctor`: what is missing on a machine, and how to get it."""

from __future__ import annotations

import pytest

from paceline.cli.commands import doctor
from paceline.cli.main import main
from paceline.core.errors import EnvironmentLackError


def test_doctor_says_what_is_lacking_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks() -> str:
        raise EnvironmentLackError("no Redis server on this machine. Three ways to have one: ...")

    monkeypatch.setattr("paceline.broker.redis_server.find_server", lacks)
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    findings = {one.name: one for one in doctor.examine()}
    assert findings["Python"].verdict == "ok"
    assert (findings["Redis server"].verdict, findings["vLLM"].verdict) == ("lacks", "lacks")
    assert "Three ways" in findings["Redis server"].hint
    assert main(["doctor"]) == 1
    assert "lacking: torch, vLLM, transformers" in capsys.readouterr().out
