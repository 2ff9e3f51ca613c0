"""`python -m paceline.launch.remote`: runs one process on the far side of ssh, for as long as ssh lasts.

The first line of standard input is the order: a JSON object with the process's command and environment. It
comes this way because the environment has secrets, which no process list may show. When the input ends,
because the launcher wants the process to end or is gone itself, the process gets SIGTERM, then SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from paceline.service.process import DIE_WITH_PARENT, PARENT_PID

_GRACE_S = 15.0

SIGNALLED = 128
"""The exit code after a signal is this plus the signal's number, as in shells."""


def order(command: Sequence[str], env: Mapping[str, str]) -> bytes:
    """Returns the first line of standard input for a process with this command and environment."""
    return json.dumps({"command": list(command), "env": dict(env)}).encode() + b"\n"


def main() -> int:
    """Reads the order and runs it; returns the process's exit code, SIGNALLED + N after signal N."""
    line = sys.stdin.buffer.readline()
    if not line:
        return 1
    job = json.loads(line)
    env = os.environ | job["env"] | {DIE_WITH_PARENT: "1", PARENT_PID: str(os.getpid())}
    process = subprocess.Popen(job["command"], env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: _end(process))
    threading.Thread(target=_end_with_input, args=(process,), name="input", daemon=True).start()
    code = process.wait()
    _signal_group(process, signal.SIGKILL)  # nothing that it started outlives it
    return SIGNALLED - code if code < 0 else code


def _end_with_input(process: subprocess.Popen[bytes]) -> None:
    while sys.stdin.buffer.read(1024):
        pass
    _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        timer = threading.Timer(_GRACE_S, _signal_group, (process, signal.SIGKILL))
        timer.daemon = True
        timer.start()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # sys.exit would wait for the thread that reads the input.
    os._exit(code)
