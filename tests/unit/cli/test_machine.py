"""Ports that are chosen before they are used."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from paceline.service import ports
from paceline.sizing import machine
from paceline.sizing.machine import free_port


@pytest.fixture
def ephemeral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's file, to be written."""
    path = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "_KERNEL", path)
    return path


def test_a_chosen_port_is_none_that_the_system_gives_to_others(ephemeral: Path) -> None:
    ephemeral.write_text("20000\t60999\n")
    chosen = [free_port() for _ in range(200)]
    assert all(15_000 <= port < 20_000 for port in chosen)
    assert len(set(chosen)) == 200


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = free_port(), free_port()
    with socket.create_server(("127.0.0.1", first)):
        monkeypatch.setattr(machine, "_GIVEN", set())
        monkeypatch.setattr(machine._RANDOM, "sample", lambda *_: [first, second])
        assert free_port() == second


@pytest.mark.parametrize("said", ["1024\t65535\n", None])
def test_where_the_system_gives_away_all_ports_it_chooses(ephemeral: Path, said: str | None) -> None:
    if said is not None:
        ephemeral.write_text(said)
    with socket.create_server(("127.0.0.1", free_port())):
        pass
