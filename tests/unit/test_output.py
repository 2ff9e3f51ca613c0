"""Lines on standard output arrive whole, also under PYTHONUNBUFFERED, which many images of containers set."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import subprocess
import sys
import tempfile
import termios
import time

import pytest

from paceline.service.output import write_whole_lines

CHILD = """
import os, signal, sys
from paceline.service.output import write_whole_lines

signal.signal(signal.SIGUSR1, lambda *_: None)
write_whole_lines()
stream = getattr(sys, sys.argv[1])
for number in range(60):
    print(f"{number:06}" * 850, file=stream)
print("ä", file=stream)
stream.write("left")
stream.flush()
os._exit(0)  # the end of an interpreter drops its handlers first
"""


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_lines_arrive_whole_if_signals_interrupt_their_writes_to_a_full_pipe(
    name: str, unbuffered: str
) -> None:
    environ = os.environ | {"PYTHONUNBUFFERED": unbuffered, "PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, name], env=environ, **{name: subprocess.PIPE}
    ) as child:
        pipe, got = getattr(child, name).fileno(), bytearray()
        got += os.read(pipe, 1)  # from now on it handles the signal
        deadline = time.monotonic() + 60
        while int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder) < 50_000:
            assert time.monotonic() < deadline, "the pipe does not fill"
            time.sleep(0.01)
        # Less than a line at a time, so that the pipe never has room for a whole one.
        while chunk := os.read(pipe, 3000):
            got += chunk
            if child.poll() is None:
                child.send_signal(signal.SIGUSR1)
            time.sleep(0.001)
    lines = [f"{number:06}" * 850 for number in range(60)]
    assert got.decode() == "\n".join([*lines, "ä", "left"])
    assert child.returncode == 0


def test_a_line_is_written_at_once() -> None:
    code = "import time; from paceline.service.output import write_whole_lines; write_whole_lines(); print(1)"
    environ = os.environ | {"PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", f"{code}; time.sleep(600)"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"1\n"
        child.kill()


@pytest.mark.parametrize(
    "begin",
    [
        "from paceline.cli.main import main; sys.argv = ['paceline']; main()",
        "from paceline.service.observability.logs import setup_logging; setup_logging('rollout-0')",
    ],
    ids=["a command", "a service"],
)
def test_commands_and_services_write_whole_lines(begin: str) -> None:
    code = f"import sys; {begin}; print(type(sys.stdout.buffer).__name__, type(sys.stderr.buffer).__name__)"
    environ = os.environ | {"PYTHONUNBUFFERED": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split()[-2:] == ["BufferedWriter"] * 2, ended.stderr


def test_streams_that_something_else_has_put_in_their_place_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryFile(buffering=0) as raw:
        captured = io.TextIOWrapper(raw, write_through=True)
        monkeypatch.setattr(sys, "stdout", captured)
        write_whole_lines()
        assert sys.stdout is captured
