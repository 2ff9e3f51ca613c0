"""Programs of others are confined: what they try, none of it gets through, and nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import time
from pathlib import Path

import psutil
import pytest

from paceline.core.errors import DeadlineError, EnvironmentLackError
from paceline.service.confinement import confined
from paceline.service.confinement.confined import (
    Command,
    CommandResult,
    ConfinedLimits,
    Ending,
    python,
    run_confined,
    why_not_confined,
)
from support import escapes
from support.confined_hosts import listening

DOCS = Path(__file__).parents[2] / "benchmarks" / "journal" / "hostile.md"
PROBLEM = asyncio.run(why_not_confined())
ATTEMPTS = Path(escapes.__file__).read_text()
INSIDE = Path(confined.inside.__file__).read_text()
PROGRAM = f"program-{os.getpid()}.py"  # other tests and runs of this machine confine programs, too
pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)


async def run(program: str, *arguments: str, stdin: str = "", **limits: float) -> CommandResult:
    return await run_confined(
        Command(
            words=[python(), "-I", "-B", f"/tmp/{PROGRAM}", *arguments],
            files={PROGRAM: program},
            stdin=stdin.encode(),
            limits=ConfinedLimits(**limits),  # type: ignore[arg-type]
        )
    )


async def run_until_it_begins(program: str) -> CommandResult:
    """With a limit that lets a busy machine confine the program; one that never ends takes all of it."""
    for seconds in (3.0, 10.0, 30.0):
        with contextlib.suppress(DeadlineError):
            return await run(program, seconds=seconds)
    return await run(program, seconds=100.0)


async def test_no_attempt_gets_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    host_file = tmp_path / "file"
    host_file.write_text("of the host")
    with listening() as (port, name):
        outcome = await run(ATTEMPTS, str(host_file), str(port), name, seconds=60.0)
    lines = outcome.stdout.decode().splitlines()
    assert lines[-1:] == ["end"], outcome
    assert lines[:-1] == [f"no {name}" for name in escapes.ATTEMPTS]
    assert len(lines) > 40


async def test_the_attempts_work_outside(tmp_path: Path) -> None:
    """An attempt that cannot work anywhere would show nothing: these do outside."""
    with listening() as (port, name):
        for family, address in ((socket.AF_INET, ("127.0.0.1", port)), (socket.AF_UNIX, "\0" + name)):
            assert escapes.connect(family, address)
    assert escapes.read("/etc/passwd")
    assert escapes.read("/proc/self/environ")
    assert escapes.signal_others()


BOMB = """
import os, time
n = 0
while True:
    try:
        if os.fork() == 0:
            time.sleep(600)
        n += 1
    except OSError:
        print(n, flush=True)
        break
"""
LEAVES_ONE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(1); os.close(2)
        time.sleep(4321)
    os._exit(0)
time.sleep(0.2)
"""
SIGNALS_ALL = """
import contextlib, os
with contextlib.suppress(ProcessLookupError):
    os.kill(-1, 9)
os.kill(os.getpid(), 9)
"""


def running() -> list[int]:
    """The processes of a test's program."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if PROGRAM in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process.pid)
    return processes


async def all_have_ended() -> None:
    """The kernel ends what a program has started; on a busy machine that takes a moment."""
    async with asyncio.timeout(120):
        while running():  # noqa: ASYNC110  a test's own look
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("program", "ending", "code"),
    [
        ("while True: pass", Ending.TIMED_OUT, -1),
        ("import time; time.sleep(600)", Ending.TIMED_OUT, -1),
        ("while True: print('x' * 1000)", Ending.PRINTED_TOO_MUCH, -1),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", Ending.PRINTED_TOO_MUCH, -1),
        ("x = bytearray(2 << 30)", Ending.EXITED, 1),
        ("import os; os.kill(os.getpid(), 11)", Ending.EXITED, 139),
        ("import os; os.close(0); os.close(1); os.close(2)", Ending.EXITED, 0),
        (BOMB, Ending.EXITED, 0),
        (LEAVES_ONE, Ending.EXITED, 0),
        (SIGNALS_ALL, Ending.EXITED, 137),
    ],
)
async def test_a_program_ends_with_all_that_it_started(program: str, ending: Ending, code: int) -> None:
    started = time.monotonic()
    # What ends by itself has as long as it takes, interpreter and namespaces included.
    if ending is Ending.TIMED_OUT:
        outcome = await run_until_it_begins(program)
    else:
        outcome = await run(program, seconds=400.0)
    assert (outcome.ending, outcome.code) == (ending, code), outcome
    assert time.monotonic() - started < 200
    if program is BOMB:
        assert int(outcome.stdout) <= 8
    await all_have_ended()


# Whatever it may hold beside the memory of its processes: in a pipe, a file, shared memory. Prints MiB.
HOARDS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
held = []
def shared():
    place = libc.shmat(libc.shmget(0, 16 << 20, 0o1600), None, 0)
    if place in (None, 2**64 - 1):
        raise OSError
    ctypes.memset(place, 1, 16 << 20)
    libc.shmdt(ctypes.c_void_p(place))
def hidden():
    held.append(os.memfd_create("x"))
    for _ in range(16):
        os.write(held[-1], bytes(1 << 20))
def files():
    for folder in ("/tmp", "/dev/shm", "/run", "/var/tmp", "/"):
        try:
            with open(f"{folder}/{len(os.listdir('/tmp'))}", "wb") as file:
                for _ in range(16):
                    file.write(bytes(1 << 20))
            return
        except OSError:
            pass
    raise OSError
for hoard in (shared, hidden, files):
    taken = 0
    try:
        while taken < 512:
            hoard()
            taken += 16
    except OSError:
        pass
    print(hoard.__name__, taken)
"""


