"""Programs of others are confined: what they try, none of it gets through, and nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.config.reward import CodeConfig
from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.core.scoring import ScoreItem
from paceline.reward.code.scorer import CodeScorer
from paceline.service.confinement import confined
from paceline.service.confinement.confined import (
    Command,
    ConfinedLimits,
    Ending,
    Outcome,
    python,
    run_confined,
    why_not_confined,
)
from support import escapes

DOCS = Path(__file__).parents[2] / "docs" / "security.md"
PROBLEM = asyncio.run(why_not_confined())
ATTEMPTS = Path(escapes.__file__).read_text()
INSIDE = Path(confined.inside.__file__).read_text()
PROGRAM = f"program-{os.getpid()}.py"  # other tests and runs of this machine confine programs, too
pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)


async def run(program: str, *arguments: str, stdin: str = "", **limits: float) -> Outcome:
    return await run_confined(
        Command(
            words=[python(), "-I", "-B", f"/tmp/{PROGRAM}", *arguments],
            files={PROGRAM: program},
            stdin=stdin.encode(),
            limits=ConfinedLimits(**limits),  # type: ignore[arg-type]
        )
    )


@contextlib.contextmanager
def listening() -> Iterator[tuple[int, str]]:
    """A TCP port and an abstract socket of the host that would accept."""
    name = f"paceline-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0" + name)
        abstract.listen()
        yield server.getsockname()[1], name


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


@pytest.mark.skipif(
    os.getuid() != 0 or not all(map(shutil.which, ("setpriv", "/usr/bin/python3"))),
    reason="needs root, setpriv (util-linux) and /usr/bin/python3 to run as another user",
)
def test_no_attempt_gets_through_where_nobody_is_root() -> None:
    """As a user without rights, the program is that user, under another number."""
    with tempfile.TemporaryDirectory() as folder, listening() as (port, name):
        root, program = Path(folder, "root"), Path(folder, "inside.py")
        root.mkdir()
        program.write_text(INSIDE)
        for path in (folder, root, program):
            os.chmod(path, 0o777)
        words = ["/usr/bin/python3", "-I", "-B", "/tmp/program.py", folder, str(port), name]
        command = Command(words=words, files={"program.py": ATTEMPTS})
        spec = os.memfd_create("spec")
        os.write(spec, json.dumps(confined._spec(command, str(root)) | {"other_user": False}).encode())
        os.lseek(spec, 0, os.SEEK_SET)
        nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        done = subprocess.run(
            [*nobody, "/usr/bin/python3", "-I", "-S", str(program), str(spec)],
            pass_fds=(spec,), env={}, capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        os.close(spec)
    assert done.stdout.splitlines() == [*(f"no {name}" for name in escapes.ATTEMPTS), "end"], done


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
    async with asyncio.timeout(20):
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
    outcome = await run(program, seconds=3.0 if ending is Ending.TIMED_OUT else 40.0)
    assert (outcome.ending, outcome.code) == (ending, code), outcome
    assert time.monotonic() - started < 30
    if program is BOMB:
        assert int(outcome.stdout) <= 8
    await all_have_ended()


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
    with pytest.raises(ConfigError, match="reward.code 'tests': code cannot be confined"):
        await CodeScorer(CodeConfig(name="tests")).start()
    assert not marker.exists()


def item(response: str, ground_truth: str) -> ScoreItem:
    return ScoreItem(trajectory_id="t", prompt="", response=response, ground_truth=ground_truth)


CALLS = '{"calls": ["add(1, 2)", "add(-1, 1)"], "results": [3, 0]}'
PRINTS = '{"inputs": ["1 2\\n", "3 4"], "outputs": ["3", "7\\n"]}'
CHEATS = "import os\nprint(3, flush=True)\nos._exit(0)"


@pytest.mark.parametrize(
    ("response", "ground_truth", "reward", "passed"),
    [
        ("Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", CALLS, 1.0, 1.0),
        ("def add(a, b):\n    return 3", CALLS, 0.0, 0.5),
        (CHEATS, CALLS, 0.0, 0.5),
        ("a, b = map(int, input().split())\nprint(a + b)", PRINTS, 1.0, 1.0),
        ("print(3)", PRINTS, 0.0, 0.5),
        ("def add(", CALLS, 0.0, 0.0),
        (
            "First:\n```\nprint(3)\n```\nBetter:\n```python\nprint(sum(map(int, input().split())))\n```",
            PRINTS,
            1,
            1,
        ),
        ("print(sum(map(int, input().split())), flush=True)\nexit(1)", PRINTS, 0.0, 0.0),
    ],
)
async def test_a_program_is_scored_by_its_tests(
    response: str, ground_truth: str, reward: float, passed: float
) -> None:
    scorer = CodeScorer(CodeConfig(name="tests"))
    await scorer.start()
    (score,) = await scorer.score([item(response, ground_truth)])
    assert (score.reward, score.components) == (reward, {"tests": reward, "tests/passed": passed})
    await scorer.close()


async def test_other_languages_and_ground_truths_that_hold_no_tests() -> None:
    scorer = CodeScorer(CodeConfig(name="tests", command=("/bin/sh", "{file}"), file="p.sh", weight=0.5))
    await scorer.start()
    scores = await scorer.score([item("read a b; echo $((a + b))", PRINTS), item("echo 1", "42")])
    assert scores[0].reward == 0.5
    assert scores[1].error is not None
    assert scores[1].error[0].value == "wrong_type"
    assert "the ground truth must be a JSON object" in scores[1].error[1]


def test_the_document_lists_what_was_tried() -> None:
    section = DOCS.read_text(encoding="utf-8").partition("## Confined code\n")[2].partition("\n## ")[0]
    listed = re.sub(r"\s+", " ", section)
    assert [name for name in escapes.ATTEMPTS if name not in listed] == []
