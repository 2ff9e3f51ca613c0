"""Two processes of a weight group: one fails, dies or stops; the other notices and goes on with another."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support import source

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


def test_the_healthy_side_notices_every_fault_and_pushes_again() -> None:
    """No memory for staging; a kill between roll call and connection, also called off; a stopped receiver."""
    command = [sys.executable, "benchmarks/weight_faults.py", "--device", "cpu"]
    result = subprocess.run(
        command, cwd=source.ROOT, capture_output=True, text=True, timeout=270, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("yes") == 4