async def test_a_program_holds_no_memory_that_its_limits_do_not_count() -> None:
    outcome = await run(HOARDS, seconds=60.0, memory_bytes=64 << 20, disk_bytes=48 << 20)
    assert outcome.stdout.decode().split("\n") == ["shared 0", "hidden 0", "files 32", ""], outcome


FORGES = """
import os
for number in range(3, 1024):
    try:
        os.write(number, b"broken")
    except OSError:
        pass
os.write(2, b"confinement: broken")
os._exit({code})
"""


@pytest.mark.parametrize("code", [1, 2, 4, 120, 125, 126, 127, 255])
async def test_no_exit_code_passes_for_a_report_of_the_builder(code: int) -> None:
    outcome = await run(FORGES.format(code=code), seconds=60.0)
    assert (outcome.ending, outcome.code, outcome.stderr) == (Ending.EXITED, code, b"confinement: broken")


async def test_a_command_that_is_no_program_is_not_started() -> None:
    outcome = await run_confined(Command(words=["/usr/bin/missing"]))
    assert outcome.ending is Ending.NOT_STARTED
    assert b"No such file or directory" in outcome.stderr


async def test_a_program_that_has_not_begun_in_time_is_not_its_own_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = tmp_path / "inside.py"
    slow.write_text(INSIDE.replace("def main() -> int:", "def main() -> int:\n    signal.pause()"))
    monkeypatch.setattr(confined.inside, "__file__", str(slow))
    with pytest.raises(DeadlineError, match="the builder of a program's confinement within 0.5 s"):
        await run("print(1)", seconds=0.5)


async def test_a_builder_that_dies_is_no_exit_of_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dies = tmp_path / "inside.py"
    dies.write_text(INSIDE.replace("    _build_root(spec)", "    os._exit(0)"))
    monkeypatch.setattr(confined.inside, "__file__", str(dies))
    with pytest.raises(EnvironmentLackError, match="its builder ended with 0"):
        await run("print(1)")


async def test_what_is_cancelled_ends() -> None:
    sleeping = asyncio.create_task(run("import time; time.sleep(600)", seconds=600.0))
    async with asyncio.timeout(60):
        while not running():  # noqa: ASYNC110  a test's own look
            await asyncio.sleep(0.05)
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    await all_have_ended()


async def test_a_machine_that_cannot_confine_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    broken = tmp_path / "inside.py"
    source = INSIDE
    broken.write_text(
        source.replace('_check(_libc.unshare(ctypes.c_int(flags)), "unshare")', "_check(-1, 'unshare')")
    )
    monkeypatch.setattr(confined.inside, "__file__", str(broken))
    with pytest.raises(EnvironmentLackError, match="cannot be confined on this machine"):
        await run(f"open({str(marker)!r}, 'w')")
    assert (await why_not_confined()).startswith("code cannot be confined on this machine ([Errno")
    assert not marker.exists()


def test_the_document_lists_what_was_tried() -> None:
    section = DOCS.read_text(encoding="utf-8").partition("## Confined code\n")[2].partition("\n## ")[0]
    listed = re.sub(r"\s+", " ", section)
    assert [name for name in escapes.ATTEMPTS if name not in listed] == []
